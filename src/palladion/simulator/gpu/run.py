"""One kernel call on a simulated GPU: prepared once, run for each call.

As on the simulated TPU: called with concrete arrays the simulator runs directly, in Python; inside jit it is one host
callback a call; inside `shard_map` the callbacks of all devices meet, and the last one to come runs them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.language.gpu.arch import arch_of
from palladion.language.gpu.params import InterpretGPUParams
from palladion.language.grid import GridMapping
from palladion.language.intern import CallKey
from palladion.simulator import blas, calls, report
from palladion.simulator.code import Code, Compiler
from palladion.simulator.engine import Deadlock
from palladion.simulator.gpu import chip, deadlock, launch, layouts, limits, rooms
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import Machine
from palladion.simulator.gpu.table import RULES, Setting
from palladion.simulator.progress import Progress
from palladion.simulator.values_table import held_dtype, held_shape

rooms.load()


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A kernel call as code.

    Attributes:
      params: of the call's equation. interpret: what the user asked for. arch: the chip's.
      code: the kernel. setting: what its rules know. aliases: {output: input}.
      written: the inputs that it, or a copy, may write. smem: bytes of SMEM that a block takes, about.
      pipeline: how blocks come to SMEM, for kernels with a grid of programs; else None.
    """

    params: dict[str, Any]
    interpret: InterpretGPUParams
    arch: str
    code: Code
    setting: Setting
    aliases: dict[int, int]
    written: frozenset[int]
    smem: int
    pipeline: Any

    @property
    def mesh(self) -> Any:
        """The blocks and threads of a `plgpu.kernel`, or None."""
        return self.params.get("mesh")

    @property
    def gm(self) -> GridMapping:
        return self.params["grid_mapping"]


_FIELDS = ("jaxpr", "grid_mapping", "input_output_aliases", "interpret", "compiler_params", "mesh")
_Key = functools.partial(CallKey, fields=_FIELDS)


@functools.lru_cache(512)
def _prepare(key: CallKey) -> Prepared:
    params = key.params
    gm: GridMapping = params["grid_mapping"]
    interpret: InterpretGPUParams = params["interpret"]
    jaxpr = params["jaxpr"]
    arch = interpret.arch or arch_of(jaxpr)
    limits.check(jaxpr, arch, params)
    layouts.check(jaxpr)
    tracked = interpret.detect_races
    setting = Setting(tracked, interpret.trace, chip.CHIPS[arch], [None, "the pipeline's copy of a block"])
    setting.last = limits.last_scope(jaxpr)
    compiler = Compiler(
        RULES,
        setting,
        skip_floats=interpret.skip_floating_point_ops,
        seconds=(lambda eqn: chip.step_seconds(eqn, setting.chip)) if interpret.trace else None,
    )
    written = jaxlink.written_vars(jaxpr)
    pipeline = None if params.get("mesh") is not None else rooms.pipeline(params, compiler, setting)
    return Prepared(
        params,
        interpret,
        arch,
        compiler.code(jaxpr),
        setting,
        {o: i - gm.num_prefetch for i, o in params["input_output_aliases"]},
        frozenset(k - gm.num_prefetch for k, v in enumerate(jaxpr.invars) if v in written),
        limits.smem_of(jaxpr) + (0 if pipeline is None else pipeline.smem),
        pipeline,
    )


# --- the two ways in ----------------------------------------------------------------------------------------------
def run(*args: Any, **params: Any) -> list[Any]:
    """Run a call on concrete arrays.

    Raises:
      KernelFinding: what the simulator found, with the user's traceback.
    """
    prepared = _prepare(_Key(params))
    return calls.in_python(functools.partial(simulate, prepared), args, params["out_avals"])


def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of `pallas_call`: one host callback, in which the devices of a shard_map meet."""
    prepared = _prepare(_Key(params))
    return calls.lower(ctx, functools.partial(simulate, prepared), args)


# --- a run --------------------------------------------------------------------------------------------------------
def simulate(prepared: Prepared, axes: Mapping[str, int], operands: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
    """Run a call on all devices.

    Arguments:
      axes: the mesh's named axes; empty outside shard_map.
      operands: of each device, in the order of logical ids.

    Returns:
      the outputs of each device.
    """
    p = prepared.interpret
    first = p.schedule if p.schedule is not None else "lazy"
    return calls.under_schedules(first, p.explore, lambda schedule: Run(prepared, axes, operands, schedule))


class Run:
    """One run of a call on all devices, under one schedule.

    Attributes: prepared; machine; gmem: of each device, its operands and results; progress.
    """

    def __init__(
        self, prepared: Prepared, axes: Mapping[str, int], operands: Sequence[Sequence[np.ndarray]], schedule: str | int
    ) -> None:
        self.prepared, self.gm = prepared, prepared.gm
        p, name = prepared.interpret, prepared.params["name"]
        tracking = prepared.setting.tracked
        self.machine = Machine(p, name, prepared.arch, axes, len(operands), prepared.mesh, schedule, tracking)
        self.machine.engine.sites = prepared.setting.sites
        self.sizes: list[list[int]] = []
        self.gmem = [self._place(device, args) for device, args in zip(self.machine.devices, operands)]
        clusters = launch.clusters_of(self)
        self.progress = Progress(name, len(clusters) * len(operands))

    def go(self) -> list[list[Any]]:
        """Run; the outputs of each device."""
        machine = self.machine
        launcher = launch.Launcher(self)
        try:
            launcher.start()
            with blas.one_thread():
                machine.engine.run()
        except Deadlock as error:
            deadlock.report(machine, error)
        finally:
            self.progress.close()
        launcher.finish()
        return [[gmem["output", k].data for k in range(self.gm.num_outputs)] for gmem in self.gmem]

    def report(self, schedules: int) -> report.SimulationReport:
        """What the run leaves behind."""
        machine = self.machine
        return report.SimulationReport(
            machine.name,
            f"simulated {machine.chip.name} ({machine.chip.arch})",
            tuple(machine.findings),
            schedules,
            seconds=machine.timeline.duration if machine.timeline is not None else None,
            smem_bytes=machine.most_smem,
            tmem_columns=machine.most_tmem or None,
            timeline=machine.timeline,
        )

    def _place(self, device: Any, args: Sequence[np.ndarray]) -> dict[Any, Any]:
        """The operands and results of a device in its GMEM."""
        gm, machine, tracked = self.gm, self.machine, self.machine.tracking
        args = list(args)
        self.sizes.append([int(x) for x in args[: gm.num_dynamic]])
        args = args[gm.num_dynamic :]
        place = device.buffers
        for k, m in enumerate(gm.prefetch_mappings):
            key = ("prefetch", k)
            place[key] = Buffer(args[k].copy(), m.origin, m.memory_space, device, key, tracked).given()
        args = args[gm.num_prefetch :]
        aliased = set(self.prepared.aliases.values())
        for k, m in enumerate(gm.inputs):
            data = args[k].copy() if k in aliased or k in self.prepared.written else calls.frozen(args[k])
            key = ("input", k)
            if k not in aliased:
                machine.read_only.add(key)
            place[key] = Buffer(data, m.origin, m.memory_space, device, key, tracked).given()
        for k, m in enumerate(gm.outputs):
            key = ("output", k)
            if k in self.prepared.aliases:
                place[key] = place["input", self.prepared.aliases[k]]
                continue
            data = machine.empty(held_shape(m.array), held_dtype(m.array))
            place[key] = Buffer(data, m.origin, m.memory_space, device, key, tracked)
        return place
