"""`plgpu.RefUnion`: buffers that share memory, since they are never in use at the same time.

As a scratch type it is a pytree of its buffers' types, so that a kernel gets a tuple with a Ref, or a nested tuple or
list of them, for each alternative. Every one of these Refs says in `storage.union` which union it is of and which
alternative; `unions_among` finds those that share memory among the scratch Refs of a kernel.

Source: the API reference of Pallas Mosaic GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from palladion import locations
from palladion.errors import kind_of, mistake
from palladion.language.gpu.memory import SMEM, TMEM, GPUMemoryRef
from palladion.language.gpu.refs import GPURef, storage_of

__all__ = ["RefUnion"]


class UnionLabel(str):
    """Where a union was made, and of how many Refs it is; the latter as `parts`, too."""

    parts: int

    @classmethod
    def make(cls, place: str, parts: int) -> UnionLabel:
        label = cls(f"{parts} at {place}")
        label.parts = parts
        return label


@dataclasses.dataclass(frozen=True)
class _Part(GPUMemoryRef):
    """The type of one buffer of a union."""

    union: tuple[str, int] | None = dataclasses.field(default=None, kw_only=True)

    def get_ref_aval(self, label: str = "scratch") -> GPURef:
        ref = super().get_ref_aval(label)
        storage = dataclasses.replace(ref.storage, union=self.union)
        return GPURef(ref.inner_aval, ref.memory_space, label=label, storage=storage)


class RefUnion:
    """The type of buffers of which one alternative is in use at a time; they share memory.

        scratch_shapes=[plgpu.RefUnion(plgpu.SMEM((64, 64), f32), [plgpu.SMEM((64, 64), f16), plgpu.SMEM((64,), f16)])]

    gives the kernel `(ref, [ref1, ref2])`. What is written through the Refs of one alternative is not to be read
    through those of another.

    Arguments:
      *refs: the alternatives, each a buffer type in SMEM (or all in TMEM), or a tuple or list of them, nested.

    Raises:
      TypeError: something else. ValueError: none, or buffers in different memories.
    """

    def __init__(self, *refs: Any) -> None:
        is_type = lambda x: hasattr(x, "shape") or isinstance(x, RefUnion)
        leaves = jax.tree.leaves(refs, is_leaf=is_type)
        for leaf in leaves:
            if not isinstance(leaf, GPUMemoryRef) or leaf.memory_space not in (SMEM, TMEM):
                headline = f"A plgpu.RefUnion is of buffer types in SMEM or TMEM, not of {kind_of(leaf)}."
                raise mistake(TypeError, headline, hint="plgpu.RefUnion(plgpu.SMEM(…), [plgpu.SMEM(…), plgpu.SMEM(…)])")
        if len({leaf.memory_space for leaf in leaves}) != 1:
            headline = f"A plgpu.RefUnion is of {'buffers in one memory' if leaves else 'at least one buffer'}."
            raise mistake(ValueError, headline, hint="plgpu.RefUnion(plgpu.SMEM(…), plgpu.SMEM(…))")
        label = UnionLabel.make(locations.current_location() or "an unknown line", len(leaves))
        self.refs = tuple(
            jax.tree.map(lambda leaf, k=k: _part(leaf, label, k), alternative, is_leaf=is_type)
            for k, alternative in enumerate(refs)
        )

    def __repr__(self) -> str:
        return f"RefUnion({', '.join(map(repr, self.refs))})"


def _part(buffer: GPUMemoryRef, label: str, k: int) -> _Part:
    fields = {f.name: getattr(buffer, f.name) for f in dataclasses.fields(GPUMemoryRef)}
    return _Part(**fields, union=(label, k))


jax.tree_util.register_pytree_with_keys(
    RefUnion,
    lambda u: ([(jax.tree_util.SequenceKey(i), r) for i, r in enumerate(u.refs)], None),
    lambda _, refs: tuple(refs),  # pyright: ignore[reportArgumentType]  # what a kernel gets is a tuple
    lambda u: (u.refs, None),
)


def unions_among(refs: Sequence[Any]) -> list[list[int]]:
    """Positions of Refs that share memory, a list for each union.

    Arguments:
      refs: Refs (or their types) in the order in which a kernel or a scope gets them; the parts of a union follow
        each other there, so that two unions made at the same line are kept apart.
    """
    found: list[list[int]] = []
    label: Any = None
    for i, ref in enumerate(refs):
        union = storage_of(ref).union
        if union is None:
            label = None
        elif isinstance(union[0], UnionLabel) and union[0] == label and len(found[-1]) < union[0].parts:
            found[-1].append(i)
        else:
            label = union[0]
            found.append([i])
    return found
