"""Argument reduction for sin, cos and tan: x = q pi/2 + r with |r| <= pi/4.

Up to |x| = 2**20 (f64: 2**30) three fma's subtract q times pi/2 in three parts (Cody and Waite, 1980): with fma the first
is exact, and each of the others rounded once, so that r is right to about one ulp even where it is tiny.

Beyond, the bits of 2/pi that matter are multiplied in 192-bit integers (Payne and Hanek, Radian Reduction for
Trigonometric Functions, SIGNUM Newsletter 18, 1983). That is a scalar function, once in a module, called lane by lane
from behind a branch that is taken when any lane is so large: the one branch in this package's trigonometry.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import builder
from palladion.compiler.cpu.builder import const, f64, i32, i64
from palladion.compiler.cpu.math.coefficients import HALF_PI, TWO_OVER_PI_BITS
from palladion.compiler.cpu.math.core import V, anywhere, fma, where

LIMIT = {"f32": 2.0**20, "f64": 2.0**30}
i128 = ir.IntType(128)


def reduced(x: V) -> tuple[V, V]:
    """x = q pi/2 + r for x >= 0 or NaN. Returns: r, and q as an integer of x's width (its low two bits, the rest may be
    anything). Infinity gives r = NaN."""
    t = x.format
    shifted = fma(x, 2 / math.pi, t.magic)
    n = shifted - t.magic
    r = x
    for part in HALF_PI[t.name]:
        r = fma(n, -part, r)
    q = shifted.bits
    b = x.b
    large = anywhere(x >= LIMIT[t.name])
    r, q = builder.branch(b, large.v, lambda: _slow(b, x.v, r.v, q.v), lambda: [r.v, q.v], likely=False)
    return V(b, r), V(b, q)


def _slow(b: ir.IRBuilder, x: Any, r: Any, q: Any) -> list[Any]:
    """r and q with the lanes where x is large replaced. A call, so that the vector code around it stays small."""
    lanes_function = _of_lanes(b.module, x.type, q.type)
    both = b.call(lanes_function, [x, r, q])
    return [b.extract_value(both, 0), b.extract_value(both, 1)]


def _of_lanes(module: Any, ty: Any, int_ty: Any) -> Any:
    """The function that runs `_scalar` on each large lane of a vector."""
    name = f"palladion.reduce.{builder.type_name(ty)}"
    if name in module.globals:
        return module.globals[name]
    scalar = _scalar(module)
    result = ir.LiteralStructType([ty, int_ty])
    function, b = builder.define(module, name, result, ty, ty, int_ty, internal=True)
    x, r, q = function.args
    lanes = builder.lanes_of(ty)
    element, int_element = builder.scalar_of(ty), builder.scalar_of(int_ty)
    at = (lambda v, i: b.extract_element(v, i)) if lanes > 1 else (lambda v, i: v)
    put = (lambda v, e, i: b.insert_element(v, e, i)) if lanes > 1 else (lambda v, e, i: e)
    with builder.loop(b, const(0, i32), const(lanes, i32), const(1, i32), [r, q]) as L:
        one = V(b, at(x, L.i))

        def replace() -> list[Any]:
            wide = one.v if element == f64 else b.fpext(one.v, f64)
            both = b.call(scalar, [wide])
            new_r, new_q = b.extract_value(both, 0), b.extract_value(both, 1)
            new_r = new_r if element == f64 else b.fptrunc(new_r, element)
            new_q = new_q if int_element == i64 else b.trunc(new_q, int_element)
            return [put(L.v[0], new_r, L.i), put(L.v[1], new_q, L.i)]

        L.next = builder.branch(b, (one >= LIMIT[one.format.name]).v, replace, lambda: L.v)
    pair = ir.Constant(result, ir.Undefined)
    b.ret(b.insert_value(b.insert_value(pair, L.out[0], 0), L.out[1], 1))
    return function


def _scalar(module: Any) -> Any:
    """{f64 r, i64 q} of one f64 of at least 2**20, in integers; NaN for infinity."""
    name = "palladion.reduce"
    if name in module.globals:
        return module.globals[name]
    result = ir.LiteralStructType([f64, i64])
    function, b = builder.define(module, name, result, f64, internal=True)
    (x,) = function.args
    word = functools.partial(const, ty=i64)
    wide = functools.partial(const, ty=i128)
    table = builder.global_bytes(module, TWO_OVER_PI_BITS, "palladion.two_over_pi")
    bits = b.bitcast(x, i64)
    exponent = b.lshr(bits, word(52))
    # x = m 2**(exponent - 1075), m < 2**53. The first bit of 2/pi that is not a multiple of 4 after the product by x:
    position = b.sub(exponent, word(1075 - 62))
    m = b.zext(b.or_(b.and_(bits, word((1 << 52) - 1)), word(1 << 52)), i128)
    first, shift = b.lshr(position, word(6)), b.and_(position, word(63))
    words = [builder.load(b, i64, builder.gep(b, table, b.add(first, word(k)), i64)) for k in range(4)]
    # 192 bits from there, the first of weight 2; times m, modulo 4. The last 64 bits of the product do not count.
    p = [b.zext(builder.intrinsic(b, i64, "fshl", words[k], words[k + 1], shift), i128) for k in range(3)]
    product = b.add(b.lshr(b.mul(m, p[2]), wide(64)), b.mul(m, p[1]))
    product = b.add(product, b.shl(b.mul(m, p[0]), wide(64)))
    q = b.lshr(b.add(product, wide(1 << 125)), wide(126))
    fraction = b.sub(product, b.shl(q, wide(126)))
    negative = b.icmp_signed("<", fraction, wide(0))
    size = b.select(negative, b.sub(wide(0), fraction), fraction)
    # The leading 64 bits, wherever they begin, as a float, times 2**(2 - 64 - zeros) pi/2.
    zeros = builder.intrinsic(b, i128, "ctlz", size, const(0, builder.i1))
    leading = b.uitofp(b.trunc(b.lshr(b.shl(size, zeros), wide(64)), i64), f64)
    scale = b.bitcast(b.shl(b.sub(word(1023 - 62), b.trunc(zeros, i64)), word(52)), f64)
    r = b.fmul(b.fmul(leading, scale), const(math.pi / 2, f64))
    r = b.select(negative, b.fneg(r), r)
    r = where(V(b, x) < math.inf, V(b, r), math.nan).v
    pair = ir.Constant(result, ir.Undefined)
    b.ret(b.insert_value(b.insert_value(pair, r, 0), b.trunc(q, i64), 1))
    return function
