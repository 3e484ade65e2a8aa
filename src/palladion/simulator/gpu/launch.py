"""Starting the blocks of a grid: in row-major order, as many at once as fit the SMs, the next when one has ended.

The order and the waves are those that hardware shows (the Mosaic GPU reference, "Taking advantage of the L2 cache"). A
cluster is started as a whole. Cluster launch control takes clusters that were not started yet off the list.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palladion.simulator.engine import Agent
from palladion.simulator.gpu import exits
from palladion.simulator.gpu.allocation import allocate
from palladion.simulator.gpu.barriers import Barriers
from palladion.simulator.gpu.chip import LANES
from palladion.simulator.gpu.departure import Departures
from palladion.simulator.gpu.machine import Block, Cluster, Device, Machine, Semaphores, Thread
from palladion.simulator.gpu.unions import allocate_all
from palladion.simulator.waits import location_of

THREADS_PER_SM = 2048


def clusters_of(run: Any, device: int = 0) -> list[tuple[int, ...]]:
    """The clusters of a run's grid in the order in which they start: coordinates along the grid's axes."""
    if run.prepared.mesh is None:
        return run.prepared.pipeline.blocks(run, device)
    return list(np.ndindex(*run.machine.grid_axes.values()))


class Launcher:
    """Starts the clusters of a run."""

    def __init__(self, run: Any) -> None:
        self.run, self.machine = run, run.machine
        machine: Machine = run.machine
        self.departures = Departures(machine)
        self.refs = [v.aval for v in run.prepared.params["jaxpr"].invars]
        per_sm = min(
            machine.chip.smem_bytes_per_sm // (run.prepared.smem + machine.chip.smem_reserved),
            THREADS_PER_SM // (LANES * machine.num_threads),
            machine.chip.max_blocks_per_sm,
        )
        self.room = max(machine.num_sms * max(per_sm, 1) // machine.cluster_size, 1)
        for device in machine.devices:
            device.pending = list(reversed(list(enumerate(clusters_of(run, device.id)))))

    def start(self) -> None:
        """Start as many clusters as there is room for."""
        for device in self.machine.devices:
            while device.pending and device.running < self.room:
                self._start(device)

    def _start(self, device: Device) -> None:
        machine, run = self.machine, self.run
        number, point = device.pending.pop()
        device.running += 1
        cluster = Cluster(device, number)
        for rank, coords in enumerate(np.ndindex(*machine.cluster_axes.values())):
            axes = dict(zip(machine.grid_axes, map(int, point)), **dict(zip(machine.cluster_axes, map(int, coords))))
            block = Block(machine, cluster, rank, axes)
            block.ids = () if run.prepared.mesh is not None else tuple(map(int, point))
            cluster.blocks.append(block)
        for block in cluster.blocks:
            self._allocate(block)
        cluster.live = len(cluster.blocks)
        for block in cluster.blocks:
            for index in range(machine.num_threads):
                thread = Thread(block, index, {machine.thread_name: index} if machine.thread_name else {})
                block.threads.append(thread)
                thread.agent = machine.engine.agent(thread.name, thread, self._thread)
                thread.agent.time = machine.engine.current.time if machine.engine.current is not None else 0.0
            block.live = len(block.threads)

    def _allocate(self, block: Block) -> None:
        """The scratch of a block."""
        first = len(self.refs) - self._num_scratch()
        if first == len(self.refs):
            return
        thread = Thread(block, 0, {})
        made = allocate_all(
            block.memory, self.refs[first:], lambda k, aval: allocate(thread, aval, ("scratch", k), None)
        )
        for k, (thing, _) in enumerate(made):
            block.buffers["scratch", k] = thing

    def _num_scratch(self) -> int:
        gm = self.run.gm
        return len(self.refs) - gm.num_prefetch - gm.num_inputs - gm.num_outputs

    # --- one thread ---------------------------------------------------------------------------------------------------
    def _thread(self, agent: Agent) -> None:
        thread: Thread = agent.place
        run, block = self.run, thread.block
        began = agent.time
        scratch = [block.buffers["scratch", k] for k in range(self._num_scratch())]
        if run.prepared.mesh is None:
            run.prepared.pipeline.run(run, agent, scratch)
        else:
            gm, place = run.gm, block.device.buffers
            refs = [place["prefetch", k] for k in range(gm.num_prefetch)]
            refs += [place["input", k] for k in range(gm.num_inputs)]
            refs += [place["output", k] for k in range(gm.num_outputs)]
            run.prepared.code(agent, [*refs, *scratch])
        self.machine.span(thread, None, self.machine.name, "program", began, agent.time)
        end_of_thread(agent)
        self.departures.note(agent)
        exits.note(agent)
        block.live -= 1
        if not block.live:
            self._end_of_block(block)

    def _end_of_block(self, block: Block) -> None:
        engine = self.machine.engine
        for key, made in block.buffers.items():
            if key[0] == "scratch" and isinstance(made, Barriers):
                made.check_end(engine, None, warn=True)
        for thread in block.threads:
            for one in (thread, *(warp for warps in thread.warps.values() for warp in warps)):
                if one.agent.actor is not None:
                    engine.registry.retire(one.agent.actor)
        cluster = block.cluster
        cluster.live -= 1
        self.run.progress.tick()
        if not cluster.live:
            self._check_collectives(cluster)
            for each in cluster.blocks:
                exits.check(each)
            cluster.device.running -= 1
            self.start()

    def _check_collectives(self, cluster: Cluster) -> None:
        """Every block must have issued what is collective, even if nobody waited for it."""
        for meeting in cluster.collectives.values():
            self.machine.found(
                "collective-mismatch",
                meeting.incomplete(),
                where=location_of(meeting.eqn),
                when=cluster.blocks[0].name,
                hint="every block along the collective axes must issue the same copies in the same order",
            )

    def finish(self) -> None:
        """After the last block: what is in flight completes, and semaphores should be back at zero."""
        machine = self.machine
        while machine.engine.flying:
            machine.engine.complete(machine.engine.flying[0])
        self.departures.check()
        for device in machine.devices:
            for made in device.buffers.values():
                if isinstance(made, Semaphores):
                    self._check_semaphores(made, device)

    def _check_semaphores(self, made: Semaphores, device: Device) -> None:
        for counter in made.counters.flat:
            if counter.value:
                sites, last = self.machine.engine.sites, counter.last_signal
                self.machine.found(
                    "semaphore-leftover",
                    f"The semaphore {counter.label} ends at {counter.value}, not at zero.",
                    where=location_of(sites[last]) if last else None,
                    when=f"device {device.id}" if len(self.machine.devices) > 1 else None,
                    operand=made.label,
                    hint="take off by waits what signals put on (semaphore_wait without decrement=False): the next "
                    "kernel that gets this memory may start with what is left",
                    warn=True,
                )


def end_of_thread(agent: Agent) -> None:
    """What a thread started must be over when it ends: a store that still reads SMEM is an error; loads of TMEM and
    products are warned of."""
    thread: Thread = agent.place
    machine = thread.machine
    stores = [pair for group in [*thread.groups, thread.open] for pair in group]
    unread = [read for read, _ in stores if not read.waited]
    for operation in unread[:1]:
        machine.found(
            "missing-wait",
            f"{thread.name} ends while {operation.name} still reads SMEM.",
            where=location_of(machine.engine.sites[operation.site]),
            when=thread.when(),
            hint="plgpu.wait_smem_to_gmem(0, wait_read_only=True) at the end, in the thread that started it",
            warn=machine.params.on_race == "warn",
        )
    products = [operation for issued in thread.products.values() for operation in issued]
    for operations, kind, hint in (
        (thread.wgmmas, "wgmma-in-flight", "plgpu.wgmma_wait(0), or read the accumulator"),
        (thread.loads, "tmem-in-flight", "plgpu.wait_load_tmem() after the last load"),
        (thread.stores, "tmem-in-flight", "plgpu.commit_tmem() after the last store"),
        (products, "tmem-in-flight", "plgpu.tcgen05_commit_arrive(barrier) after the last product, and wait on it"),
    ):
        for operation in operations[:1]:
            machine.found(
                kind,
                f"{thread.name} ends while {operation.name} is still running.",
                where=location_of(machine.engine.sites[operation.site]),
                when=thread.when(),
                hint=hint,
                warn=True,
            )
