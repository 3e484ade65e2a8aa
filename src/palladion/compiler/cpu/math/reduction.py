"""Argument reduction for sin, cos and tan: x = q pi/2 + r with |r| <= pi/4.

Up to |x| = 2**20 (f64: 2**30) three fma's subtract q times pi/2 in three parts (Cody and Waite, 1980): with
fma the first is exact, and each of the others rounded once, so that r is right to about one ulp even where it
is tiny.

Beyond, the bits of 2/pi that matter are multiplied in 192-bit integers (Payne and Hanek, Radian Reduction for
Trigonometric Functions, SIGNUM Newsletter 18, 1983). That is a scalar function, once in a module, called lane
by lane from behind a branch that is taken when any lane is so large: the one branch in this package's
trigonometry.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import builder
from palladion.compiler.cpu.builder import const, f64, i32, i64
from palladion.compiler.cpu.math.coefficients import HALF_PI, TWO_OVER_PI_WORDS
from palladion.compiler.cpu.math.core import V, anywhere, fma, two_product, two_sum, where

LIMIT = {"f32": 2.0**20, "f64": 2.0**30}
i128 = ir.IntType(128)


def reduced(x: V, pair: bool = False) -> tuple[V, ...]:
    """x = q pi/2 + r for x >= 0 or NaN.

    Arguments: pair: r as the sum of two numbers, for f32 only.
    Returns: q as an integer of x's width (its low two bits; the rest may be anything), r, and if `pair` its
      low part. Infinity gives r = NaN.
    """
    t, b = x.format, x.b
    shifted = fma(x, 2 / math.pi, t.magic)
    n = shifted - t.magic
    first, second, third = HALF_PI[t.name]
    exact = fma(n, -first, x)
    if pair:
        product, error = two_product(n, x.like(-second))
        middle, lost = two_sum(exact, product)
        low = lost + fma(n, -third, error)
        r = middle + low
        found = [shifted.bits, r, (middle - r) + low]
    else:
        found = [shifted.bits, fma(n, -third, fma(n, -second, exact))]
    values = [v.v for v in found]
    large = anywhere(x >= LIMIT[t.name])
    merged = builder.branch(b, large.v, lambda: _slow(b, x.v, values), lambda: values, likely=False)
    return tuple(V(b, v) for v in merged)


def _unpack(b: ir.IRBuilder, struct: Any) -> list[Any]:
    return [b.extract_value(struct, k) for k in range(len(struct.type.elements))]


def _pack(b: ir.IRBuilder, ty: Any, values: list[Any]) -> Any:
    struct = ir.Constant(ty, ir.Undefined)
    for k, v in enumerate(values):
        struct = b.insert_value(struct, v, k)
    return struct


def _slow(b: ir.IRBuilder, x: Any, values: list[Any]) -> list[Any]:
    """The values with the lanes where x is large replaced. A call, so that the code around it stays small."""
    return _unpack(b, b.call(_of_lanes(b.module, x.type, [v.type for v in values]), [x, *values]))


def _of_lanes(module: Any, ty: Any, types: list[Any]) -> Any:
    """The function that runs `_scalar` on each large lane of a vector."""
    name = f"palladion.reduce.{builder.type_name(ty)}.{len(types)}"
    if name in module.globals:
        return module.globals[name]
    scalar = _scalar(module)
    result = ir.LiteralStructType(types)
    function, b = builder.define(module, name, result, ty, *types, internal=True)
    x, *values = function.args
    lanes, element = builder.lanes_of(ty), builder.scalar_of(ty)

    with builder.loop(b, const(0, i32), const(lanes, i32), const(1, i32), values) as L:
        one = V(b, b.extract_element(x, L.i) if lanes > 1 else x)

        def replace() -> list[Any]:
            q, r = _unpack(b, b.call(scalar, [one.v if element == f64 else b.fpext(one.v, f64)]))
            new = [q, r]
            if element != f64:
                high = b.fptrunc(r, element)
                new = [b.trunc(q, i32), high, b.fptrunc(b.fsub(r, b.fpext(high, f64)), element)]
            return [b.insert_element(v, e, L.i) if lanes > 1 else e for v, e in zip(L.v, new)]

        L.next = builder.branch(b, (one >= LIMIT[one.format.name]).v, replace, lambda: L.v)
    b.ret(_pack(b, result, L.out))
    return function


def _scalar(module: Any) -> Any:
    """{i64 q, f64 r} of one f64 of at least 2**20, in integers; NaN for infinity."""
    name = "palladion.reduce"
    if name in module.globals:
        return module.globals[name]
    result = ir.LiteralStructType([i64, f64])
    function, b = builder.define(module, name, result, f64, internal=True)
    (x,) = function.args
    word = functools.partial(const, ty=i64)
    wide = functools.partial(const, ty=i128)
    bits_of_ratio = struct.pack(f"<{len(TWO_OVER_PI_WORDS)}Q", *TWO_OVER_PI_WORDS)
    table = builder.global_bytes(module, bits_of_ratio, "two_over_pi")
    bits = b.bitcast(x, i64)
    exponent = b.lshr(bits, word(52))
    # x = m 2**(exponent - 1075), m < 2**53. The first bit of 2/pi that is not a multiple of 4 after the
    # product by x:
    position = b.sub(exponent, word(1075 - 62))
    m = b.zext(b.or_(b.and_(bits, word((1 << 52) - 1)), word(1 << 52)), i128)
    first, shift = b.lshr(position, word(6)), b.and_(position, word(63))
    words = [builder.load(b, i64, builder.gep(b, table, b.add(first, word(k)), i64)) for k in range(4)]
    # 192 bits from there, the first of weight 2; times m, modulo 4. The last 64 bits of the product do not
    # count.
    p = [b.zext(builder.intrinsic(b, i64, "fshl", words[k], words[k + 1], shift), i128) for k in range(3)]
    product = b.add(b.lshr(b.mul(m, p[2]), wide(64)), b.mul(m, p[1]))
    product = b.add(product, b.shl(b.mul(m, p[0]), wide(64)))
    q = b.lshr(b.add(product, wide(1 << 125)), wide(126))
    fraction = b.sub(product, b.shl(q, wide(126)))
    negative = b.icmp_signed("<", fraction, wide(0))
    size = b.select(negative, b.sub(wide(0), fraction), fraction)
    # The leading 53 bits, wherever they begin, and the next 53, as two floats; times 2**(2 - 53 - zeros)
    # pi/2.
    zeros = builder.intrinsic(b, i128, "ctlz", size, const(0, builder.i1))
    leading = b.shl(size, zeros)
    high = V(b, b.uitofp(b.trunc(b.lshr(leading, wide(75)), i64), f64))
    low = V(b, b.uitofp(b.and_(b.trunc(b.lshr(leading, wide(22)), i64), word((1 << 53) - 1)), f64))
    scale = V(b, b.bitcast(b.shl(b.sub(word(1023 - 51), b.trunc(zeros, i64)), word(52)), f64))
    first, second, _ = HALF_PI["f64"]
    product, error = two_product(high, high.like(first))
    r = (product + fma(high, second, fma(low, first * 2.0**-53, error))) * scale
    r = where(V(b, negative), -r, r)
    r = where(V(b, x) < math.inf, r, math.nan)
    b.ret(_pack(b, result, [b.trunc(q, i64), r.v]))
    return function
