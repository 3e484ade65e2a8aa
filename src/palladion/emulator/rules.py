"""Rules: instructions that are arithmetic of lanes, each a function that writes NumPy source for the translator.

    @rule("add", "sub")
    def _(e, i):                       # e: translate.Emitter, i: the instruction
        kind = i.type()
        return e.let(f"{e.src(i, 1, kind)} + {e.src(i, 2, kind)}", kind)

A rule gives one `Value` for each destination. The key is the leading words of the opcode, the longest one wins, as for
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RULES: dict[str, Rule] = {}
HELPERS: dict[str, Any] = {}
"""Functions that generated code may call, by name."""


@dataclass(frozen=True)
class Rule:
    """A rule: `write(emitter, instruction)`; `out` destinations, or a function of the instruction that says so."""

    key: str
    write: Callable[[Any, Any], Any]
    out: int | Callable[[Any], int]
    fills: bool

    def outputs(self, instr: Any) -> int:
        return self.out(instr) if callable(self.out) else self.out


def rule(
    *keys: str, out: int | Callable[[Any], int] = 1, guarded: bool = False
) -> Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]:
    """Register a rule.

    Arguments:
      keys: leading words of the opcodes.
      out: number of destinations.
      guarded: the rule itself heeds the guard (memory accesses), besides what the translator does with its results.
    """

    def register(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        for key in keys:
            RULES[key] = Rule(key, write, out, guarded)
        return write

    return register


def helper[F: Callable[..., Any]](function: F) -> F:
    """Let generated code call this function by its name."""
    HELPERS[function.__name__] = function
    return function


def longest[T](table: dict[str, T], parts: tuple[str, ...]) -> T | None:
    """The entry whose key is the most leading words of an opcode, or None."""
    for length in range(len(parts), 0, -1):
        found = table.get(".".join(parts[:length]))
        if found is not None:
            return found
    return None


def find_rule(parts: tuple[str, ...]) -> Rule | None:
    """The rule for the words of an opcode: the one with the longest key."""
    return longest(RULES, parts)
