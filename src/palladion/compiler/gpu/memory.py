"""Refs of a compiled kernel: where they lie, and what the other files know of them.

operand, scratch_all            make Refs; `prepare` before all others, `finish` at the end
view_of                         a Ref operand of an equation with its view: a `views.View`
access.py                       loads and stores       smem.py    shared memory
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.compiler.gpu import narrow, smem, smem_inference
from palladion.compiler.gpu.generated import Pointer, Workspace
from palladion.compiler.gpu.header import PRELUDE
from palladion.compiler.gpu.memory_header import HEADER as HEADER
from palladion.compiler.gpu.smem import itemsize as itemsize_of
from palladion.compiler.gpu.usage import Facts, Usage
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.views import Axis, Index, View, resolve
from palladion.language.dtypes import SemaphoreDType
from palladion.language.gpu.refs import BarrierDType, storage_of
from palladion.language.gpu.union import unions_among

_FUNCTION = re.compile(r"__forceinline__[^({;]*?(\w+)\(")
_USAGE, _COUNT = "usage", "operands"


@dataclasses.dataclass(frozen=True)
class Ref:
    """A buffer in global or shared memory.

    Attributes:
      aval: its type. label: for messages.
      base: C++ of its address, a `char*`.
      axes: how its dimensions lie, see `views`.
      swizzle: bytes of the swizzle, 0: none.
      at: where it begins in shared memory, a multiple of what its swizzle wants; None: in global memory.
      size: in bytes.
      operand: of the call, in global memory.
      aligned: what divides its address, in global memory.
      moving: whether `base` changes from one place of the kernel to the next (a buffer of a pipeline).
      transforms: how it is stored: the kernel's, or inferred.
      facts: what the kernel does with it.
    """

    aval: Any
    label: str
    base: str
    axes: tuple[Axis, ...]
    swizzle: int = 0
    at: int | None = None
    size: int = 0
    operand: int | None = None
    aligned: int = 16
    moving: bool = False
    transforms: tuple[Any, ...] = ()
    facts: Facts = dataclasses.field(default_factory=lambda: Facts(2, 2, True), compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def in_smem(self) -> bool:
        return self.at is not None


@dataclasses.dataclass(frozen=True)
class Barriers:
    """A group of mbarriers.

    Attributes:
      aval: its type. label: for messages.
      address: C++ of the address of the first in shared memory, a u32.
      phase: the C++ variable whose bit i is the parity that the thread waits for next on barrier i.
      partners: of a cluster barrier: see `clusters.Partners`; else None.
    """

    aval: Any
    label: str
    address: str
    phase: str
    partners: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def axes(self) -> tuple[Axis, ...]:
        """As of a buffer, in numbers of barriers."""
        return smem.stored_axes(self.shape, 1, ())[0]


@dataclasses.dataclass(frozen=True)
class Semaphores:
    """Counters in global memory. Attributes: aval, label: as of `Ref`. base: C++ of the address, a `char*`."""

    aval: Any
    label: str
    base: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def axes(self) -> tuple[Axis, ...]:
        """As of a buffer, in bytes."""
        return smem.stored_axes(self.shape, 4, ())[0]


# --- before the walk ------------------------------------------------------------------------------------------------
def prepare(unit: Any, params: dict[str, Any]) -> None:
    """Look at the whole kernel; before any Ref is made.

    Arguments:
      unit: the unit. params: of the call's equation.
    """
    gm = params["grid_mapping"]
    more = unit.tables.more
    more[_COUNT] = gm.num_prefetch + gm.num_inputs + gm.num_outputs
    more["inputs"] = frozenset(range(gm.num_prefetch + gm.num_inputs))  # an aliased one counts as the output
    more[_USAGE] = found = Usage(params["jaxpr"])
    aliases, first = dict(params["input_output_aliases"]), gm.num_prefetch + gm.num_inputs
    written = [{first + o, *(i for i, to in aliases.items() if to == o)} for o in range(gm.num_outputs)]
    # What copies write and threads read: the C++ compiler must not take such memory for constant.
    together = [[found.of(k) for k in keys if k in found.facts] for keys in written]
    if any(any(f.loads for f in group) and any(f.copies for f in group) for group in together):
        more["communicates"] = True
    for name in functions():
        unit.writer.name(name)  # so that no variable hides it
    room = 8 * sum(n * (unit.num_threads if scoped else 1) for n, scoped in found.barriers)
    more["barrier room"] = room
    unit.shared(room, 8)


def functions() -> list[str]:
    """The names of the device functions that every kernel has."""
    return list(dict.fromkeys(_FUNCTION.findall(PRELUDE + HEADER)))


def finish(unit: Any) -> None:
    """What the kernel does before its body and after it, for all Refs together."""
    from palladion.compiler.gpu import rules_barriers, tmem

    tmem.finish(unit)
    rules_barriers.finish(unit)


def pointer_type(unit: Any, of: Pointer) -> str:
    """The C++ type of an operand's address.

    Only inputs are `__restrict__`: of others, the compiler would take what a thread has stored or loaded for what is
    there after a barrier, too, though another thread has stored something else.
    """
    alone = of.operand in unit.tables.more["inputs"] and not unit.tables.more.get("communicates")
    return "char* __restrict__" if alone else "char*"


def usage(unit: Any) -> Usage:
    """What the kernel does with its Refs."""
    return unit.tables.more[_USAGE]


# --- making Refs ----------------------------------------------------------------------------------------------------
def name_of(aval: Any) -> str:
    """The user's name of a Ref, from its label: `x_ref (input 0)`."""
    name = str(aval.label).split(" (")[0]
    return "scoped" if name.startswith("scoped buffer") else name


def operand(unit: Any, aval: Any, pointer: Pointer, key: Any = None) -> Ref:
    """The Ref of an operand in global memory.

    Arguments:
      aval: its type. pointer: which array of the call. key: its number among the kernel's Refs; None: not one of them.
    """
    _whole_bytes(unit, aval)
    name = unit.param(name_of(aval), pointer)
    itemsize = itemsize_of(aval.dtype)
    axes, _ = smem.stored_axes(aval.shape, itemsize, ())
    size = narrow.bytes_of(aval.shape, aval.dtype)
    facts = usage(unit).of(key)
    return Ref(aval, aval.label, name, axes, size=size, operand=pointer.operand, facts=facts)


def workspace(unit: Any, name: str, size: int, zeroed: bool) -> Pointer:
    """Device memory for the call."""
    tables = unit.tables
    tables.workspaces.append(Workspace(name, size, zeroed))
    return Pointer(tables.more[_COUNT] + len(tables.workspaces) - 1)


def scratch_all(unit: Any, avals: Sequence[Any], keys: Sequence[Any], private: bool = False) -> list[Any]:
    """Scratch buffers; parts of a `plgpu.RefUnion` share memory.

    Arguments:
      avals: their types, in the order in which the kernel gets them. keys: roots in `Usage`.
      private: whether each Pallas thread of the block gets its own.
    """
    made: list[Any] = [None] * len(avals)
    grouped = {i: group for group in unions_among(avals) for i in group}
    for i, aval in enumerate(avals):
        if i in grouped and made[i] is None and in_shared(aval):
            for k, ref in zip(grouped[i], _union(unit, [(avals[k], keys[k]) for k in grouped[i]], private)):
                made[k] = ref
        elif made[i] is None:
            made[i] = _one(unit, aval, keys[i], private)
    return made


def in_shared(aval: Any) -> bool:
    """Whether a buffer lies in shared memory (not a barrier, semaphore, accumulator or tensor memory)."""
    return not isinstance(aval.dtype, SemaphoreDType) and getattr(aval.memory_space, "name", "") not in (
        "REGS",
        "TMEM",
        "GMEM",
    )


def _one(unit: Any, aval: Any, key: Any, private: bool) -> Any:
    space = getattr(aval.memory_space, "name", "")
    if isinstance(aval.dtype, BarrierDType):
        from palladion.compiler.gpu import rules_barriers

        return rules_barriers.make(unit, aval, private)
    if isinstance(aval.dtype, SemaphoreDType):
        size = 4 * math.prod(aval.shape)
        name = unit.param(name_of(aval), workspace(unit, name_of(aval), size, zeroed=True))
        return Semaphores(aval, aval.label, name)
    if space == "REGS":
        from palladion.compiler.gpu import rules_wgmma

        return rules_wgmma.scratch(unit, aval)
    if space == "TMEM":
        from palladion.compiler.gpu import rules_tcgen05

        return rules_tcgen05.scratch(unit, aval, private)
    if space == "GMEM":
        pointer = workspace(unit, name_of(aval), narrow.bytes_of(aval.shape, aval.dtype), zeroed=False)
        return operand(unit, aval, pointer)
    _whole_bytes(unit, aval)
    transforms = smem_transforms(unit, aval, key)
    size, align = _room(aval, transforms)
    return placed(unit, aval, key, smem.allocate(unit, size * _copies(unit, private), align), private)


def _whole_bytes(unit: Any, aval: Any) -> None:
    count = narrow.in_byte(aval.dtype)
    if count > 1 and (not aval.shape or aval.shape[-1] % count):
        raise unit.refuse(
            f"{aval.label} holds {aval.dtype}, of which a byte holds {count}, and its rows end within one.",
            f"make its last dimension a multiple of {count}, or widen the elements before the call",
        )


def _copies(unit: Any, private: bool) -> int:
    return unit.num_threads if private else 1


def _room(aval: Any, transforms: Sequence[Any]) -> tuple[int, int]:
    """The bytes of a buffer, up to a multiple of its alignment, and that."""
    itemsize = itemsize_of(aval.dtype)
    size = narrow.bytes_of(aval.shape, aval.dtype)
    align = smem.alignment(smem.stored_axes(aval.shape, itemsize, transforms)[1], size)
    return -(-size // align) * align, align


def _union(unit: Any, members: Sequence[tuple[Any, Any]], private: bool) -> list[Ref]:
    """Parts of a union: alternatives begin at the same place, the buffers of one follow each other."""
    offsets, sizes = [], {}
    most_align = 1
    for aval, key in members:
        size, align = _room(aval, smem_transforms(unit, aval, key))
        part = storage_of(aval).union
        which = 0 if part is None else part[1]
        at = -(-sizes.get(which, 0) // align) * align
        offsets.append(at)
        sizes[which] = at + size
        most_align = max(most_align, align)
    total = -(-max(sizes.values()) // most_align) * most_align
    start = smem.allocate(unit, total * _copies(unit, private), most_align)
    return [
        placed(unit, aval, key, start + at, private, total) for (aval, key), at in zip(members, offsets, strict=True)
    ]


def placed(unit: Any, aval: Any, key: Any, at: int, private: bool = False, pitch: int | None = None) -> Ref:
    """The Ref of a buffer at an offset of shared memory.

    Arguments:
      at: offset. private: whether thread w has its own, `w * pitch` further (None: its size, aligned).
    """
    transforms = smem_transforms(unit, aval, key)
    itemsize = itemsize_of(aval.dtype)
    axes, swizzle = smem.stored_axes(aval.shape, itemsize, transforms)
    size = narrow.bytes_of(aval.shape, aval.dtype)
    base = f"smem + {at}"
    if private and unit.num_threads > 1:
        base = f"smem + {at} + wg * {_room(aval, transforms)[0] if pitch is None else pitch}"
    name = unit.name(name_of(aval))
    unit.tables.prologue.append(f"char* const {name} = {base};")
    stored = f", stored in {', '.join(map(str, transforms))}" if transforms else ""
    dtype = f"{jax.numpy.dtype(aval.dtype).name}{list(aval.shape)}"
    unit.tables.notes.append(f"{aval.label}: {dtype} at {at} of shared memory{stored}")
    return Ref(aval, aval.label, name, axes, swizzle, at, size, transforms=transforms, facts=usage(unit).of(key))


def rooms(unit: Any, refs: Sequence[Any]) -> list[tuple[int, int]]:
    """(offset, bytes) of what buffers of a scope have taken of shared memory; what parts of a union share is one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted({_taken(r) for r in refs if isinstance(r, Ref) and r.in_smem}):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return [(start, end - start) for start, end in found]


def _taken(ref: Ref) -> tuple[int, int]:
    assert ref.at is not None
    return ref.at, ref.at + _room(ref.aval, ref.transforms)[0]


def smem_transforms(unit: Any, aval: Any, key: Any) -> tuple[Any, ...]:
    """How a buffer in shared memory is stored: as the kernel says, or as the products that read it want it."""
    given = storage_of(aval).transforms
    return tuple(given) or smem_inference.inferred(usage(unit).of(key), aval)


# --- views ----------------------------------------------------------------------------------------------------------
def operands_of(unit: Any, eqn: Any, values: Sequence[Any], first: int = 0) -> list[Any]:
    """An equation's operands from number `first` on, scalars and arrays as `Index`es with what divides them."""
    known = usage(unit)
    return [
        Index(value, known.multiple(var) if isinstance(value, Scalar) else 1)
        if not isinstance(var.aval, jaxlink.AbstractRef)
        else value
        for value, var in zip(values[first:], eqn.invars[first:], strict=True)
    ]


def arguments(unit: Any, eqn: Any, values: Sequence[Any]) -> Any:
    """The operands of a GPU operation as its NamedTuple, with `Index`es for values, `RefView`s of `Ref`s for Refs."""
    return jax.tree.unflatten(eqn.params["tree"], operands_of(unit, eqn, values))


def view_of(unit: Any, ref_view: Any) -> View:
    """The view of a Ref among the `arguments` of an operation; of narrow elements as one of bytes."""
    return narrow.as_bytes(unit, resolve(unit, ref_view.ref, ref_view.transforms))


def predicate(given: Any) -> str | None:
    """C++ for whether an operation happens; None: always."""
    return None if given is None or _is_true(given.value) else given.value.text


def _is_true(value: Any) -> bool:
    return value.value is not None and bool(value.value)
