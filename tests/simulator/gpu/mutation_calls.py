"""The calls of kernels that a program makes, recorded, and repeated with mutated kernels.

`calls_of` records the calls; `Call.run` repeats one of them on the simulator, with the kernel as it was or with another
one, for a limited time.
"""

from __future__ import annotations

import dataclasses
import signal
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding
from palladion.simulator import report
from palladion.simulator.gpu import run as gpu_run
from palladion.simulator.gpu.machine import Machine
from simulator.gpu.mutations import Mutant


class TooLong(BaseException):
    """A mutant does not come to an end."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
      kinds: of its findings, in order. message: of the first. results: arrays. error: whether it raised something.
      found: its findings as (kind, lines, operand); of a semaphore that is left above zero also the value.
    """

    kinds: tuple[str, ...] = ()
    message: str = ""
    results: tuple[np.ndarray, ...] = ()
    error: bool = False
    found: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel that a program made. Attributes: as `run.simulate` takes them; program: its name."""

    program: str
    prepared: Any
    axes: dict[str, int]
    operands: list[list[np.ndarray]]

    @property
    def jaxpr(self) -> Any:
        """The kernel."""
        return self.prepared.params["jaxpr"]

    def mutated(self, mutant: Mutant, **how: Any) -> Outcome:
        """Run a mutant of it; what the language itself refuses is reported, too."""
        try:
            jaxpr = mutant.apply(self.jaxpr)
        except (TypeError, ValueError) as error:
            return Outcome(("refused",), str(error), error=True)
        return self.run(jaxpr, **how)

    def run(
        self,
        jaxpr: Any = None,
        *,
        schedule: str | int | None = None,
        goes_on: bool = False,
        seconds: float = 20,
    ) -> Outcome:
        """Run it, with another kernel if one is given, for at most so many seconds.

        Arguments:
          goes_on: collect what is found instead of stopping at the first error, where the run can go on.
        """
        interpret = dataclasses.replace(self.prepared.interpret, schedule=schedule)
        params = {**self.prepared.params, "interpret": interpret}
        if jaxpr is not None:
            params["jaxpr"] = jaxpr
        runs: list[Any] = []
        results: Any = ()
        message, error_kind = "", None
        keep, report.keep = report.keep, runs.append
        raises = Machine.found
        if goes_on:
            Machine.found = _note  # pyright: ignore[reportAttributeAccessIssue]
        before = signal.signal(signal.SIGVTALRM, _too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)  # again, if it could not be raised
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                prepared = gpu_run._prepare.__wrapped__(gpu_run._Key(params))
                results = _simulate(prepared, self.axes, self.operands)
        except TooLong:
            error_kind, message = "no end", f"more than {seconds} s"
        except Exception as error:
            error_kind, message = type(error).__name__, str(error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            report.keep = keep
            Machine.found = raises
        findings = [f for r in runs for f in r.findings]
        kinds = [f.kind for f in findings]
        found = [(f.kind, f.where, f.message if f.kind == "semaphore-leftover" else f.operand) for f in findings]
        if error_kind not in (None, "KernelFinding"):
            kinds.append(error_kind)
            found.append((error_kind, message.split("\n")[0], None))
        kept = tuple(np.array(x) for device in results for x in device)
        first = message or (findings[0].message if findings else "")
        return Outcome(tuple(kinds), first, kept, error_kind is not None, tuple(found))


_simulate = gpu_run.simulate
_found = Machine.found


def _note(machine: Machine, kind: str, message: str, **how: Any) -> None:
    try:
        _found(machine, kind, message, **how)
    except KernelFinding:
        if kind in ("deadlock", "collective-mismatch", "out-of-bounds"):
            raise


def _too_long(number: int, frame: Any) -> None:
    if frame is None or frame.f_code.co_name not in ("_xla_gc_callback", "__del__"):  # there it would be lost
        raise TooLong


def calls_of(program: str, run: Callable[[], Any], arch: Any, **options: Any) -> list[Call]:
    """The kernel calls that a program makes, one for each kernel."""
    found: list[Call] = []

    def record(prepared: Any, axes: Any, operands: Any) -> Any:
        arrays = [[np.array(x) for x in device] for device in operands]
        if all(c.jaxpr is not prepared.params["jaxpr"] for c in found):
            found.append(Call(program, prepared, axes, arrays))
        return _simulate(prepared, axes, operands)

    jax.clear_caches()
    gpu_run.simulate = record
    try:
        params = plgpu.InterpretGPUParams(detect_races=True, arch=arch, **options)
        with plgpu.force_gpu_interpret_mode(params):
            jax.block_until_ready(run())  # calls inside jit are made in their own time
    finally:
        gpu_run.simulate = _simulate
    return found


def same(a: Outcome, b: Outcome) -> bool:
    """Whether two runs gave the same results, bit by bit."""
    return len(a.results) == len(b.results) and all(x.tobytes() == y.tobytes() for x, y in zip(a.results, b.results))
