"""Device printf: a format with the promoted arguments that the compiler packed into a buffer.

Every argument lies at a multiple of its size (4 bytes, or 8 for doubles, long and pointers).
Source: CUDA programming guide, "Formatted output"; C standard, fprintf.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

_FIELD = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+))?(?P<long>hh|h|ll|l|j|z|t|L)?"
    r"(?P<kind>[diouxXeEfFgGaAcsp%])"
)


def formatted(text: str, fetch: Callable[[int, int], bytes], string: Callable[[int], str]) -> tuple[str, int]:
    """A format with its arguments.

    Arguments:
      text: the format.
      fetch: gives `size` bytes at an offset of the argument buffer.
      string: gives the string at an address.

    Returns: what is printed, and the number of arguments.
    """
    at, count = 0, 0

    def number(size: int, code: str) -> int | float:
        nonlocal at, count
        at = -(-at // size) * size
        value = struct.unpack("<" + code, fetch(at, size))[0]
        at += size
        count += 1
        return value

    def field(match: re.Match[str]) -> str:
        kind = match["kind"]
        if kind == "%":
            return "%"
        width = str(number(4, "i")) if match["width"] == "*" else match["width"] or ""
        precision = match["precision"]
        if precision == "*":
            precision = str(number(4, "i"))
        flags = match["flags"] + width + (f".{precision}" if precision is not None else "")
        wide = match["long"] in ("l", "ll", "j", "z", "t")
        if kind in "eEfFgG":
            return f"%{flags}{kind}" % number(8, "d")
        if kind in "aA":
            found = float(number(8, "d")).hex()
            return found.upper() if kind == "A" else found
        if kind == "s":
            return f"%{flags}s" % string(int(number(8, "Q")))
        if kind == "p":
            return f"%{flags}s" % hex(int(number(8, "Q")))
        if kind == "c":
            return f"%{flags}c" % chr(int(number(4, "i")) & 0xFF)
        if kind in "di":
            return f"%{flags}d" % number(8 if wide else 4, "q" if wide else "i")
        value = number(8 if wide else 4, "Q" if wide else "I")
        return f"%{flags}{'d' if kind == 'u' else kind}" % value

    return _FIELD.sub(field, text), count
