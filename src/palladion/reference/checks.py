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
import numpy as np

from palladion.errors import KernelCheckError, explain

_lock = threading.Lock()
_failures: list[KernelCheckError] = []


def report(condition: Any, message: str, where: str | None, ids: Sequence[Any], *values: Any) -> None:
    """Make the program stop with `message` (formatted with `values`) if `condition` is false when it comes here."""

    def on_host(ok, ids, *values):
        if np.all(ok):
            return
        point = tuple(int(i) for i in ids)
        failure = KernelCheckError(
            explain(message.format(*(np.asarray(v) for v in values)), where=where, grid_point=point or None)
        )
        with _lock:
            _failures.append(failure)
        raise failure

    jax.debug.callback(on_host, condition, list(ids), *values)


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
