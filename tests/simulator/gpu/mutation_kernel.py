"""What the rules of mutation_reasons.py want to know of a kernel, and mutations by which they try something out.

A kernel is run once with a `tick` before everything that it does: what is executed, in what order, and with what in
flight. A synchronisation that is *deaf* keeps its count, but orders nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.mma import Acc, wgmma_accumulator_load_p
from palladion.language.gpu.primitives import gpu_primitive
from palladion.language.refs import RefView
from palladion.simulator.code import location, placeholders
from palladion.simulator.gpu.barriers import Barriers
from palladion.simulator.gpu.table import RULES
from simulator.gpu import mutations
from simulator.gpu.mutation_calls import Call
from simulator.gpu.mutations import Mutant, inputs_of, is_effectful, walk

WAITS = frozenset({
    "barrier_wait", "semaphore_wait", "wait_smem_to_gmem", "wait_gmem_to_smem", "wgmma_wait", "wait_load_tmem",
    "commit_tmem",
})  # fmt: skip
SIGNALS = frozenset({"barrier_arrive", "semaphore_signal", "semaphore_signal_multicast", "tcgen05_commit_arrive"})
ASYNC = frozenset({
    "copy_gmem_to_smem", "copy_smem_to_gmem", "wgmma", "tcgen05_mma", "async_copy_smem_to_tmem", "try_cluster_cancel",
})  # fmt: skip
MOST = 10  # pairs of barriers that are tried


class Kernel:
    """A call with what the rules ask of its kernel.

    Attributes:
      call; base: the outcome without a mutation.
      roots: of a Ref's variable, the operands and scopes that it stands for.
      log: (cluster, thread, path and index) of all of them, and of asynchronous operations, as they were executed.
      executed: of each synchronisation that is, by path and index: whether anything was ever in flight that it waits
        for.
      left: of each wait for stores, by path and index: what it would leave in flight if it left one group more, as
        (equation, whether it was known to have left SMEM).
    """

    def __init__(self, call: Call) -> None:
        self.call, self.base = call, call.run()
        self.roots: dict[Any, frozenset[Any]] = {}
        self._find_roots(call.jaxpr, {v: frozenset({v}) for v in call.jaxpr.invars})
        self.executed = _executed(call)
        self.log, self.left = list(_log), dict(_left)
        self.mutants = mutations.mutants(call.jaxpr)
        self._alone: dict[Any, frozenset[Any]] = {}
        everything = [e for _, j in walk(call.jaxpr) for e in j.eqns]
        self.by_hand_written = self.union(e for e in everything if str(e.primitive) in ("swap", "addupdate"))
        self.by_hand = self.by_hand_written | self.union(
            e for e in everything if str(e.primitive) in ("get", "query_cluster_cancel")
        )
        asynchronous = [e for e in everything if str(e.primitive) in ASYNC]
        self.async_written = frozenset().union(*(self.async_writes(e) for e in asynchronous))
        self.async_read = frozenset().union(*(self.async_reads(e) for e in asynchronous))

    def _find_roots(self, jaxpr: Any, known: dict[Any, frozenset[Any]]) -> None:
        for eqn in jaxpr.eqns:
            for name, _, inner in mutations.inner_of(eqn):
                given = inputs_of(eqn, name, inner)
                there = {w: known.get(v, frozenset()) for v, w in zip(given, inner.invars) if not hasattr(v, "val")}
                there |= {w: frozenset({w}) for w in inner.invars[len(given) :]}
                self._find_roots(inner, there)
        for var, roots in known.items():
            self.roots[var] = self.roots.get(var, frozenset()) | roots

    def union(self, eqns: Any) -> frozenset[Any]:
        return frozenset().union(*(self.of(e.invars[0]) for e in eqns))

    def of(self, var: Any) -> frozenset[Any]:
        """What a Ref's variable may stand for: memory that is not a thread's own."""
        found = () if hasattr(var, "val") else self.roots.get(var, ())
        return frozenset(v for v in found if getattr(v.aval, "memory_space", None) is not MemorySpace.REGS)

    def fields(self, eqn: Any, *names: str) -> frozenset[Any]:
        given = mutations.given_of(eqn)
        views = [getattr(given, n, None) for n in names]
        found = [v.ref.k for v in views if v is not None and hasattr(v, "ref")]
        return frozenset().union(*(self.of(eqn.invars[k]) for k in found))

    def async_reads(self, eqn: Any) -> frozenset[Any]:
        """What an asynchronous operation reads."""
        return self.fields(eqn, "src", "a", "b", "smem")

    def async_writes(self, eqn: Any) -> frozenset[Any]:
        """What an asynchronous operation writes."""
        return self.fields(eqn, "dst", "result")

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
                    found.append([Mutant("weaker", "get", "does not wait", location(eqn), path, i, _unwaited)])
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
        stores = [m for m in self.mutants if m.how == "removed" and m.what == "wait_smem_to_gmem"]
        stores = [m for m in stores if self.executed.get((m.path, m.index))]
        pairs += [[a, b] for a, b in itertools.combinations(stores, 2)][:MOST]
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
    rule = RULES.get(original.primitive)
    assert rule is not None
    run, tells = rule(compiler, original), str(original.primitive) in SIGNALS

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
        b.knowledge[thread.observer] for made in arrays for b in made.barriers.flat if thread.observer in b.knowledge
    ]
    return max([epoch for component, epoch, _ in waits if component == thread.agent.actor.component], default=0)


def deafened(mutant: Mutant) -> Mutant:
    """The same synchronisation, which orders nothing."""

    def edit(eqns: list[Any], i: int) -> list[Any]:
        return [*eqns[:i], eqns[i].replace(primitive=deaf_p, params={"eqn": eqns[i]}), *eqns[i + 1 :]]

    return Mutant("weaker", mutant.what, "deaf", mutant.where, mutant.path, mutant.index, edit)


_ticks: dict[Any, bool] = {}
_log: list[Any] = []
_left: dict[Any, set[Any]] = {}


@RULES.rule(tick_p)
def _tick(compiler: Any, eqn: Any) -> Callable[..., list[Any]]:
    key, of = eqn.params["key"], eqn.params["of"]
    name = str(of.primitive)

    def run(agent: Any) -> list[Any]:
        if key is not None:
            thread = agent.place
            busy = {"wgmma_wait": thread.wgmmas, "wait_load_tmem": thread.loads, "commit_tmem": thread.stores}
            flying = len(busy.get(name, "something")) > of.params.get("n", 0)
            if name == "wait_smem_to_gmem":
                old = thread.groups[: max(len(thread.groups) - of.params["n"], 0)]
                sites = thread.machine.engine.sites
                _left.setdefault(key, set()).update((sites[r.site], r.waited) for group in old[-1:] for r, _ in group)
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

    for record in (_ticks, _log, _left):
        record.clear()
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
