"""`interpret=plgpu.EmulateParams(...)`: a call is compiled, and its PTX runs on the emulator.

This is the one place where the compiler meets the emulator: it hands over PTX as text, and arrays through a `Driver`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu import launch, rules_debug
from palladion.errors import KernelCheckError, PalladionWarning, explain, failed_check
from palladion.language import concrete
from palladion.language.gpu.emulate_params import EmulateParams


def run(*args: Any, **params: Any) -> list[Any]:
    """Run a call on concrete arrays.

    Raises:
      TargetNotBuilt: NVRTC is not installed. EmulationFault: the compiled code did what hardware does not allow.
      KernelCheckError: a
      `pl.debug_check` was false. Those of the compiler.
    """
    results = _emulate(params, [concrete.held(x) for x in args])
    return [concrete.returned(x, aval) for x, aval in zip(results, params["out_avals"])]


def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of `pallas_call`: one host callback."""
    if (axes := _mesh_axes(ctx)) and any(n > 1 for n in axes.values()):
        raise NotImplementedError(
            "The emulated GPU is one device; this call stands in a shard_map over several. "
            "interpret=plgpu.InterpretGPUParams() simulates several."
        )
    launch.prepare(params, params["interpret"].arch)  # what cannot be compiled is said now, not in the middle of a run

    def call(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_emulate(params, [np.asarray(x) for x in arrays]))

    return jaxlink.lower_host_call(ctx, call, args)


def _mesh_axes(ctx: Any) -> dict[str, int]:
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return dict(mesh.shape) if mesh is not None else {}


def _emulate(params: dict[str, Any], operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    from palladion.emulator.driver import EmulatedDriver, EmulationFault

    asked: EmulateParams = params["interpret"]
    program = launch.prepare(params, asked.arch)
    printed = _Printed()
    sms: dict[str, Any] = {} if asked.num_sms is None else {"sms": asked.num_sms}
    driver = EmulatedDriver(
        program.generated.arch,
        order=asked.order,
        source=program.generated.source,
        detect_uninitialized=asked.detect_uninitialized,
        output=printed,
        **sms,
    )
    try:
        results = launch.on_host(program, driver, program.ptx, operands)
    except EmulationFault as fault:
        check = printed.failed_check() if fault.kind == "trap" else None
        if check is None:
            raise
        raise check from fault
    for note in driver.findings:
        warnings.warn(explain(f"{note.kind}: {note.message}", where=str(note.place)), PalladionWarning, stacklevel=2)
    return results


class _Printed:
    """Standard output that remembers its last line, which a failed `pl.debug_check` has printed before its trap."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, text: str) -> None:
        sys.stdout.write(text)
        self.last = "\n".join((self.last + text).split("\n")[-2:])

    def failed_check(self) -> KernelCheckError | None:
        """The check that the last line tells of."""
        line = self.last.rstrip("\n").rpartition("\n")[2]
        found = rules_debug.FAILED_CHECK.fullmatch(line)
        if found is None:
            return None
        return failed_check(found["message"], f"{found['where'] or 'a kernel'}, block {found['block']}", ())
