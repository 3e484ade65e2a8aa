"""Loads and stores of all widths, vectors and spaces, address conversions, and what only guides caches.

A whole vector is one indexed read of an array of vectors. Cache operators, eviction priorities and `.nc` change
nothing here; neither do `.acquire` and `.release`, as the emulated machine does one thing after another.
Source: PTX ISA manual, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.emulator import spaces
from palladion.emulator.emitter import Emitter, Value, code_of
from palladion.emulator.ptx import SIZES, Address, Instruction, Symbol, Vector
from palladion.emulator.rules import helper, rule
from palladion.emulator.runtime import DTYPES, Unreached

Array = np.ndarray


# --- called by generated code -------------------------------------------------------------------------------
@helper
def ld_global(g: Any, a: Any, m: Any, code: str, vector: int, nbytes: int) -> Any:
    index = spaces.global_index(g, a, m, nbytes, False)
    if index is None:
        return _nothing(g, code, vector)
    return g.machine.memory.typed(code, vector)[index]


@helper
def st_global(g: Any, a: Any, m: Any, data: Any, code: str, vector: int, nbytes: int) -> None:
    index = spaces.global_index(g, a, m, nbytes, True)
    if index is not None:
        _put(g.machine.memory.typed(code, vector), index, m, data, vector)


@helper
def ld_shared(g: Any, a: Any, m: Any, code: str, vector: int, nbytes: int) -> Any:
    found = spaces.shared_index(g, a, m, nbytes, False)
    if found is None:
        return _nothing(g, code, vector)
    views, offset = found
    if g.machine.detect_uninitialized:
        g.cta.check_read(g, views, offset, m, nbytes)
    return views.typed(code, vector)[offset >> offset.dtype.type(spaces.SHIFT[nbytes])]


@helper
def st_shared(g: Any, a: Any, m: Any, data: Any, code: str, vector: int, nbytes: int) -> None:
    found = spaces.shared_index(g, a, m, nbytes, True)
    if found is None:
        return
    views, offset = found
    if g.machine.accounts:
        spaces.written(g, views, offset, m, nbytes)
    _put(views.typed(code, vector), offset >> offset.dtype.type(spaces.SHIFT[nbytes]), m, data, vector)


@helper
def ld_local(g: Any, a: Any, m: Any, code: str, vector: int, nbytes: int) -> Any:
    offset = spaces.local_index(g, a, m, nbytes, False)
    return spaces.Views(g.cta.local.reshape(-1)).typed(code, vector)[offset >> spaces.SHIFT[nbytes]]


@helper
def st_local(g: Any, a: Any, m: Any, data: Any, code: str, vector: int, nbytes: int) -> None:
    offset = spaces.local_index(g, a, m, nbytes, True)
    if m is None or m.any():
        _put(spaces.Views(g.cta.local.reshape(-1)).typed(code, vector), offset >> spaces.SHIFT[nbytes], m, data, vector)


_LOADS = {"global": ld_global, "shared": ld_shared, "local": ld_local}
_STORES = {"global": st_global, "shared": st_shared, "local": st_local}


@helper
def ld_generic(g: Any, a: Any, m: Any, code: str, vector: int, nbytes: int) -> Any:
    parts = spaces.spaces_of(g, a, m)
    if len(parts) == 1:
        space, local, chosen = parts[0]
        return _LOADS[space](g, local, chosen, code, vector, nbytes)
    found = np.array(_nothing(g, code, vector))
    for space, local, chosen in parts:
        found[chosen] = _LOADS[space](g, local, chosen, code, vector, nbytes)[chosen]
    return found


@helper
def st_generic(g: Any, a: Any, m: Any, data: Any, code: str, vector: int, nbytes: int) -> None:
    for space, local, chosen in spaces.spaces_of(g, a, m):
        _STORES[space](g, local, chosen, data, code, vector, nbytes)


@helper
def ld_param(g: Any, offset: int, code: str) -> Any:
    """A parameter of the kernel: the same for all lanes."""
    return g.machine.params[offset : offset + DTYPES[code]().itemsize].view(DTYPES[code])[0]


def _nothing(g: Any, code: str, vector: int) -> Array:
    """What a load gives that no lane executes."""
    vector *= 2 if code == "x" else 1
    return np.zeros((g.n, vector) if vector > 1 else g.n, DTYPES[code])


def _put(memory: Array, index: Array, m: Any, data: Any, vector: int) -> None:
    if isinstance(data, tuple):
        row = np.empty((len(index), vector), memory.dtype)
        for k, column in enumerate(data):
            row[:, k] = column
        data = row
    if m is None:
        memory[index] = data
    else:
        memory[index[m]] = data[m] if np.ndim(data) else data


# --- rules --------------------------------------------------------------------------------------------------
def space_of(e: Emitter, i: Instruction, address: Address) -> str:
    """Which helper an access needs: global, shared, local, generic or param."""
    space = i.space().split("::")[0]
    if space == "const":
        return "global"
    if space == "param":
        if isinstance(address.base, Symbol):
            return "local" if address.base.name in e.offsets else "param"
        return "global" if e.function.entry else "local"
    return space


def space_in(i: Instruction) -> str:
    """The state space of an operation's address, as `Group.read` wants it."""
    space = i.space().split("::")[0]
    return "global" if space in ("const", "param") else space


def vector_of(i: Instruction) -> int:
    """Number of items of a vector access."""
    return next((int(p[1:]) for p in i.parts if p in ("v2", "v4", "v8")), 1)


@rule("ld", "ldu")
def _ld(e: Emitter, i: Instruction) -> Any:
    kind, vector = i.type(), vector_of(i)
    address = i.operands[1]
    assert isinstance(address, Address)
    space, code = space_of(e, i, address), code_of(kind)
    if code == "bf":
        code = "u2"
    items = i.operands[0].items if isinstance(i.operands[0], Vector) else (i.operands[0],)
    if len(items) != vector:
        raise Unreached("a vector of another length")
    if space == "param":
        assert isinstance(address.base, Symbol)
        offset = e.param_offset(address.base.name) + address.base.offset + address.offset
        size = SIZES[kind]
        loaded = [e.let(f"ld_param(g, {offset + k * size}, {code!r})", code, True) for k in range(vector)]
    else:
        e.locate(i)
        size = SIZES[kind]
        at, wide = e.address(address).name, size * vector
        if (code == "x" and vector > 1) or wide > 32:
            raise Unreached("a vector of 128-bit numbers")
        text = f"ld_{space}(g, {at}, {e.mask}, {code!r}, {vector}, {wide})"
        if vector == 1:
            loaded = [e.let(text, code)]
        else:
            whole = e.expression(text)
            loaded = [e.let(f"{whole}[:, {k}]", code) for k in range(vector)]
    guard = e.guard_value
    for target, value in zip(items, loaded, strict=True):
        e.assign(target, value, guard)
    return []


@rule("st", out=0)
def _st(e: Emitter, i: Instruction) -> None:
    kind, vector = i.type(), vector_of(i)
    address = i.operands[0]
    assert isinstance(address, Address)
    space, code = space_of(e, i, address), code_of(kind)
    code = f"u{SIZES[kind]}" if code == "bf" else code
    if space == "param":
        raise Unreached("a store to a kernel's parameter")
    e.locate(i)
    source = i.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    if len(items) != vector:
        raise Unreached("a vector of another length")
    values = [e.operand(o, code).name for o in items]
    data = values[0] if vector == 1 else f"({', '.join(values)})"
    at, wide = e.address(address).name, SIZES[kind] * vector
    e.lines.append(f"st_{space}(g, {at}, {e.mask}, {data}, {code!r}, {vector}, {wide})")


@rule("cvta")
def _cvta(e: Emitter, i: Instruction) -> Value:
    kind = i.type()
    value = e.operand(i.operands[1], kind)
    space = next((p.split("::")[0] for p in i.parts if p.split("::")[0] in ("shared", "local")), None)
    if space is None:  # global, const and param addresses are generic addresses
        return value
    window = e.constant(np.uint64(spaces.SHARED_WINDOW if space == "shared" else spaces.LOCAL_WINDOW))
    if kind == "u32":
        raise Unreached("32-bit generic addresses")
    sign = "-" if i.has("to") else "+"
    return e.let(f"{value.name} {sign} {window}", kind, value.uniform)


@rule("isspacep")
def _isspacep(e: Emitter, i: Instruction) -> Value:
    value = e.operand(i.operands[1], "u64")
    window = f"({value.name} >> U8(40))"
    space = i.parts[1]
    if space in ("shared::cta",):
        inside = f"{window} == U8(2)) & (({value.name} >> U8(24) & U8(0xFFFF)) == U8(g.cta.rank))"
        return e.let(f"({inside}", "p", value.uniform)
    number = {"shared": 2, "shared::cluster": 2, "local": 3, "global": 1, "const": 1, "param": 1}[space]
    return e.let(f"{window} == U8({number})", "p", value.uniform)


@rule("prefetch", "prefetchu", "applypriority", "discard", out=0)
def _hint(e: Emitter, i: Instruction) -> None:
    """Cache hints do nothing."""
