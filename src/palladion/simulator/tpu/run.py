"""One kernel call on the simulated TPU: prepared once, run for each call.

Called with concrete arrays the simulator runs directly, in Python. Inside jit it is one host callback a call, which
gets NumPy arrays; inside `shard_map` the callbacks of all devices meet, and the last one to come runs the simulation
for all of them (spikes/tracing.md, 5).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.errors import count_of, mistake
from palladion.language.grid import GridMapping
from palladion.language.intern import CallKey
from palladion.language.tpu.params import InterpretParams
from palladion.simulator import calls, memory, report
from palladion.simulator.blocks import InPlace, Plan
from palladion.simulator.code import Code, Compiler
from palladion.simulator.engine import Deadlock
from palladion.simulator.memory import Buffer
from palladion.simulator.progress import Progress
from palladion.simulator.tpu import chip, deadlock, dma, extras, masked, rules  # noqa: F401 - they register their rules
from palladion.simulator.tpu.machine import HBM_SPACES, Core, Machine
from palladion.simulator.tpu.windows import Window
from palladion.simulator.values_table import held_dtype, held_shape

SPLIT = ("parallel", "core_parallel")  # grid axes whose programs are divided among cores


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A kernel call as code.

    Attributes:
      params: of the call's equation. interpret: what the user asked for.
      code: the kernel. prefetch (after vmap), inputs, outputs: its operands' windows.
      sites: the lines that stamps name.
      aliases: {output: input}. semantics: of the grid's axes. machine_only: whether the kernel copies by itself.
      written: the inputs that it, or a copy, may write.
    """

    params: dict[str, Any]
    interpret: InterpretParams
    code: Code
    prefetch: tuple[Plan, ...]
    inputs: tuple[Plan, ...]
    outputs: tuple[Plan, ...]
    sites: list[Any]
    aliases: dict[int, int]
    semantics: tuple[str, ...]
    machine_only: bool
    written: frozenset[int]

    @property
    def mesh(self) -> Any:
        """The cores of a `pl.kernel`, or None."""
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
    interpret: InterpretParams = params["interpret"]
    if interpret.buffer_bounds == "padded":
        raise NotImplementedError(
            "The simulated TPU checks accesses against the shapes of Refs: buffer_bounds='padded' is not there yet."
        )
    given = getattr(params["compiler_params"], "dimension_semantics", None)
    axes = len(gm.kernel_grid)
    if given is not None and len(given) != axes and params.get("mesh") is None:
        raise mistake(
            ValueError,
            f"dimension_semantics has {count_of(len(given), 'entry', 'entries')}, but the grid of {params['name']} has "
            f"{count_of(axes, 'axis', 'axes')}.",
            hint='one entry for each axis: ("parallel", "arbitrary")',
        )
    sites: list[Any] = [None, "the pipeline's copy of a block"]

    def site_of(eqn: Any) -> int:
        sites.append(eqn)
        return len(sites) - 1

    info = chip.chip(interpret.chip)
    compiler = Compiler(
        rules.RULES,
        (tracks(interpret), site_of),
        skip_floats=interpret.skip_floating_point_ops,
        seconds=(lambda eqn: chip.step_seconds(eqn, info)) if interpret.trace else None,
    )
    aliased = {o for _, o in params["input_output_aliases"]}
    written = jaxlink.written_vars(params["jaxpr"])
    semantics = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    return Prepared(
        params,
        interpret,
        compiler.code(params["jaxpr"]),
        tuple(Plan(m, k, False, compiler) for k, m in enumerate(gm.prefetch_mappings if gm.vmapped_dims else ())),
        tuple(Plan(m, k, False, compiler) for k, m in enumerate(gm.inputs)),
        tuple(Plan(m, k, True, compiler, k in aliased) for k, m in enumerate(gm.outputs)),
        sites,
        {o: i - gm.num_prefetch for i, o in params["input_output_aliases"]},
        (*["arbitrary"] * len(gm.vmapped_dims), *[getattr(s, "value", s) for s in semantics]),
        dma.uses_machine(params["jaxpr"]),
        frozenset(k - gm.num_prefetch for k, v in enumerate(params["jaxpr"].invars) if v in written),
    )


def tracks(interpret: InterpretParams) -> bool:
    """Whether the history of memory is kept."""
    return interpret.detect_races or interpret.uninitialized_reads != "allow"


# --- the two ways in -----------------------------------------------------------------------------------------------
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


# --- a run -------------------------------------------------------------------------------------------------------
def simulate(prepared: Prepared, axes: Mapping[str, int], operands: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
    """Run a call on all devices.

    Arguments:
      axes: the mesh's named axes; empty outside shard_map.
      operands: of each device, in the order of logical ids.

    Returns:
      the outputs of each device.
    """
    p = prepared.interpret
    first = p.schedule if p.schedule is not None else "eager" if p.dma_execution_mode == "eager" else "lazy"
    return calls.under_schedules(first, p.explore, lambda schedule: _Run(prepared, axes, operands, schedule))


class _Run:
    """One run of a call on all devices, under one schedule."""

    def __init__(
        self, prepared: Prepared, axes: Mapping[str, int], operands: Sequence[Sequence[np.ndarray]], schedule: str | int
    ) -> None:
        self.prepared, self.gm = prepared, prepared.gm
        p = prepared.interpret
        name = prepared.params["name"]
        mesh = {} if prepared.mesh is None else dict(prepared.mesh.shape)
        cores = math.prod(mesh.values()) if mesh else p.num_cores_or_threads
        # One core that runs by itself, its blocks moved by the pipeline, has nobody to race with.
        unwritten = p.uninitialized_reads != "allow"
        track_vmem = unwritten or (p.detect_races and prepared.machine_only)
        tracking = track_vmem or (p.detect_races and cores * len(operands) > 1)
        self.machine = Machine(p, name, axes, len(operands), cores, schedule, tracking, track_vmem)
        self.machine.core_axes, self.machine.vmapped = mesh, len(self.gm.vmapped_dims)
        for core in self.machine.cores if mesh else ():
            place = np.unravel_index(core.index, tuple(mesh.values()))
            core.axes = dict(zip(mesh, map(int, place)))
        self.machine.engine.sites = prepared.sites
        programs = self.gm.num_programs
        self.progress = Progress(name, None if programs is None else programs * len(operands))
        self.machine.collective_id = getattr(prepared.params["compiler_params"], "collective_id", None)
        self.machine.semaphore_checks = not getattr(
            prepared.params["compiler_params"], "disable_semaphore_checks", False
        )
        self.hbm = [self._place(device, args) for device, args in zip(self.machine.devices, operands)]

    def go(self) -> list[list[Any]]:
        machine = self.machine
        for core in machine.cores:
            who = f"{core.name} ({machine.name})" if core.name != "the core" else f"the kernel {machine.name}"
            core.agent = machine.engine.agent(who, core, self._core)
        try:
            machine.engine.run()
        except Deadlock as error:
            deadlock.report(machine, error)
        finally:
            self.progress.close()
        dma.finish(machine)
        for k in filter(self._filled_later, range(self.gm.num_outputs)):
            self._fill_rest(k)
        return [[hbm[f"output {k}"].data for k in range(self.gm.num_outputs)] for hbm in self.hbm]

    def report(self, schedules: int) -> report.SimulationReport:
        """What the run leaves behind."""
        machine = self.machine
        return report.SimulationReport(
            machine.name,
            "simulated TPU",
            tuple(machine.findings),
            schedules,
            seconds=machine.timeline.duration if machine.timeline is not None else None,
            vmem_bytes=max((c.most_vmem for c in machine.cores), default=0),
            timeline=machine.timeline,
        )

    def _place(self, device: Any, args: Sequence[np.ndarray]) -> dict[str, Any]:
        """The operands and results of a device in its HBM."""
        gm, machine = self.gm, self.machine
        tracked = machine.tracking
        args = list(args)
        found: dict[str, Any] = {"sizes": [int(x) for x in args[: gm.num_dynamic]]}
        args = args[gm.num_dynamic :]
        for k, m in enumerate(gm.prefetch_mappings):
            table = Buffer(args[k].copy(), m.origin, m.memory_space, device, ("prefetch", k), tracked)
            found[f"prefetch {k}"] = table.given()
        args = args[gm.num_prefetch :]
        aliased = {i: o for o, i in self.prepared.aliases.items()}
        for k, m in enumerate(gm.inputs):
            changes = k in aliased or k in self.prepared.written
            data = args[k].copy() if changes else calls.frozen(args[k])
            buffer = Buffer(data, m.origin, m.memory_space, device, ("input", k), tracked)
            found[f"input {k}"] = buffer.given()
        for k, m in enumerate(gm.outputs):
            if k in self.prepared.aliases:
                buffer = found[f"input {self.prepared.aliases[k]}"]
            else:
                data = memory.aligned(held_shape(m.array), held_dtype(m.array))
                if not self._filled_later(k):
                    data[...] = machine.fill(data.dtype)
                buffer = Buffer(data, m.origin, m.memory_space, device, ("output", k), tracked)
            found[f"output {k}"] = buffer
            device.buffers["output", k] = buffer
        for k in range(gm.num_inputs):
            device.buffers["input", k] = found[f"input {k}"]
        return found

    def _filled_later(self, k: int) -> bool:
        """Whether an output is filled at the end, where no program wrote: nobody can look at it before."""
        plan = self.prepared.outputs[k]
        whole = plan.mapping.memory_space in HBM_SPACES or self.prepared.mesh is not None
        return not (whole or self.prepared.machine_only or k in self.prepared.aliases or not plan.side_by_side)

    def _fill_rest(self, k: int) -> None:
        plan = self.prepared.outputs[k]
        for device, hbm in zip(self.machine.devices, self.hbm):
            seen: set[Any] = set()
            for core in self.machine.cores:
                if core.device is device:
                    seen |= {self._clamped(plan, flat) for flat in core.visited.get(k, ())}
            rest = [b for b in plan.blocks() if b not in seen]
            data = hbm[f"output {k}"].data
            for block in rest:
                data[plan.at(block)[0]] = self.machine.fill(data.dtype)

    def _clamped(self, plan: Plan, flat: Any) -> tuple[int, ...]:
        return tuple(min(max(i, low), high) for i, (low, high) in zip(flat, plan.mapping.extents))

    # --- one core ----------------------------------------------------------------------------------------------------
    def _core(self, agent: Any) -> None:
        core: Core = agent.place
        gm, prepared, machine = self.gm, self.prepared, self.machine
        hbm = self.hbm[core.device.id]
        sizes = iter(hbm["sizes"])
        grid = [next(sizes) if n is None else n for n in gm.grid]
        core.sizes = tuple(gm.kernel_ids(grid))
        prefetch = [hbm[f"prefetch {k}"] for k in range(gm.num_prefetch)]
        in_place: list[InPlace] = []
        for k, plan in enumerate(prepared.prefetch):
            if not plan.mapping.covers_array:
                in_place.append(InPlace(plan, prefetch[k], ("window", "prefetch", k), machine.vmapped))
                prefetch[k] = in_place[-1].view
        refs: list[Any] = [*prefetch]
        windows = []
        for kind, plans in (("input", prepared.inputs), ("output", prepared.outputs)):
            for k, plan in enumerate(plans):
                whole = hbm[f"{kind} {k}"]
                mapping = plan.mapping
                if prepared.mesh is not None or (mapping.memory_space in HBM_SPACES and mapping.covers_array):
                    refs.append(whole)
                    continue
                if mapping.memory_space in HBM_SPACES and plan.divides:
                    in_place.append(InPlace(plan, whole, ("window", kind, k), machine.vmapped))
                    refs.append(in_place[-1].view)
                    continue
                unseen = not (machine.track_vmem or whole.data.flags.writeable or prepared.machine_only)
                direct = kind == "input" and unseen
                window = Window(plan, core, whole, ("window", kind, k), direct)
                core.buffers["window", kind, k] = window.view
                windows.append(window)
                refs.append(window.view)
        jaxpr = prepared.params["jaxpr"]
        for k, var in enumerate(jaxpr.invars[len(refs) :]):
            key = ("scratch", k)
            core.hold(var.aval, 1, var.aval.label)
            core.buffers[key] = machine.allocate(var.aval, var.aval.label, core, key)
            refs.append(core.buffers[key])
        recorder, token = prepared.interpret.grid_point_recorder, np.int32(0)
        vmapped = bool(gm.vmapped_dims)
        for point in self._points(core, grid):
            core.ids = tuple(gm.kernel_ids(point)) if vmapped else point
            for one in in_place:
                one.enter(agent, point, prefetch)
            for window in windows:
                window.enter(agent, point, prefetch)
            if recorder is not None:
                token = recorder(token, tuple(map(np.int32, core.ids)), np.int32(core.index))
            core.before, began = agent.time, agent.time
            prepared.code(agent, refs)
            machine.span(core, f"core {core.index}", f"program {point}", "program", began, agent.time)
            self.progress.tick()
        for window in windows:
            if window.plan.is_output:
                window.leave(agent)
                core.visited[window.plan.number] = window.seen
        for made in core.buffers.values():
            if made.key[0] == "scratch":
                machine.keep_watch(made, core)

    def _points(self, core: Core, grid: Sequence[int]) -> Any:
        """The grid points of a core, in order."""
        ranges: list[Any] = [range(n) for n in grid]
        semantics = self.prepared.semantics
        split = [a for a, s in enumerate(semantics[: len(grid)]) if s in SPLIT]
        if split and self.prepared.interpret.random_seed is not None:
            rng = np.random.default_rng(self.prepared.interpret.random_seed % 2**64)
            for a in split:
                ranges[a] = [int(i) for i in rng.permutation(grid[a])]
        cores = self.machine.num_cores
        if self.prepared.mesh is not None:
            return [tuple(core.axes.values())]
        if cores > 1:
            if not split:
                return itertools.product(*ranges) if core.index == 0 else ()
            axis = split[0]
            each = -(-grid[axis] // cores)
            ranges[axis] = ranges[axis][core.index * each : (core.index + 1) * each]
        return itertools.product(*ranges)
