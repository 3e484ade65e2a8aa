"""How often the body of a loop is written out.

A loop of a pipeline goes round its buffers: `slot = rem(i, buffers)`. Written out as many times, the slot is a constant
in each copy of the body, and with it the addresses of buffers and barriers, which between two products cost more
instructions than all the rest. So loops with products of Hopper's tensor core, whose instructions all warps issue, are
written out so. Not those that compute arrays, too: there such instructions are few among many, and registers scarce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import lax

from palladion import jaxlink
from palladion.language.gpu.mma import wgmma_p

MOST = 6  # copies of a body


def times(body: Any, length: int, asked: int) -> int:
    """How often a loop's body is written out.

    Arguments:
      body: the jaxpr of the loop's body. length: how often it runs. asked: what the user says; 1: nothing.
    """
    if asked != 1:
        return asked
    eqns = list(_equations(body))
    arrays = any(v.aval.shape for e in eqns for v in e.outvars if not isinstance(v.aval, jaxlink.AbstractRef))
    if arrays or not any(e.primitive is wgmma_p for e in eqns):
        return 1
    buffers = [_divisor(e) for e in eqns if e.primitive is lax.rem_p]
    return max((n for n in buffers if 1 < n <= min(MOST, length)), default=1)


def _divisor(eqn: Any) -> int:
    return (
        int(eqn.invars[1].val) if isinstance(eqn.invars[1], jaxlink.Literal) and eqn.invars[1].aval.shape == () else 0
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr and of what it calls; not those of loops in it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive not in (lax.scan_p, lax.while_p):
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                yield from _equations(inner)
