"""Why a mutant that the simulator does not report is harmless: rules that are checked, in the order of the table below.

A mutant that none of the rules covers is a hole, in the simulator or in this table. `reason_of` gives the name of the
first rule that holds; `REASONS` says each in words.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.mma import Acc, wgmma_accumulator_load_p
from palladion.language.gpu.primitives import gpu_primitive
from palladion.language.gpu.views import MulticastRef, PeerMemRef
from palladion.language.refs import RefView
from palladion.simulator.code import location, placeholders
from palladion.simulator.gpu.barriers import Barriers
from palladion.simulator.gpu.limits import equations
from palladion.simulator.gpu.table import RULES
from simulator.gpu import mutations
from simulator.gpu.mutations import Call, Mutant, inputs_of, is_effectful, walk

WAITS = frozenset({
    "barrier_wait", "semaphore_wait", "wait_smem_to_gmem", "wait_gmem_to_smem", "wgmma_wait", "wait_load_tmem",
    "commit_tmem",
})  # fmt: skip
SIGNALS = frozenset(
    {"barrier_arrive", "semaphore_signal", "semaphore_signal_multicast", "tcgen05_commit_arrive"}
)
ASYNC = frozenset({
    "copy_gmem_to_smem", "copy_smem_to_gmem", "wgmma", "tcgen05_mma", "async_copy_smem_to_tmem", "try_cluster_cancel",
})  # fmt: skip
MOST = 10  # pairs of barriers that are tried
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
    "waits in a row": "Two waits of a thread change places: both must be over before it goes on, in either order.",
    "nothing to do with it": "The wait comes later, after an access by hand of memory that it is not about: of TMEM is "
    "nothing read or written by hand, and stores from SMEM neither read nor write that buffer.",
    "signals in a row": "Two signals of a thread change places: they say the same.",
    "waits earlier": "The wait comes earlier, before something that does not start what is waited for: everything that "
    "was ordered is ordered still. (That others now wait for each other would be a deadlock, which is reported.)",
    "signals later": "The signal comes later: whoever waits for it learns more.",
    "fence covers more": "The fence comes later, and nothing asynchronous and no signal is in between.",
    "fence covers the same": "The fence comes earlier, and there is no access by hand in between.",
    "nothing follows": "After the fence nothing asynchronous is started on memory that is read or written by hand.",
    "can go": "Even without it nothing is found, for another of these reasons; where it stands now it waits for more.",
    "protects other memory": "What is found where the synchronisation orders nothing is about other memory than what it "
    "was moved past.",
    "finer groups": "Stores are committed one by one instead of together: a wait that leaves n groups leaves less.",
    "group closed later": "The store is committed by the next store or commit, before any wait.",
    "end of the kernel": "The wait is only for the data to leave SMEM; that it is in GMEM the end of the kernel makes sure, "
    "and nobody in the kernel reads it after that.",
    "each for itself": "Every block copies all of the data to itself, and its own barrier tells it.",
    "nothing in flight": "Nothing that it waits for is ever in flight when it is executed.",
    "only copies arrive": "On this barrier only copies by TMA arrive, which bring nothing of TMEM that must be ordered.",
    "same slots": "A row of waits goes once through all slots, beginning with another one: the same waits.",
    "not needed": "What the wait teaches, or the signal tells, is not needed in this kernel: if it only counts, and "
    "orders nothing at all, nothing is found either (the last tile, after which the buffer is not used again).",
    "backed up by several": "As before, with all waits for a barrier, or for two barriers, or all fences together.",
    "backed up": "Another synchronisation makes the same order: without both the simulator reports what it does not "
    "report without the other one alone.",
}


class Kernel:
    """A call with what the rules ask of its kernel.

    Attributes:
      call; base: the outcome without a mutation.
      roots: of a Ref's variable, the operands and scopes that it stands for.
      log: (cluster, thread, path and index) of all of them, and of asynchronous operations, as they were executed.
      executed: of each synchronisation that is, by path and index: whether anything was ever in flight that it waits
        for.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.base = call, call.run()
        self.roots: dict[Any, frozenset[Any]] = {}
        self._find_roots(call.jaxpr, {v: frozenset({v}) for v in call.jaxpr.invars})
        self.executed = _executed(call)
        self.log = list(_log)
        self.mutants = mutations.mutants(call.jaxpr)
        self._alone: dict[Any, frozenset[Any]] = {}
        everything = [e for _, j in walk(call.jaxpr) for e in j.eqns]
        self.by_hand_written = self._union(e for e in everything if str(e.primitive) in ("swap", "addupdate"))
        self.by_hand = self.by_hand_written | self._union(
            e for e in everything if str(e.primitive) in ("get", "query_cluster_cancel")
        )
        asynchronous = [e for e in everything if str(e.primitive) in ASYNC]
        self.async_written = frozenset().union(*(self.async_writes(e) for e in asynchronous))
        self.async_read = frozenset().union(*(self.async_reads(e) for e in asynchronous))

    def _find_roots(self, jaxpr: Any, known: dict[Any, frozenset[Any]]) -> None:
        for eqn in jaxpr.eqns:
            for name, _, inner in mutations.inner_of(eqn):
                given = inputs_of(eqn, name, inner)
                there = {
                    w: known.get(v, frozenset()) for v, w in zip(given, inner.invars) if not hasattr(v, "val")
                }
                there |= {w: frozenset({w}) for w in inner.invars[len(given) :]}
                self._find_roots(inner, there)
        for var, roots in known.items():
            self.roots[var] = self.roots.get(var, frozenset()) | roots

    def _union(self, eqns: Any) -> frozenset[Any]:
        return frozenset().union(*(self.of(e.invars[0]) for e in eqns))

    def of(self, var: Any) -> frozenset[Any]:
        """What a Ref's variable may stand for: memory that is not a thread's own."""
        found = () if hasattr(var, "val") else self.roots.get(var, ())
        return frozenset(v for v in found if getattr(v.aval, "memory_space", None) is not MemorySpace.REGS)

    def _fields(self, eqn: Any, *names: str) -> frozenset[Any]:
        given = mutations.given_of(eqn)
        views = [getattr(given, n, None) for n in names]
        return frozenset().union(*(self.of(eqn.invars[v.ref.k]) for v in views if hasattr(v, "ref")))

    def async_reads(self, eqn: Any) -> frozenset[Any]:
        """What an asynchronous operation reads."""
        return self._fields(eqn, "src", "a", "b", "smem")

    def async_writes(self, eqn: Any) -> frozenset[Any]:
        """What an asynchronous operation writes."""
        return self._fields(eqn, "dst", "result")

    # --- other mutants, together with one ---------------------------------------------------------------------------
    def findings(self, mutants: Sequence[Mutant]) -> frozenset[Any]:
        """What is found with all of these at once, the run going on after races."""
        jaxpr = self.call.jaxpr
        try:
            for m in sorted(mutants, key=lambda m: m.how != "removed"):
                jaxpr = (neutral(m) if m.how == "removed" else m).apply(jaxpr)
        except (TypeError, ValueError):
            return frozenset({"refused"})
        return frozenset(self.call.run(jaxpr, goes_on=True, seconds=2).found)

    def alone(self, mutants: Sequence[Mutant]) -> frozenset[Any]:
        """What is found with these, remembered."""
        key = tuple((m.path, m.index, m.how, m.detail) for m in mutants)
        if key not in self._alone:
            self._alone[key] = self.findings(mutants)
        return self._alone[key]

    @functools.cached_property
    def backups(self) -> list[list[Mutant]]:
        """What may make the same order as a synchronisation: another one."""
        found = [[m] for m in self.mutants if m.how == "removed"]
        for path, jaxpr in walk(self.call.jaxpr):
            for i, eqn in enumerate(jaxpr.eqns):
                if str(eqn.primitive) == "get" and eqn.invars[0].aval.memory_space is MemorySpace.REGS:
                    found.append(
                        [Mutant("weaker", "get", "does not wait", location(eqn), path, i, _unwaited)]
                    )
        return found

    @functools.cached_property
    def common_backups(self) -> list[list[Mutant]]:
        """Several together: all waits for a barrier, for two of them, for all; all fences."""
        waits: dict[Any, list[Mutant]] = {}
        for m in self.mutants:
            if m.how == "removed" and m.what in ("barrier_wait", "semaphore_wait"):
                waits.setdefault(self.of(m.eqn.invars[0]), []).append(m)
        groups = list(waits.values())
        pairs = [[*a, *b] for a, b in itertools.combinations(groups, 2)][:MOST]
        fences = [m for m in self.mutants if m.how == "removed" and m.what == "commit_smem"]
        return [g for g in [*groups, fences, *pairs, [m for g in groups for m in g]] if len(g) > 1]


# --- edits --------------------------------------------------------------------------------------------------------
tick_p = gpu_primitive("tick")
deaf_p = gpu_primitive("deaf")


@RULES.rule(deaf_p)
def _deaf(compiler: Any, eqn: Any) -> Callable[..., list[Any]]:
    """A synchronisation of which little but the count remains: a wait teaches nothing, a signal tells nothing of what
    its thread did since it last waited."""
    original = eqn.params["eqn"]
    run, tells = RULES.get(original.primitive)(compiler, original), str(original.primitive) in SIGNALS

    def without(agent: Any, *operands: Any) -> Any:
        actor = agent.actor
        if actor is None:
            return run(agent, *operands)
        before = actor.clock.known.copy()
        if tells:  # all but its own accesses since it last waited
            actor.clock.known[:, actor.component] = _last_wait(agent.place)
        results = run(agent, *operands)
        known = actor.clock.known
        known[:] = 0
        known[:, : before.shape[1]] = before
        known[actor.home, actor.component] = actor.epoch
        return results

    return without


def _last_wait(thread: Any) -> int:
    arrays = [made for made in thread.block.buffers.values() if isinstance(made, Barriers)]
    waits = [
        b.knowledge[thread.observer]
        for made in arrays
        for b in made.barriers.flat
        if thread.observer in b.knowledge
    ]
    return max(
        [epoch for component, epoch, _ in waits if component == thread.agent.actor.component], default=0
    )


def deafened(mutant: Mutant) -> Mutant:
    """The same synchronisation, which orders nothing."""

    def edit(eqns: list[Any], i: int) -> list[Any]:
        return [*eqns[:i], eqns[i].replace(primitive=deaf_p, params={"eqn": eqns[i]}), *eqns[i + 1 :]]

    return Mutant("weaker", mutant.what, "deaf", mutant.where, mutant.path, mutant.index, edit)


_ticks: dict[Any, bool] = {}
_log: list[Any] = []


@RULES.rule(tick_p)
def _tick(compiler: Any, eqn: Any) -> Callable[..., list[Any]]:
    key, of = eqn.params["key"], eqn.params["of"]
    name = str(of.primitive)

    def run(agent: Any) -> list[Any]:
        if key is not None:
            thread = agent.place
            busy = {"wgmma_wait": thread.wgmmas, "wait_load_tmem": thread.loads, "commit_tmem": thread.stores}
            flying = bool(busy.get(name, True))
            if name == "wait_smem_to_gmem":
                old = thread.groups[: max(len(thread.groups) - of.params["n"], 0)]
                flying = any(not reads.waited for group in old for reads, _ in group)
                flying = flying or (any(old) and not of.params["wait_read_only"])
            _log.append((id(thread.block.cluster), id(thread), key))
            _ticks[key] = _ticks.get(key, False) or flying
        return []

    return run


def _ticking(eqn: Any, key: Any) -> Any:
    params = {"key": key, "of": eqn}
    return eqn.replace(primitive=tick_p, invars=[], outvars=[], params=params, effects=eqn.effects)


def _executed(call: Call) -> dict[Any, bool]:
    def counted(jaxpr: Any, path: Any) -> Any:
        eqns = []
        for number, eqn in enumerate(jaxpr.eqns):
            params = dict(eqn.params)
            for name, k, inner in mutations.inner_of(eqn):
                new = counted(inner, (*path, (number, name, k)))
                params[name] = new if k is None else mutations.with_item(params[name], k, new)
            if is_effectful(eqn) and not eqn.outvars:
                eqns.append(_ticking(eqn, (path, number)))
            eqns.append(eqn.replace(params=params))
        return jaxpr.replace(eqns=eqns)

    _ticks.clear()
    _log.clear()
    call.run(counted(call.jaxpr, ()))
    return dict(_ticks)


def neutral(mutant: Mutant) -> Mutant:
    """A removal that leaves the other equations where they are."""

    def edit(eqns: list[Any], i: int) -> list[Any]:
        return [*eqns[:i], _ticking(eqns[i], None), *eqns[i + 1 :]]

    return Mutant(mutant.how, mutant.what, mutant.detail, mutant.where, mutant.path, mutant.index, edit)


def _unwaited(eqns: list[Any], i: int) -> list[Any]:
    """An accumulator read by brackets does not wait for the products on it any more."""
    refs = placeholders(eqns[i])
    transforms = tuple(jax.tree.unflatten(eqns[i].params["tree"], refs[1:]))
    flat, tree = jaxlink.flatten_views(Acc(RefView(refs[0], transforms)))
    load = eqns[i].replace(
        primitive=wgmma_accumulator_load_p,
        invars=[eqns[i].invars[leaf.k] for leaf in flat],
        params={"tree": tree, "wait_n": None},
    )
    return [*eqns[:i], load, *eqns[i + 1 :]]


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


def _signals_later(k: Kernel, m: Mutant) -> bool:
    return m.how == "moved later" and m.what in SIGNALS


def _fence_covers_more(k: Kernel, m: Mutant) -> bool:
    if (
        m.what != "commit_smem"
        or m.how != "moved later"
        or names_in(m.past) & (SIGNALS | {"run_scoped", "warp_map"})
    ):
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
    if (
        m.what == "commit_smem"
        and m.how == "moved later"
        and not names_in(m.past) & (SIGNALS | {"run_scoped"})
    ):
        removed = next(o for o in k.mutants if o.how == "removed" and (o.path, o.index) == (m.path, m.index))
        started = [e for e in _parts(m.past) if str(e.primitive) in ASYNC]
        touched = {v.aval.label for e in started for v in k.async_reads(e) | k.async_writes(e)}
        return _about_others(k.findings([removed]) - frozenset(k.base.found), touched)
    if not (m.how == "moved later" and m.what in WAITS) and not (
        m.how == "moved earlier" and m.what in SIGNALS
    ):
        return False
    if names_in(m.past) & (SIGNALS | WAITS | mutations.CONTROL):
        return False
    touched = {
        v.aval.label for x in m.past.invars if hasattr(getattr(x, "aval", None), "label") for v in k.of(x)
    }
    return _about_others(k.findings([deafened(m)]) - frozenset(k.base.found), touched)


def _about_others(found: frozenset[Any], labels: set[str]) -> bool:
    protected = {operand for _, _, operand in found}
    return bool(protected) and not any(
        label in operand for operand in protected if operand for label in labels
    )


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
    if m.detail != "wait_read_only":
        return False
    stores = _since_the_last_wait(k, m)
    goals = [mutations.given_of(e).dst for e in stores]
    if any(isinstance(t, (PeerMemRef, MulticastRef)) for goal in goals for t in goal.transforms):
        return False  # to another device
    stored = frozenset().union(*(k.async_writes(e) for e in stores))
    jaxpr = k.call.jaxpr if m.path else k.call.jaxpr.replace(eqns=k.call.jaxpr.eqns[m.index :])
    read = [e for e in equations(jaxpr) if str(e.primitive) in ("get", "addupdate")]
    loaded = [e for e in equations(jaxpr) if str(e.primitive) in ASYNC]
    return not stored & frozenset().union(k._union(read), *(k.async_reads(e) for e in loaded))


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
    arriving = [
        e
        for e in equations(k.call.jaxpr)
        if str(e.primitive) in (*SIGNALS, "tcgen05_mma", "async_store_smem")
    ]
    return not any(
        m.var in k._fields(e, "barrier") for e in arriving if hasattr(mutations.given_of(e), "barrier")
    )


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
            o
            for o in k.mutants
            if o.how == "removed" and o.what == "barrier_wait" and m.var in k.of(o.eqn.invars[0])
        ]
        return m.how == "weaker" and not k.findings([deafened(o) for o in chosen]) - frozenset(k.base.found)
    weaker = (m.what in WAITS and m.how in ("moved later", "wrong slot")) or (
        m.what in SIGNALS and m.how == "moved earlier"
    )
    return weaker and not k.findings([deafened(m)]) - frozenset(k.base.found)


_RULES: dict[str, Callable[[Kernel, Mutant], bool]] = {  # the cheap ones first
    "never executed": _never,
    "waits in a row": _waits_in_a_row,
    "nothing to do with it": _nothing_to_do_with_it,
    "signals in a row": _signals_in_a_row,
    "waits earlier": _waits_earlier,
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


_FIVE = "One signal adds 5: who waits for 3, 4 or 5 of them waits for that signal."
_TURN = (
    "In between is the arrival that gives the other thread its turn; that thread never touches this one's q."
)
BY_HAND = {  # of (program, operation, mutation, detail)
    ("waits_that_do_not_decrement", "semaphore_wait", "wrong count", "+1"): _FIVE,
    ("waits_that_do_not_decrement", "semaphore_wait", "wrong count", "-1"): _FIVE,
    (
        "programs_start_in_row_major_order",
        "semaphore_wait",
        "wrong count",
        "-1",
    ): "The semaphore makes blocks end in order and orders no data: who waits for one signal less may end earlier.",
    ("jax_attention", "barrier_wait", "moved later", "past cond"): _TURN,
    ("jax_emitter", "barrier_wait", "moved later", "past cond"): _TURN,
    (
        "jax_attention",
        "barrier_arrive",
        "removed",
        "",
    ): "The last arrivals on the consumed barriers, for which nobody waits (the kernel itself is warned of that).",
}


def reason_of(kernel: Kernel, mutant: Mutant) -> str | None:
    """The first rule by which a mutant is harmless, "by hand" for those of `BY_HAND`, or None."""
    if (kernel.call.program, mutant.what, mutant.how, mutant.detail) in BY_HAND:
        return "by hand"
    return next((name for name, holds in _RULES.items() if holds(kernel, mutant)), None)
