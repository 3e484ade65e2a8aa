"""Rules of moves, choices and comparisons, of conversions, and of what only guides the hardware.

Source: PTX ISA manual, "mov", "Comparison and Selection Instructions", "cvt", "Miscellaneous Instructions".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.emulator import lane_conversions
from palladion.emulator.emitter import Emitter, Value, code_of
from palladion.emulator.lane_types import DTYPES, PACKED
from palladion.emulator.ptx import SIZES, Instruction, Pair, Special, Vector
from palladion.emulator.registry import operation
from palladion.emulator.rules import HELPERS, helper, rule
from palladion.emulator.rules_arithmetic import flushed, sources
from palladion.emulator.rules_bits import unsigned
from palladion.emulator.runtime import Unreached

HELPERS["C"] = lane_conversions


@rule("mov")
def _mov(e: Emitter, i: Instruction) -> Any:
    kind = i.type()
    target, source = i.operands
    if isinstance(target, Vector):
        for item, part in zip(target.items, _unpacked(e, kind, source, len(target.items)), strict=True):
            e.assign(item, part, e.guard_value)
        return []
    if isinstance(source, Vector):
        return _packed(e, kind, source)
    if isinstance(source, Special):
        return e.operand(source, None)
    return e.operand(source, code_of(kind))


def _unpacked(e: Emitter, kind: str, source: Any, count: int) -> list[Value]:
    if kind == "b128":
        value = e.operand(source, "b128")
        return [e.let(f"{value.name}[:, {k}]", "u8", False, value.base) for k in range(2)]
    size = SIZES[kind]
    value, code, shift = e.operand(source, f"u{size}"), f"u{size // count}", 8 * size // count
    texts = [f"({value.name} >> U{size}({shift * k}))" if k else value.name for k in range(count)]
    return [e.let(f"{text}.astype({code.upper()})", code, value.uniform) for text in texts]


def _packed(e: Emitter, kind: str, source: Vector) -> Value:
    if kind == "b128":
        low, high = (e.array(e.operand(o, "u8")) for o in source.items)
        return e.let(f"np.stack(({low}, {high}), 1)", "x")
    size, count = SIZES[kind], len(source.items)
    values = [e.operand(o, f"u{size // count}") for o in source.items]
    texts = [f"{v.name}.astype(U{size})" for v in values]
    parts = [t if k == 0 else f"({t} << U{size}({8 * size // count * k}))" for k, t in enumerate(texts)]
    return e.let(" | ".join(parts), f"u{size}", all(v.uniform for v in values))


@rule("selp")
def _selp(e: Emitter, i: Instruction) -> Value:
    if i.type() == "b128":
        a, b = (e.operand(o, "b128").name for o in i.operands[1:3])
        p = e.array(e.operand(i.operands[3], "pred"))
        return e.let(f"where({p}[:, None], {a}, {b})", "x")
    kind = unsigned(i.type())
    (a, b), uniform = sources(e, i, kind, 1, 2)
    p = e.operand(i.operands[3], "pred")
    return e.let(f"where({p.name}, {a}, {b})", kind, uniform and p.uniform)


@rule("slct")
def _slct(e: Emitter, i: Instruction) -> Value:
    first, last = [p for p in i.parts[1:] if p in SIZES][-2:]
    (a, b), uniform = sources(e, i, unsigned(first), 1, 2)
    (c,) = flushed(i, [e.src(i, 3, last)])
    return e.let(f"where({c} >= 0, {a}, {b})", unsigned(first), uniform and e.operand(i.operands[3], last).uniform)


# --- comparisons --------------------------------------------------------------------------------------------
_ORDERED = {
    "eq": "{a} == {b}", "lt": "{a} < {b}", "le": "{a} <= {b}", "gt": "{a} > {b}", "ge": "{a} >= {b}",
    "lo": "{a} < {b}", "ls": "{a} <= {b}", "hi": "{a} > {b}", "hs": "{a} >= {b}",
    "neu": "{a} != {b}", "ltu": "~({a} >= {b})", "leu": "~({a} > {b})", "gtu": "~({a} <= {b})", "geu": "~({a} < {b})",
    "equ": "({a} == {b}) | np.isnan({a}) | np.isnan({b})", "num": "({a} == {a}) & ({b} == {b})",
    "nan": "({a} != {a}) | ({b} != {b})",
}  # fmt: skip
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


def _compare(e: Emitter, i: Instruction, kind: str) -> tuple[str, str | None, bool]:
    """The comparison of a setp or set: its expression, the third operand with its operator, if any; uniform."""
    name = next(p for p in i.parts[1:] if p in _ORDERED or p == "ne")
    if kind in PACKED:
        names = [f"T.decode({e.array(e.operand(o, 'u32'))}, {kind!r})" for o in i.operands[1:3]]
        uniform = False
    else:
        names, uniform = sources(e, i, unsigned(kind) if kind[0] == "b" and kind != "bf16" else kind, 1, 2)
    a, b = flushed(i, names)
    text = _ORDERED.get(name)
    if text is None:  # ne: of floats neither may be NaN
        text = "({a} < {b}) | ({a} > {b})" if kind[0] == "f" or kind.startswith("bf") else "{a} != {b}"
    combine = next((p for p in i.parts[1:] if p in _BOOLEAN), None)
    third = None
    if combine is not None:
        c = e.operand(i.operands[3], "pred")
        third, uniform = f"{_BOOLEAN[combine]} {c.name}", uniform and c.uniform
    return f"({text.format(a=a, b=b)})", third, uniform


def _compared_type(i: Instruction) -> str:
    return [p for p in i.parts[1:] if p in SIZES][-1]


@rule("setp")
def _setp(e: Emitter, i: Instruction) -> Any:
    kind = _compared_type(i)
    text, third, uniform = _compare(e, i, kind)
    d = i.operands[0]
    if kind in PACKED or isinstance(d, Pair):
        q = e.expression(text)
        if not isinstance(d, Pair):
            raise Unreached("one predicate for two comparisons")
        both = (f"{q}[:, 0]", f"{q}[:, 1]") if kind in PACKED else (q, f"~{q}")
        for item, one in zip((d.first, d.second), both, strict=True):
            e.assign(item, e.let(one if third is None else f"{one} {third}", "p", uniform), e.guard_value)
        return []
    return e.let(text if third is None else f"{text} {third}", "p", uniform)


@rule("set")
def _set(e: Emitter, i: Instruction) -> Value:
    target, kind = [p for p in i.parts[1:] if p in SIZES][-2:]
    text, third, uniform = _compare(e, i, kind)
    if third is not None:
        text = f"({text} {third})" if kind not in PACKED else f"({text} {third.replace(' ', ' ')}[:, None])"
    if target in PACKED:
        return e.let(f"T.encode({text}.astype(T.DTYPES[{target!r}]), {target!r})", "u4")
    if kind in PACKED:
        return e.let(f"T.encode(where({text}, U2(0xFFFF), U2(0)), 'u16x2')", "u4")
    if target[0] == "f" or target == "bf16":
        return e.let(f"{text}.astype(T.DTYPES[{target!r}])", target, uniform)
    return e.let(f"where({text}, {code_of(target).upper()}(0) - {code_of(target).upper()}(1), {code_of(target).upper()}(0))", target, uniform)  # fmt: skip # noqa: E501


_TESTS = {
    "finite": "np.isfinite({a})", "infinite": "np.isinf({a})",
    "number": "~np.isnan({a})", "notanumber": "np.isnan({a})",
    "normal": "np.isfinite({a}) & (np.abs({a}) >= np.finfo({a}.dtype).tiny)",
    "subnormal": "({a} != 0) & (np.abs({a}) < np.finfo({a}.dtype).tiny)",
}  # fmt: skip


@rule("testp")
def _testp(e: Emitter, i: Instruction) -> Value:
    (a,), uniform = sources(e, i, i.type())
    return e.let(_TESTS[i.parts[1]].format(a=a), "p", uniform)


# --- conversions --------------------------------------------------------------------------------------------
_PAIRS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2", "e2m3x2": "e2m3", "e3m2x2": "e3m2", "e2m1x2": "e2m1", "ue8m0x2": "ue8m0"}
_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}


@rule("cvt")
def _cvt(e: Emitter, i: Instruction) -> Any:
    target, source = [p for p in i.parts[1:] if p in SIZES or p in _PAIRS or p in _HALVES][:2]
    mode = next((p for p in i.parts if p in ("rn", "rz", "rm", "rp", "rna")), "")
    whole = next((p for p in i.parts if p in ("rni", "rzi", "rmi", "rpi")), "")
    positive, clamp = i.has("relu"), i.has("sat", "satfinite")
    given = i.operands[1:]
    if i.has("rs", "scaled"):
        raise Unreached("stochastic or scaled conversions")
    if target == "tf32":
        (a,), uniform = sources(e, i, "f32")
        return e.let(f"C.to_tf32({f'F.relu({a})' if positive else a}, {mode!r})", "u4", uniform)
    small = _PAIRS.get(target) or _HALVES.get(target)
    if small is not None and source == "f32":
        high, low = (e.array(e.operand(o, "f32")) for o in given[:2])
        code = {"e2m1x2": "u1"}.get(target, "u4" if target in _HALVES else "u2")
        return e.let(f"C.pack({high}, {low}, {small!r}, {mode!r}, {positive}, {clamp})", code)
    if target in _HALVES and source in _PAIRS:
        a = e.array(e.operand(given[0], "u8" if source == "e2m1x2" else "u16"))
        return e.let(f"C.unpack({a}, {_PAIRS[source]!r}, {small!r}, {positive})", "u4")
    if target in _PAIRS and source in _HALVES:
        a = e.array(e.operand(given[0], "u32"))
        text = f"C.renarrow({a}, {_HALVES[source]!r}, {small!r}, {mode!r}, {positive})"
        return e.let(text, "u1" if target == "e2m1x2" else "u2")
    if target not in DTYPES or source not in DTYPES or len(given) != 1:
        raise Unreached("a conversion between these types")
    a = e.operand(given[0], source)
    if target[0] in "us" and source[0] in "us" and not clamp:
        return e.let(f"{a.name}.astype({code_of(target).upper()})", target, a.uniform)
    name = f"T.flush({a.name})" if i.has("ftz") else a.name
    if not (whole or clamp or positive) and mode in ("", "rn") and source in ("f16", "bf16", "f32"):
        if target in ("f16", "bf16", "f32", "f64"):  # one rounding, or none
            text = f"{name}.astype({code_of(target).upper()})"
            if target in ("f16", "bf16"):
                text = f"C.narrower({name}, {code_of(target).upper()})"
            return e.let(f"T.flush({text})" if i.has("ftz") else text, target, a.uniform)
    finite = clamp and i.has("satfinite")
    text = f"C.convert({name}, {target!r}, {mode!r}, {clamp and not finite}, {whole!r})"
    if finite and target in ("f16", "bf16"):
        text = f"C.half({name}, {target!r}, {mode!r})"
    text = f"F.relu({text})" if positive else text
    return e.let(f"T.flush({text})" if i.has("ftz") else text, target, a.uniform)


# --- what only guides the hardware, and fences --------------------------------------------------------------
@rule("nanosleep", "pmevent", out=0)
def _pause(e: Emitter, i: Instruction) -> None:
    if i.name == "nanosleep":
        e.lines.append("g.poll()")


@rule("createpolicy")
def _policy(e: Emitter, i: Instruction) -> Value:
    return Value(e.constant(np.uint64(0)), "u8", None, True)


@operation("fence", "membar")
def _fence(group: Any, instr: Instruction) -> None:
    """The machine does one access after another; what the cluster may rely on from now on is kept by `proxies`."""
    if instr.has("proxy"):
        raise Unreached
    if instr.has("cluster", "gpu", "sys", "gl"):
        from palladion.emulator import proxies

        proxies.publish(group)


@helper
def active_lanes(g: Any, m: Any) -> Any:
    """The lanes of a mask as bits of one number a warp, in each lane."""
    mask = g.mask if m is None else m
    bits = mask.reshape(-1, 32).astype(np.uint64) @ (np.uint64(1) << np.arange(32, dtype=np.uint64))
    return np.repeat(bits, 32).astype(np.uint32)


@rule("activemask")
def _activemask(e: Emitter, i: Instruction) -> Value:
    return e.let(f"active_lanes(g, {e.mask})", "u32")
