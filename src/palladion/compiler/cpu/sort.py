"""Sorting rows in place: a bottom-up merge sort, stable, in step over several buffers.

Runs of 1, 2, 4, … elements are merged from the buffers into the spare ones and back. NaN sorts last, as in XLA, in
descending order first; zeros of either sign are equal.
"""

from __future__ import annotations

import math
from typing import Any

from palladion.compiler.cpu import dtypes, ir
from palladion.compiler.cpu.builder import branch, const, gep, is_float, load, loop, repeat_while, select, smin, store


def _before(b: Any, dtype: Any, x: Any, y: Any, descending: bool) -> Any:
    """Whether x comes strictly before y."""
    sign = ">" if descending else "<"
    if not is_float(x.type):
        return (b.icmp_signed if dtypes.is_signed(dtype) else b.icmp_unsigned)(sign, x, y)
    x_nan, y_nan = b.fcmp_unordered("uno", x, x), b.fcmp_unordered("uno", y, y)
    first, second = (x_nan, y_nan) if descending else (y_nan, x_nan)
    return b.or_(b.fcmp_ordered(sign, x, y), b.and_(first, b.not_(second)))


def _key(b: Any, buf: ir.Buf, value: Any) -> Any:
    """An element as something to compare: narrow floats widened."""
    if dtypes.is_floating(buf.dtype) and buf.dtype.itemsize < 4:
        return dtypes.widen(b, value, buf.dtype.name)
    return value


def emit_sort(emitter: Any, s: ir.Sort) -> None:
    """Emit the sort of every row."""
    b, n = emitter.b, s.bufs[0].shape[-1]
    rows = math.prod(s.bufs[0].shape[:-1])
    if n < 2:
        return
    types = [dtypes.stored(buf.dtype) for buf in s.bufs]
    zero = tuple(ir.index(0) for _ in s.bufs[0].shape)
    homes = [[emitter.place(buf, zero) for buf in group] for group in (s.bufs, s.spare)]
    with loop(b, 0, rows) as R:
        source, spare = ([gep(b, p, b.mul(R.i, const(n)), t) for p, t in zip(group, types)] for group in homes)
        width, passes = 1, 0
        while width < n:
            _merge_pass(b, s, types, source, spare, n, width)
            source, spare = spare, source
            width, passes = 2 * width, passes + 1
        if passes % 2:  # the sorted row is in the spare buffers
            with loop(b, 0, n) as L:
                for p, q, t in zip(source, spare, types):
                    store(b, load(b, t, gep(b, p, L.i, t)), gep(b, q, L.i, t))


def _merge_pass(b: Any, s: ir.Sort, types: Any, source: Any, spare: Any, n: int, width: int) -> None:
    """Merge neighbouring runs of `width` elements."""
    with loop(b, 0, n, 2 * width) as L:
        middle = smin(b, b.add(L.i, const(width)), const(n))
        end = smin(b, b.add(L.i, const(2 * width)), const(n))
        with repeat_while(b, [L.i, middle, L.i]) as W:
            left, right, out = W.v
            W.test(b.icmp_signed("<", out, end))

            def compare():
                result = const(0, dtypes.i1)
                for buf, p, t in reversed(list(zip(s.bufs[: s.keys], source, types))):
                    x, y = (_key(b, buf, load(b, t, gep(b, p, i, t))) for i in (left, right))
                    later = _before(b, buf.dtype, y, x, s.descending)
                    earlier = _before(b, buf.dtype, x, y, s.descending)
                    result = select(b, later, const(1, dtypes.i1), select(b, earlier, const(0, dtypes.i1), result))
                return [result]

            both = b.and_(b.icmp_signed("<", left, middle), b.icmp_signed("<", right, end))
            (take_right,) = branch(b, both, compare, lambda: [b.icmp_signed(">=", left, middle)])
            chosen = select(b, take_right, right, left)
            for p, q, t in zip(source, spare, types):
                store(b, load(b, t, gep(b, p, chosen, t)), gep(b, q, out, t))
            step = b.zext(take_right, dtypes.i64)
            W.next = [b.add(left, b.sub(const(1), step)), b.add(right, step), b.add(out, const(1))]
