"""Rules: reading and writing Refs, with and without masks, atomic updates, and buffers that live in registers.

What `pltriton.load` and `store` say about caches goes to Triton as it is. Atomic maxima and minima of floats are those
of their bits: of the signed integer where the value is not negative, of the unsigned one, turned round, elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import add
from palladion.compiler.triton.lowering import RULES, Cell, Lowering, dtype_of, refusal
from palladion.compiler.triton.refs import Ref, View, addresses, before, load, resolve, store
from palladion.compiler.triton.registers import read_cell, write_cell
from palladion.language import ops
from palladion.language.masked import atomic_update_p, masked_load_p, masked_store_p


def _transforms(eqn: Any, flat: Sequence[Any]) -> Sequence[Any]:
    return jax.tree.unflatten(eqn.params["tree"], flat)


@RULES.rule(jaxlink.get_p)
def _get(ctx: Lowering, eqn, ref, *flat) -> Any:
    view = resolve(eqn, ref, _transforms(eqn, flat))
    return read_cell(eqn, ref, view) if isinstance(ref, Cell) else load(ctx, ref, view)


@RULES.rule(jaxlink.swap_p)
def _swap(ctx: Lowering, eqn, ref, new, *flat) -> Any:
    wanted = ctx.wanted[0]
    view = resolve(eqn, ref, _transforms(eqn, flat))
    if isinstance(ref, Cell):
        old = read_cell(eqn, ref, view) if wanted else None
        write_cell(eqn, ref, view, new)
        return old
    old = load(ctx, ref, view) if wanted else None
    store(ctx, ref, view, new)
    return old


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(ctx: Lowering, eqn, ref, new, *flat) -> list[Any]:
    """Add to a part of a Ref. Index arrays may name an element twice, so that needs atomics."""
    transforms = _transforms(eqn, flat)
    view = resolve(eqn, ref, transforms)
    arrays = any(isinstance(t, jaxlink.NDIndexer) and t.int_indexer_shape for t in transforms)
    if isinstance(ref, Cell):
        if arrays:
            raise RULES.unsupported(eqn)
        write_cell(eqn, ref, view, add(view.dtype, read_cell(eqn, ref, view), new))
    elif arrays:
        _atomic(ctx, eqn, ref, view, "add", [new], None)
    else:
        store(ctx, ref, view, add(view.dtype, load(ctx, ref, view), new))
    return []


# --- masks ------------------------------------------------------------------------------------------------------------
_CACHE = {".ca": "ca", ".cg": "cg", ".cs": "cs", ".cv": "cv", ".wb": "wb", ".wt": "wt"}
_EVICTION = ("evict_normal", "evict_first", "evict_last", "no_allocate")


def _policy(eqn: Any, hints: dict[str, Any]) -> Any:
    """The attribute for what the user says about caches; None for nothing."""
    cache, eviction = hints.get("cache_modifier"), hints.get("eviction_policy")
    if not cache and not eviction:
        return None
    if cache and f".{cache.lstrip('.')}" not in _CACHE:
        hint = f"one of {', '.join(_CACHE)}"
        raise refusal(ValueError, f"There is no cache modifier {cache!r}.", eqn, hint)
    if eviction and eviction not in _EVICTION:
        hint = f"one of {', '.join(_EVICTION)}"
        raise refusal(ValueError, f"There is no eviction policy {eviction!r}.", eqn, hint)
    if cache and eviction not in (None, "evict_normal"):
        headline = f"PTX does not combine the cache modifier {cache!r} with the eviction policy {eviction!r}."
        raise refusal(ValueError, headline, eqn, "give one of them")
    modifier = "none" if not cache else cache.lstrip(".")
    text = f"#tt.cache_policy<cache_modifier = {modifier}, eviction_policy = {eviction or 'evict_normal'}>"
    try:
        return ir.Attribute.parse(text)
    except ir.MLIRError as error:
        headline = f"Triton does not know {eviction or cache!r} here."
        raise refusal(ValueError, headline, eqn, "leave the hint out") from error


@RULES.rule(masked_load_p)
def _masked_load(ctx: Lowering, eqn, ref, *flat) -> Any:
    transforms, mask, other = jax.tree.unflatten(eqn.params["tree"], flat)
    view, hints = resolve(eqn, ref, transforms), dict(eqn.params["hints"])
    if isinstance(ref, Cell):
        value = read_cell(eqn, ref, view)
        return value if mask is None or other is None else emit.select(mask, value, other)
    volatile = dict(is_volatile=True) if hints.get("volatile") else {}
    return load(ctx, ref, view, mask=mask, other=other, policy=_policy(eqn, hints), **volatile)


@RULES.rule(masked_store_p)
def _masked_store(ctx: Lowering, eqn, ref, new, *flat) -> list[Any]:
    transforms, mask = jax.tree.unflatten(eqn.params["tree"], flat)
    view = resolve(eqn, ref, transforms)
    if isinstance(ref, Cell):
        write_cell(eqn, ref, view, new if mask is None else emit.select(mask, new, read_cell(eqn, ref, view)))
    else:
        store(ctx, ref, view, new, mask=mask, policy=_policy(eqn, dict(eqn.params["hints"])))
    return []


# --- atomics ----------------------------------------------------------------------------------------------------------
_SEMANTICS = tt.MemSemantic.ACQUIRE_RELEASE, tt.MemSyncScope.GPU
_RMW = {"and": tt.RMWOp.AND, "or": tt.RMWOp.OR, "xor": tt.RMWOp.XOR, "xchg": tt.RMWOp.XCHG}


@RULES.rule(atomic_update_p)
def _atomic_update(ctx: Lowering, eqn, ref, *flat) -> Any:
    values, transforms, mask = jax.tree.unflatten(eqn.params["tree"], flat)
    if isinstance(ref, Cell):
        headline = f"{ref.label} lives in registers of one program; atomics are for arrays that programs share."
        raise refusal(ValueError, headline, eqn, "read and write it as it is")
    return _atomic(ctx, eqn, ref, resolve(eqn, ref, transforms), eqn.params["op"], list(values), mask)


def _atomic(ctx: Lowering, eqn: Any, ref: Ref, view: View, op: str, values: list[Any], mask: Any) -> Any:
    dtype = jnp.dtype(view.dtype)
    bits = emit.bits_of(dtype)
    narrow = bits < 32 and not (op == "add" and str(dtype) in ("float16", "bfloat16"))
    if narrow or str(dtype) not in emit.HELD:
        headline = f"{ref.label} holds {dtype}; PTX has no atomic {op} of {bits} bits."
        raise refusal(NotImplementedError, headline, eqn, "use a 32-bit array")
    before(ctx, ref, "written")
    pointers, exists = addresses(ref, view)
    on = exists if mask is None else emit.both(exists, mask)
    values = [emit.broadcast(v, view.shape) for v in values]
    if op == "cas":
        return _compare_and_swap(eqn, ref, dtype, pointers, on, values)
    (value,) = values
    if op in ("max", "min") and emit.is_float(dtype):
        return _float_extreme(op, dtype, pointers, value, on)
    if op == "add":
        kind = tt.RMWOp.FADD if emit.is_float(dtype) else tt.RMWOp.ADD
    elif op in ("max", "min"):
        unsigned = emit.is_unsigned(dtype)
        kind = {"max": (tt.RMWOp.MAX, tt.RMWOp.UMAX), "min": (tt.RMWOp.MIN, tt.RMWOp.UMIN)}[op][unsigned]
    else:
        kind = _RMW[op]
    return tt.atomic_rmw(value.type, kind, pointers, value, *_SEMANTICS, mask=on)


def _float_extreme(op: str, dtype: Any, pointers: Any, value: Any, on: Any) -> Any:
    """The larger or smaller float by its bits: as signed integers where it is positive, as unsigned ones elsewhere."""
    integer = jnp.dtype(f"int{emit.bits_of(dtype)}")
    shape = emit.shape_of(value)
    element = emit.element_type(integer)
    bits = tt.bitcast(emit.typed(shape, element), value)
    places = tt.bitcast(emit.typed(shape, tt.PointerType.get(element, 1)), pointers)
    negative = arith.cmpi(arith.CmpIPredicate.slt, bits, emit.like(bits, 0))
    positive = arith.xori(negative, emit.like(negative, 1))
    up, down = (tt.RMWOp.MAX, tt.RMWOp.UMIN) if op == "max" else (tt.RMWOp.MIN, tt.RMWOp.UMAX)
    first = tt.atomic_rmw(bits.type, up, places, bits, *_SEMANTICS, mask=emit.both(on, positive))
    second = tt.atomic_rmw(bits.type, down, places, bits, *_SEMANTICS, mask=emit.both(on, negative))
    return tt.bitcast(value.type, arith.select(positive, first, second))


def _compare_and_swap(eqn: Any, ref: Ref, dtype: Any, pointers: Any, on: Any, values: list[Any]) -> Any:
    if on is not None:
        headline = f"atomic_cas has no mask in Triton, and this block of {ref.label} may hang over the array's edge."
        raise refusal(NotImplementedError, headline, eqn, "use blocks that divide the array")
    expected, new = values
    if not emit.is_float(dtype):
        return tt.atomic_cas(new.type, pointers, expected, new, *_SEMANTICS)
    shape, element = emit.shape_of(new), emit.element_type(f"int{emit.bits_of(dtype)}")
    kind = emit.typed(shape, element)
    places = tt.bitcast(emit.typed(shape, tt.PointerType.get(element, 1)), pointers)
    found = tt.atomic_cas(kind, places, tt.bitcast(kind, expected), tt.bitcast(kind, new), *_SEMANTICS)
    return tt.bitcast(new.type, found)


# --- buffers in registers ---------------------------------------------------------------------------------------------
@RULES.rule(ops.run_scoped_p)
def _run_scoped(ctx: Lowering, eqn, *operands) -> list[Any]:
    from palladion.compiler.triton.module import scratch

    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    cells = [scratch(v.aval) for v in jaxpr.invars[len(jaxpr.invars) - n :]]
    return ctx.run(jaxpr, [*operands, *cells])


@RULES.rule(jaxlink.ref_p)
def _new_ref(ctx: Lowering, eqn, x) -> Cell:
    return Cell(emit.shape_of(x), dtype_of(eqn.invars[0]), "a new Ref", x)


@RULES.rule(jaxlink.empty_ref_p)
def _empty_ref(ctx: Lowering, eqn) -> Cell:
    aval = eqn.outvars[0].aval
    return Cell(tuple(aval.shape), jnp.dtype(aval.dtype), "a new Ref")


@RULES.rule(jaxlink.freeze_p)
def _freeze(ctx: Lowering, eqn, ref) -> Any:
    return read_cell(eqn, ref, resolve(eqn, ref, ()))


RULES.rule(jaxlink.free_ref_p)(lambda ctx, eqn, ref: [])
