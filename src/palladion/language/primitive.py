"""The `pallas_call` primitive: what one traced kernel call is to JAX.

It has a lowering rule for every platform (the executor is looked up by `executors`), a batching rule and a JVP rule
(`transforms`). It has no partial-evaluation and no transpose rule, as the reference says (tutorial 5.3).

Parameters of the equation: `jaxpr` (the kernel over Refs, or an `EagerKernel`), `grid_mapping`, `out_avals`,
`input_output_aliases`, `interpret`, `name`, `debug`, `debug_checks`, `compiler_params`, `cost_estimate`, `metadata`,
`mesh`.

A call by `pl.kernel` or `pl.core_map` has a `mesh` of cores (None for `pallas_call`). Its grid is the mesh's shape, and
program i is what core i runs: all of them at once, with scratch of their own. The operands are whole arrays, where
they lie, for all cores; `lax.axis_index` of an axis of the mesh is the core's number, and there are no program ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from palladion import executors, jaxlink
from palladion.language.semaphores import WaitEffect


@dataclasses.dataclass(frozen=True, eq=False)
class EagerKernel:
    """A kernel whose Python is run program by program instead of being traced.

    Attributes:
      function: the user's kernel.
      arguments: regroups flat Refs into the kernel's (args, kwargs).
      refs: the abstract Refs: scalar prefetch, inputs, outputs, scratch.
      name: of the call.
    """

    function: Callable
    arguments: Callable
    refs: tuple[Any, ...]
    name: str

    def __repr__(self) -> str:
        return f"EagerKernel({self.name})"


pallas_call_p = jaxlink.Primitive("pallas_call")
pallas_call_p.multiple_results = True
_compiled = jaxlink.compile_and_run(pallas_call_p)

_observers: tuple[Callable[[tuple, dict], None], ...] = ()  # replaced, never changed in place
_changing = threading.Lock()


@contextlib.contextmanager
def observing(observer: Callable[[tuple, dict], None]):
    """Call `observer(operands, params)` for every kernel call that this process makes in the block, on any thread.

    Threads that make calls at the same time call it at the same time. Operands are concrete arrays when the call is
    made outside jit, tracers inside. `palladion check` uses this.
    """
    global _observers
    with _changing:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _changing:
            last = len(_observers) - 1 - _observers[::-1].index(observer)
            _observers = _observers[:last] + _observers[last + 1 :]


def notify(operands: tuple, params: dict) -> None:
    """Tell the observers about a call."""
    for observer in _observers:
        observer(operands, params)


@pallas_call_p.def_impl
def _run(*args, **params):
    if executors.runs_in_python(params["interpret"]):
        return executors.run_in_python(*args, **params)
    waits = any(isinstance(e, WaitEffect) for e in params["jaxpr"].effects)
    if not params["debug_checks"] and not waits:
        return _compiled(*args, **params)
    return executors.run_checked(lambda: _compiled(*args, **params))


@pallas_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals, jaxpr, out_avals, **_):
    # Reads and writes of the kernel's Refs end with the call. The effect of a debug print goes on, or dead-code
    # elimination would drop a call whose results nobody uses.
    effects = set() if isinstance(jaxpr, EagerKernel) else jaxlink.effects_outside(jaxpr)
    return jaxlink.varying_as(out_avals, avals), effects


def _collective_ids(jaxpr, seen=None):
    """The collective ids that kernel calls of a program name; JAX picks others for those that name none."""
    seen, found = set() if seen is None else seen, set()
    if jaxpr not in seen:
        seen.add(jaxpr)
        for eqn in jaxpr.eqns:
            if "compiler_params" in eqn.params:
                found.add(getattr(eqn.params["compiler_params"], "collective_id", None))
            else:
                found.update(*(_collective_ids(inner, seen) for inner in jaxlink.jaxprs_in_params(eqn.params)))
    return found - {None}


jaxlink.find_collective_ids(_collective_ids)


def _lowering(platform):
    def rule(ctx, *args, **params):
        executor = executors.for_lowering(platform, params["interpret"], params["compiler_params"], params)
        return executor.lower(ctx, *args, **params)

    return rule


jaxlink.mlir.register_lowering(pallas_call_p, _lowering("this platform"))
for _platform in ("cpu", "tpu", "cuda", "rocm"):
    jaxlink.mlir.register_lowering(pallas_call_p, _lowering(_platform), platform=_platform)
