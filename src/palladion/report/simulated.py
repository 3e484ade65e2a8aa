"""How kernel calls run while a program is checked: on simulated GPUs where that is asked for, else as ever.

`CheckParams` stands in for `interpret=` in calls that give none. A call that is written for a GPU, or for no machine in
particular, runs on each GPU that `--target` names, with the program's own operands and its history of memory kept; the
program goes on with the first one's results, or ends with the first finding that is an error. What came of it is in a
`Journal`. A kernel that only a GPU runs (a mesh of `plgpu`, or its operations) runs on a simulated one in any case, or
the program could not go on; all others mean what they mean without a check.

It is an executor as `executors` describes them: `run` on concrete arrays, `lower` under jit.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from palladion import executors
from palladion.compiler.reports import Refusal
from palladion.errors import Finding, KernelFinding
from palladion.language.check import check_kernel
from palladion.language.gpu.arch import equations
from palladion.language.gpu.layouts import layout_cast_p
from palladion.language.gpu.mesh import Mesh
from palladion.language.gpu.mma import mma_p
from palladion.language.gpu.params import InterpretGPUParams
from palladion.language.gpu.primitives import GPUEffect
from palladion.language.primitive import pallas_call_p
from palladion.report.calls import Call
from palladion.report.targets import Target, target_of
from palladion.simulator import calls
from palladion.simulator import report as simulation
from palladion.simulator.gpu import run as gpu

GPUS = {"gpu:h100": "sm_90a", "gpu:b200": "sm_100a"}  # names of targets, and the architectures


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a call on one simulated GPU, all times that it was made together.

    Attributes:
      target: "gpu:h100". runs: how often it ran there. schedules: in all.
      findings: each once. seconds: simulated time of the first run, None if that did not come to its end.
      smem_bytes, tmem_columns: the most that a block held; None: not known.
      refusal: why it does not run there, or None.
    """

    target: str
    runs: int = 0
    schedules: int = 0
    findings: tuple[Finding, ...] = ()
    seconds: float | None = None
    smem_bytes: int | None = None
    tmem_columns: int | None = None
    refusal: Refusal | None = None

    def and_then(self, later: Outcome) -> Outcome:
        """This, and what came of the same call made again."""
        known = {identity(f) for f in self.findings}
        return dataclasses.replace(
            self,
            runs=self.runs + later.runs,
            schedules=self.schedules + later.schedules,
            findings=(*self.findings, *(f for f in later.findings if identity(f) not in known)),
            smem_bytes=max(self.smem_bytes or 0, later.smem_bytes or 0) or None,
            tmem_columns=max(self.tmem_columns or 0, later.tmem_columns or 0) or None,
            refusal=self.refusal or later.refusal,
        )


def identity(finding: Finding) -> tuple[Any, ...]:
    """Equal for findings that say the same, of other blocks or schedules perhaps."""
    return finding.kind, finding.level, finding.where, finding.operand


class Journal:
    """What came of calls, by the call and the target. A program may make calls from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, tuple[dict[str, Any], dict[str, Outcome]]] = {}

    def add(self, params: dict[str, Any], outcome: Outcome) -> None:
        """Note what came of a call, given by the parameters of its equation."""
        with self._lock:  # the parameters are kept, so that the number stays their own
            _, outcomes = self._entries.setdefault(id(params["jaxpr"]), (params, {}))
            before = outcomes.get(outcome.target)
            outcomes[outcome.target] = outcome if before is None else before.and_then(outcome)

    def of(self, calls: Sequence[Call]) -> list[dict[str, Outcome]]:
        """For each recorded call the outcomes by target. Under vmap, what ran is another kernel than what was recorded:
        it belongs to the last call of the same function and name."""
        found: list[dict[str, Outcome]] = [{} for _ in calls]
        for params, outcomes in self._entries.values():
            ran = Call(params, None, None)
            same = [k for k, call in enumerate(calls) if call.jaxpr is params["jaxpr"] or call.key == ran.key]
            same = same or [k for k, call in enumerate(calls) if call.origin == ran.origin]
            for target, outcome in outcomes.items() if same else ():
                before = found[same[-1]].get(target)
                found[same[-1]][target] = outcome if before is None else before.and_then(outcome)
        return found

    def errors(self) -> Iterable[Finding]:
        """The findings that ended, or would have ended, the program."""
        for _, outcomes in self._entries.values():
            for outcome in outcomes.values():
                yield from (f for f in outcome.findings if f.level == "error")


@dataclasses.dataclass(frozen=True)
class CheckParams:
    """In place of `interpret=`, for calls that say nothing.

    Attributes:
      targets: of `GPUS`. journal: where what came of the calls goes.
    """

    targets: tuple[str, ...]
    journal: Journal


# --- which machine a call runs on -------------------------------------------------------------------------------------
def why_not(call: Call) -> str | None:
    """Why a call does not run on simulated GPUs, in words; None: it does."""
    interpret = call.params["interpret"]
    if not isinstance(interpret, CheckParams):
        named = type(interpret).__name__
        return f"the call says interpret={interpret if isinstance(interpret, bool) else f'{named}(…)'}"
    target, mesh = target_of(call), call.params.get("mesh")
    if target is Target.TPU or (mesh is not None and not isinstance(mesh, Mesh)):
        return "the call is written for a TPU"
    if target is Target.TRITON:
        return "the call is written for Triton"
    if type(call.params["compiler_params"]).__module__.startswith("palladion.language.cpu."):
        return "the call is compiled for the CPU"
    return None


def _only_on_gpus(params: dict[str, Any]) -> bool:
    """Whether nothing but a GPU runs a kernel."""
    if isinstance(params.get("mesh"), Mesh):
        return True
    jaxpr = params["jaxpr"]
    pure = any(e.primitive in (layout_cast_p, mma_p) for e in equations(jaxpr))
    return pure or any(isinstance(effect, GPUEffect) for effect in jaxpr.effects)


# --- the two ways in --------------------------------------------------------------------------------------------------
def run(*args: Any, **params: Any) -> Sequence[Any]:
    """Run a call on concrete arrays.

    Raises:
      KernelFinding: an error that one of the machines found, with the user's traceback.
    """
    machines = _machines(params)
    if not machines:
        return pallas_call_p.bind(*args, **_otherwise(params))
    return calls.in_python(functools.partial(_simulate, machines, params), args, params["out_avals"])


def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of `pallas_call`: one host callback for all machines; the devices of a shard_map meet in it."""
    machines = _machines(params)
    if not machines:
        executor = executors.for_lowering(ctx.module_context.platforms[0], False, params["compiler_params"], params)
        return executor.lower(ctx, *args, **_otherwise(params))
    return calls.lower(ctx, functools.partial(_simulate, machines, params), args)


def _otherwise(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call as it would be without a check."""
    if params["mesh"] is not None:  # left to the machine until it was known which one
        check_kernel(params["jaxpr"], params["grid_mapping"], params["input_output_aliases"], params["name"])
    return {**params, "interpret": False}


ANY_GPU = ""  # the target of a call for which none was asked, or which refuse it
_Machine = tuple[str, Callable[[Any, Any], list[Any]]]  # the target's name, and (axes, operands) -> results


def _machines(params: dict[str, Any]) -> list[_Machine]:
    """The GPUs that a call runs on: those asked for that take it, else any that it needs; none: it runs elsewhere."""
    check: CheckParams = params["interpret"]
    found: list[_Machine] = []
    for target in check.targets if why_not(Call(params, None, None)) is None else ():
        wanted = InterpretGPUParams(arch=GPUS[target], detect_races=True, trace=True)  # pyright: ignore[reportArgumentType]
        try:
            found.append(_prepared(target, params, wanted))
        except KernelFinding:
            raise
        except Exception as error:
            refusal = Refusal(type(error).__name__, str(error), getattr(error, "where", None))
            check.journal.add(params, Outcome(target, refusal=refusal))
    if found or not _only_on_gpus(params):
        return found
    return [_prepared(ANY_GPU, params, InterpretGPUParams(detect_races=True))]


def _prepared(target: str, params: dict[str, Any], wanted: InterpretGPUParams) -> _Machine:
    """The call prepared for a machine.

    Raises:
      KernelFinding: what is wrong with the call is found before it runs. Others: why the machine refuses it.
    """
    try:
        prepared = gpu._prepare(gpu._Key({**params, "interpret": wanted}))
    except KernelFinding as error:
        params["interpret"].journal.add(params, Outcome(target, findings=(error.finding,)))
        raise
    return target, lambda axes, operands: gpu.simulate(prepared, axes, operands)


def _simulate(machines: Sequence[_Machine], params: dict[str, Any], axes: Any, operands: Any) -> list[Any]:
    """Run a call on all machines; what it gives on the first.

    Raises:
      what it raises on the first machine on which it fails, after all of them.
    """
    results: list[Any] | None = None
    failure: Exception | None = None
    for target, simulate in machines:
        try:
            given = simulate(axes, operands)
            results = given if results is None else results
        except Exception as error:
            failure = failure or error
            given = None
        params["interpret"].journal.add(params, _outcome(target, given is not None))
    if failure is not None:
        raise failure
    assert results is not None
    return results


def _outcome(target: str, ended: bool) -> Outcome:
    left = simulation.last()
    assert left is not None  # every run leaves one
    return Outcome(
        target,
        runs=1,
        schedules=left.schedules,
        findings=left.findings,
        seconds=left.seconds if ended else None,
        smem_bytes=left.smem_bytes,
        tmem_columns=left.tmem_columns,
    )
