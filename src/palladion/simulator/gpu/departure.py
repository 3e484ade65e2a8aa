"""What other devices do with a device's memory must be over when the kernel ends there.

What they write to it must have come, since whoever gets the results reads them; what they read of it must have been
read, since the memory may be freed, or written by what runs next. A device's kernel ends when all of its threads have
ended and their own stores are complete. Nothing else waits for other devices: a thread must know, by a semaphore, that
they are done. What a signal says that nobody waits for, nobody knows.

A semaphore of a kernel belongs to its whole grid. Blocks that wait without taking anything off may each have a share of
the signals in mind, as if each had a semaphore of its own: at the end the amounts that they waited for count as one.

Source: the Mosaic GPU reference, "Semaphore" (what a thread did before its signal, reads and writes of remote memory
among it, is complete when the signal is seen) and "NVLINK transfers".
"""

from __future__ import annotations

from palladion.simulator.clocks import Actor, Clock, stamp
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import GENERIC, VIEWS, Device, Machine, Semaphores, Thread
from palladion.simulator.waits import location_of


def note_foreign(thread: Thread, buffer: Buffer, actor: Actor, site: int) -> None:
    """Note a read for `thread`, if it is of another device's memory."""
    place = buffer.place
    if isinstance(place, Device) and place is not thread.block.device:
        place.reads[actor.component] = stamp(actor.component, actor.epoch, site), buffer


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
          KernelFinding: another device used a buffer in GMEM, and nothing orders that before the end there.
        """
        for device in self.machine.devices if self.wanted else ():
            clock = self.clocks[device.id]
            for operation in self.pending[device.id]:
                if operation.actor is not None:
                    clock.join(operation.actor.clock)
            end = self.machine.engine.registry.actor(f"the end of device {device.id}", clock)
            for made in device.buffers.values():
                for counter, looks in made.looks.items() if isinstance(made, Semaphores) else ():
                    counter.look(min(sum(looks.values()), counter.value), end)
            for made in list(device.buffers.values()):
                if isinstance(made, Buffer) and made.writes is not None:
                    if conflict := made.written_before(end, GENERIC):
                        self._found(device, made, conflict[1], "wrote it", "wait for the store, then signal")
            for read, buffer in device.reads.values():
                if not clock.knows(GENERIC, read):
                    self._found(device, buffer, read, "reads it", "after the read (and a wait for it) signal")

    def _found(self, device: Device, buffer: Buffer, stamp: int, does: str, then: str) -> None:
        engine = self.machine.engine
        self.machine.found(
            "race",
            f"Race on {buffer.label} of device {device.id}: {engine.who(stamp)} {does}, and nothing makes sure that "
            f"this has happened when the kernel ends on device {device.id}.",
            where=location_of(engine.place_of(stamp)),
            when=f"the end of device {device.id}",
            operand=buffer.label,
            hint=f"{then} a semaphore of that device, and wait for it there before the kernel ends",
            warn=self.machine.params.on_race == "warn",
        )
