"""One large matrix product on several threads.

A grid's programs run on all threads by themselves. Where there is only one group of them, a product in it is cut into
parts, each a product of its own, formed by whichever thread comes next (jobs.spread). Parts are cut where the plan's
blocks of packed columns end or, where there are few columns, along the rows; of a batch, element by element. So they
write different elements of C, and nothing is packed twice but, for parts of rows, the few columns. What comes before
and after the product stays in order, as the call returns when all parts are done.

    split(spec)                       # Split(axis="n", size=64, count=16)
    emit_spread(module, b, spec, buffers, places, workspace, stride)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import jobs, matmul, target
from palladion.compiler.cpu.builder import Value, const, define, gep, i32, i64, load, loop, on_stack, ptr, store
from palladion.compiler.cpu.matmul_plan import MatmulSpec, plans
from palladion.compiler.cpu.pack import STORED

WORTH = 1.6e7  # operations of a product, below which it stays on one thread; a tenth of a millisecond, or less
PART = 4e6  # operations of a part, at least: many times what it costs to take one
PARTS = 16  # at most: more would make them too narrow to multiply fast


@dataclasses.dataclass(frozen=True)
class Split:
    """Parts of a product: `count` ranges of `size` along an axis, "m", "n" or "batch"; the last may be shorter."""

    axis: str
    size: int
    count: int

    def offsets(self, spec: MatmulSpec) -> tuple[int, int, int]:
        """Elements of A, B and C from one part to the next."""
        strides = {"m": (spec.a[0], 0, spec.c[0]), "n": (0, spec.b[1], spec.c[1]), "batch": spec.batch_strides}
        a, b, c = strides[self.axis]
        return self.size * a, self.size * b, self.size * c

    def part(self, spec: MatmulSpec, last: bool) -> MatmulSpec:
        """The product that a part is."""
        total = getattr(spec, self.axis)
        return dataclasses.replace(spec, **{self.axis: total - self.size * (self.count - 1) if last else self.size})


def split(spec: MatmulSpec, host: target.Host | None = None) -> Split | None:
    """How to cut a product; None: it stays whole."""
    work = 2.0 * spec.m * spec.n * spec.k * spec.batch
    if work < WORTH:
        return None
    most = min(PARTS, int(work / PART))
    if spec.batch >= 4:
        size = -(-spec.batch // most)
        return Split("batch", size, -(-spec.batch // size))
    plan = plans(spec, host or target.host())[0]
    # as the plan sees it, where B is packed by columns, if it is
    rows, columns = ("n", "m") if plan.swapped else ("m", "n")
    wide = 16 if plan.dots else 2 * plan.vectors * plan.lanes
    for axis, unit in ((columns, wide), (rows, 4 * plan.rows)):
        total = getattr(spec, axis)
        size = -(-total // most)
        size = -(-size // unit) * unit
        if total >= 2 * size:
            return Split(axis, size, -(-total // size))
    return None


def _parts(spec: MatmulSpec, host: target.Host | None) -> list[MatmulSpec]:
    how = split(spec, host)
    return [spec] if how is None else [how.part(spec, last) for last in (False, True)]


def workspace_bytes(spec: MatmulSpec, host: target.Host | None = None) -> int:
    """The bytes of workspace that one thread needs for its parts of the product."""
    return max(matmul.workspace_bytes(part, host) for part in _parts(spec, host))


def emit_spread(
    module: Any,
    b: ir.IRBuilder,
    spec: MatmulSpec,
    buffers: Value,
    places: Sequence[Value],
    workspace: Value,
    stride: int,
) -> None:
    """Emit, in the function of a phase that is not parallel, a product that `split` cuts.

    Arguments: places: the addresses of A, B and C; workspace: of worker 0; stride: bytes to the next worker's.
    """
    data = on_stack(b, ptr, 4)
    for n, place in enumerate((*places, workspace)):
        store(b, place, gep(b, data, n, ptr))
    how = split(spec)
    assert how is not None
    jobs.spread(b, buffers, _worker(module, spec, how, stride), data, how.count)


def _worker(module: Any, spec: MatmulSpec, how: Split, stride: int) -> Any:
    """i32 worker(data, begin, end, worker): some parts of the product."""
    first, last = (matmul.emit_matmul(module, how.part(spec, last)) for last in (False, True))
    name = f"{first.name}_{last.name}_spread_{stride}"
    if name in module.globals:
        return module.globals[name]
    function, b = define(module, name, i32, ptr, i64, i64, i64, internal=True)
    data, begin, end, worker = function.args
    *bases, workspace = (load(b, ptr, gep(b, data, n, ptr)) for n in range(4))
    workspace = gep(b, workspace, b.mul(worker, const(stride)))
    dtypes = (spec.a_dtype, spec.b_dtype, spec.c_dtype)
    with loop(b, begin, end) as L:
        places = [
            gep(b, base, b.mul(L.i, const(offset)), STORED[dtype])
            for base, offset, dtype in zip(bases, how.offsets(spec), dtypes)
        ]
        with b.if_else(b.icmp_signed("==", L.i, const(how.count - 1))) as sides:
            for side, product in zip(sides, (last, first)):
                with side:
                    b.call(product, [*places, workspace])
    b.ret(const(0, i32))
    return function
