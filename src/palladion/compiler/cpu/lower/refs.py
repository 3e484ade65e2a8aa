"""Reads and writes of Refs, scoped buffers, and the kernel's own operations.

A Ref is a buffer. Views (`.at`, reshape, transpose, bitcast) and indices are composed into one function from the index
of an element of the view to its place in the buffer. Run-time indices are clamped as XLA clamps them, so that no
kernel can touch memory outside its operands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink, locations
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.elementwise import scalar_op
from palladion.compiler.cpu.lower.values import (
    RULES,
    Affine,
    Index,
    Lazy,
    Lowering,
    as_index,
    clamp_index,
    of_buffer,
    of_const,
    op,
)
from palladion.errors import count_of
from palladion.language import ops
from palladion.language.dtypes import element_bits, unwritten


@dataclasses.dataclass(frozen=True)
class Ref:
    """A kernel's Ref.

    Attributes:
      buf: where its elements are.
      label: how messages call it.
    """

    buf: ir.Buf
    label: str = "a Ref"


@dataclasses.dataclass(frozen=True)
class _View:
    """A view of a buffer: its type, where its elements are, and how they are encoded.

    Attributes:
      place: from an index of the view to one of the buffer.
      affine: set while the view is strided.
      pieces: how many elements of the buffer, one row below the other, make one of the view (a bitcast to a wider
        type).
      memories: of the arrays of indices that `place` reads.
    """

    buf: ir.Buf
    shape: tuple[int, ...]
    dtype: Any
    place: Callable[[Index], Index]
    affine: Affine | None
    pieces: int = 1
    memories: frozenset = frozenset()

    def piece(self, index: Index, k: int) -> Index:
        """The place of the k-th element of the buffer that makes an element of the view."""
        place = self.place(index)
        return (*place[:-2], ir.add(ir.mul(place[-2], self.pieces), k), place[-1]) if self.pieces > 1 else place

    def read(self) -> Lazy:
        cast = jnp.dtype(self.dtype) != self.buf.dtype
        wide, narrow = _unsigned(self.dtype), _unsigned(self.buf.dtype)

        def at(index):
            if self.pieces == 1:
                e = ir.Load(self.buf.dtype, self.buf, self.place(index))
                return op("bitcast", self.dtype, e) if cast else e
            total = None
            for k in range(self.pieces):
                e = ir.Load(self.buf.dtype, self.buf, self.piece(index, k))
                e = op("convert", wide, op("bitcast", narrow, e))
                e = op("shift_left", wide, e, ir.Const(wide, k * element_bits(narrow)))
                total = e if total is None else op("or", wide, total, e)
            assert total is not None
            return op("bitcast", self.dtype, total)

        affine = None if cast or self.pieces > 1 else self.affine
        return Lazy(self.shape, self.dtype, at, memories=self.memories | {self.buf.memory}, cost=1, affine=affine)


def _whole(ref: Ref) -> _View:
    buf = ref.buf
    zero = tuple(ir.index(0) for _ in buf.shape)
    return _View(buf, buf.shape, buf.dtype, lambda index: index, Affine(buf, zero, buf.strides))


def view_of(ctx: Lowering, eqn, ref: Ref, transforms: Sequence[Any]) -> _View:
    """The part of a Ref that a chain of views selects."""
    return functools.reduce(lambda v, t: _step(ctx, eqn, ref, v, t), transforms, _whole(ref))


def _step(ctx: Lowering, eqn, ref: Ref, v: _View, transform: Any) -> _View:
    match transform:
        case jaxlink.NDIndexer():
            return _indexed(ctx, eqn, ref, v, transform)
        case jaxlink.TransposeTransform():
            perm = transform.permutation
            inverse = [int(i) for i in np.argsort(perm)]
            affine = v.affine and Affine(v.buf, v.affine.base, tuple(v.affine.strides[p] for p in perm))
            place = lambda index: v.place(tuple(index[i] for i in inverse))
            return dataclasses.replace(v, shape=tuple(v.shape[p] for p in perm), place=place, affine=affine)
        case jaxlink.ReshapeTransform():
            return _reshaped(v, tuple(transform.shape))
        case jaxlink.BitcastTransform() if element_bits(transform.dtype) == element_bits(v.dtype):
            return dataclasses.replace(v, dtype=jnp.dtype(transform.dtype))
        case jaxlink.BitcastTransform() if v.dtype == v.buf.dtype and v.pieces == 1:
            if element_bits(transform.dtype) >= 8:  # halves of a byte have no place of their own
                return _recast(v, jnp.dtype(transform.dtype))
    raise RULES.unsupported(eqn)


def _unsigned(dtype: Any) -> Any:
    return jnp.dtype(f"uint{element_bits(dtype)}")


def _recast(v: _View, dtype: Any) -> _View:
    """Elements of another width, with the second-to-last dimension scaled (Pallas:TPU's rule)."""
    buf = v.buf
    old, new = element_bits(buf.dtype), element_bits(dtype)
    if new > old:
        ratio = new // old
        shape = (*v.shape[:-2], v.shape[-2] // ratio, v.shape[-1])
        return dataclasses.replace(v, shape=shape, dtype=dtype, affine=None, pieces=ratio)
    ratio = old // new
    # The same bytes as rows of `ratio` parts; a part is the innermost step in memory.
    *outer, rows, columns = buf.strides
    strides = (*(s * ratio for s in outer), rows * ratio, 1, columns * ratio)
    parts = ir.Buf(
        buf.name, (*buf.shape[:-1], ratio, buf.shape[-1]), dtype, strides, buf.kind, buf.memory, buf.root or buf
    )

    def place(index):
        row = index[-2]
        at = v.place((*index[:-2], _divide("div", row, ratio), index[-1]))
        return (*at[:-1], _divide("rem", row, ratio), at[-1])

    shape = (*v.shape[:-2], v.shape[-2] * ratio, v.shape[-1])
    return _View(parts, shape, dtype, place, None, memories=v.memories)


def _reshaped(v: _View, shape: tuple[int, ...]) -> _View:
    old = v.shape

    def place(index):
        linear: ir.Expr = ir.index(0)
        for i, n in zip(index, shape):
            linear = ir.add(ir.mul(linear, n), i)
        parts = []
        for d in range(len(old)):
            inner = math.prod(old[d + 1 :])
            q = linear if inner == 1 else _divide("div", linear, inner)
            parts.append(q if d == 0 else _divide("rem", q, old[d]))
        return v.place(tuple(parts))

    contiguous = v.affine is not None and v.affine.strides == ir.row_major(old)
    affine = Affine(v.buf, v.affine.base, ir.row_major(shape)) if contiguous and v.affine else None
    return dataclasses.replace(v, shape=shape, place=place, affine=affine)


def _divide(name: str, e: ir.Expr, by: int) -> ir.Expr:
    if isinstance(e, ir.Const):
        return ir.index(e.value // by if name == "div" else e.value % by)
    return ir.Op(ir.INDEX, name, (e, ir.index(by)))


def _indexed(ctx: Lowering, eqn, ref: Ref, v: _View, indexer: Any) -> _View:
    arrays, memories = indexer.int_indexer_shape != (), v.memories
    picks: list[tuple[str, Any, int, int]] = []  # kind, start or array, size, stride
    for d, (i, n) in enumerate(zip(indexer.indices, indexer.shape)):
        if isinstance(i, jaxlink.Slice):
            size: Any = i.size  # static: run-time sizes are refused while tracing
            picks.append(("slice", _start(ctx, eqn, ref, i.start, d, n, i), size, i.stride))
        elif arrays:
            _check(ctx, eqn, ref, i, d, n)
            rows = ctx.keep(i) if isinstance(i, Lazy) else of_const(i, np.int32)
            if v.buf.memory in rows.memories:  # a Ref indexed by what it holds itself
                ctx.materialise(rows, copy=True)
            memories |= rows.memories
            picks.append(("array", rows, n, 1))
        else:
            picks.append(("scalar", _start(ctx, eqn, ref, i, d, n), 1, 1))
    shape = tuple(indexer.get_indexer_shape())
    kinds = [k for k, *_ in picks]
    n_array = len(indexer.int_indexer_shape)
    together = arrays and all(k == "array" for k in kinds[kinds.index("array") :][: kinds.count("array")])
    front = 0 if not together else sum(k == "slice" for k in kinds[: kinds.index("array")]) if arrays else 0

    def place(index):
        array_index = index[front : front + n_array]
        rest = iter((*index[:front], *index[front + n_array :]))
        parts = []
        for kind, start, n, stride in picks:
            if kind == "slice":
                parts.append(ir.add(ir.mul(next(rest), stride), start))
            elif kind == "scalar":
                parts.append(start)
            else:
                e = as_index(start.at(array_index if start.shape else ()))
                parts.append(clamp_index(_wrapped(e, n), 0, n - 1))
        return v.place(tuple(parts))

    affine = None
    if not arrays and v.affine is not None and v.affine.strides == v.buf.strides and len(picks) == len(v.affine.base):
        base = tuple(ir.add(b, start) for b, (_, start, _, _) in zip(v.affine.base, picks))
        strides = [s * stride for s, (k, _, _, stride) in zip(v.affine.strides, picks) if k == "slice"]
        affine = Affine(v.buf, base, tuple(strides))
    return dataclasses.replace(v, shape=shape, place=place, affine=affine, memories=memories)


def _wrapped(e: ir.Expr, n: int) -> ir.Expr:
    """Negative indices count from the end, as NumPy has it."""
    if isinstance(e, ir.Const):
        return ir.index(e.value + n * (e.value < 0))
    negative = ir.Op(np.dtype(np.bool_), "lt", (e, ir.index(0)))
    return ir.Op(ir.INDEX, "select", (negative, ir.add(e, n), e))


def _start(ctx: Lowering, eqn, ref: Ref, start: Any, d: int, n: int, span: Any = None) -> ir.Expr:
    last = 0 if span is None else (span.size - 1) * span.stride
    if not isinstance(start, Lazy):
        return ir.index(int(start) + n * (int(start) < 0))
    _check(ctx, eqn, ref, start, d, n, span)
    e = as_index(ctx.scalar(start))
    return clamp_index(_wrapped(e, n), 0, max(n - 1 - last, 0))


def _check(ctx: Lowering, eqn, ref: Ref, start: Any, d: int, n: int, span: Any = None) -> None:
    """Under `enable_debug_checks`: stop where an index, or all that a slice starts at, runs past a dimension."""
    if not ctx.checks or not isinstance(start, Lazy):
        return
    from palladion.compiler.cpu.lower.host import check
    from palladion.compiler.cpu.lower.reduce import reduce_axes

    last = 0 if span is None else (span.size - 1) * span.stride
    stride = f", stride={span.stride}" if span is not None and span.stride != 1 else ""
    what = "Index {}" if span is None else f"pl.ds(start={{}}, size={span.size}{stride})"
    message = f"{what} runs past dimension {d} of {_braced(ref.label)}, which has {count_of(n, 'element')}."
    ctx.keep(start)
    low, high = (
        reduce_axes(ctx, name, start, range(len(start.shape)), start.dtype) if start.shape else start
        for name in ("min", "max")
    )
    first = ir.Const(start.dtype, -n if span is None and jnp.issubdtype(start.dtype, jnp.signedinteger) else 0)

    def past(name: str, x: Lazy, bound: ir.Const) -> ir.Expr:
        return scalar_op(name, np.bool_, x.at(()), bound)

    def fits(_: Index) -> ir.Expr:
        return op("and", np.bool_, past("ge", low, first), past("lt", high, _limit(start.dtype, n - last)))

    def worst(_: Index) -> ir.Expr:
        return op("select", start.dtype, past("lt", low, first), low.at(()), high.at(()))

    memories = low.memories | high.memories
    ok = Lazy((), np.bool_, fits, memories=memories, cost=2)
    check(ctx, ok, message, locations.location_of(eqn), Lazy((), start.dtype, worst, memories=memories, cost=2))


def _limit(dtype: Any, n: int) -> ir.Const:
    return ir.Const(dtype, min(n, jnp.iinfo(dtype).max))


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _transforms(eqn, flat: Sequence[Any]) -> Sequence[Any]:
    return jax.tree.unflatten(eqn.params["tree"], flat)


@RULES.rule(jaxlink.get_p)
def _get(ctx: Lowering, eqn, ref: Ref, *flat) -> Lazy:
    return view_of(ctx, eqn, ref, _transforms(eqn, flat)).read()


@RULES.rule(jaxlink.swap_p)
def _swap(ctx: Lowering, eqn, ref: Ref, new: Lazy, *flat) -> Lazy | None:
    wanted = ctx.wanted[0]
    view = view_of(ctx, eqn, ref, _transforms(eqn, flat))
    old = None
    if wanted:
        old = view.read()
        ctx.materialise(old, copy=True)
    store(ctx, view, new)
    return old


def store(ctx: Lowering, view: _View, new: Lazy) -> None:
    """Write a value to a view."""
    if view.pieces > 1:
        wide, narrow = _unsigned(view.dtype), _unsigned(view.buf.dtype)
        ctx.before_write(view.buf)
        ctx.materialise(new, copy=view.buf.memory in new.memories)

        def one(index):
            bits = op("bitcast", wide, new.at(index))
            for k in range(view.pieces):
                part = op("shift_right_logical", wide, bits, ir.Const(wide, k * element_bits(narrow)))
                part = op("bitcast", view.buf.dtype, op("convert", narrow, part))
                ctx.emit(ir.Store(view.buf, view.piece(index, k), part))

        ctx.loops(view.shape, one)
        return
    if jnp.dtype(view.dtype) != view.buf.dtype:
        new = Lazy(
            new.shape,
            view.buf.dtype,
            lambda index, x=new: op("bitcast", view.buf.dtype, x.at(index)),
            memories=new.memories,
            cost=new.cost + 1,
        )
    ctx.store(view.buf, view.shape, view.place, new)


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(ctx: Lowering, eqn, ref: Ref, new: Lazy, *flat) -> list:
    view = view_of(ctx, eqn, ref, _transforms(eqn, flat))
    cast = jnp.dtype(view.dtype) != view.buf.dtype
    if cast:
        raise RULES.unsupported(eqn)
    ctx.before_write(view.buf)
    if view.buf.memory in new.memories:
        ctx.materialise(new, copy=True)
    name = "or" if new.dtype == np.bool_ else "add"

    def one(index):  # in order: a repeated index counts each time
        place = view.place(index)
        old = ir.Load(view.buf.dtype, view.buf, place)
        ctx.emit(ir.Store(view.buf, place, scalar_op(name, new.dtype, old, new.at(index))))

    ctx.loops(view.shape, one)
    return []


# --- Refs made inside the kernel ------------------------------------------------------------------------------------
def uninitialized(ctx: Lowering, buf: ir.Buf) -> None:
    """Fill a buffer with what memory holds before it is written, as the reference interpreter has it."""
    ctx.fill(buf, of_const(unwritten(buf.dtype), buf.dtype, buf.shape))


@RULES.rule(ops.run_scoped_p)
def _run_scoped(ctx: Lowering, eqn, *operands) -> list[Lazy]:
    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    refs = []
    for v in jaxpr.invars[len(jaxpr.invars) - n :]:
        buf = ir.temp(v.aval.shape, v.aval.dtype, "scoped")
        uninitialized(ctx, buf)
        refs.append(Ref(buf, v.aval.label))
    outs = ctx.run(jaxpr, [*operands, *refs])
    for out in outs:  # the buffers end here
        if isinstance(out, Lazy) and any(r.buf.memory in out.memories for r in refs):
            ctx.materialise(out, copy=True)
    return outs


@RULES.rule(jaxlink.ref_p)
def _new_ref(ctx: Lowering, eqn, x: Lazy) -> Ref:
    ctx.materialise(x, copy=True)
    assert x.affine is not None
    return Ref(x.affine.buf)


@RULES.rule(jaxlink.empty_ref_p)
def _empty_ref(ctx: Lowering, eqn) -> Ref:
    aval = eqn.outvars[0].aval
    buf = ir.temp(aval.shape, aval.dtype, "ref")
    uninitialized(ctx, buf)
    return Ref(buf)


@RULES.rule(jaxlink.freeze_p)
def _freeze(ctx: Lowering, eqn, ref: Ref) -> Lazy:
    return of_buffer(ref.buf)


@RULES.rule(jaxlink.free_ref_p)
def _free_ref(ctx: Lowering, eqn, ref: Ref) -> list:
    return []


@RULES.rule(ops.program_id_p)
def _program_id(ctx: Lowering, eqn) -> Lazy:
    return ctx.ids[eqn.params["axis"]]


@RULES.rule(ops.num_programs_p)
def _num_programs(ctx: Lowering, eqn) -> Lazy:
    size = ctx.sizes[eqn.params["axis"]]
    return size if isinstance(size, Lazy) else of_const(size, np.int32)


@RULES.rule(ops.delay_p)
def _delay(ctx: Lowering, eqn, nanos) -> list:
    return []
