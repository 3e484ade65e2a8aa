"""Operations: instructions with effects beyond the arithmetic of their lanes, each a Python function found by name.

The key of an operation is the leading words of its opcode; the longest key that is registered wins, so
`cp.async.bulk.tensor` and `cp.async` are different operations. Modules that register operations are imported when a
module of PTX is loaded. How an operation is called is said in `translate.py`, what it may ask of the machine in
`group.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from palladion.emulator.rules import longest

MODULES = (
    "lanes_memory",
    "rules_arithmetic",
    "rules_bits",
    "rules_moves",
    "shuffles",
    "barriers",
    "atomics",
    "calls",
    "mbarrier",
    "bulk",
    "tensor_copies",
    "multimem",
    "copies",
    "cluster",
    "launch_control",
    "proxies",
    "fences",
    "matrices",
    "mma",
    "wgmma",
    "tcgen05",
    "tmem",
)


@dataclass(frozen=True)
class Operation:
    """A registered operation.

    Attributes:
      key: leading words of the opcodes it is for.
      run: the function, called with (group, instruction, *operand values); gives a value for each destination.
      out: number of destination operands, or a function of the instruction that says so.
      parks: it may raise `Wait`, so that it has to be the first instruction of a block (or a function of the
        instruction that says so; `collective` may be one, too).
      collective: "warp" (or "aligned"), "warpgroup": whose lanes must be here together; None: no demand.
      inout: the destinations' current values come first among the arguments.
    """

    key: str
    run: Callable[..., Any]
    out: int | Callable[[Any], int]
    parks: bool | Callable[[Any], bool]
    collective: str | Callable[[Any], str | None] | None
    inout: bool = False

    def outputs(self, instr: Any) -> int:
        return self.out(instr) if callable(self.out) else self.out

    def may_park(self, instr: Any) -> bool:
        return self.parks(instr) if callable(self.parks) else self.parks

    def gathers(self, instr: Any) -> str | None:
        """Whose lanes have to be here together."""
        found = self.collective(instr) if callable(self.collective) else self.collective
        return "warp" if found == "aligned" else found


class Wait(Exception):
    """Raised by an operation that cannot go on yet.

    Arguments:
      until: asked again whenever something has happened; when it is true the instruction is run again.
      reason: what is waited for, for the report of a deadlock.
      ready: the lanes that need not wait (bool, shape (lanes,)); the instruction is run again for them alone.
      finish: given where the instruction has had its effect: when `until` is true its results are what
        `finish()` gives, and the instruction is not run again.
      merge: other lanes that come to this instruction join those that wait.
    """

    def __init__(
        self,
        until: Callable[[], bool],
        reason: str,
        ready: Any = None,
        finish: Callable[[], Any] | None = None,
        merge: bool = False,
    ) -> None:
        super().__init__(reason)
        self.until, self.reason, self.ready, self.finish, self.merge = until, reason, ready, finish, merge


OPERATIONS: dict[str, Operation] = {}


def operation(
    *keys: str,
    out: int | Callable[[Any], int] = 0,
    parks: bool | Callable[[Any], bool] = False,
    collective: str | Callable[[Any], str | None] | None = None,
    inout: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operation for opcodes that begin with one of `keys`; arguments as in `Operation`."""
    if not callable(collective) and collective not in (None, "warp", "aligned", "warpgroup"):
        raise ValueError(f"An operation's lanes gather by warp or warpgroup, not by {collective!r}.")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for key in keys:
            OPERATIONS[key] = Operation(key, run, out, parks, collective, inout)
        return run

    return register


def find_operation(parts: tuple[str, ...]) -> Operation | None:
    """The operation for the words of an opcode: the one with the longest key."""
    return longest(OPERATIONS, parts)


def import_operations() -> None:
    """Import every module that registers operations."""
    for name in MODULES:
        full = f"palladion.emulator.{name}"
        if importlib.util.find_spec(full) is not None:
            importlib.import_module(full)
