"""Why a mutant that the simulator does not report is harmless: rules that are checked, in the order of the table below.

A mutant that none of the rules covers is a hole, in the simulator or in this table. `reason_of` gives the name of the
first rule that holds; `REASONS` says each in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from palladion.language.gpu.arch import equations
from palladion.language.gpu.views import MulticastRef, PeerMemRef
from simulator.gpu import mutations
from simulator.gpu.mutation_kernel import ASYNC, SIGNALS, WAITS, Kernel, deafened
from simulator.gpu.mutations import Mutant, walk

_STARTS = {  # what starts what a wait waits for
    "wait_smem_to_gmem": {"copy_smem_to_gmem", "commit_group"},
    "wait_gmem_to_smem": {"copy_gmem_to_smem"},
    "wgmma_wait": {"wgmma"},
    "wait_load_tmem": {"async_load_tmem"},
    "commit_tmem": {"async_store_tmem"},
}
_READS = frozenset({"get", "swap", "addupdate", "copy_gmem_to_smem"})
REASONS = {
    "never executed": "The line is not reached in this run.",
    "waits there, too": "The wait comes later, after a condition: one branch begins with the same wait, the other one "
    "does nothing.",
    "waits in a row": "Two waits of a thread change places: both must be over before it goes on, in either order.",
    "nothing to do with it": "The wait comes later, after an access by hand of memory that it is not about: of TMEM is "
    "nothing read or written by hand, and stores from SMEM neither read nor write that buffer.",
    "signals in a row": "Two signals of a thread change places: they say the same.",
    "waits earlier": "The wait comes earlier, before something that does not start what is waited for: everything that "
    "was ordered is ordered still. If threads now waited for each other, that would be a deadlock, which is reported.",
    "waits for more": "The wait takes nothing off, and is for more than before: if that much never came, that would be "
    "a deadlock, which is reported.",
    "signals later": "The signal comes later: whoever waits for it learns more.",
    "fence covers more": "The fence comes later, and nothing asynchronous and no signal is in between.",
    "fence covers the same": "The fence comes earlier, and there is no access by hand in between.",
    "nothing follows": "After the fence nothing asynchronous starts on memory that is accessed by hand.",
    "can go": "Even without it nothing is found, for another of these reasons; where it stands now it waits for more.",
    "protects other memory": "What is found where the synchronisation orders nothing is about other memory than what "
    "it was moved past.",
    "finer groups": "Stores are committed one by one instead of together: a wait that leaves n groups leaves less.",
    "group closed later": "The stores are committed later, but before any wait for them.",
    "end of the kernel": "What it leaves in flight has left SMEM; that it is in GMEM the end of the kernel makes sure, "
    "and nobody in the kernel reads it after that.",
    "each for itself": "Every block copies all of the data to itself, and its own barrier tells it.",
    "nothing in flight": "Nothing that it waits for is ever in flight when it is executed.",
    "only copies arrive": "Only copies by TMA arrive on this barrier, and they bring nothing of TMEM to be ordered.",
    "same slots": "A row of waits goes once through all slots, beginning with another one: the same waits.",
    "not needed": "What the wait teaches, or the signal tells, is not needed in this kernel: if it only counts, and "
    "orders nothing at all, nothing is found either (the last tile, after which the buffer is not used again).",
    "backed up by several": "As before, with all waits for a barrier, or for two barriers, or two waits for stores, or "
    "all fences together.",
    "backed up": "Another synchronisation makes the same order: without both the simulator reports what it does not "
    "report without the other one alone.",
}


# --- the rules ----------------------------------------------------------------------------------------------------
def names_in(eqn: Any) -> frozenset[str]:
    """The names of the primitives of an equation and all inner ones."""
    inner = [str(e.primitive) for _, _, j in mutations.inner_of(eqn) for e in equations(j)]
    return frozenset({str(eqn.primitive), *inner})


def _parts(eqn: Any) -> Iterator[Any]:
    yield eqn
    for _, _, j in mutations.inner_of(eqn):
        yield from equations(j)


def _never(k: Kernel, m: Mutant) -> bool:
    return m.index >= 0 and not m.eqn.outvars and (m.path, m.index) not in k.executed


def _waits_there_too(k: Kernel, m: Mutant) -> bool:
    if m.how != "moved later" or m.what not in WAITS or str(m.past.primitive) != "cond":
        return False
    begin = [next((e for e in b.eqns if mutations.is_effectful(e)), None) for b in m.past.params["branches"]]
    begin = [e for e in begin if e is not None]
    same = [e for e in begin if str(e.primitive) == m.what and not e.invars and not m.eqn.invars]
    ours = m.eqn.params
    stronger = [
        e
        for e in same
        if e.params.get("n", 0) <= ours.get("n", 0)
        and e.params.get("wait_read_only", False) <= ours.get("wait_read_only", False)
    ]
    return bool(begin) and len(stronger) == len(begin)


def _waits_in_a_row(k: Kernel, m: Mutant) -> bool:
    return m.how.startswith("moved") and m.what in WAITS and str(m.past.primitive) in WAITS


def _nothing_to_do_with_it(k: Kernel, m: Mutant) -> bool:
    if m.how != "moved later" or str(m.past.primitive) not in ("get", "swap", "addupdate"):
        return False
    if m.what in ("wait_load_tmem", "commit_tmem"):
        return True
    stores = [e for e in equations(k.call.jaxpr) if str(e.primitive) == "copy_smem_to_gmem"]
    written = frozenset().union(*(k.async_writes(e) for e in stores))
    if str(m.past.primitive) != "get":
        written |= frozenset().union(*(k.async_reads(e) for e in stores))
    return m.what == "wait_smem_to_gmem" and not k.of(m.past.invars[0]) & written


def _signals_in_a_row(k: Kernel, m: Mutant) -> bool:
    return m.how.startswith("moved") and m.what in SIGNALS and str(m.past.primitive) in SIGNALS


def _waits_earlier(k: Kernel, m: Mutant) -> bool:
    if m.how != "moved earlier" or m.what not in WAITS:
        return False
    jaxpr = dict(walk(k.call.jaxpr))[m.path]
    number = next(i for i, e in enumerate(jaxpr.eqns) if e is m.past)
    inside = (*m.path, number)
    started = {str(m.past.primitive)}
    for path, i in k.executed:
        if len(path) > len(m.path) and (*path[: len(m.path)], path[len(m.path)][0]) == inside:
            started.add(str(dict(walk(k.call.jaxpr))[path].eqns[i].primitive))
    return not started & _STARTS.get(m.what, set())


def _waits_for_more(k: Kernel, m: Mutant) -> bool:
    return m.what == "semaphore_wait" and m.detail == "+1" and not mutations.given_of(m.eqn).decrement


def _signals_later(k: Kernel, m: Mutant) -> bool:
    return m.how == "moved later" and m.what in SIGNALS


def _fence_covers_more(k: Kernel, m: Mutant) -> bool:
    if m.what != "commit_smem" or m.how != "moved later" or names_in(m.past) & (SIGNALS | {"run_scoped", "warp_map"}):
        return False
    started = [e for e in _parts(m.past) if str(e.primitive) in ASYNC]
    return not any(k.async_reads(e) & k.by_hand_written or k.async_writes(e) & k.by_hand for e in started)


def _fence_covers_the_same(k: Kernel, m: Mutant) -> bool:
    if m.what != "commit_smem" or m.how != "moved earlier":
        return False
    if names_in(m.past) & (WAITS | {"run_scoped", "warp_map", "query_cluster_cancel"}):
        return False
    for e in _parts(m.past):
        name = str(e.primitive)
        if name == "get" and k.of(e.invars[0]) & k.async_written:
            return False
        if name in ("swap", "addupdate") and k.of(e.invars[0]) & (k.async_written | k.async_read):
            return False
    return True


def _nothing_follows(k: Kernel, m: Mutant) -> bool:
    if m.what != "commit_smem":
        return False
    jaxprs = dict(walk(k.call.jaxpr))
    after: set[Any] = set()
    for cluster, _, (path, number) in k.log:
        if (path, number) == (m.path, m.index):
            after.add(cluster)
        eqn = jaxprs[path].eqns[number]
        if cluster in after and str(eqn.primitive) in ASYNC:
            if k.async_reads(eqn) & k.by_hand_written or k.async_writes(eqn) & k.by_hand:
                return False
    return True


def _protects_other_memory(k: Kernel, m: Mutant) -> bool:
    if m.what == "commit_smem" and m.how == "moved later" and not names_in(m.past) & (SIGNALS | {"run_scoped"}):
        removed = next(o for o in k.mutants if o.how == "removed" and (o.path, o.index) == (m.path, m.index))
        started = [e for e in _parts(m.past) if str(e.primitive) in ASYNC]
        touched = {v.aval.label for e in started for v in k.async_reads(e) | k.async_writes(e)}
        return _about_others(k.findings([removed]) - frozenset(k.base.found), touched)
    if not (m.how == "moved later" and m.what in WAITS) and not (m.how == "moved earlier" and m.what in SIGNALS):
        return False
    if names_in(m.past) & (SIGNALS | WAITS | mutations.CONTROL):
        return False
    touched = {v.aval.label for x in m.past.invars if hasattr(getattr(x, "aval", None), "label") for v in k.of(x)}
    return _about_others(k.findings([deafened(m)]) - frozenset(k.base.found), touched)


def _about_others(found: frozenset[Any], labels: set[str]) -> bool:
    protected = {operand for _, _, operand in found}
    return bool(protected) and not any(label in operand for operand in protected if operand for label in labels)


_CAN_GO = frozenset(
    {"commit_smem", "wait_smem_to_gmem", "wait_gmem_to_smem", "wgmma_wait", "wait_load_tmem", "commit_tmem"}
)


def _can_go(k: Kernel, m: Mutant) -> bool:
    if m.what not in _CAN_GO or m.how == "removed":
        return False
    removed = next(o for o in k.mutants if o.how == "removed" and (o.path, o.index) == (m.path, m.index))
    return not k.alone([removed]) - frozenset(k.base.found) and reason_of(k, removed) is not None


def _finer_groups(k: Kernel, m: Mutant) -> bool:
    return m.what == "copy_smem_to_gmem" and m.detail == "commit_group=True"


def _closed_later(k: Kernel, m: Mutant) -> bool:
    if m.what == "commit_group" and m.how.startswith("moved"):
        return not names_in(m.past) & {"copy_smem_to_gmem", "commit_group", "wait_smem_to_gmem"}
    if m.what != "copy_smem_to_gmem" or m.detail != "commit_group=False":
        return False
    jaxprs, is_open = dict(walk(k.call.jaxpr)), set()
    for _, thread, (path, number) in k.log:
        eqn = jaxprs[path].eqns[number]
        name = str(eqn.primitive)
        if (path, number) == (m.path, m.index):
            is_open.add(thread)
        elif name == "commit_group" or (name == "copy_smem_to_gmem" and eqn.params["commit_group"]):
            is_open.discard(thread)
        elif name == "wait_smem_to_gmem" and thread in is_open:
            return False
    return not is_open


def _end_of_kernel(k: Kernel, m: Mutant) -> bool:
    if m.what != "wait_smem_to_gmem" or (m.how, m.eqn.params["wait_read_only"]) == ("wrong count", True):
        return False
    if m.how == "wrong count":
        left = k.left.get((m.path, m.index), set())
        if not left or not all(has_left_smem for _, has_left_smem in left):
            return False
        stores = [e for e, _ in left]
    elif m.how == "weaker":
        stores = _since_the_last_wait(k, m)
    else:
        return False
    goals = [mutations.given_of(e).dst for e in stores]
    if any(isinstance(t, (PeerMemRef, MulticastRef)) for goal in goals for t in goal.transforms):
        return False  # to another device
    stored = frozenset().union(*(k.async_writes(e) for e in stores))
    jaxpr = k.call.jaxpr if m.path else k.call.jaxpr.replace(eqns=k.call.jaxpr.eqns[m.index :])
    read = [e for e in equations(jaxpr) if str(e.primitive) in ("get", "addupdate")]
    loaded = [e for e in equations(jaxpr) if str(e.primitive) in ASYNC]
    return not stored & frozenset().union(k.union(read), *(k.async_reads(e) for e in loaded))


def _since_the_last_wait(k: Kernel, m: Mutant) -> list[Any]:
    """The stores that a wait may wait for."""
    jaxpr = next(j for path, j in walk(k.call.jaxpr) if path == m.path)
    if not m.path:
        before = jaxpr.eqns[: m.index]
        full = [i for i, e in enumerate(before) if str(e.primitive) == "wait_smem_to_gmem" and not e.params["n"]
                and not e.params["wait_read_only"]]  # fmt: skip
        jaxpr = jaxpr.replace(eqns=before[full[-1] :] if full else before)
    else:
        jaxpr = k.call.jaxpr
    return [e for e in equations(jaxpr) if str(e.primitive) == "copy_smem_to_gmem"]


def _each_for_itself(k: Kernel, m: Mutant) -> bool:
    return m.detail == "not collective" and m.eqn.params["leader_tracked"] is None


def _backed_up(k: Kernel, m: Mutant) -> bool:
    return any(_shows(k, m, others) for others in k.backups)


def _backed_up_by_several(k: Kernel, m: Mutant) -> bool:
    return any(_shows(k, m, others) for others in k.common_backups)


def _shows(k: Kernel, m: Mutant, others: Sequence[Mutant]) -> bool:
    """Whether without these, too, something is found that is not found without them alone."""
    others = [o for o in others if m.index < 0 or (o.path, o.index) != (m.path, m.index)]
    return bool(others) and bool(k.findings([*others, m]) - k.alone(others))


def _nothing_in_flight(k: Kernel, m: Mutant) -> bool:
    return m.how != "moved earlier" and m.what in WAITS and k.executed.get((m.path, m.index)) is False


def _only_copies_arrive(k: Kernel, m: Mutant) -> bool:
    if m.detail != "orders_tensor_core=False":
        return False
    arriving = [e for e in equations(k.call.jaxpr) if str(e.primitive) in (*SIGNALS, "tcgen05_mma", "async_store_smem")]
    return not any(m.var in k.fields(e, "barrier") for e in arriving if hasattr(mutations.given_of(e), "barrier"))


def _same_slots(k: Kernel, m: Mutant) -> bool:
    if m.how != "wrong slot" or m.what != "barrier_wait":
        return False
    shape = mutations.given_of(m.eqn).barrier.transforms[-1].shape
    n, runs, last = shape[int(m.detail.split()[-1])], {}, {}
    for _, thread, key in k.log:
        here = key == (m.path, m.index)
        if here and not last.get(thread):
            runs.setdefault(thread, []).append(0)
        if here:
            runs[thread][-1] += 1
        last[thread] = here
    return bool(runs) and all(length % n == 0 for lengths in runs.values() for length in lengths)


def _not_needed(k: Kernel, m: Mutant) -> bool:
    if m.what == "cond":
        inside = [
            o
            for o in k.mutants
            if o.how == "removed" and o.path[:-1] == m.path and o.path[-1][:2] == (m.index, "branches")
        ]
        deaf = k.findings([deafened(o) for o in inside])
        return bool(inside) and not deaf - frozenset(k.base.found)
    if m.index < 0:
        path = m.path
        inner = next(j for p, j in walk(k.call.jaxpr) if p == path)
        assert any(v is m.var for v in inner.invars)
        chosen = [
            o for o in k.mutants if o.how == "removed" and o.what == "barrier_wait" and m.var in k.of(o.eqn.invars[0])
        ]
        return m.how == "weaker" and not k.findings([deafened(o) for o in chosen]) - frozenset(k.base.found)
    weaker = (m.what in WAITS and m.how in ("moved later", "wrong slot")) or (
        m.what in SIGNALS and m.how == "moved earlier"
    )
    return weaker and not k.findings([deafened(m)]) - frozenset(k.base.found)


_RULES: dict[str, Callable[[Kernel, Mutant], bool]] = {  # the cheap ones first
    "never executed": _never,
    "waits there, too": _waits_there_too,
    "waits in a row": _waits_in_a_row,
    "nothing to do with it": _nothing_to_do_with_it,
    "signals in a row": _signals_in_a_row,
    "waits earlier": _waits_earlier,
    "waits for more": _waits_for_more,
    "signals later": _signals_later,
    "fence covers more": _fence_covers_more,
    "fence covers the same": _fence_covers_the_same,
    "nothing follows": _nothing_follows,
    "finer groups": _finer_groups,
    "group closed later": _closed_later,
    "end of the kernel": _end_of_kernel,
    "each for itself": _each_for_itself,
    "nothing in flight": _nothing_in_flight,
    "only copies arrive": _only_copies_arrive,
    "same slots": _same_slots,
    "not needed": _not_needed,
    "protects other memory": _protects_other_memory,
    "backed up": _backed_up,
    "can go": _can_go,
    "backed up by several": _backed_up_by_several,
}


_FIVE = "One signal adds 5: who waits for 3 or 4 of them waits for that signal."
_TURN = "In between is the arrival that gives the other thread its turn; that thread never touches this one's q."
_ASKS = "The thread that asks knows of the read by the request before, and has a fence of its own between the two."
BY_HAND = {  # of (program, operation, mutation, detail)
    ("waits_that_do_not_decrement", "semaphore_wait", "wrong count", "-1"): _FIVE,
    (
        "programs_start_in_row_major_order",
        "semaphore_wait",
        "wrong count",
        "-1",
    ): "The semaphore makes blocks end in order and orders no data: who waits for one signal less may end earlier.",
    ("dynamic_scheduling_in_clusters", "commit_smem", "moved later", "past barrier_arrive"): _ASKS,
    ("dynamic_scheduling_in_clusters", "commit_smem", "moved earlier", "past query_cluster_cancel"): _ASKS,
    ("jax_attention", "barrier_wait", "moved later", "past cond"): _TURN,
    ("jax_backward", "barrier_wait", "moved later", "past cond"): _TURN,
    ("jax_emitter", "barrier_wait", "moved later", "past cond"): _TURN,
    (
        "jax_attention",
        "barrier_arrive",
        "removed",
        "",
    ): "The last arrivals on the consumed barriers, for which nobody waits (the kernel itself is warned of that).",
}


def reason_of(kernel: Kernel, mutant: Mutant) -> str | None:
    """The first rule by which a mutant is harmless, "by hand" for those of `BY_HAND`, or None.

    None, too, if something is found when it runs.
    """
    if kernel.alone([mutant]) - frozenset(kernel.base.found):
        return None
    if (kernel.call.program, mutant.what, mutant.how, mutant.detail) in BY_HAND:
        return "by hand"
    return next((name for name, holds in _RULES.items() if holds(kernel, mutant)), None)
