"""The blocks, clusters and threads of a GPU kernel as a mesh with named axes, and the warps of a thread as another.

`plgpu.Mesh` says how many blocks a kernel has, how they form clusters, and how many Pallas threads (warpgroups of 128
CUDA threads) a block has; `lax.axis_index` of its names says which of them runs. `plgpu.WarpMesh` splits one thread
into its four warps.

Source: the Mosaic GPU reference, "Using core_map"; CUDA's limits on blocks and clusters.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palladion.errors import explain
from palladion.language.fields import Check, check_fields, integer, optional, sequence_of, text
from palladion.language.gpu.memory import GMEM, SMEM, MemorySpace

__all__ = ["Mesh", "WarpMesh"]

MAX_THREADS = 8  # of 128 CUDA threads: a block has at most 1024 of those
MAX_CLUSTER = 16  # blocks; more than 8 need the kernel's consent, which Pallas gives
WARPS = 4  # in a Pallas thread


def _names() -> Check:
    names = sequence_of(text(), "axis")

    def convert(value: Any) -> tuple[str, ...]:
        return names.convert((value,) if isinstance(value, str) else value)

    return Check(names.expected.replace("a string", "a name"), convert)


def _sizes(of: str) -> Check:
    sizes = sequence_of(integer(1, of), "axis")

    def convert(value: Any) -> tuple[int, ...]:
        return sizes.convert((value,) if isinstance(value, int) else value)

    return Check(sizes.expected, convert)


_CHECKS: dict[str, Check] = {
    "grid": _sizes("number of blocks"),
    "grid_names": _names(),
    "cluster": _sizes("number of blocks"),
    "cluster_names": _names(),
    "num_threads": optional(integer(1, "number of threads")),
    "thread_name": optional(text()),
    "kernel_name": optional(text()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """How a kernel's work is spread over one GPU: a grid of clusters of blocks of threads.

        mesh = plgpu.Mesh(grid=(4, 2), grid_names=("m", "n"), num_threads=2, thread_name="wg")

    Arguments:
      grid, grid_names: sizes and names of the grid's axes, any number of them; the last varies fastest. The grid counts
        clusters, which are single blocks where there is no `cluster`.
      cluster, cluster_names: sizes and names of the axes of a cluster, at most three: blocks that run at the same time
        and reach each other's shared memory.
      num_threads, thread_name: how many Pallas threads a block has, and the name of their axis; both or neither
        (one thread, which has no axis).
      kernel_name: of the compiled kernel, for profilers.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    grid: Sequence[int] = ()
    grid_names: Sequence[str] = ()
    cluster: Sequence[int] = ()
    cluster_names: Sequence[str] = ()
    num_threads: int | None = None
    thread_name: str | None = None
    kernel_name: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.Mesh", _CHECKS)
        for axes in ("grid", "cluster"):
            sizes, names = getattr(self, axes), getattr(self, f"{axes}_names")
            if len(sizes) != len(names):
                raise _refused(
                    f"{axes}_names must have the same length as {axes}: there is a name for each axis, but {axes} is "
                    f"{sizes} and {axes}_names is {names}",
                    f"plgpu.Mesh({axes}=(2, 4), {axes}_names=('x', 'y'))",
                )
        if (self.num_threads is None) != (self.thread_name is None):
            given, missing = ("num_threads", "thread_name")
            if self.num_threads is None:
                given, missing = missing, given
            raise _refused(
                f"num_threads and thread_name must be either both set or both None, but {given} is given without "
                f"{missing}",
                "num_threads=2, thread_name='wg': lax.axis_index('wg') is then the thread's number",
            )
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise _refused(
                f"num_threads is {self.num_threads}, but a block has at most {MAX_THREADS} Pallas threads",
                "a Pallas thread is a warpgroup of 128 CUDA threads, and a block has at most 1024 of those",
            )
        if len(self.cluster) > 3:
            raise _refused(
                f"cluster must be at most 3D, but it is {self.cluster}", "merge axes: a grid may have any number"
            )
        if (blocks := math.prod(self.cluster)) > MAX_CLUSTER:
            raise _refused(
                f"the cluster {self.cluster} has {blocks} blocks, but at most {MAX_CLUSTER} can form one",
                "8 blocks work on every GPU with clusters",
            )
        names = self.axis_names
        if doubled := sorted({n for n in names if names.count(n) > 1}):
            raise _refused(
                f"two axes are called {doubled[0]!r}; the axes are {names}",
                "lax.axis_index takes an axis by its name, so that each needs its own",
            )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Of the grid, then of the cluster, then of the threads."""
        return (*self.grid_names, *self.cluster_names, *(() if self.thread_name is None else (self.thread_name,)))

    @property
    def shape(self) -> Mapping[str, int]:
        """{axis name: size}: the axes of the grid, then of the cluster, then of the threads."""
        threads = () if self.num_threads is None else (self.num_threads,)
        return collections.OrderedDict(zip(self.axis_names, (*self.grid, *self.cluster, *threads), strict=True))

    @property
    def default_memory_space(self) -> MemorySpace:
        """Where operands and outputs of a kernel on this mesh are."""
        return GMEM

    @property
    def scratch_memory_space(self) -> MemorySpace:
        """Where a buffer is whose type is a plain shape and dtype."""
        return SMEM


def _refused(what: str, hint: str) -> ValueError:
    return ValueError(explain(f"plgpu.Mesh: {what}.", hint=hint))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpMesh:
    """The four warps of a Pallas thread, as one named axis, for `pl.core_map` inside a kernel.

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            pl.when(lax.axis_index("warp") == 0)(lambda: plgpu.tcgen05_mma(…))

    Arguments:
      axis_name: of the axis, for `lax.axis_index`.

    Raises:
      TypeError: it has no hash.
    """

    axis_name: Any

    def __post_init__(self) -> None:
        try:
            hash(self.axis_name)
        except TypeError:
            what = f"plgpu.WarpMesh: axis_name must be a name, but it is {self.axis_name!r}."
            raise TypeError(explain(what, hint="plgpu.WarpMesh(axis_name='warp')")) from None

    @property
    def shape(self) -> Mapping[Any, int]:
        """{axis name: 4}."""
        return collections.OrderedDict({self.axis_name: WARPS})

    @property
    def default_memory_space(self) -> MemorySpace:
        return GMEM

    def run_inside(self, function: Callable[[], None]) -> None:
        """Run a function on each warp of the thread: what `pl.core_map` inside a kernel does."""
        from palladion.language.gpu.control import map_warps  # which needs this module

        map_warps("pl.core_map with plgpu.WarpMesh", function, self.axis_name)
