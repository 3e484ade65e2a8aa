"""Failed checks inside compiled kernels: `pl.debug_check`, and run-time indices that leave their Ref.

A check is a host callback that raises. XLA turns what a callback raises into an internal error with the text of the
traceback, so the first failure is also kept here, and a call made outside jit raises it as it was
(`run_checked`). Inside jit the user gets XLA's error, whose last line is ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import KernelCheckError, explain
from palladion.language import ops

_lock = threading.Lock()
_failures: list[KernelCheckError] = []


check_p = jaxlink.Primitive("host_check")
check_p.multiple_results = True
check_p.def_effectful_abstract_eval(lambda *avals, message, where: ([], {ops.check_effect}))


def report(condition: Any, message: str, where: str | None, ids: Sequence[Any], *values: Any) -> None:
    """Make the program stop with `message` (formatted with two values) if `condition` is false when it comes here."""
    operands = [jnp.asarray(condition), *(jnp.asarray(v) for v in values), *(jnp.asarray(i) for i in ids)]
    check_p.bind(*operands, message=(message, len(values)), where=where)


@check_p.def_impl
def _check_now(condition, *rest, message, where):
    _on_host(message, where, condition, *rest)
    return []


def _on_host(message: tuple[str, int], where: str | None, condition: Any, *rest: Any) -> None:
    if np.all(condition):
        return
    text, n_values = message
    values, point = rest[:n_values], tuple(int(i) for i in rest[n_values:])
    failure = KernelCheckError(
        explain(text.format(*(np.asarray(v) for v in values)), where=where, grid_point=point or None)
    )
    with _lock:
        _failures.append(failure)
    raise failure


def _lower(ctx, *args, message, where):
    jaxlink.lower_host_call(ctx, lambda *values: _on_host(message, where, *values), args)
    return []


jaxlink.mlir.register_lowering(check_p, _lower, cacheable=False)


def run_checked(run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Run a compiled call to its end; raise its first failed check as it was raised on the host."""
    with _lock:
        _failures.clear()
    try:
        outs = jax.block_until_ready(run())
        jax.effects_barrier()
        return outs
    except jax.errors.JaxRuntimeError as error:
        with _lock:
            failure = _failures[0] if _failures else None
        if failure is None:
            raise
        raise failure from error
