"""Control of launches and of registers: cluster launch control, dependent launches, setmaxnreg.

Cluster launch control takes a cluster that has not started from the grid's queue and gives its place to the asker.
The 16-byte answer is opaque to programs; here: x, y, z of the cluster's first CTA, and a word that is 1 for a
success and 2 for a refusal, so that a query of bytes nobody answered into is noticed. Facts file, sections 6.6, 6.7, 7.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palladion.emulator import engine
from palladion.emulator.mbarrier import Told
from palladion.emulator.registry import Wait, operation

GRANTED, REFUSED = 1, 2

# ---------------------------------------------------------------------------------------- cluster launch control


@operation("clusterlaunchcontrol.try_cancel")
def try_cancel(group, instr, response, mbarrier) -> None:
    """`clusterlaunchcontrol.try_cancel.async{.shared::cta}….b128 [resp], [mb];`"""
    what = "clusterlaunchcontrol.try_cancel"
    for lane in group.active_indices().tolist():
        cta, offset = engine.shared_span(group, int(group.array(response)[lane]), 16, 16, lane, what, own=True)
        if cta.slot("refused", list):
            group.fault(
                "launch-control",
                f"{what} after this CTA has seen an earlier one refused: no cluster is left, and asking again is "
                "undefined; leave the loop when is_canceled is false",
                lane=lane,
            )
        at = group.locate_shared(int(group.array(mbarrier)[lane]))[1]
        targets = group.cluster.ctas if instr.has("multicast::cluster::all") else [cta]
        for one in targets:
            if not one.live.any():
                group.fault("race", f"{what}: CTA {one.rank} of the cluster has exited", lane=lane)
        signals = [engine.signal_at(group, one, at, lane) for one in targets]
        machine, shape = group.machine, group.cluster.shape

        def fetch(machine=machine, shape=shape):
            return answer(machine, shape)

        places = [(one, np.arange(offset, offset + 16)) for one in targets]
        engine.load(group, lane, what, fetch, places, signals, 16)


def answer(machine, shape: tuple[int, int, int]) -> np.ndarray:
    """Take a cluster off the queue of those not launched; its 16 bytes, or those of a refusal."""
    if not machine.pending:
        return np.array([0, 0, 0, REFUSED], np.uint32).view(np.uint8)
    index = machine.pending.popleft()
    clusters = [-(-n // s) for n, s in zip(machine.launch.grid, shape)]
    place = (index % clusters[0], index // clusters[0] % clusters[1], index // clusters[0] // clusters[1])
    return np.array([p * s for p, s in zip(place, shape)] + [GRANTED], np.uint32).view(np.uint8)


def _answers(group, response) -> np.ndarray:
    """The answers that lanes hold, as (n, 4) words; checked."""
    words = np.ascontiguousarray(response).view(np.uint32).reshape(group.n, 4)
    wrong = np.flatnonzero(group.active & ~np.isin(words[:, 3], (GRANTED, REFUSED)))
    if len(wrong):
        group.fault(
            "launch-control",
            "clusterlaunchcontrol.query_cancel of 16 bytes that are no answer of try_cancel; wait on its mbarrier "
            "before they are loaded",
            lane=int(wrong[0]),
        )
    return words


@operation("clusterlaunchcontrol.query_cancel.is_canceled", out=1)
def is_canceled(group, instr, response):
    """`clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, resp;`"""
    granted = _answers(group, response)[:, 3] == GRANTED
    if (~granted & group.active).any():
        group.cta.slot("refused", list).append(True)
    return granted


def _first(group, instr, response):
    words = _answers(group, response)
    refused = np.flatnonzero(group.active & (words[:, 3] == REFUSED))
    if len(refused):
        group.fault(
            "launch-control",
            "clusterlaunchcontrol.query_cancel.get_first_ctaid of a refusal; ask is_canceled first",
            lane=int(refused[0]),
        )
    for axis, name in enumerate(("x", "y", "z")):
        if instr.has(f"get_first_ctaid::{name}"):
            return words[:, axis].copy()
    return [words[:, 0].copy(), words[:, 1].copy(), words[:, 2].copy(), np.zeros(group.n, np.uint32)]


for _name in ("get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"):
    operation(f"clusterlaunchcontrol.query_cancel.{_name}", out=1)(_first)


# ------------------------------------------------------------------------------------------------ dependent launches


@operation("griddepcontrol.launch_dependents")
def launch_dependents(group, instr) -> None:
    """`griddepcontrol.launch_dependents;`: a permission. The emulated device runs grids one after the other, so a
    dependent grid starts when this one has ended, as it also may on hardware."""


@operation("griddepcontrol.wait")
def dependency_wait(group, instr) -> None:
    """`griddepcontrol.wait;`: earlier grids have ended before this one started."""


# ------------------------------------------------------------------------------------------------ registers


@dataclass
class RegisterPool:
    """The registers of a CTA. `free`: given back and not taken; `changes`: how often that changed; `counts`: a
    thread, by warpgroup."""

    launched: int
    free: int = 0
    changes: int = 0
    counts: dict[int, int] = field(default_factory=dict)

    def count(self, warpgroup: int) -> int:
        """Registers a thread of a warpgroup has now."""
        return self.counts.get(warpgroup, self.launched)


def registers_at_launch(directives: dict, threads: int) -> int | None:
    """Registers a thread that ptxas gives a kernel whose entry has these directives; None if it cannot know,
    and would ignore setmaxnreg (facts file 0.5)."""
    if "maxnreg" in directives:
        return int(directives["maxnreg"][0])
    bound = directives.get("maxntid") or directives.get("reqntid")
    if not bound or ("minnctapersm" not in directives and "reqntid" not in directives):
        return None
    ctas = int(directives.get("minnctapersm", (1,))[0])
    limit = int(np.prod([int(b) for b in bound]))
    return min(255, 65536 // (ctas * -(-limit // 128) * 128) // 8 * 8)


def pool(group) -> RegisterPool | None:
    """The register pool of a group's CTA; None if its kernel has no known count of registers."""

    def make():
        launched = registers_at_launch(group.machine.entry.directives, len(group.cta.live))
        return RegisterPool(launched) if launched else None

    return group.cta.slot("registers", make)


@operation("setmaxnreg", parks=True, collective="warpgroup")
def setmaxnreg(group, instr, count) -> None:
    """`setmaxnreg.{inc|dec}.sync.aligned.u32 N;`: a warpgroup gives registers to the CTA's pool, or takes some."""
    wanted = int(count)
    if wanted % 8 or not 24 <= wanted <= 256:
        group.fault("illegal-shape", f"setmaxnreg of {wanted}; it must be a multiple of 8 from 24 to 256")
    registers = pool(group)
    if registers is None:
        group.machine.note(
            "register-pool",
            "setmaxnreg has no effect: the kernel has neither .maxnreg nor .maxntid with .minnctapersm, so the "
            "assembler does not know its count of registers",
            group,
        )
        return
    rising = instr.has("inc")
    groups = {w: np.repeat(group.warps // 4 == w, 32) & group.active for w in set((group.warps // 4).tolist())}
    free, ready, short = registers.free, np.zeros(group.n, bool), {}
    for warpgroup, lanes in groups.items():
        now = registers.count(warpgroup)
        if lanes.any() and ((wanted < now) if rising else (wanted > now)):
            group.fault(
                "register-pool",
                f"setmaxnreg.{'inc' if rising else 'dec'} to {wanted} registers, but warpgroup {warpgroup} has {now}",
                lane=int(np.flatnonzero(lanes)[0]),
            )
        need = (wanted - now) * 128
        if need <= free:
            free -= need
            ready |= lanes
        else:
            short[warpgroup] = need
    if short:
        least, changes = min(short.values()), registers.changes

        def tell():
            wanting = [f"{n} registers for warpgroup {w} (to {wanted} a thread)" for w, n in short.items()]
            return f"{', '.join(wanting)}; {registers.free} are free in the CTA's pool"

        reason: Any = Told(tell)
        raise Wait(
            # What is free now is for the lanes that are ready, which run this again alone.
            lambda: registers.changes != changes and registers.free >= least,
            reason,
            ready=ready if ready.any() else None,
        )
    for warpgroup, lanes in groups.items():
        if lanes.any():
            registers.counts[warpgroup] = wanted
    registers.free = free
    registers.changes += 1
