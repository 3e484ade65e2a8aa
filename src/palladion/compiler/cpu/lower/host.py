"""Prints and checks: the kernel hands values to Python, which may stop it."""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.compiler.cpu.lower.values import RULES, Lazy, Lowering
from palladion.language import ops


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
    """Stop with a message when the first value is false; the others are the grid point."""

    message: str
    where: str | None


def call(ctx: Lowering, site: Any, values: list[Lazy]) -> None:
    """Emit a host call at this point of the kernel."""
    bufs = tuple(ctx.materialise(v, "shown") for v in values)
    ctx.emit(ir.HostCall(len(ctx.sites), bufs))
    ctx.sites.append(site)


def check(ctx: Lowering, ok: Lazy, message: str, where: str | None) -> None:
    """Emit a check."""
    call(ctx, CheckSite(message, where), [ok, *ctx.ids])


@RULES.rule(ops.debug_print_p)
def _debug_print(ctx: Lowering, eqn, *values: Lazy) -> list:
    call(ctx, PrintSite(eqn.params["fmt"]), list(values))
    return []


@RULES.rule(ops.debug_check_p)
def _debug_check(ctx: Lowering, eqn, ok: Lazy) -> list:
    check(ctx, ok, eqn.params["message"], eqn.params["where"])
    return []


@RULES.rule(jaxlink.jax_debug_print_p)
def _jax_debug_print(ctx: Lowering, eqn, *values: Lazy) -> list:
    if eqn.params["static_args"]:
        raise RULES.unsupported(eqn)
    call(ctx, JaxPrintSite(eqn.params["fmt"], eqn.params["in_tree"]), list(values))
    return []
