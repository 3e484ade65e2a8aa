"""Prints and checks: the kernel hands values to Python, which may stop it."""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering
from palladion.language import ops
from palladion.language.tpu import hints


@dataclasses.dataclass(frozen=True)
class PrintSite:
    """Print a line: the format, filled in with the values."""

    fmt: str


@dataclasses.dataclass(frozen=True)
class JaxPrintSite:
    """A `jax.debug.print`: its arguments by position and by name."""

    fmt: str
    tree: Any


@dataclasses.dataclass(frozen=True)
class CheckSite:
    """Stop when the first value is false.

    Attributes:
      message: filled in with the next `n_values` values; the rest are the program's grid point.
      where: the user's `file:line (function)`.
    """

    message: str
    n_values: int
    where: str | None


def call(ctx: Lowering, site: Any, values: list[Lazy]) -> None:
    """Emit a host call at this point of the kernel."""
    bufs = tuple(ctx.materialise(v, "shown") for v in values)
    ctx.emit(ir.HostCall(len(ctx.sites), bufs))
    ctx.sites.append(site)


def check(ctx: Lowering, ok: Lazy, message: str, where: str | None, *values: Lazy) -> None:
    """Emit a check; its message is a format of the values."""
    call(ctx, CheckSite(message, len(values), where), [ok, *values, *ctx.ids])


@RULES.rule(ops.debug_print_p)
def _debug_print(ctx: Lowering, eqn, *values: Lazy) -> list:
    call(ctx, PrintSite(eqn.params["fmt"]), list(values))
    return []


@RULES.rule(ops.debug_check_p)
def _debug_check(ctx: Lowering, eqn, ok: Lazy) -> list:
    message = eqn.params["message"].replace("{", "{{").replace("}", "}}")
    check(ctx, ok, message, eqn.params["where"])
    return []


@RULES.rule(jaxlink.jax_debug_print_p)
def _jax_debug_print(ctx: Lowering, eqn, *values: Lazy) -> list:
    if eqn.params["static_args"]:
        raise RULES.unsupported(eqn)
    call(ctx, JaxPrintSite(eqn.params["fmt"], eqn.params["in_tree"]), list(values))
    return []


# --- marks for a TPU's compiler or profile: nothing to do here ---------------------------------------------------
@RULES.rule(hints.touch_p, hints.trace_value_p)
def _mark(ctx: Lowering, eqn, *operands: Any) -> list:
    return []


@RULES.rule(hints.with_memory_space_constraint_p)
def _constraint(ctx: Lowering, eqn, x: Lazy) -> Lazy:
    return x
