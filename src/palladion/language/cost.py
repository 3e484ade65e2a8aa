"""CostEstimate, and `estimate_cost`: what a JAX function costs, counted from its jaxpr.

Counting rules: one flop for each element of an elementwise operation or reduction, 2·m·n·k for a matrix product;
one transcendental for each element of exp, log, sin, … ; bytes are those of the arguments and results of the whole
function (what must cross the memory bus once), plus what kernel calls inside it declare. Loops multiply by their
trip count where it is known and count once where it is not; a branch costs as much as its dearest side.
Source: the public documentation of `pl.CostEstimate`; tutorial 6.3 (arithmetic intensity).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language.primitive import EagerKernel, pallas_call_p
from palladion.rules import needs_machine


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """What one call of a kernel costs; a hint for the compiler's scheduler.

    Arguments:
      flops: floating-point operations.
      transcendentals: exp, log, tanh and the like, in elements.
      bytes_accessed: bytes read from and written to main memory.
      remote_bytes_transferred: bytes sent to other devices.

    Raises:
      ValueError: a number is negative or not an integer.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
    remote_bytes_transferred: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                count = operator.index(value)
            except TypeError:
                headline = f"{field.name} of pl.CostEstimate must be an integer, not {kind_of(value)}."
                raise mistake(ValueError, headline, hint="round it: int(value)") from None
            if count < 0:
                headline = f"{field.name} of pl.CostEstimate must not be negative, but it is {count}."
                raise mistake(ValueError, headline, hint="counts are of one call of the kernel, all programs together")
            object.__setattr__(self, field.name, count)

    def to_json(self) -> bytes:
        """The estimate as XLA's custom calls take it."""
        text = ", ".join(f'"{f.name}": {getattr(self, f.name)}' for f in dataclasses.fields(self))
        return f"{{{text}}}".encode("ascii")


def estimate_cost(fun: Callable, *args: Any, **kwargs: Any) -> CostEstimate:
    """Count what `fun(*args, **kwargs)` costs, without running it.

    Arguments:
      fun: a JAX function.
      *args, **kwargs: arrays, or `jax.ShapeDtypeStruct`s in their place; anything else is passed as it is.

    Returns:
      a CostEstimate by the rules of this module.
    """
    if not callable(fun):
        hint = "pl.estimate_cost(fun, *args): the function, then its arguments"
        raise mistake(TypeError, f"pl.estimate_cost takes a function, not {kind_of(fun)}.", hint=hint)
    flat, tree = jax.tree.flatten((args, kwargs))
    arrays = {n: x for n, x in enumerate(flat) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def flat_fun(arrays):
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(n, x) for n, x in enumerate(flat)])
        return fun(*args, **kwargs)

    jaxpr = jax.make_jaxpr(flat_fun)(arrays)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    work = _count(jaxpr)
    moved = sum(_bytes(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars))
    return CostEstimate(work.flops, work.transcendentals, moved + work.bytes_accessed, work.remote_bytes_transferred)


_NOTHING = CostEstimate(0, 0, 0)


def _plus(a: CostEstimate, b: CostEstimate, times: int = 1) -> CostEstimate:
    return CostEstimate(
        a.flops + b.flops * times,
        a.transcendentals + b.transcendentals * times,
        a.bytes_accessed + b.bytes_accessed * times,
        a.remote_bytes_transferred + b.remote_bytes_transferred * times,
    )


def _bytes(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _elements(eqn: Any) -> int:
    shapes = [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]
    return max((math.prod(s) for s in shapes), default=0)


_TRANSCENDENTAL = {
    getattr(lax, f"{name}_p")
    for name in (
        "exp exp2 expm1 log log1p sin cos tan tanh sinh cosh asin acos atan atan2 asinh acosh atanh logistic pow erf "
        "erfc erf_inv rsqrt sqrt cbrt lgamma digamma"
    ).split()
}
_FREE = {
    getattr(lax, f"{name}_p")
    for name in (
        "broadcast_in_dim reshape transpose squeeze concatenate pad slice dynamic_slice dynamic_update_slice rev iota "
        "gather convert_element_type bitcast_convert_type copy"
    ).split()
} | {jaxlink.get_p, jaxlink.swap_p}


def _dot(eqn: Any) -> CostEstimate:
    (contract, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[d] for d in contract)
    return CostEstimate(2 * depth * math.prod(eqn.outvars[0].aval.shape), 0, 0)


def _conv(eqn: Any) -> CostEstimate:
    kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    per_output = math.prod(kernel) // max(kernel[spec[0]], 1)
    return CostEstimate(2 * per_output * math.prod(eqn.outvars[0].aval.shape), 0, 0)


def flops_of(eqn: Any) -> int:
    """The floating-point operations of a matrix product or convolution."""
    return _RULES[eqn.primitive](eqn).flops


def _kernel(eqn: Any) -> CostEstimate:
    if eqn.params["cost_estimate"] is not None:
        return eqn.params["cost_estimate"]
    programs = eqn.params["grid_mapping"].num_programs or 1
    body = eqn.params["jaxpr"]
    return _NOTHING if isinstance(body, EagerKernel) else _plus(_NOTHING, _count(body), programs)


def _branches(eqn: Any) -> CostEstimate:
    return max((_count(b) for b in eqn.params["branches"]), key=lambda c: (c.flops, c.transcendentals))


_RULES: dict[Any, Callable[[Any], CostEstimate]] = {
    lax.dot_general_p: _dot,
    lax.conv_general_dilated_p: _conv,
    lax.cond_p: _branches,
    lax.scan_p: lambda eqn: _plus(_NOTHING, _count(eqn.params["jaxpr"]), eqn.params["length"]),
    lax.while_p: lambda eqn: _plus(_count(eqn.params["cond_jaxpr"]), _count(eqn.params["body_jaxpr"])),
    pallas_call_p: _kernel,
}


def _count(jaxpr: Any) -> CostEstimate:
    total = _NOTHING
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = list(jaxlink.jaxprs_in_params(eqn.params))
        if (rule := _RULES.get(eqn.primitive)) is not None:
            total = _plus(total, rule(eqn))
        elif needs_machine(eqn.primitive):
            continue  # copies and semaphores compute nothing
        elif inner:
            for part in inner:
                total = _plus(total, _count(part))
        elif eqn.primitive in _TRANSCENDENTAL:
            total = _plus(total, CostEstimate(0, _elements(eqn), 0))
        elif eqn.primitive not in _FREE:
            total = _plus(total, CostEstimate(_elements(eqn), 0, 0))
    return total
