"""Vector arithmetic with operators: what the elementary functions of this package are written in.

`V` wraps an LLVM value (f32, f64, an integer or i1; a scalar or a vector of any number of lanes) and the
builder, so that a formula reads as in the books: `fma(p, x, 0.5) * x`, `where(x < 0, nan, y)`. Python numbers
become constants of the other operand's type, in every lane. Each operator is one LLVM instruction: nothing is
simplified, reordered or contracted, so every rounding is the one that is written.

    def logistic(x: V) -> V:
        e = exp(-abs(x))
        return where(x < 0, e, 1) / (1 + e)

Comparisons are ordered (false for NaN) and give i1 lanes for `where`, `&`, `|`, `~`. Use `eq` and
`ne` for equality: `==` stays Python's identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from llvmlite.ir import instructions

from palladion.compiler.cpu import builder


@dataclasses.dataclass(frozen=True)
class Format:
    """An IEEE 754 binary format, with the numbers that bit tricks need.

    name: "f32" or "f64", also the key of coefficients; bits: its width; mantissa: stored significand bits;
    bias: of the exponent; magic: 1.5 * 2**mantissa. Adding magic rounds a number below 2**(mantissa - 1) to
    an integer, which then stands in the low bits of the sum.
    """

    name: str
    bits: int
    mantissa: int
    bias: int

    @property
    def magic(self) -> float:
        """1.5 * 2**mantissa."""
        return 1.5 * 2.0**self.mantissa

    @property
    def min_normal(self) -> float:
        """The smallest positive normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa

    @property
    def sign_bit(self) -> int:
        """The integer with the sign bit set."""
        return 1 << (self.bits - 1)


F32 = Format("f32", 32, 23, 127)
F64 = Format("f64", 64, 52, 1023)
_FORMATS = {builder.f32: F32, builder.f64: F64}
_INTS = {F32: builder.i32, F64: builder.i64}
_FLOATS = {32: builder.f32, 64: builder.f64}

Operand = Any  # a V, or a Python number


class V:
    """An LLVM value with operators. Arguments: b: where instructions go; v: the value."""

    __slots__ = ("b", "v")

    def __init__(self, b: ir.IRBuilder, v: Any) -> None:
        self.b, self.v = b, v

    # ------------------------------------------------------------------------------------------- what it is
    @property
    def format(self) -> Format:
        """The floating-point format of a float value."""
        return _FORMATS[builder.scalar_of(self.v.type)]

    @property
    def _float(self) -> bool:
        return builder.is_float(self.v.type)

    @property
    def _float_type(self) -> Any:
        # Of an integer: the float of its width.
        return builder.like(_FLOATS[builder.scalar_of(self.v.type).width], self.v.type)

    def like(self, x: Operand) -> V:
        """`x` as a value of this one's type."""
        return x if isinstance(x, V) else V(self.b, builder.const(x, self.v.type))

    # ------------------------------------------------------------------------------------------- arithmetic
    def _binary(self, x: Operand, of_floats: str, of_ints: str) -> V:
        return V(self.b, getattr(self.b, of_floats if self._float else of_ints)(self.v, self.like(x).v))

    def __add__(self, x: Operand) -> V:
        return self._binary(x, "fadd", "add")

    def __sub__(self, x: Operand) -> V:
        return self._binary(x, "fsub", "sub")

    def __mul__(self, x: Operand) -> V:
        return self._binary(x, "fmul", "mul")

    def __truediv__(self, x: Operand) -> V:
        return self._binary(x, "fdiv", "sdiv")

    def __rsub__(self, x: Operand) -> V:
        return self.like(x) - self

    def __rtruediv__(self, x: Operand) -> V:
        return self.like(x) / self

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> V:
        return V(self.b, self.b.fneg(self.v)) if self._float else 0 - self

    def __abs__(self) -> V:
        return self._intrinsic("fabs")

    def _intrinsic(self, name: str, *args: V) -> V:
        return V(self.b, builder.intrinsic(self.b, self.v.type, name, self.v, *[a.v for a in args]))

    def sqrt(self) -> V:
        """The correctly rounded square root."""
        return self._intrinsic("sqrt")

    def rint(self) -> V:
        """The nearest integer, ties to even."""
        return self._intrinsic("rint")

    def trunc(self) -> V:
        """The integer part."""
        return self._intrinsic("trunc")

    def floor(self) -> V:
        """The next integer below."""
        return self._intrinsic("floor")

    def ceil(self) -> V:
        """The next integer above."""
        return self._intrinsic("ceil")

    def copysign(self, x: Operand) -> V:
        """This magnitude with the sign of x."""
        return self._intrinsic("copysign", self.like(x))

    # ------------------------------------------------------------------------------ integers, bits and masks
    def __and__(self, x: Operand) -> V:
        return V(self.b, self.b.and_(self.v, self.like(x).v))

    def __or__(self, x: Operand) -> V:
        return V(self.b, self.b.or_(self.v, self.like(x).v))

    def __xor__(self, x: Operand) -> V:
        return V(self.b, self.b.xor(self.v, self.like(x).v))

    def __invert__(self) -> V:
        return self ^ -1

    def __lshift__(self, n: int) -> V:
        return V(self.b, self.b.shl(self.v, self.like(n).v))

    def __rshift__(self, n: int) -> V:
        """Arithmetic: copies the sign."""
        return V(self.b, self.b.ashr(self.v, self.like(n).v))

    @property
    def bits(self) -> V:
        """The bits of a float as a signed integer of its width."""
        return V(self.b, self.b.bitcast(self.v, builder.like(_INTS[self.format], self.v.type)))

    @property
    def real(self) -> V:
        """The float whose bits an integer is."""
        return V(self.b, self.b.bitcast(self.v, self._float_type))

    def to_float(self) -> V:
        """A signed integer as the float of its width, rounded."""
        return V(self.b, self.b.sitofp(self.v, self._float_type))

    def f64(self) -> V:
        """An f32 as f64 (exact)."""
        return V(self.b, self.b.fpext(self.v, builder.like(builder.f64, self.v.type)))

    def f32(self) -> V:
        """An f64 rounded to f32."""
        return V(self.b, self.b.fptrunc(self.v, builder.like(builder.f32, self.v.type)))

    # ------------------------------------------------------------------------------------------ comparisons
    def _compare(self, op: str, x: Operand) -> V:
        x = self.like(x)
        return V(self.b, (self.b.fcmp_ordered if self._float else self.b.icmp_signed)(op, self.v, x.v))

    def __lt__(self, x: Operand) -> V:
        return self._compare("<", x)

    def __le__(self, x: Operand) -> V:
        return self._compare("<=", x)

    def __gt__(self, x: Operand) -> V:
        return self._compare(">", x)

    def __ge__(self, x: Operand) -> V:
        return self._compare(">=", x)

    def eq(self, x: Operand) -> V:
        """Equal lanes; false for NaN."""
        return self._compare("==", x)

    def ne(self, x: Operand) -> V:
        """Lanes that are not equal; true for NaN."""
        return ~self.eq(x) if not self._float else V(self.b, self.b.fcmp_unordered("!=", self.v, self.like(x).v))


# -------------------------------------------------------------------------------------------------- functions
def where(cond: V, x: Operand, y: Operand) -> V:
    """x where cond, else y; at least one of them a V."""
    x, y = (x, x.like(y)) if isinstance(x, V) else (y.like(x), y)
    return V(cond.b, cond.b.select(cond.v, x.v, y.v))


def constants(cond: V, like: V, x: float, y: float) -> V:
    """One of two constants of the type of `like`."""
    return where(cond, like.like(x), y)


def unordered(x: V, y: V) -> V:
    """Lanes where x or y is NaN."""
    return V(x.b, x.b.fcmp_unordered("uno", x.v, y.v))


def fma(x: Operand, y: Operand, z: Operand) -> V:
    """x * y + z, rounded once; at least one of them a V."""
    one = next(v for v in (x, y, z) if isinstance(v, V))
    return one.like(x)._intrinsic("fma", one.like(y), one.like(z))


def clamp(x: V, low: float | None, high: float | None) -> V:
    """x kept within bounds; NaN stays NaN. One instruction a bound."""
    # "x < c ? c : x" is what minps and maxps do, NaN included, when the constant comes first.
    x = x if low is None else where(x < low, low, x)
    return x if high is None else where(x > high, high, x)


def smaller(x: V, y: V) -> V:
    """The smaller of two numbers; y if one of them is NaN."""
    return where(x < y, x, y)


def larger(x: V, y: V) -> V:
    """The larger of two numbers; y if one of them is NaN."""
    return where(x > y, x, y)


def horner(x: V, coefficients: Iterable[float], start: V | None = None) -> V:
    """c[0] + c[1] x + c[2] x² + …, by fma from the highest power down.

    Arguments: coefficients: from the lowest power up; start: the coefficient above the last, a V.
    """
    c = list(coefficients)
    p = x.like(c.pop()) if start is None else start
    while c:
        p = fma(p, x, c.pop())
    return p


def xor_sign(x: V, sign: V) -> V:
    """x with its sign flipped where the sign bit of `sign` (a float or its bits) is set."""
    bits = sign.bits if sign._float else sign
    return (x.bits ^ (bits & _signed(x.format.sign_bit, x.format.bits))).real


def _signed(n: int, bits: int) -> int:
    return n - (1 << bits) if n >> (bits - 1) else n


def anywhere(cond: V) -> V:
    """A scalar i1: whether any lane of cond is true."""
    # A lane that nobody reads may be undefined, and a branch on an undefined value is undefined behaviour:
    # freeze it.
    frozen = instructions.Instruction(cond.b.block, cond.v.type, "freeze", [cond.v])
    cond.b._insert(frozen)
    if not isinstance(cond.v.type, ir.VectorType):
        return V(cond.b, frozen)
    return V(cond.b, builder.intrinsic(cond.b, builder.i1, "vector.reduce.or", frozen, types=(cond.v.type,)))


# --------------------------------------------------------------------------------- pairs: twice the precision
def two_sum(x: V, y: V) -> tuple[V, V]:
    """x + y exactly, as the rounded sum and its error (Knuth)."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)


def fast_two_sum(x: V, y: V) -> tuple[V, V]:
    """x + y exactly, for |x| >= |y| (Dekker)."""
    s = x + y
    return s, y - (s - x)


def two_product(x: V, y: Operand) -> tuple[V, V]:
    """x * y exactly, as the rounded product and its error (needs no underflow)."""
    p = x * y
    return p, fma(x, y, -p)
