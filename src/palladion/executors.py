"""How an executor is found from the arguments of a call: one table in one place.

`language` describes kernels and never runs them; the executors run them and never import each other. This module
is the only link: it names, for each value of `interpret=` and each platform, the module that runs the call, and
imports it when it is first needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from palladion import config
from palladion.errors import TargetNotBuilt, kind_of, mistake, raising_failed_checks

# An executor module offers `lower(ctx, *args, **params)`, the lowering rule of `pallas_call`; one that runs Python
# on concrete arrays offers `run(*args, **params)` instead.
REFERENCE = "palladion.reference.interpret"
EAGER = "palladion.reference.eager"
NATIVE_CPU = "palladion.compiler.cpu.compile"
COMPILED_TPU = "palladion.compiler.tpu.lower"
COMPILED_TRITON = "palladion.compiler.triton.lower"
COMPILED_GPU = "palladion.compiler.gpu.lower"
SIMULATED_TPU = "palladion.simulator.tpu.run"
SIMULATED_GPU = "palladion.simulator.gpu.run"
EMULATED_GPU = "palladion.compiler.gpu.emulated"
# By the name of `interpret`'s class: the classes live in dialects that need not be imported for this.
_MACHINES = {
    "InterpretParams": SIMULATED_TPU,
    "InterpretGPUParams": SIMULATED_GPU,
    "EmulateParams": EMULATED_GPU,
    "CheckParams": "palladion.report.simulated",  # of `palladion check`: machines, or what a call gets without it
}

WAYS_OUT = (
    "Ways out:\n"
    "  - interpret=True             the plain meaning of the kernel, compiled by XLA\n"
    "  - interpret=pl.EagerParams() the kernel's Python, program by program: print, breakpoint, assert\n"
    "  - compiler_params=plcpu.CompilerParams(), with `from palladion import cpu as plcpu`: native code\n"
    "  - interpret=pltpu.InterpretParams() the simulated TPU: copies, semaphores, several cores and devices\n"
    "  - interpret=plgpu.InterpretGPUParams() the simulated GPU: TMA, barriers, tensor cores, with their rules\n"
    "  - interpret=plgpu.EmulateParams() the code compiled for a GPU, run instruction by instruction\n"
    "  - palladion.config.cpu = 'interpret' or 'native', or `palladion run --cpu interpret FILE`, for a program\n"
    "  - run it on a machine with a TPU; `palladion.compile(f, x, target='tpu:v5e')` compiles for one that is not here"
)


def normalise_interpret(interpret: Any) -> Any:
    """Check a value of `interpret=` and fill in the defaults of `palladion.config`.

    Raises:
      TypeError: it is not a value that `interpret` takes.
    """
    if interpret is None or interpret is False:
        interpret = config.get("interpret") or False
    if isinstance(interpret, bool):
        return interpret
    if is_eager(interpret) or type(interpret).__name__ in _MACHINES:
        return interpret
    raise mistake(
        TypeError,
        f"interpret cannot be {kind_of(interpret)}.",
        hint="interpret=True, pl.EagerParams(), pltpu.InterpretParams(), plgpu.InterpretGPUParams() or "
        "plgpu.EmulateParams()",
    )


def is_eager(interpret: Any) -> bool:
    """Whether the kernel's own Python runs on concrete arrays, with no tracing of its body."""
    return type(interpret).__name__ == "EagerParams"


def finds_blocks_outside(interpret: Any) -> bool:
    """Whether the executor itself refuses blocks outside their array, instead of clamping them."""
    return type(interpret).__name__ in _MACHINES


def finds_stores_to_inputs(interpret: Any) -> bool:
    """Whether the executor itself refuses stores to an input when they happen, so that code may have them to no effect.

    Collectives for GPUs that ship with JAX do: a store that never runs makes XLA put the operand into symmetric memory.
    """
    return type(interpret).__name__ in ("InterpretGPUParams", "CheckParams")


def runs_in_python(interpret: Any) -> bool:
    """Whether a call on concrete arrays runs at once, in Python, with nothing compiled."""
    return not isinstance(interpret, bool)


def for_lowering(platform: str, interpret: Any, compiler_params: Any = None, call: Any = None) -> Any:
    """The executor module whose `lower` handles a call, or the error that the user gets.

    Arguments:
      call: all parameters of its equation.

    Raises:
      ValueError: on the CPU without interpret (the tutorial's words). TargetNotBuilt: on GPUs, where nothing says which
        compiler is meant.
    """
    if interpret is True:
        return importlib.import_module(REFERENCE)
    if (machine := _MACHINES.get(type(interpret).__name__)) is not None:
        return importlib.import_module(machine)
    if platform == "cpu" and interpret is False:
        native = type(compiler_params).__module__.startswith("palladion.language.cpu.")
        wanted = "native" if native else config.get("cpu")
        if wanted != "refuse":
            return importlib.import_module({"native": NATIVE_CPU, "interpret": REFERENCE}[wanted])
    if is_eager(interpret):
        raise ValueError(
            "interpret=pl.EagerParams(...) runs the kernel's Python on concrete arrays, so it cannot stand inside "
            "jit, scan or another compiled function.\n"
            "  fix: call it outside jit, or run the program under `with jax.disable_jit():`"
        )
    if platform == "tpu" and interpret is False:
        return importlib.import_module(COMPILED_TPU)
    triton = type(compiler_params).__module__.startswith("palladion.language.triton.")
    if platform == "cuda" and interpret is False and triton:
        return importlib.import_module(COMPILED_TRITON)
    if platform == "cuda" and interpret is False and _is_for_mosaic_gpu(compiler_params, call or {}):
        return importlib.import_module(COMPILED_GPU)
    if platform == "cpu":
        raise ValueError(f"Only interpret mode is supported on CPU backend.\n{WAYS_OUT}")
    ways = "interpret=True runs the kernel there through XLA"
    if platform == "cuda":
        compilers = "compiler_params=plgpu.CompilerParams() or pltriton.CompilerParams() compiles it for this one"
        raise TargetNotBuilt(f"Nothing says which compiler this kernel is for; {compilers}, and {ways}.")
    raise TargetNotBuilt(f"Palladion has no compiler for {platform} yet; {ways}.")


_GPU_DIALECT = "palladion.language.gpu."


def _is_for_mosaic_gpu(compiler_params: Any, call: Any) -> bool:
    """Whether a call has the parameters of the Mosaic GPU compiler, a mesh of its dialect, or operations of it."""
    effects = getattr(call.get("jaxpr"), "effects", ())
    parts = (compiler_params, call.get("mesh"), *effects)
    return any(type(x).__module__.startswith(_GPU_DIALECT) for x in parts)


def run_in_python(*args: Any, **params: Any) -> Sequence[Any]:
    """Run a call on concrete arrays, where `runs_in_python`."""
    module = EAGER if is_eager(params["interpret"]) else _MACHINES[type(params["interpret"]).__name__]
    return importlib.import_module(module).run(*args, **params)


def last_report() -> Any:
    """What the last kernel call on a simulated machine left behind: findings, VMEM, timeline.

    Returns:
      a `SimulationReport`, or None before the first such call of this process. A later call on any thread replaces it.
    """
    return importlib.import_module("palladion.simulator.report").last()


def simulated_sms(params: Any) -> int:
    """How many streaming multiprocessors the GPU has that a `plgpu.InterpretGPUParams` or `EmulateParams` describes."""
    chips = importlib.import_module("palladion.simulator.gpu.chip").CHIPS
    return params.num_sms or chips[params.arch or "sm_90a"].num_sms


def load_all() -> None:
    """Import every executor, so that a message can name the targets that run an operation."""
    compilers = ["palladion.compiler.cpu.unit", COMPILED_TPU, "palladion.compiler.triton.module"]
    compilers.append("palladion.compiler.gpu.rules")
    for module in (REFERENCE, EAGER, *compilers, SIMULATED_TPU, SIMULATED_GPU):
        importlib.import_module(module)


def discharge(jaxpr: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Run a jaxpr over Refs on values: its results, and what every argument holds at the end."""
    return importlib.import_module("palladion.reference.evaluate").discharge(jaxpr, values)


def run_checked(run: Any) -> Sequence[Any]:
    """Run a compiled call whose checks are on; a failed check raises its own exception."""
    return raising_failed_checks(run)
