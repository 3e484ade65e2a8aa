"""A block of a cluster must not end while another one may still read or write its shared memory.

Shared memory is the block's as long as the block runs; then another block of the grid gets it. So the accesses of other
blocks must be ordered before the end of some thread of this one, which a ClusterBarrier before the end does. What the
block itself left running is not the matter of this module: `launch.end_of_thread` tells of it.

It is a warning: a compiler may let the blocks of a cluster meet at the end of each kernel.

Source: PTX ISA, "Shared memory", lifetime of `.shared::cluster`; the facts file, section 6.2.
"""

from __future__ import annotations

from palladion.simulator.clocks import Clock
from palladion.simulator.engine import Agent
from palladion.simulator.gpu.history import Buffer
from palladion.simulator.gpu.machine import GENERIC, VIEWS, Block, Thread, Who
from palladion.simulator.waits import location_of


def note(agent: Agent) -> None:
    """A thread ends: its block knows what it knows."""
    thread: Thread = agent.place
    machine, block = thread.machine, thread.block
    if machine.tracking and machine.cluster_size > 1:
        block.known = block.known or Clock(VIEWS, 1)
        block.known.join(agent.actor.clock)


def check(block: Block) -> None:
    """When the blocks of the cluster have ended.

    Warns of a "race": an access by another block that nothing orders before this one's end.
    """
    known, machine = block.known, block.machine
    if known is None:
        return
    for made in block.buffers.values():
        if not isinstance(made, Buffer):
            continue
        for stamp in sorted(made.stamps()):
            who = machine.engine.who(stamp)
            if known.knows(GENERIC, stamp) or (isinstance(who, Who) and who.kind != "remote store"):
                continue
            machine.found(
                "race",
                f"Race on {made.label} of {block.name}: {who} uses it, and nothing makes sure that {block.name} has "
                "not ended by then.",
                where=location_of(machine.engine.place_of(stamp)),
                when=f"the end of {block.name}",
                operand=made.label,
                hint="let the blocks meet at a ClusterBarrier (barrier_arrive, barrier_wait) after the last access to "
                "each other's memory",
                warn=True,
            )
