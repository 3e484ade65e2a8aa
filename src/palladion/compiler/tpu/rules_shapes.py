"""Operations that move elements: reshapes, broadcasts, transposes, slices, joins, rotations.

Mosaic splits vectors of any shape into registers itself. What it has no operation for is put together of those it has:
a strided slice of slices, a slice at a run-time place of a rotation, an update of a selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from palladion import jaxlink
from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import broadcast, concatenate, constant, cut, full, iota, reshape, shape_of, splat
from palladion.compiler.tpu.emit import RULES, Emitter, Empty
from palladion.compiler.tpu.kinds import Refusal, i32, is_unsigned, value_type
from palladion.compiler.tpu.rules_casts import convert
from palladion.compiler.tpu.rules_elementwise import choose, widened

UNROLLED = 128  # at most so many slices stand for one operation


@RULES.rule(lax.broadcast_in_dim_p)
def _broadcast_in_dim(ev: Emitter, eqn, x, *dynamic):
    return broadcast(x, eqn.params["shape"], eqn.params["broadcast_dimensions"])


@RULES.rule(lax.reshape_p)
def _reshape(ev: Emitter, eqn, x, *dynamic):
    if eqn.params.get("dimensions") is not None:
        x = build.transpose(x, eqn.params["dimensions"])
    return reshape(x, eqn.outvars[0].aval.shape)


@RULES.rule(lax.squeeze_p)
def _squeeze(ev: Emitter, eqn, x):
    return reshape(x, eqn.outvars[0].aval.shape)


@RULES.rule(lax.transpose_p)
def _transpose(ev: Emitter, eqn, x):
    return build.transpose(x, eqn.params["permutation"])


@RULES.rule(lax.concatenate_p)
def _concatenate(ev: Emitter, eqn, *parts):
    return concatenate([p for p in parts if not isinstance(p, Empty)], eqn.params["dimension"])


@RULES.rule(lax.stack_p)
def _stack(ev: Emitter, eqn, *parts):
    axis, shape = eqn.params["axis"], list(eqn.outvars[0].aval.shape)
    shape[axis] = 1
    return concatenate([reshape(p, shape) for p in parts], axis)


@RULES.rule(lax.unstack_p)
def _unstack(ev: Emitter, eqn, x):
    axis, n = eqn.params["axis"], len(eqn.outvars)
    return [reshape(part, eqn.outvars[0].aval.shape) for part in pieces(x, axis, [1] * n)]


def along(x: ir.Value, axis: int, start: int, size: int) -> ir.Value:
    """Elements start … start + size along an axis."""
    shape = list(shape_of(x))
    starts = [0] * len(shape)
    starts[axis], shape[axis] = start, size
    return cut(x, starts, shape)


def pieces(x: ir.Value, axis: int, sizes: Sequence[int]) -> list[ir.Value]:
    """A value cut along an axis into parts of the given sizes."""
    starts = np.cumsum([0, *sizes])[:-1]
    return [along(x, axis, int(s), n) for s, n in zip(starts, sizes)]


@RULES.rule(lax.split_p)
def _split(ev: Emitter, eqn, x):
    return pieces(x, eqn.params["axis"], eqn.params["sizes"])


@RULES.rule(lax.tile_p)
def _tile(ev: Emitter, eqn, x):
    shape = eqn.outvars[0].aval.shape
    x = reshape(x, (1,) * (len(shape) - len(shape_of(x))) + shape_of(x))
    for axis, (n, old) in enumerate(zip(shape, shape_of(x))):
        x = concatenate([x] * (n // old), axis)
    return x


@RULES.rule(jaxlink.empty_p)
def _empty(ev: Emitter, eqn):
    return full(value_type(eqn.outvars[0].aval), 0)


@RULES.rule(lax.iota_p)
def _iota(ev: Emitter, eqn, *dynamic):
    aval = eqn.outvars[0].aval
    return convert(iota(aval.shape, eqn.params["dimension"]), np.dtype("int32"), aval.dtype)


# --- slices -----------------------------------------------------------------------------------------------------------
def strided(x: ir.Value, axis: int, start: int, size: int, stride: int) -> ir.Value:
    """Every `stride`-th element along an axis."""
    if stride == 1 or size == 1:
        return along(x, axis, start, size)
    if size > UNROLLED:
        raise Refusal(
            f"{size} elements with the stride {stride} would take {size} slices.",
            "slice the Ref instead of its value, or reshape to (…, n, stride) and take [..., 0]",
        )
    places = range(start, start + size * stride, stride)
    return concatenate([along(x, axis, p, 1) for p in places], axis)


@RULES.rule(lax.slice_p)
def _slice(ev: Emitter, eqn, x):
    shape, params = eqn.outvars[0].aval.shape, eqn.params
    strides = params["strides"] or (1,) * len(shape)
    unit = [n if s == 1 else (n - 1) * s + 1 for n, s in zip(shape, strides)]
    x = cut(x, params["start_indices"], unit)
    for axis, (n, s) in enumerate(zip(shape, strides)):
        if s != 1:
            x = strided(x, axis, 0, n, s)
    return x


def _start(ev: Emitter, eqn: Any, atom: Any, x: ir.Value, room: int) -> Any:
    """A start as an int, or an `i32` clamped to 0..room, as lax says."""
    if isinstance(atom, jaxlink.Literal):
        return min(max(int(atom.val), 0), room)
    if room == 0:
        return 0
    x = widened(x, atom.aval.dtype)
    low = arith.minui if is_unsigned(atom.aval.dtype) else arith.minsi
    x = low(x, constant(room))
    return x if is_unsigned(atom.aval.dtype) else arith.maxsi(x, constant(0))


@RULES.rule(lax.dynamic_slice_p)
def _dynamic_slice(ev: Emitter, eqn, x, *starts):
    sizes = eqn.params["slice_sizes"]
    for axis, (size, start, atom) in enumerate(zip(sizes, starts, eqn.invars[1:])):
        n = shape_of(x)[axis]
        at = _start(ev, eqn, atom, start, n - size)
        if not isinstance(at, int):
            x, at = build.rotate(x, arith.subi(constant(n), at), axis), 0  # element `at` comes to 0
        x = strided(x, axis, at, size, 1)
    return x


@RULES.rule(lax.dynamic_update_slice_p)
def _dynamic_update_slice(ev: Emitter, eqn, x, update, *starts):
    if isinstance(update, Empty):
        return x
    shape, inside = shape_of(x), None
    for axis, (n, start, atom) in enumerate(zip(shape, starts, eqn.invars[2:])):
        size = shape_of(update)[axis]
        if size == n:
            continue
        at = _start(ev, eqn, atom, start, n - size)
        rest = [n - size if d == axis else m for d, m in enumerate(shape_of(update))]
        filler = full(ir.VectorType.get(rest, i32() if build.is_mask(update) else build.element_of(update)), 0)
        filler = build.as_mask(filler) if build.is_mask(update) else filler
        update = concatenate([update, filler], axis)
        if not isinstance(at, int) or at:
            update = build.rotate(update, build.as_i32(at), axis)
        place = arith.subi(iota(shape, axis), splat(build.as_i32(at), shape))
        here = arith.cmpi(arith.CmpIPredicate.ult, place, full(place.type, size))
        inside = here if inside is None else arith.andi(inside, here)
    return update if inside is None else choose(inside, update, x)


@RULES.rule(lax.pad_p)
def _pad(ev: Emitter, eqn, x, value):
    if isinstance(x, Empty):
        return splat(value, eqn.outvars[0].aval.shape)
    for axis, (low, high, between) in enumerate(eqn.params["padding_config"]):
        if between:
            x = _spread(x, value, axis, between)
        n = shape_of(x)[axis]
        x = strided(x, axis, max(-low, 0), n - max(-low, 0) - max(-high, 0), 1)
        parts = [_block(x, value, axis, low), x, _block(x, value, axis, high)]
        x = concatenate([p for p in parts if p is not None], axis)
    return x


def _block(x: ir.Value, value: ir.Value, axis: int, n: int) -> ir.Value | None:
    return splat(value, [n if d == axis else m for d, m in enumerate(shape_of(x))]) if n > 0 else None


def _spread(x: ir.Value, value: ir.Value, axis: int, between: int) -> ir.Value:
    """`between` elements of `value` between each two along an axis."""
    n = shape_of(x)[axis]
    if n > UNROLLED:
        raise Refusal(f"padding between {n} elements would take as many slices.", "pad with a reshape")
    parts = []
    for part in pieces(x, axis, [1] * n):
        parts += [part, _block(part, value, axis, between)]
    return concatenate(parts[:-1], axis)


@RULES.rule(lax.rev_p)
def _rev(ev: Emitter, eqn, x):
    for axis in eqn.params["dimensions"]:
        n = shape_of(x)[axis]
        if n > UNROLLED:
            raise ev.refuse(eqn, f"rev of {n} elements")
        x = concatenate(pieces(x, axis, [1] * n)[::-1], axis)
    return x
