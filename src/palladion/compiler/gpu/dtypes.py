"""JAX's dtypes as types of the generated C++ (`header.py` declares them), and their constants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Kind:
    """One dtype.

    Attributes:
      c: the C++ type of a value. bits: of an element in memory. family: "float", "int", "uint" or "bool".
      compute: the C++ type in which arithmetic happens (its values are rounded back after each operation).
    """

    c: str
    bits: int
    family: str
    compute: str


KINDS = {
    "float64": Kind("double", 64, "float", "double"),
    "float32": Kind("float", 32, "float", "float"),
    "bfloat16": Kind("bf16", 16, "float", "float"),
    "float16": Kind("f16", 16, "float", "float"),
    "float8_e4m3fn": Kind("e4m3", 8, "float", "float"),
    "float8_e5m2": Kind("e5m2", 8, "float", "float"),
    "int64": Kind("i64", 64, "int", "i64"),
    "int32": Kind("int", 32, "int", "int"),
    "int16": Kind("i16", 16, "int", "int"),
    "int8": Kind("i8", 8, "int", "int"),
    "uint64": Kind("u64", 64, "uint", "u64"),
    "uint32": Kind("u32", 32, "uint", "u32"),
    "uint16": Kind("u16", 16, "uint", "u32"),
    "uint8": Kind("u8", 8, "uint", "u32"),
    "bool": Kind("bool", 8, "bool", "bool"),
}


class NoSuchType(TypeError):
    """A dtype that the compiler has no values of."""


def kind(dtype: Any) -> Kind:
    """The C++ side of a dtype.

    Raises: NoSuchType: the compiler has none.
    """
    name = str(jnp.dtype(dtype)) if not str(dtype).startswith("key<") else str(dtype)
    if name not in KINDS:
        raise NoSuchType(f"The Mosaic GPU compiler has no values of {name}.\n  fix: it has {', '.join(KINDS)}")
    return KINDS[name]


def constant(value: Any, dtype: Any) -> str:
    """A number as C++ of type `kind(dtype).c`."""
    of = kind(dtype)
    if of.family == "bool":
        return "true" if bool(value) else "false"
    if of.family in ("int", "uint"):
        number = int(value)
        suffix = {"i64": "ll", "u64": "ull", "u32": "u"}.get(of.c, "")
        if number == -(2**31) and of.c == "int":
            return "(-2147483647 - 1)"
        if number == -(2**63):
            return "(-9223372036854775807ll - 1)"
        text = f"{number}{suffix}"
        text = f"({text})" if number < 0 else text
        return text if of.c in ("int", "u32", "i64", "u64") else f"({of.c}){text}"
    number = float(np.asarray(value).astype(np.float64))
    if of.c == "double":
        nan, infinity = (f"__longlong_as_double(0x7ff{digit}000000000000ll)" for digit in (8, 0))
        return _floating(number, "", nan, infinity)
    text = _floating(number, "f", "__int_as_float(0x7fc00000)", "__int_as_float(0x7f800000)")
    return text if of.c == "float" else f"{of.c}({text})"


def _floating(number: float, suffix: str, nan: str, infinity: str) -> str:
    if math.isnan(number):
        return nan
    if math.isinf(number):
        return infinity if number > 0 else f"(-{infinity})"
    text = repr(number) if suffix == "" else repr(float(np.float32(number)))
    text = text if any(c in text for c in ".en") else f"{text}.0"
    text = f"{text}{suffix}"
    return f"({text})" if number < 0 or text.startswith("-") else text
