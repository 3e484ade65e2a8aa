"""Initial values of PTX variables: numbers, nested lists, and addresses of other variables.

Source: PTX ISA manual, "Initializers".
"""

from __future__ import annotations

import re
import struct
from typing import Any

from palladion.emulator.ptx import SIZES

Links = tuple[tuple[int, str, int, bool, int], ...]


def number(text: str) -> int | float:
    """A numeric literal of PTX: decimal, hexadecimal, octal, binary, or floating-point."""
    text = text.rstrip("U")
    if text[:2] in ("0f", "0F"):
        return struct.unpack("<f", struct.pack("<I", int(text[2:], 16)))[0]
    if text[:2] in ("0d", "0D"):
        return struct.unpack("<d", struct.pack("<Q", int(text[2:], 16)))[0]
    if re.fullmatch(r"0[0-7]+", text):
        return int(text, 8)
    if re.fullmatch(r"\d+", text) or text[:2] in ("0x", "0X", "0b", "0B"):
        return int(text, 0)
    return float(text)


def initial_bytes(p: Any, kind: str) -> tuple[bytes, Links, int]:
    """The bytes of an initialiser of elements of type `kind`.

    Arguments:
      p: the parser, after the `=`.

    Returns: bytes, the addresses that they hold (`Variable.links`), and the number of elements.
    """
    size = SIZES[kind]
    data, links, items = bytearray(), [], 0

    def one() -> None:
        nonlocal items
        items += 1
        at, mask = len(data), None
        if p.tokens[p.at].kind == "number" and p.peek(1) == "(":  # 0xFF(symbol): one byte of an address
            mask = int(number(p.take()))
            p.take("(")
        if p.tokens[p.at].kind == "word":
            generic = p.peek() == "generic"
            if generic:
                p.take()
                p.take("(")
            name, addend = p.take(), 0
            while p.peek() in ("+", "-"):
                addend += (-1 if p.take() == "-" else 1) * int(number(p.take()))
            if generic:
                p.take(")")
                while p.peek() in ("+", "-"):
                    addend += (-1 if p.take() == "-" else 1) * int(number(p.take()))
            if mask is not None:
                p.take(")")
                generic = generic or False
                shift = (mask & -mask).bit_length() - 1
                links.append((at, name, addend, generic, -shift - 1))
            else:
                links.append((at, name, addend, generic, size))
            data.extend(bytes(size))
            return
        negative = p.accept("-")
        text = p.take()
        value = -number(text) if negative else number(text)
        if kind in ("f32", "f64"):
            if text[:2] in ("0f", "0F", "0d", "0D") and not negative:
                bits = int(text[2:], 16)
                if (text[1] in "fF") == (kind == "f32"):
                    data.extend(bits.to_bytes(size, "little"))
                    return
            data.extend(struct.pack("<f" if kind == "f32" else "<d", value))
        else:
            data.extend((int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little"))

    def some() -> None:
        if p.accept("{"):
            while not p.accept("}"):
                some()
                p.accept(",")
        else:
            one()

    some()
    return bytes(data), tuple(links), items
