"""The reference's names and those of JAX 0.12, and the table of fragments that are written for both.

A fragment is a function of a spelling `s`. It uses plgpu's names where the two agree, and `s` where they differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from palladion import mosaic_gpu as plgpu

NEW_KEYWORDS = {"out_shape": "out_type", "scratch_shapes": "scratch_types"}


class Spelling:
    """Names and forms of call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.old = old = name == "reference"
        self.TileTransform: Any = plgpu.TileTransform if old else plgpu.TilingTransform
        self.TransposeTransform = plgpu.TransposeTransform  # 0.12 has none
        self.Semaphore: Any = plgpu.Semaphore if old else plgpu.SemaphoreType
        self.TryCancelResultRef = plgpu.TryCancelResultRef if old else plgpu.TryClusterCancelResult
        self.peer_ref = plgpu.peer_ref if old else plgpu.remote_ref
        self.commit_group = plgpu.commit_group if old else plgpu.commit_smem_to_gmem_group
        self.tcgen05_commit = plgpu.tcgen05_commit if old else plgpu.tcgen05_commit_arrive
        self.TMA_GATHER_INDICES: Any = plgpu.Layout.TMA_GATHER_INDICES if old else plgpu.Layout.TMA_INDICES

    def __repr__(self) -> str:
        return self.name

    def kernel(self, *body: Any, **options: Any) -> Any:
        """`plgpu.kernel`, in the reference with out_shape and scratch_shapes; also a decorator."""
        if not self.old:
            options = {NEW_KEYWORDS.get(k, k): v for k, v in options.items()}
        return plgpu.kernel(*body, **options) if body else functools.partial(plgpu.kernel, **options)

    def load(self, ref: Any, idx: Any = (), **options: Any) -> Any:
        """`plgpu.load(ref, idx)`, or `plgpu.load(ref.at[idx])`."""
        if self.old:
            return plgpu.load(ref, idx, **options)
        return plgpu.load(ref if isinstance(idx, tuple) and not idx else ref.at[idx], **options)

    def transpose_ref(self, ref: Any, permutation: tuple[int, ...]) -> Any:
        """`plgpu.transpose_ref(ref, permutation)`, or `ref.transpose(permutation)`."""
        return plgpu.transpose_ref(ref, permutation) if self.old else ref.transpose(permutation)

    def meet(self, barrier: Any) -> None:
        """Arrive and wait: two calls, or one."""
        if self.old:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
        else:
            plgpu.barrier_arrive_and_wait(barrier)


SPELLINGS = (Spelling("reference"), Spelling("jax-0.12"))


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A fragment of the reference as a program.

    Attributes:
      name: unique. section: of the reference, its heading in English.
      run: of a spelling: one (actual, expected, tolerance), or a list of them.
      arch: of the simulated GPU. options: further fields of `plgpu.InterpretGPUParams`.
    """

    name: str
    section: str
    run: Callable[[Spelling], Any]
    arch: str
    options: dict[str, Any]


FRAGMENTS: dict[str, Fragment] = {}


def fragment(section: str, arch: str = "sm_90a", **options: Any) -> Any:
    """Decorator: enter a fragment under its name."""

    def enter(run: Callable[[Spelling], Any]) -> Callable[[Spelling], Any]:
        name = run.__name__
        assert name not in FRAGMENTS, name
        FRAGMENTS[name] = Fragment(name, section, run, arch, options)
        return run

    return enter
