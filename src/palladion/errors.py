"""Every exception, warning and finding that a user of Palladion can meet.

Errors are for people at work: the first line says what is wrong in the user's terms, then where (file and line,
operand, grid point), then how to fix it. `explain` puts a message in that order. Mistakes of use are raised as
the built-in exceptions that Pallas users catch (`ValueError`, `TypeError`, `IndexError`); the classes here are
for what has no built-in name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def explain(headline: str, *, where: str | None = None, hint: str | None = None, **facts: Any) -> str:
    """A message in Palladion's order: what is wrong, where, the facts, how to fix it.

    Arguments:
      headline: one sentence in the user's terms.
      where: `file:line (function)` of the user's line.
      hint: the usual fix.
      **facts: further lines, `name: value` (underscores in a name become spaces); None values are left out.
    """
    lines = [headline]
    if where is not None:
        lines.append(f"  at: {where}")
    lines += [f"  {name.replace('_', ' ')}: {value}" for name, value in facts.items() if value is not None]
    if hint is not None:
        lines.append(f"  fix: {hint}")
    return "\n".join(lines)


class PalladionWarning(UserWarning):
    """A call that works as specified, but probably not as meant (a block index past the end, for one)."""


class UnsupportedPrimitive(NotImplementedError):
    """An operation that a target has no rule for.

    Attributes:
      primitive: the name of the JAX primitive.
      target: the executor that met it ("the reference interpreter", "native CPU" …).
      where: the user's file and line, or None.
      supported_by: the targets that do have a rule for it.
    """

    def __init__(self, primitive: str, target: str, where: str | None = None, supported_by: Iterable[str] = ()) -> None:
        self.primitive, self.target, self.where = primitive, target, where
        self.supported_by = tuple(supported_by)
        others = ", ".join(self.supported_by) or "none yet"
        super().__init__(
            explain(
                f"The operation `{primitive}` is not supported in a kernel on {target}.",
                where=where,
                supported_by=others,
            )
        )


class TargetNotBuilt(NotImplementedError):
    """A machine or compiler that this version of Palladion does not have yet."""


class KernelCheckError(AssertionError):
    """A `pl.debug_check` in a kernel was false, or a checked run-time index left its Ref."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that a check found in a kernel call.

    Attributes:
      kind: one of the kinds of `docs/design.md`, such as "out-of-bounds" or "revisited-block".
      level: "error" (wrong results on a target named in the message), "warning" or "note".
      message: one line.
      where: the user's source line, `file:line (function)`.
      when: the grid point(s) concerned, or None.
      hint: the rule that was broken and the usual fix.
      operand: the operand concerned ("input 0 (x_ref)"), or None.
    """

    kind: str
    level: str
    message: str
    where: str | None = None
    when: str | None = None
    hint: str | None = None
    operand: str | None = None
