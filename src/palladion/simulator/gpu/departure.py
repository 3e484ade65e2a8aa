"""What devices write to each other's memory must be there when the kernel ends: whoever gets the results reads them.

A device's kernel ends when all of its threads have ended and their own stores are complete. Nothing else waits for what
another device still writes to its memory: a thread of it must know, by a semaphore, that this has happened. (Reads of
its memory that come too late still find the array, which stays as it is.)

Source: the Mosaic GPU reference, "Semaphore" and "NVLINK transfers": wait for the store, signal, and wait for the
signal on the other device.
"""

from __future__ import annotations

from palladion.simulator.clocks import Actor, Clock
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import GENERIC, VIEWS, Device, Machine, Semaphores, Thread, location_of


class Departures:
    """What is known on each device when its threads end; nothing is kept where one device runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.wanted = machine.tracking and len(machine.devices) > 1
        self.clocks = {device.id: Clock(VIEWS, 1) for device in machine.devices}
        self.pending: dict[int, list[Operation]] = {device.id: [] for device in machine.devices}

    def note(self, agent: Agent) -> None:
        """A thread ends."""
        if not self.wanted:
            return
        thread: Thread = agent.place
        device = thread.block.device.id
        self.clocks[device].join(agent.actor.clock)
        for group in (*thread.groups, thread.open):
            self.pending[device] += [operation for pair in group for operation in pair]

    def check(self) -> None:
        """At the end of the call, when nothing is in flight any more.

        Raises:
          KernelFinding: another device wrote to a buffer in GMEM, and nothing orders that before the end there.
        """
        for device in self.machine.devices if self.wanted else ():
            clock = self.clocks[device.id]
            for operation in self.pending[device.id]:
                if operation.actor is not None:
                    clock.join(operation.actor.clock)
            for made in device.buffers.values():  # signals that nobody waits for are a finding of their own
                for counter in made.counters.flat if isinstance(made, Semaphores) else ():
                    for _, told, _ in counter.tokens:
                        if told is not None:
                            clock.join(told)
            end = self.machine.engine.registry.actor(f"the end of device {device.id}", clock)
            for made in list(device.buffers.values()):
                if isinstance(made, Buffer) and made.writes is not None:
                    self._check(device, made, end)

    def _check(self, device: Device, buffer: Buffer, end: Actor) -> None:
        conflict = buffer.written_before(end, GENERIC)
        if conflict is None:
            return
        engine, stamp = self.machine.engine, conflict[1]
        self.machine.found(
            "race",
            f"Race on {buffer.label} of device {device.id}: {engine.who(stamp)} wrote it, and nothing makes sure that "
            f"this has happened when the kernel ends on device {device.id}.",
            where=location_of(engine.place_of(stamp)),
            when=f"the end of device {device.id}",
            operand=buffer.label,
            hint="wait for the store, then signal a semaphore of that device, and wait for it there before the kernel "
            "ends",
            warn=self.machine.params.on_race == "warn",
        )
