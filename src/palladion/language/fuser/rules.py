"""One table: primitive -> how blocks go through it, backwards and forwards, and what it does to a block.

A `Rule` has three functions. They see an equation, a context (`passes.Pass`, `passes.Program`) and blocks:

    pull(ctx, eqn, outs)   blocks of the results (None: not used) -> blocks of the operands (None: not used as blocks)
    push(ctx, eqn, ins)    blocks of the operands (None: no block) -> blocks of the results
    run(ctx, eqn, values)  the results' blocks, from the operands' blocks

`run` rules work on values of full rank, where a squeezed dimension has one element: `ctx.full` and `ctx.fit` go
between those and what a kernel sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from palladion import locations
from palladion.errors import UnsupportedPrimitive, explain, mistake

RULES: dict[Any, Rule] = {}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How blocks go through one primitive; a direction that is None is refused."""

    pull: Callable[..., Any] | None = None
    push: Callable[..., Any] | None = None
    run: Callable[..., Any] | None = None


def rule(*primitives: Any, pull: Any = None, push: Any = None, run: Any = None) -> None:
    """Enter a rule in the table."""
    for primitive in primitives:
        RULES[primitive] = Rule(pull, push, run)


class NotFusible(UnsupportedPrimitive):
    """An operation around a kernel through which the fuser cannot pass blocks.

    Attributes: those of `UnsupportedPrimitive`.
    """

    def __init__(self, eqn: Any, reason: str, hint: str) -> None:
        self.primitive, self.target, self.supported_by = str(eqn.primitive), "the fuser", ()
        self.where = locations.location_of(eqn)
        operands = ", ".join(a.aval.str_short(short_dtypes=True) for a in eqn.invars)
        results = ", ".join(a.aval.str_short(short_dtypes=True) for a in eqn.outvars)
        message = explain(reason, where=self.where, operation=f"{self.primitive}: {operands} -> {results}", hint=hint)
        NotImplementedError.__init__(self, message)


def find(eqn: Any, direction: str) -> Callable[..., Any]:
    """The function of an equation's rule for a direction: "pull", "push" or "run".

    Raises:
      NotFusible: there is none.
    """
    function = getattr(RULES.get(eqn.primitive), direction, None)
    if function is None:
        verb = {"pull": "input blocks follow from output blocks", "push": "output blocks follow from input blocks"}
        reason = (
            f"The fuser has no rule for `{eqn.primitive}` that says how {verb.get(direction, 'a block is computed')}."
        )
        raise NotFusible(eqn, reason, "compute it outside the fused function, or wrap it in pl.fuser.custom_fusion")
    return function


def conflict(var: Any, eqn: Any, a: Any, b: Any) -> ValueError:
    """The exception for a value of which two different blocks are wanted."""
    return mistake(
        ValueError,
        f"The fusion needs two different blocks of one value, {var.aval.str_short(short_dtypes=True)}.",
        where=None if eqn is None else locations.location_of(eqn),
        one_block=a.block_shape,
        other_block=b.block_shape,
        hint="choose blocks that cover the dimension along which they differ, pass the array twice as two operands, "
        "or compute one of the two uses outside the fused function",
    )
