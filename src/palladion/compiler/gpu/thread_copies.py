"""Copies that the TMA engine cannot make (rows that are no multiple of 16 bytes, a last dimension that changes, …), by
the threads: a loop over the elements, each of which is left out or filled with zeros where it lies outside the array.

Slow, and synchronous: the copy is done when the thread goes on, and then arrives on its barrier. Correct kernels cannot
tell, but for the time.
"""

from __future__ import annotations

import math
from typing import Any

from palladion.compiler.gpu import plans
from palladion.compiler.gpu.axes import Axis
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.views import View

_BITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_REDUCTIONS = {"add": "+", "and": "&", "or": "|", "xor": "^"}


def copy_in(unit: Any, source: View, buffer: View, base: str, fills: bool) -> None:
    """Global to shared memory; `fills`: with zeros what lies outside."""
    c = _BITS[source.itemsize]
    with _loop(unit, source.size):
        indices = _indices(source.shape)
        inside = _inside(source, indices) if fills else None
        unit.line(f"const char* const from = {_address(source, indices, base)};")
        value = f"*(const {c}*)from"
        if inside is not None:
            value = f"{inside} ? {value} : {c}(0)"
        unit.line(f"*({c}*)({_address(buffer, indices, buffer.ref.base)}) = {value};")


def copy_out(unit: Any, buffer: View, goal: View, base: str, reduction: str | None) -> None:
    """Shared to global memory; what lies outside is left out."""
    c = _BITS[goal.itemsize] if reduction is None else kind(goal.dtype).c
    with _loop(unit, goal.size):
        indices = _indices(goal.shape)
        inside = _inside(goal, indices)
        unit.line(f"const {c} value = *(const {c}*)({_address(buffer, indices, buffer.ref.base)});")
        to = f"({c}*)({_address(goal, indices, base)})"
        text = f"*{to} = value;" if reduction is None else f"{update(unit, reduction, goal.dtype)}({to}, value);"
        unit.line(text if inside is None else f"if ({inside}) {text}")


def _loop(unit: Any, size: int) -> Any:
    start = "t" if unit.warps == 4 else "lane"
    return unit.block(f"for (int e = {start}; e < {size}; e += {unit.lanes})")


def _indices(shape: tuple[int, ...]) -> list[str]:
    """C++ for the indices of element e."""
    found = []
    for d, n in enumerate(shape):
        below = math.prod(shape[d + 1 :])
        text = "e" if below == 1 else f"e / {below}"
        found.append(text if math.prod(shape[:d]) == 1 else f"{text} % {n}")
    return found


def _address(view: View, indices: list[str], base: str) -> str:
    if view.windows is not None:
        return f"{base} + {_window_place(view, indices)}"
    parts = [_added(axis, index) for axis, index in zip(view.axes, indices)]
    whole = plans.total(None, [*plans.terms_of(view), *(p for p in parts if p != "0")], view.offset)
    return f"{base} + swizzle<{view.ref.swizzle}>({whole})" if view.ref.swizzle else f"{base} + {whole}"


def _added(axis: Axis, index: str) -> str:
    return plans.added(axis, index) if axis.n > 1 or axis.first or axis.terms else "0"


def _coordinate(axis: Axis, index: str) -> str:
    stepped = f"({index}) * {axis.step}" if axis.step != 1 else index
    return plans.total(None, [*map(str, axis.terms), stepped], axis.first)


def _inside(view: View, indices: list[str]) -> str | None:
    """C++ for whether an element lies in its array; None: it always does."""
    if view.windows is not None:
        return _window_inside(view, indices)
    tests = []
    for axis, index in zip(view.axes, indices):
        if axis.dim is not None and axis.coords is None:
            extent = view.root[axis.dim][0]
            if axis.terms or axis.first < 0 or axis.first + (axis.n - 1) * axis.step >= extent:
                tests.append(f"(u32)({_coordinate(axis, index)}) < {extent}u")
    for d, first, terms in view.fixed:
        if terms or not 0 <= first < view.root[d][0]:
            tests.append(f"(u32)({plans.total(None, list(map(str, terms)), first)}) < {view.root[d][0]}u")
    return " && ".join(tests) or None


# --- windows of images ----------------------------------------------------------------------------------------------
def _window_parts(view: View, indices: list[str]) -> list[tuple[str, int, int]]:
    """(coordinate, extent, stride) along each dimension of the images, for an element of a view of windows."""
    windows = view.windows
    assert windows is not None
    images, *sizes, depth = view.ref.shape
    by_dim = {a.dim: _coordinate(a, i) for a, i in zip(view.axes, indices)}
    by_dim |= {d: plans.total(None, list(map(str, terms)), first) for d, first, terms in view.fixed}
    positions = [n + sum(p) - w + 1 for n, p, w in zip(sizes, windows.padding, windows.window_shape)]
    row, parts = by_dim[0], []
    strides = [axis.digits[0][1] if axis.digits else 0 for axis in view.ref.axes]
    below = math.prod(positions)
    parts.append((f"({row}) / {below}", images, strides[0]))
    for k, (size, count, (before, _)) in enumerate(zip(sizes, positions, windows.padding)):
        below //= count
        corner = f"({row}) / {below} % {count}"
        parts.append((f"{corner} + ({by_dim[1 + k]}) - {before}", size, strides[1 + k]))
    parts.append((by_dim[len(view.ref.shape) - 1], depth, strides[-1]))
    return parts


def _window_place(view: View, indices: list[str]) -> str:
    return " + ".join(f"({c}) * {stride}" for c, _, stride in _window_parts(view, indices))


def _window_inside(view: View, indices: list[str]) -> str:
    return " && ".join(f"(u32)({c}) < {extent}u" for c, extent, _ in _window_parts(view, indices))


# --- updates --------------------------------------------------------------------------------------------------------
def update(unit: Any, op: str, dtype: Any) -> str:
    """The name of a device function (address, value) that combines memory with a value atomically.

    Integers and floats of 32 and 64 bits use the hardware's where it has the operation; others replace the word that
    holds the element until nobody else has come between.
    """
    of = kind(dtype)
    name = f"atomic_{op}_{of.c}"
    if of.bits in (32, 64):
        word = "u32" if of.bits == 32 else "u64"
        text = f"""// Combine memory with a value, atomically.
__device__ __forceinline__ void {name}({of.c}* to, {of.c} value) {{
  {_body(op, of, word)}
}}
"""
        return unit.function(name, text)
    text = f"""// Combine an element of memory with a value, atomically: by the 32-bit word that holds it.
__device__ __forceinline__ void {name}({of.c}* to, {of.c} value) {{
  u32* const word = (u32*)((u64)to & ~3ull);
  const u32 shift = ((u64)to & 3) * 8, mask = {"0xffffu" if of.bits == 16 else "0xffu"} << shift;
  u32 seen = *(volatile u32*)word, found;
  do {{
    found = seen;
    {of.c} old;
    {"u16" if of.bits == 16 else "u8"} bits = (found & mask) >> shift;
    *({"u16" if of.bits == 16 else "u8"}*)&old = bits;
    const {of.c} next = {_combined(op, of)};
    bits = *(const {"u16" if of.bits == 16 else "u8"}*)&next;
    seen = atomicCAS(word, found, (found & ~mask) | (u32)bits << shift);
  }} while (seen != found);
}}
"""
    return unit.function(name, text)


def _combined(op: str, of: Any) -> str:
    """C++ of what memory then holds, of `old` and `value`."""
    if op in _REDUCTIONS:
        if of.family == "bool":
            return f"(bool)((int)old {_REDUCTIONS[op]} (int)value)"
        return f"{of.c}(old {_REDUCTIONS[op]} value)"
    if op == "inc":
        return f"old >= value ? {of.c}(0) : {of.c}(old + 1)"
    if op == "dec":
        return f"old == {of.c}(0) || old > value ? value : {of.c}(old - 1)"
    sign = ">" if op == "max" else "<"
    if of.family == "float":  # a NaN stays
        return f"old != old || old {sign} value ? old : value"
    return f"old {sign} value ? old : value"


def _body(op: str, of: Any, word: str) -> str:
    native = {"add": "atomicAdd", "max": "atomicMax", "min": "atomicMin", "and": "atomicAnd", "or": "atomicOr",
              "xor": "atomicXor"}  # fmt: skip
    if of.family in ("int", "uint") and op in native:
        c = of.c if op in ("max", "min") else word
        return f"{native[op]}(({c}*)to, ({c})value);"
    if of.family == "float" and op == "add":
        return "atomicAdd(to, value);"
    as_bits = f"*({word}*)&"
    return f"""{word} seen = *(volatile {word}*)to, found;
  do {{
    found = seen;
    const {of.c} old = *({of.c}*)&found;
    const {of.c} next = {_combined(op, of)};
    seen = atomicCAS(({word}*)to, found, {as_bits.replace(f"({word}*)", f"(const {word}*)")}next);
  }} while (seen != found);"""
