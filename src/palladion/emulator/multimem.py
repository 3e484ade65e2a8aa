"""`multimem` instructions, as far as one device goes: a multicast object with one device is that device's memory.

So a reduction over the devices' copies is the value itself, and a store to all of them one store. Programs for
several devices need the others' memory, which is not emulated. PTX manual, "multimem".
"""

import numpy as np

from palladion.emulator import engine
from palladion.emulator.bulk import lanes_of
from palladion.emulator.reductions import DTYPES, reduce_bytes
from palladion.emulator.registry import operation

_PACKED = {"f16x2": "f16", "bf16x2": "bf16"}


def _shape(instr) -> tuple[str, int, int]:
    """Element type, bytes of a register, registers."""
    kind: str = instr.parts[-1]
    count = next((int(part[1:]) for part in instr.parts if part in ("v2", "v4", "v8")), 1)
    element = _PACKED.get(kind, kind)
    size = 4 if kind in _PACKED else np.dtype(DTYPES[element]).itemsize
    return element, size, count


def _columns(group, value, size: int) -> np.ndarray:
    items = value if isinstance(value, tuple) else (value,)
    parts = [np.ascontiguousarray(group.array(v)).view(np.uint8).reshape(group.n, -1)[:, :size] for v in items]
    return np.concatenate(parts, 1)


@operation("multimem.ld_reduce", out=1)
def ld_reduce(group, instr, address):
    """`multimem.ld_reduce….OP{.acc::f32}{.vN}.TYPE d, [a];`"""
    _, size, count = _shape(instr)
    data = group.read("global", address, size * count)
    columns = [np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(f"u{size}")[:, 0] for i in range(count)]
    return columns if count > 1 else columns[0]


@operation("multimem.st")
def st(group, instr, address, value) -> None:
    """`multimem.st….{vN}.TYPE [a], b;`"""
    _, size, _ = _shape(instr)
    group.write("global", address, _columns(group, value, size))


@operation("multimem.red")
def red(group, instr, address, value) -> None:
    """`multimem.red….OP{.vN}.TYPE [a], b;`"""
    element, size, _ = _shape(instr)
    name = next(part for part in instr.parts if part in ("add", "min", "max", "and", "or", "xor"))
    data, addresses = _columns(group, value, size), group.array(address)
    for lane in group.active_indices().tolist():
        there = group.view("global", int(addresses[lane]), data.shape[1], data.shape[1], write=True)
        there[:] = reduce_bytes(name, element, there.copy(), data[lane])


@operation("multimem.cp.async.bulk", "multimem.cp.reduce.async.bulk")
def bulk(group, instr, target, source, size, *extra) -> None:
    """`multimem.cp{.reduce}.async.bulk.bulk_group{.OP.TYPE} [dst], [src], size;`"""
    reduces = "reduce" in instr.parts
    name, kind = (instr.parts[-2], instr.parts[-1]) if reduces else ("", "")
    for lane, at in lanes_of(group):
        n = at(size)
        what = f"multimem bulk copy of {n} bytes"
        engine.multiple_of_16(group, at(target), "global address", lane, what)
        engine.multiple_of_16(group, n, "size", lane, what)
        _, start = engine.shared_span(group, at(source), n, 16, lane, what, own=True)
        out = group.view("global", at(target), n, write=True)

        def put(data, out=out):
            out[:] = reduce_bytes(name, kind, out.copy(), data) if reduces else data

        engine.store(group, lane, what, np.arange(start, start + n), put)
