"""How numbers and points are written for people."""

from __future__ import annotations

from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def bytes_text(count: int) -> str:
    """64.0 KiB; whole bytes below 1 KiB."""
    value, power = float(count), 0
    while value >= 1024 and power < len(_BINARY) - 1:
        value, power = value / 1024, power + 1
    return f"{count} B" if power == 0 else f"{value:.1f} {_BINARY[power]}"


def si_text(count: float, unit: str) -> str:
    """16.8 Mflop; whole numbers below 1000."""
    value, power = float(count), 0
    while value >= 999.95 and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    return f"{count:.0f} {unit}" if power == 0 else f"{value:.1f} {_DECIMAL[power]}{unit}"


def plural(count: int, noun: str) -> str:
    """1 program, 2 programs, 1,024 programs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def tuple_text(items: Sequence[object]) -> str:
    """(4, ?) for (4, None): grids, blocks and points as Python writes tuples."""
    words = ["?" if x is None else str(x) for x in items]
    return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"


def listing(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1] if words else ""]))
