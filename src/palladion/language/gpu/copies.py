"""Asynchronous copies between GMEM and SMEM, stores to other blocks, and the fence and waits that go with them.

A copy to SMEM arrives on a barrier when it is done; copies to GMEM are committed in groups, and a thread waits until at
most n of its latest groups are in flight. Copies see what was written with ordinary stores only after `commit_smem`.

Equations (operands are the leaves of the NamedTuple named; a Ref comes before the dynamic indices of its view, and
unflattens to a `RefView`; what is not there is None):

    copy_gmem_to_smem  Copy(src, dst, barrier, predicate)     collective_axes, leader_tracked, oob_mode
    copy_smem_to_gmem  Store(src, dst, predicate)             commit_group, reduction_op
    commit_group, commit_smem          Nothing()
    wait_smem_to_gmem  Nothing()                              n, wait_read_only
    wait_gmem_to_smem  Nothing()                              n
    async_prefetch     Prefetch(ref, predicate)               collective_axes, leader_tracked
    async_store_smem   AsyncStore(value, ref, barrier, cluster_idx)     cluster_dim, atomic

Source: the Pallas Mosaic GPU reference, "Asynchronous copies" and "commit_smem".
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax

from palladion.errors import kind_of, mistake
from palladion.language import frames, indexing
from palladion.language.gpu.arguments import (
    a_count,
    a_predicate,
    a_ref,
    an_operation,
    cluster_axes,
    one_barrier,
    print_operands,
    same_type,
    shape_of,
)
from palladion.language.gpu.copy_rules import (
    ATOMICS,
    arrays_at,
    check_gather,
    check_windows,
    reduction,
    refuse_places,
    shape_for_each,
)
from palladion.language.gpu.memory import GMEM, SMEM
from palladion.language.gpu.params import OOBFillMode
from palladion.language.gpu.partition import CopyPartition
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.gpu.views import ClusterRef, Im2Col, MulticastRef, split_view
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import RefView
from palladion.language.semaphores import int32

__all__ = [
    "CopyPartition",
    "async_prefetch",
    "async_store_smem",
    "commit_group",
    "commit_smem",
    "commit_smem_to_gmem_group",
    "copy_gmem_to_smem",
    "copy_smem_to_gmem",
    "wait_gmem_to_smem",
    "wait_smem_to_gmem",
]


# --- equations --------------------------------------------------------------------------------------------------------
class Copy(NamedTuple):
    """The operands of `copy_gmem_to_smem`."""

    src: RefView
    dst: RefView
    barrier: RefView | None
    predicate: Any = None


class Store(NamedTuple):
    """The operands of `copy_smem_to_gmem`."""

    src: RefView
    dst: RefView
    predicate: Any = None


class Prefetch(NamedTuple):
    """The operands of `async_prefetch`."""

    ref: RefView
    predicate: Any = None


class AsyncStore(NamedTuple):
    """The operands of `async_store_smem`."""

    value: Any
    ref: RefView
    barrier: RefView
    cluster_idx: Any


class Nothing(NamedTuple):
    """No operands."""


copy_gmem_to_smem_p = gpu_primitive("copy_gmem_to_smem", reads=["src"], writes=["dst", "barrier"])
copy_smem_to_gmem_p = gpu_primitive("copy_smem_to_gmem", reads=["src"], writes=["dst"])
commit_group_p = gpu_primitive("commit_group")
wait_smem_to_gmem_p = gpu_primitive("wait_smem_to_gmem")
wait_gmem_to_smem_p = gpu_primitive("wait_gmem_to_smem")
commit_smem_p = gpu_primitive("commit_smem")
async_prefetch_p = gpu_primitive("async_prefetch", reads=["ref"])
async_store_smem_p = gpu_primitive("async_store_smem", writes=["ref", "barrier"])
print_operands(copy_gmem_to_smem_p, copy_smem_to_gmem_p, commit_group_p, wait_smem_to_gmem_p, wait_gmem_to_smem_p)
print_operands(commit_smem_p, async_prefetch_p, async_store_smem_p)


# --- GMEM to SMEM -----------------------------------------------------------------------------------------------------
def copy_gmem_to_smem(
    src: Any,
    dst: Any,
    barrier: Any = None,
    *,
    collective_axes: str | tuple[str, ...] | None = None,
    leader_tracked: Any = None,
    oob_mode: OOBFillMode | None = None,
    predicate: bool | jax.Array | None = None,
) -> None:
    """Start a copy from global to shared memory, by the TMA engine; it arrives on `barrier` when it is done.

    Several copies may arrive on one barrier, which then has as many `num_arrivals`. With `collective_axes` the blocks
    along these cluster axes all make the same copy, and each gets the data.

    Arguments:
      src: a Ref or view in GMEM, of this or (`plgpu.remote_ref`) another device. A view by an int32 array of shape
        [n], `x_ref.at[indices]`, gathers n rows of a matrix; `plgpu.im2col_ref` gives windows of images.
      dst: a Ref or view in SMEM of the same shape and dtype. It must have been read for the last time before, with a
        `plgpu.commit_smem` in between where threads read it.
      barrier: a Ref of one barrier; None: the copy is waited for with `plgpu.wait_gmem_to_smem`.
      collective_axes: cluster axes, a name or a tuple of names; None: this block alone copies.
      leader_tracked: with `collective_axes` of two blocks: only the first one's barrier is told.
        `plgpu.CopyPartition.PARTITIONED(axis)`: `src` is twice as large as `dst` along `axis`, and each block gets its
        half; `plgpu.CopyPartition.REPLICATED`: both get all.
      oob_mode: what is read outside the source, a `plgpu.OOBFillMode`; None: zeros.
      predicate: a boolean scalar; False: no copy, and no arrival.

    Raises:
      TypeError: not Refs, not a barrier, different dtypes, something else than described. ValueError: different
        shapes, other memories, an array of barriers, axes that are not the cluster's; outside a kernel.

    Reference: "GMEM to SMEM copies", "Collective copies", "Leader-tracked collective copies", "Async gather".
    """
    name = "plgpu.copy_gmem_to_smem"
    source, target = a_ref(name, "source", src, GMEM), a_ref(name, "destination", dst, SMEM)
    refuse_places(name, source, MulticastRef, ClusterRef)
    refuse_places(name, target, ClusterRef)
    axes = cluster_axes(name, collective_axes)
    shape = shape_for_each(name, source, leader_tracked, axes)
    check_windows(name, source)
    check_gather(name, source)
    same_type(source, target, shape, "A copy")
    if oob_mode is not None and not isinstance(oob_mode, OOBFillMode):
        hint = "plgpu.OOBFillMode.ZEROS, .UNDEFINED or .PROMISE_IN_BOUNDS"
        raise mistake(TypeError, f"The oob_mode of {name} is {kind_of(oob_mode)}.", hint=hint)
    if barrier is None and axes:
        headline = f"A collective copy needs a barrier: this one, of {label_of(source)}, has none."
        raise mistake(ValueError, headline, hint="plgpu.copy_gmem_to_smem(src, dst, barrier, collective_axes=…)")
    if barrier is None and oob_mode not in (None, OOBFillMode.PROMISE_IN_BOUNDS):
        headline = f"A copy without a barrier cannot fill what is outside its source, as oob_mode={oob_mode!r} asks."
        raise mistake(ValueError, headline, hint="give it a barrier, or plgpu.OOBFillMode.PROMISE_IN_BOUNDS")
    one = None if barrier is None else one_barrier(name, barrier)
    bind(
        name,
        copy_gmem_to_smem_p,
        Copy(source, target, one, a_predicate(name, predicate)),
        collective_axes=axes,
        leader_tracked=leader_tracked,
        oob_mode=oob_mode,
    )


def wait_gmem_to_smem(n: int) -> None:
    """Wait until at most `n` of this thread's latest copies to SMEM without a barrier are in flight.

    Arguments:
      n: a Python integer; 0 waits for all.

    Raises:
      TypeError, ValueError: not a count; outside a kernel.
    """
    name = "plgpu.wait_gmem_to_smem"
    frames.required(name)
    bind(name, wait_gmem_to_smem_p, Nothing(), n=a_count(name, n))


# --- SMEM to GMEM -----------------------------------------------------------------------------------------------------
def copy_smem_to_gmem(
    src: Any,
    dst: Any,
    predicate: bool | jax.Array | None = None,
    *,
    commit_group: bool = True,
    reduction_op: str | None = None,
) -> None:
    """Start a copy from shared to global memory, by the TMA engine; the same thread waits with `wait_smem_to_gmem`.

    Arguments:
      src: a Ref or view in SMEM. What threads wrote there needs a `plgpu.commit_smem` before.
      dst: a Ref or view in GMEM of the same shape and dtype, of this or (`plgpu.remote_ref`) another device.
      predicate: a boolean scalar; False: no copy.
      commit_group: close the group of copies that are waited for as one; False leaves it open for further ones.
      reduction_op: combine with what is there instead of replacing it: 'add', 'min', 'max', and for integers 'inc',
        'dec', 'and', 'or', 'xor'. None: replace.

    Raises:
      TypeError: not Refs, different dtypes, something else than described. ValueError: different shapes, other
        memories, an unknown reduction; outside a kernel.

    Reference: "SMEM to GMEM copies", "Grouping multiple copies".
    """
    name = "plgpu.copy_smem_to_gmem"
    source, target = a_ref(name, "source", src, SMEM), a_ref(name, "destination", dst, GMEM)
    refuse_places(name, source, ClusterRef)
    if arrays_at(target) or arrays_at(source) or any(isinstance(t, Im2Col) for t in split_view(target)[1]):
        raise mistake(
            ValueError,
            f"{name} writes a box; {label_of(target)} and {label_of(source)} cannot be indexed by arrays or windows.",
            hint="one copy for each row: loop over plgpu.copy_smem_to_gmem(smem.at[i], gmem.at[rows[i]])",
        )
    same_type(source, target, shape_of(source), "A copy")
    if not isinstance(commit_group, bool):
        raise mistake(TypeError, f"The commit_group of {name} is {kind_of(commit_group)}.", hint="True or False")
    bind(
        name,
        copy_smem_to_gmem_p,
        Store(source, target, a_predicate(name, predicate)),
        commit_group=commit_group,
        reduction_op=None if reduction_op is None else reduction(name, reduction_op, source.dtype),
    )


def commit_smem_to_gmem_group() -> None:
    """Close the group of this thread's copies to GMEM that were started with `commit_group=False`.

    Raises:
      ValueError: outside a kernel.

    Reference: "Grouping multiple copies", which calls it by its older name, `plgpu.commit_group`.
    """
    bind("plgpu.commit_smem_to_gmem_group", commit_group_p, Nothing())


commit_group = commit_smem_to_gmem_group


def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None:
    """Wait until at most `n` of this thread's latest groups of copies to GMEM are in flight.

    Arguments:
      n: a Python integer; 0 waits for all.
      wait_read_only: wait only until their sources have been read, so that SMEM may be written again.

    Raises:
      TypeError, ValueError: not a count, not a Python bool; outside a kernel.

    Reference: "SMEM to GMEM copies", "Waiting for the SMEM read only".
    """
    name = "plgpu.wait_smem_to_gmem"
    frames.required(name)
    if not isinstance(wait_read_only, bool):
        raise mistake(TypeError, f"The wait_read_only of {name} is {kind_of(wait_read_only)}.", hint="True or False")
    bind(name, wait_smem_to_gmem_p, Nothing(), n=a_count(name, n), wait_read_only=wait_read_only)


def commit_smem() -> None:
    """Make this thread's ordinary reads and writes of SMEM known to copies and tensor cores that come after.

    Needed between an ordinary write and a copy or matrix product that reads, and between an ordinary read and a copy
    that overwrites.

    Raises:
      ValueError: outside a kernel.

    Reference: "commit_smem".
    """
    bind("plgpu.commit_smem", commit_smem_p, Nothing())


# --- others -----------------------------------------------------------------------------------------------------------
def async_prefetch(
    ref: Any,
    *,
    collective_axes: str | tuple[str, ...] | None = None,
    leader_tracked: Any = None,
    predicate: bool | jax.Array | None = None,
) -> None:
    """Ask for global memory to be brought into the L2 cache; nothing to wait for.

    Arguments:
      ref: a Ref or view in GMEM.
      collective_axes: cluster axes whose blocks each fetch a part of it.
      leader_tracked: that of the copy which follows, as in `plgpu.copy_gmem_to_smem`; it changes nothing here.
      predicate: a boolean scalar; False: nothing is fetched.

    Raises:
      TypeError, ValueError: as `plgpu.copy_gmem_to_smem`.
    """
    name = "plgpu.async_prefetch"
    view = a_ref(name, "ref", ref, GMEM)
    axes = cluster_axes(name, collective_axes)
    shape_for_each(name, view, leader_tracked, axes)
    operands = Prefetch(view, a_predicate(name, predicate))
    bind(name, async_prefetch_p, operands, collective_axes=axes, leader_tracked=leader_tracked)


def async_store_smem(
    src: jax.Array,
    ref: Any,
    barrier: Any,
    *,
    cluster_idx: int | jax.Array,
    cluster_dim: Any,
    optimized: bool = True,
    atomic: Literal["add", "max", "min", "and", "or", "xor"] | None = None,
) -> None:
    """Start a store of an array to the shared memory of another block of the cluster.

    Arguments:
      src: the array.
      ref: a Ref or view in SMEM with its shape and dtype, which names that of the other block.
      barrier: a Ref of one barrier; the store arrives on the other block's, when it is done.
      cluster_idx: an integer scalar, that block's index along `cluster_dim`; the others are one's own.
      cluster_dim: a cluster axis, by name or by number.
      optimized: a promise that the array's layout suits the store.
      atomic: combine with what is there instead of replacing it.

    Raises:
      TypeError: not an array, a Ref, a barrier, an integer; different dtypes. ValueError: different shapes, other
        memories, an unknown operation, not a cluster axis; outside a kernel.
    """
    name = "plgpu.async_store_smem"
    view = a_ref(name, "ref", ref, SMEM)
    if is_ref(src):
        raise mistake(TypeError, f"The src of {name} is a Ref, {label_of(src)}.", hint="read it: x_ref[...]")
    value = indexing.as_stored(view, src, shape_of(view))
    operands = AsyncStore(value, view, one_barrier(name, barrier), int32(name, "cluster_idx", cluster_idx))
    op = None if atomic is None else an_operation(name, "atomic", atomic, ATOMICS, view.dtype)
    bind(name, async_store_smem_p, operands, cluster_dim=_one_axis(name, cluster_dim), atomic=op)


def _one_axis(name: str, axis: Any) -> Any:
    frame = frames.required(name)
    names = getattr(getattr(frame, "mesh", None), "cluster_names", None)
    if isinstance(axis, int) and not isinstance(axis, bool) and names is not None:
        if not 0 <= axis < len(names):
            headline = f"The cluster_dim of {name} is {axis}; the cluster has {len(names)} axes."
            raise mistake(ValueError, headline, axes=", ".join(map(repr, names)) or "none", hint="name the axis")
        return names[axis]
    found = cluster_axes(name, axis, "cluster_dim")
    if len(found) != 1:
        raise mistake(ValueError, f"The cluster_dim of {name} is {kind_of(axis)}; it is one axis.", hint="name it")
    return found[0]
