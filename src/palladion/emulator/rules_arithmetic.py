"""Rules of arithmetic: sums, products, quotients, minima and functions of integers and floats, packed ones too.

Each writes one expression over arrays of the instruction's type; what NumPy has not is in `lane_integers.py` and
`lane_floats.py`, which generated code knows as `I` and `F`.
Source: PTX ISA manual, the sections on arithmetic instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palladion.emulator import lane_floats, lane_integers, lane_types
from palladion.emulator.emitter import Emitter, Value, code_of
from palladion.emulator.ptx import SIZES, Instruction, Register
from palladion.emulator.rules import HELPERS, rule
from palladion.emulator.runtime import Unreached

HELPERS.update(I=lane_integers, F=lane_floats, T=lane_types)
CARRY = Register("%cc", "pred")
"""The carry flag, a register like others."""
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_MODES = ("rz", "rm", "rp")


def sources(e: Emitter, i: Instruction, kind: str, first: int = 1, count: int | None = None) -> tuple[list[str], bool]:
    """Expressions of source operands as one type, and whether they are the same for all lanes."""
    given = i.operands[first:] if count is None else i.operands[first : first + count]
    values = [e.operand(o, kind) for o in given]
    return [v.name for v in values], all(v.uniform for v in values)


def flushed(i: Instruction, names: list[str]) -> list[str]:
    return [f"T.flush({n})" for n in names] if i.has("ftz") else names


def after(i: Instruction, text: str) -> str:
    """What modifiers do to a float result."""
    if i.has("sat"):
        text = f"F.saturate({text})"
    if i.has("relu"):
        text = f"F.relu({text})"
    return f"T.flush({text})" if i.has("ftz") else text


def compute(e: Emitter, i: Instruction, kind: str, text: Callable[..., str], first: int = 1) -> Value:
    """The result of a function of numbers of one type, packed or not, with the modifiers of floats."""
    floating = kind[0] == "f" or kind.startswith("bf")
    if kind in lane_types.PACKED:
        names = [f"T.decode({e.array(e.operand(o, _raw(kind)))}, {kind!r})" for o in i.operands[first:]]
        names = flushed(i, names)
        return e.let(f"T.encode({after(i, text(*names)) if floating else text(*names)}, {kind!r})", _raw(kind))
    names, uniform = sources(e, i, kind, first)
    found = after(i, text(*flushed(i, names))) if floating else text(*names)
    return e.let(found, kind, uniform)


def _raw(kind: str) -> str:
    return f"u{8 * SIZES[kind]}" if kind in SIZES else "u32"


def kind_of(i: Instruction) -> str:
    """The type of an instruction's operands, with the packed integers."""
    return next((p for p in reversed(i.parts) if p in ("u16x2", "s16x2", "u8x4", "s8x4") or p in SIZES), "b32")


def _mixed(i: Instruction) -> str | None:
    """The narrow type of an instruction that takes f16 or bf16 and adds to f32."""
    types = [p for p in i.parts[1:] if p in SIZES]
    return types[1] if len(types) == 2 and types[0] == "f32" and types[1] in ("f16", "bf16") else None


def mode_of(i: Instruction) -> str:
    return next((m for m in _MODES if i.has(m)), "")


@rule("add", "sub", "mul")
def _sums(e: Emitter, i: Instruction) -> Any:
    kind, name = kind_of(i), i.name
    if i.has("cc"):
        return _carried(e, i, kind, False)
    if _mixed(i):
        x, y = e.src(i, 1, _mixed(i) or ""), e.src(i, 2, "f32")
        return e.let(after(i, f"{x}.astype(F4) {_SIGNS[name]} {y}"), "f32")
    mode = mode_of(i)
    if mode:
        return compute(e, i, kind, lambda a, b: f"F.rounded({name!r}, {mode!r}, {a}, {b})")
    if kind[0] in "us" and i.has("sat"):
        (a, b), uniform = sources(e, i, kind)
        return e.let(f"I.saturated({name!r}, {a}, {b})", kind, uniform)
    if i.has("hi"):
        (a, b), uniform = sources(e, i, kind)
        return e.let(f"I.mul_hi({a}, {b})", kind, uniform)
    if i.has("wide"):
        return _wide(e, i, kind)
    return compute(e, i, kind, lambda a, b: f"({a} {_SIGNS[name]} {b})")


def _wide(e: Emitter, i: Instruction, kind: str) -> Value:
    """Products of twice the size, and perhaps a sum."""
    wide = f"{kind[0]}{16 * SIZES[kind]}"
    code = code_of(wide).upper()
    (a, b), uniform = sources(e, i, kind, 1, 2)
    text = f"{a}.astype({code}) * {b}.astype({code})"
    if i.name == "mad":
        c = e.operand(i.operands[3], wide)
        text, uniform = f"{text} + {c.name}", uniform and c.uniform
    return e.let(text, wide, uniform)


@rule("addc", "subc", "madc")
def _with_carry(e: Emitter, i: Instruction) -> Any:
    return _carried(e, i, kind_of(i), True)


def _carried(e: Emitter, i: Instruction, kind: str, takes: bool) -> Value:
    """Sums that set the carry flag (`.cc`) or add it."""
    plain = f"u{8 * SIZES[kind]}"
    incoming = e.read(CARRY).name if takes else None
    if i.name.startswith("mad"):
        (x, y), _ = sources(e, i, kind, 1, 2)
        product = (
            f"I.mul_hi({x}, {y}).view({code_of(plain).upper()})"
            if i.has("hi")
            else f"({x} * {y}).view({code_of(plain).upper()})"
        )
        a, b = e.let(product, plain).name, e.src(i, 3, plain)
    else:
        (a, b), _ = sources(e, i, plain, 1, 2)
    pair = e.expression(f"I.with_carry({a}, {b}, {incoming}, {not i.name.startswith('sub')})")
    result = e.let(f"{pair}[0]", plain)
    if i.has("cc"):
        e.assign(CARRY, e.let(f"{pair}[1]", "p"), e.guard_value)
    return result


@rule("mad", "fma")
def _fused(e: Emitter, i: Instruction) -> Any:
    kind = kind_of(i)
    if i.has("cc"):
        return _carried(e, i, kind, False)
    if _mixed(i):
        (a, b), _ = sources(e, i, _mixed(i) or "", 1, 2)
        return e.let(after(i, f"F.fma({a}.astype(F4), {b}.astype(F4), {e.src(i, 3, 'f32')})"), "f32")
    if i.has("wide"):
        return _wide(e, i, kind)
    if kind[0] in "us":
        (a, b, c), uniform = sources(e, i, kind)
        if i.has("sat"):
            raise Unreached("saturation of integers")
        return e.let(f"I.mul_hi({a}, {b}) + {c}" if i.has("hi") else f"{a} * {b} + {c}", kind, uniform)
    mode = mode_of(i)
    if mode:
        return compute(e, i, kind, lambda a, b, c: f"F.rounded('fma', {mode!r}, {a}, {b}, {c})")
    return compute(e, i, kind, lambda a, b, c: f"F.fma({a}, {b}, {c})")


@rule("mul24", "mad24")
def _mul24(e: Emitter, i: Instruction) -> Any:
    kind = i.type()
    names, uniform = sources(e, i, kind)
    text = f"I.mul24({names[0]}, {names[1]}, {i.has('hi')})"
    return e.let(f"{text} + {names[2]}" if i.name == "mad24" else text, kind, uniform)


@rule("div", "rem")
def _quotients(e: Emitter, i: Instruction) -> Any:
    kind = i.type()
    if kind[0] == "f":
        mode = mode_of(i)
        return compute(e, i, kind, lambda a, b: f"F.rounded('div', {mode!r}, {a}, {b})" if mode else f"({a} / {b})")
    name = "divide" if i.name == "div" else "remainder"
    return compute(e, i, kind, lambda a, b: f"I.{name}({a}, {b})")


@rule("min", "max")
def _extremes(e: Emitter, i: Instruction) -> Any:
    name = "F.minimum" if i.name == "min" else "F.maximum"
    if i.has("xorsign"):
        name = f"F.with_sign({name})"
    if i.has("NaN"):
        name = f"F.with_nan({name})"

    def text(first: str, *more: str) -> str:
        for other in more:
            first = f"{name}({first}, {other})"
        return first

    kind = kind_of(i)
    integer_relu = i.has("relu") and kind[0] in "us"
    return compute(e, i, kind, (lambda *a: f"F.relu({text(*a)})") if integer_relu else text)


@rule("copysign")
def _copysign(e: Emitter, i: Instruction) -> Any:
    return compute(e, i, i.type(), lambda a, b: f"np.copysign({b}, {a})")


@rule("neg", "abs", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh")
def _functions(e: Emitter, i: Instruction) -> Any:
    mode = mode_of(i)
    if mode:
        return compute(e, i, i.type(), lambda a: f"F.rounded({i.name!r}, {mode!r}, {a})")
    return compute(e, i, i.type(), lambda a: f"F.UNARY[{i.name!r}]({a})")


@rule("sad")
def _sad(e: Emitter, i: Instruction) -> Any:
    return compute(e, i, i.type(), lambda a, b, c: f"I.absolute_difference({a}, {b}, {c})")


@rule("dp4a", "dp2a")
def _dot(e: Emitter, i: Instruction) -> Any:
    first, second = [p for p in i.parts[1:] if p in ("u32", "s32")]
    a, b = (e.array(e.operand(o, "u32")) for o in i.operands[1:3])
    kind = "s32" if "s32" in (first, second) else "u32"
    c = e.src(i, 3, kind)
    if i.name == "dp4a":
        return e.let(f"I.dot4({a}, {b}, {c}, {first!r}, {second!r})", kind)
    return e.let(f"I.dot2({a}, {b}, {c}, {first!r}, {second!r}, {i.has('hi')})", kind)
