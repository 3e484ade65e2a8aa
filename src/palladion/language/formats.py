"""The format strings of `pl.debug_print`: checked where they are written, filled in where values are known.

The syntax is that of `jax.debug.print` with values by position. A format without a place for values prints them after
the text, as it must be written for Triton. Strings and other things that are not arrays become part of the text.

Source: tutorial 3; the public documentation of `pl.debug_print`.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language.indexing import is_ref


def prepare(fmt: Any, args: Sequence[Any]) -> tuple[str, list[Any]]:
    """A format that fits the arrays among the arguments, and those arrays.

    Arguments:
      fmt: what the user wrote.
      args: arrays, scalars, Refs (their values are printed), strings and other things known while tracing.

    Raises:
      TypeError: the format is not a string, or an argument cannot be printed. ValueError: the format does not fit.
    """
    hint = 'pl.debug_print("i={} x={}", i, x): one {} for each value, {{ and }} for braces'
    if not isinstance(fmt, str):
        raise mistake(TypeError, f"pl.debug_print takes a format string first, not {kind_of(fmt)}.", hint=hint)
    values = [a[...] if is_ref(a) else a for a in args]
    fields = _fields(fmt, len(values), hint)
    if not fields and values:  # as on Triton: the values follow the text
        fmt = " ".join([fmt.rstrip(" "), *["{}"] * len(values)])
        fields = list(range(len(values)))
    if unused := sorted(set(range(len(values))) - set(fields)):
        raise mistake(
            ValueError,
            f"The format {fmt!r} of pl.debug_print has no place for argument {unused[0]} of {len(values)}.",
            hint=hint,
        )
    is_array = [_is_array(v, n) for n, v in enumerate(values)]
    try:
        fmt.format(*(_stand_in(v) if a else v for v, a in zip(values, is_array)))
    except (IndexError, TypeError, ValueError, AttributeError) as error:
        raise mistake(
            ValueError,
            f"The format {fmt!r} does not fit the values of pl.debug_print: {error}.",
            values=", ".join(map(kind_of, values)),
            hint="{:d} takes integers, {:.3f} numbers; arrays take no format specification",
        ) from None
    fmt = fmt if all(is_array) else _fold(fmt, values, is_array)
    return fmt, [jnp.asarray(v) for v, a in zip(values, is_array) if a]


def _fields(fmt: str, count: int, hint: str) -> list[int]:
    """The numbers of the arguments that a format asks for."""
    used: list[Any] = []

    class Collect(string.Formatter):
        def get_value(self, key, args, kwargs):
            used.append(key)
            return _Anything()

    try:
        Collect().vformat(fmt, (), {})
    except ValueError as error:
        raise mistake(ValueError, f"The format {fmt!r} of pl.debug_print is not one: {error}.", hint=hint) from None
    for key in used:
        if not isinstance(key, int):
            headline = f"The format {fmt!r} of pl.debug_print names {key!r}, but its values come by position."
            raise mistake(ValueError, headline, hint=hint)
        if key >= count:
            headline = f"The format {fmt!r} of pl.debug_print asks for more than its {count_of(count, 'value')}."
            raise mistake(ValueError, headline, hint=hint)
    return used


class _Anything:
    """Takes any format specification, index and attribute."""

    def __format__(self, spec: str) -> str:
        return ""

    def __getitem__(self, key: Any) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        return self


def _is_array(value: Any, number: int) -> bool:
    """Whether a value is to be printed at run time; other values are known now."""
    if isinstance(value, (jax.Array, jaxlink.Tracer)):
        if jaxlink.is_opaque(value.dtype):
            raise mistake(
                TypeError,
                f"Argument {number} of pl.debug_print is {kind_of(value)}, which has no text.",
                hint="print jax.random.key_data(key)",
            )
        return True
    if any(isinstance(leaf, jaxlink.Tracer) for leaf in jax.tree.leaves(value)):
        raise mistake(
            TypeError,
            f"Argument {number} of pl.debug_print is a {type(value).__name__} of values known at run time.",
            hint="print each with a {} of its own",
        )
    return isinstance(value, (int, float, complex, np.ndarray, np.generic)) and not isinstance(value, bool)


def _stand_in(value: Any) -> _Printable:
    return _Printable(np.zeros(np.shape(value), value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype))


def _fold(fmt: str, values: Sequence[Any], is_array: Sequence[bool]) -> str:
    """The format with the values that are not arrays put in, and the others renumbered."""
    number = {n: sum(is_array[:n]) for n in range(len(values)) if is_array[n]}
    auto = iter(range(len(values)))
    parts = []
    for text, field, spec, conversion in string.Formatter().parse(fmt):
        parts.append(text.replace("{", "{{").replace("}", "}}"))
        if field is None:
            continue
        head = len(field) - len(field.lstrip("0123456789"))
        n, rest = int(field[:head]) if head else next(auto), field[head:]
        tail = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        if is_array[n]:
            parts.append(f"{{{number[n]}{rest}{tail}}}")
        else:
            parts.append(f"{{0{rest}{tail}}}".format(values[n]).replace("{", "{{").replace("}", "}}"))
    return "".join(parts)


def format_values(fmt: str, values: Any) -> str:
    """The line that a print gives: arrays as NumPy prints them, scalars as numbers that take format specifications."""
    return fmt.format(*(_Printable(np.asarray(v)) for v in values))


class _Printable:
    """An array or scalar in a format string; narrow floats take the specifications of floats."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return format(self.value.item() if self.value.ndim == 0 else self.value, spec)

    def __str__(self) -> str:
        text = str(self.value)
        whole = self.value.ndim == 0 and jnp.issubdtype(self.value.dtype, jnp.floating) and text.lstrip("-").isdigit()
        return f"{text}.0" if whole else text  # bfloat16 and the like print 1 for 1.0

    def __repr__(self) -> str:
        return repr(self.value)

    def __getitem__(self, key: Any) -> _Printable:
        return _Printable(self.value[key])
