"""`atom` and `red`: all operations, types, vectors and spaces.

Lanes that hit the same address take effect one after another, in the order of their lanes. They are done in rounds:
in each one the lanes whose turn it is all have different addresses, and one array operation does them. Orders,
scopes and cache hints change nothing here, as the machine does one thing after another.
Source: PTX ISA manual, "atom", "red".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from palladion.emulator import spaces
from palladion.emulator.lanes_memory import space_in
from palladion.emulator.ptx import SIZES, Instruction
from palladion.emulator.registry import operation
from palladion.emulator.runtime import DTYPES, Unreached

Array = np.ndarray
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas")
_NUMPY: dict[str, Any] = {
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b16": np.uint16, "b32": np.uint32,
    "b64": np.uint64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16,
    "f32": np.float32, "f64": np.float64, "u16": np.uint16, "s16": np.int16,
}  # fmt: skip
_TINY = np.finfo(np.float32).tiny


def flushed(x: Array) -> Array:
    """Subnormal float32 numbers as zeros of the same sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _added(old: Array, new: Array) -> Array:
    if (
        old.dtype == np.float16 or old.dtype == ml_dtypes.bfloat16
    ):  # once rounded: float32 holds more than twice the bits
        return (old.astype(np.float32) + new.astype(np.float32)).astype(old.dtype)
    return old + new


def _extreme(old: Array, new: Array, function: Any, below: Any) -> Array:
    """min or max; of floats a number before a NaN, and -0 below +0."""
    if old.dtype.kind in "iu":
        return below(old, new)
    a, b = old.astype(np.float64), new.astype(np.float64)
    found = function(a, b)
    zero = (a == 0) & (b == 0)
    sign = np.signbit(a) | np.signbit(b) if function is np.fmin else np.signbit(a) & np.signbit(b)
    return np.where(zero, np.where(sign, -0.0, 0.0), found).astype(old.dtype)


_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": _added,
    "min": lambda old, new: _extreme(old, new, np.fmin, np.minimum),
    "max": lambda old, new: _extreme(old, new, np.fmax, np.maximum),
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - old.dtype.type(1)),
    "exch": lambda old, new: new,
}


def rounds(offsets: Array) -> list[Array]:
    """Indices of accesses in groups without a repeated offset, such that equal offsets keep their order."""
    order = np.argsort(offsets, kind="stable")
    sorted_ = offsets[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_[1:] != sorted_[:-1])))
    if len(starts) == len(order):
        return [np.arange(len(offsets))]
    counts = np.diff(np.append(starts, len(order)))
    turn = np.arange(len(order)) - np.repeat(starts, counts)
    by_turn = np.argsort(turn, kind="stable")
    return np.split(order[by_turn], np.cumsum(np.bincount(turn))[:-1])


def _columns(value: Any, group: Any, dtype: Any, packed: bool) -> Array:
    """An operand as numbers (n, items) of a type; a vector has one array an item, a packed pair two numbers each."""
    parts = value if isinstance(value, tuple) else (value,)
    found = []
    for part in parts:
        if isinstance(part, (int, float)):
            part = np.array(part & (1 << 64) - 1 if isinstance(part, int) else part)
            if part.dtype.kind == "f":
                part = part.astype(dtype)
            part = (
                part.astype(DTYPES[f"u{4 if packed else np.dtype(dtype).itemsize}"]) if part.dtype.kind != "f" else part
            )
        array = np.ascontiguousarray(group.array(part))
        size = 4 if packed else np.dtype(dtype).itemsize
        if array.dtype.itemsize != size:
            array = array.astype(DTYPES[f"u{size}"])
        found.append(array.view(dtype).reshape(group.n, -1))
    return np.concatenate(found, 1)


def perform(group: Any, instr: Instruction, address: Array, b: Any, c: Any = None) -> Array:
    """Do an atomic operation for the active lanes.

    Returns: what was in memory before, as items (n, count) of the type; zeros for lanes that are off.
    """
    name = next(p for p in instr.parts[1:] if p in _OPERATIONS)
    kind = instr.type()
    space = space_in(instr)
    if kind == "b128":
        return _wide(group, name, space, address, b, c)
    packed = kind in ("f16x2", "bf16x2")
    dtype = np.dtype(_NUMPY[kind])
    new = _columns(b, group, dtype, packed)
    swap = None if c is None else _columns(c, group, dtype, packed)
    count = new.shape[1]
    nbytes = count * dtype.itemsize
    before = np.zeros((group.n, count), dtype)
    function = _FUNCTIONS.get(name)
    for buffer, offsets, chosen in spaces.places(group, space, address, nbytes, nbytes, group.active, True):
        flush = kind == "f32" and name == "add" and buffer is group.machine.memory.bytes
        memory = buffer.view(dtype)
        index = (offsets.astype(np.int64) // dtype.itemsize)[:, None] + np.arange(count)
        for turn in rounds(offsets):
            at, lanes = index[turn], chosen[turn]
            old = memory[at]
            if swap is not None:
                raw = DTYPES[f"u{dtype.itemsize}"]
                result = np.where(old.view(raw) == new[lanes].view(raw), swap[lanes], old)
            else:
                assert function is not None
                operand = new[lanes]
                result = flushed(function(flushed(old), flushed(operand))) if flush else function(old, operand)
            memory[at] = result
            before[lanes] = old
    return before


def _wide(group: Any, name: str, space: str, address: Array, b: Any, c: Any) -> Array:
    """exch and cas of 128 bits: pairs of numbers (n, 2)."""
    before = np.zeros((group.n, 2), np.uint64)
    for buffer, offsets, chosen in spaces.places(group, space, address, 16, 16, group.active, True):
        memory = buffer.view(np.uint64).reshape(-1, 2)
        index = offsets.astype(np.int64) // 16
        for turn in rounds(offsets):
            at, lanes = index[turn], chosen[turn]
            old = memory[at]
            if name == "cas":
                memory[at] = np.where((old == b[lanes]).all(1)[:, None], c[lanes], old)
            elif name == "exch":
                memory[at] = b[lanes]
            else:
                raise Unreached
            before[lanes] = old
    return before


def _operands(instr: Instruction, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands without a cache policy."""
    return values[:-1] if instr.has("L2::cache_hint") else values


@operation("atom", out=1)
def _atom(group: Any, instr: Instruction, address: Array, *values: Any) -> Any:
    before = perform(group, instr, address, *_operands(instr, values))
    kind = instr.type()
    if kind == "b128":
        return before
    width = DTYPES[f"u{SIZES[kind]}"]
    raw = np.ascontiguousarray(before).view(width)
    columns = tuple(np.ascontiguousarray(raw[:, k]) for k in range(raw.shape[1]))
    return columns if isinstance(values[0], tuple) else columns[0]


@operation("red")
def _red(group: Any, instr: Instruction, address: Array, *values: Any) -> None:
    perform(group, instr, address, *_operands(instr, values))
