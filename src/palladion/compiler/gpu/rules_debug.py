"""Printing and checks, by the device's own printf.

One CUDA thread of the Pallas thread prints. Numbers take the format specifications of Python that C has; without one,
floats print as many digits as tell them apart, arrays in NumPy's brackets. Lines of different blocks come in any order.

A check that fails prints its message and stops the kernel with a trap.

Source: CUDA programming guide, "Formatted output" (32 arguments at most).
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.compiler.gpu.dtypes import Kind
from palladion.compiler.gpu.rules_elementwise import expression
from palladion.compiler.gpu.spill import spilled
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar
from palladion.language import ops

MOST = 30  # arguments of one printf
_SPEC = re.compile(
    r"(?:(?P<fill>.)?(?P<align>[<>=^]))?(?P<sign>[-+ ])?(?P<form>#)?(?P<zero>0)?(?P<width>\d+)?"
    r"(?:\.(?P<precision>\d+))?(?P<type>[a-zA-Z%])?$"
)
_DIGITS = {"double": 16, "float": 8, "f16": 5, "bf16": 4, "e4m3": 4, "e5m2": 4}


def literal(text: str) -> str:
    """A text as a C string that printf prints as it is."""
    found = []
    for byte in text.replace("%", "%%").encode():
        char = chr(byte)
        if char in '"\\':
            found.append("\\" + char)
        elif 32 <= byte < 127 and char != "?":  # no trigraphs
            found.append(char)
        else:
            found.append(f"\\{byte:03o}")
    return "".join(found)


def conversion(unit: Unit, of: Kind, spec: str, text: str) -> tuple[str, str]:
    """A number in a printf: the conversion, and C++ of the argument.

    Arguments:
      of: of the number. spec: Python's format specification. text: C++ of the number.
    """
    match = _SPEC.match(spec)
    if match is None or match["type"] in ("b", "n", "%") or match["align"] in ("^", "=") or match["fill"] not in (
        None, " ", "0",
    ):  # fmt: skip
        raise unit.refuse(
            f"The device's printf has nothing for the format specification {spec!r}.",
            "it has widths, precisions and the types d, x, o, e, f and g",
        )
    sign = match["sign"] or ""
    flags = ("-" if match["align"] == "<" else "") + (sign if sign != "-" else "") + (match["form"] or "")
    flags += "0" if match["zero"] or match["fill"] == "0" else ""
    wanted, width, precision = match["type"], match["width"] or "", match["precision"]
    if of.family == "bool" and wanted is None:
        return f"%{flags}{width}s", f'{text} ? "True" : "False"'
    if of.family == "float" or wanted in ("e", "E", "f", "F", "g", "G"):
        digits = precision or (str(_DIGITS.get(of.c, 16)) if wanted is None else "6")
        return f"%{flags}{width}.{digits}{wanted or 'g'}", f"(double){expression(of, text)}"
    if wanted == "c":
        return f"%{flags}{width}c", f"(int){text}"
    wanted = "u" if of.family == "uint" and wanted in (None, "d") else wanted or "d"
    return f"%{flags}{width}ll{wanted}", f"({'u64' if of.family == 'uint' else 'i64'}){text}"


def _print(unit: Unit, fmt: str, fields: dict[Any, Any], avals: Sequence[Any], values: Sequence[Any]) -> None:
    """Print a line. Arguments: fields: what a field of the format is called -> number of the value."""
    arrays = [k for k, a in enumerate(avals) if a.shape]
    if arrays and unit.warps != 4:
        raise unit.refuse("A single warp cannot print an array.", "print it in the whole Pallas thread, or an element")
    pointers = dict(zip(arrays, spilled(unit, *((values[k], None) for k in arrays)))) if arrays else {}
    parts: list[tuple[str, str | None]] = []  # (conversions, argument)
    auto = iter(range(len(avals)))
    with unit.one_thread():
        for text, name, spec, _ in string.Formatter().parse(fmt):
            parts.append((literal(text), None))
            if name is None:
                continue
            k = fields.get(int(name) if name.isdigit() else name or next(auto))
            if k is None:
                raise unit.refuse(f"The device's printf has no place for {{{name}}}.", "print the value itself: {}")
            if k in pointers:
                _flush(unit, parts)
                _print_array(unit, pointers[k], values[k].kind, tuple(avals[k].shape), spec or "")
            else:
                parts.append(conversion(unit, values[k].kind, spec or "", values[k].text))
        parts.append(("\\n", None))
        _flush(unit, parts)


def _flush(unit: Unit, parts: list[tuple[str, str | None]]) -> None:
    """Print what has been collected."""
    texts: list[str] = []
    given: list[str] = []
    for text, argument in [*parts, ("", "end")]:
        if (argument == "end" or len(given) == MOST) and "".join(texts):
            unit.line(f'printf("{"".join(texts)}"{"".join(f", {g}" for g in given)});')
            texts, given = [], []
        texts.append(text)
        given += [] if argument in (None, "end") else [argument]
    parts.clear()


def _print_array(unit: Unit, pointer: str, of: Kind, shape: tuple[int, ...], spec: str) -> None:
    """An array, in brackets; a line for each row."""
    size, rank = math.prod(shape), len(shape)
    if not size:
        unit.line('printf("[]");')
        return
    runs = [math.prod(shape[d:]) for d in range(rank)]  # elements of a row, and of what is made of rows
    what, argument = conversion(unit, of, spec, f"{pointer}[k]")
    with unit.block(f"for (int k = 0; k < {size}; ++k)"):
        between = f'k % {runs[-1]} ? " " : "\\n{" " * (rank - 1)}"' if rank > 1 else '" "'
        unit.line(f"if (k) printf({between});")
        for n in runs:
            unit.line(f'if (k % {n} == 0) printf("[");')
        unit.line(f'printf("{what}", {argument});')
        for n in reversed(runs):
            unit.line(f'if ((k + 1) % {n} == 0) printf("]");')


@RULES.rule(ops.debug_print_p)
def _debug_print(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    fields = {k: k for k in range(len(values))}
    _print(unit, eqn.params["fmt"], fields, [v.aval for v in eqn.invars], values)
    return []


@RULES.rule(jaxlink.jax_debug_print_p)
def _jax_debug_print(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    if eqn.params["static_args"]:
        raise RULES.unsupported(eqn)
    args, named = jax.tree.unflatten(eqn.params["in_tree"], range(len(values)))
    _print(unit, eqn.params["fmt"], {**dict(enumerate(args)), **named}, [v.aval for v in eqn.invars], values)
    return []


# What a failed check prints before its trap.
FAILED_CHECK = re.compile(r"(?P<message>.*?)(?: at (?P<where>\S.*?:\d+(?: \([^()]*\))?))?, block (?P<block>\d+)")


@RULES.rule(ops.debug_check_p)
def _debug_check(unit: Unit, eqn: Any, ok: Scalar) -> list[Any]:
    where = eqn.params["where"]
    text = literal(f"{eqn.params['message']}{f' at {where}' if where else ''}")
    with unit.block(f"if (!{ok.text})"):
        with unit.one_thread():
            unit.line(f'printf("{text}, block %u\\n", blockIdx.x);')
        unit.line('asm volatile("trap;");')
    return []
