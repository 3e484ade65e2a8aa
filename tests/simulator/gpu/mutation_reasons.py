"""Why a mutant that the simulator does not report is harmless: rules that are checked, in the order of the table below.

A mutant that none of the rules covers is a hole, in the simulator or in this table. `reason_of` gives the name of the
first rule that holds; `REASONS` says each in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from simulator.gpu import mutations
from simulator.gpu.mutations import Call, Mutant, inputs_of, is_effectful, walk

from palladion import jaxlink
from palladion.language.gpu.mma import Acc, wgmma_accumulator_load_p
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.primitives import gpu_primitive
from palladion.language.refs import RefView
from palladion.simulator.code import placeholders
from palladion.simulator.gpu.limits import equations
from palladion.simulator.gpu.table import RULES

WAITS = frozenset({
    "barrier_wait", "semaphore_wait", "wait_smem_to_gmem", "wait_gmem_to_smem", "wgmma_wait", "wait_load_tmem",
    "commit_tmem",
})  # fmt: skip
SIGNALS = frozenset({"barrier_arrive", "semaphore_signal", "semaphore_signal_multicast", "tcgen05_commit_arrive"})
ASYNC = frozenset({
    "copy_gmem_to_smem", "copy_smem_to_gmem", "wgmma", "tcgen05_mma", "async_copy_smem_to_tmem", "try_cluster_cancel",
})  # fmt: skip
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
    "fence covers more": "The fence comes later, and nothing asynchronous, no signal and no other thread is in between.",
    "fence covers the same": "The fence comes earlier, and there is no access by hand in between.",
    "finer groups": "Stores are committed one by one instead of together, so a wait that leaves n groups leaves less.",
    "group closed later": "The store is committed by the next store or commit, before any wait.",
    "end of the kernel": "Only that the data has left SMEM is waited for; that it is in GMEM the end of the kernel makes "
    "sure, and nobody in the kernel reads it.",
    "each for itself": "Every block copies all of the data to itself, and its own barrier tells it.",
    "backed up": "Another synchronisation makes the same order: without both the simulator reports what it does not "
    "report without the other one alone.",
}


class Kernel:
    """A call with what the rules ask of its kernel.

    Attributes:
      call; base: the outcome without a mutation. roots: of a Ref's variable, the operands and scopes that it stands for.
      counts: how often each synchronisation was executed, by path and index.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.base = call, call.run()
        self.roots: dict[Any, frozenset[Any]] = {}
        self._find_roots(call.jaxpr, {v: frozenset({v}) for v in call.jaxpr.invars})
        self.counts = _counts_of(call)
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
                there = {w: known.get(v, frozenset()) for v, w in zip(given, inner.invars) if not hasattr(v, "val")}
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
                jaxpr = (neutral(m) if m.how == "removed" and len(mutants) > 1 else m).apply(jaxpr)
        except (TypeError, ValueError):
            return frozenset({"refused"})
        outcome = self.call.run(jaxpr, on_race="warn", seconds=10)
        return frozenset(outcome.found)

    def alone(self, mutant: Mutant) -> frozenset[Any]:
        """What is found with this one."""
        key = mutant.path, mutant.index, mutant.how, mutant.detail
        if key not in self._alone:
            self._alone[key] = self.findings([mutant])
        return self._alone[key]

    @functools.cached_property
    def backups(self) -> list[Mutant]:
        """What may make the same order as a synchronisation."""
        found = [m for m in self.mutants if m.how == "removed" or (m.what == "Barrier" and m.how == "weaker")]
        for path, jaxpr in walk(self.call.jaxpr):
            for i, eqn in enumerate(jaxpr.eqns):
                if str(eqn.primitive) == "get" and eqn.invars[0].aval.memory_space is MemorySpace.REGS:
                    found.append(Mutant("weaker", "get", "does not wait", mutations.location(eqn), path, i, _unwaited))
        return found


# --- edits --------------------------------------------------------------------------------------------------------
tick_p = gpu_primitive("tick")
_ticks: dict[Any, int] = {}


@RULES.rule(tick_p)
def _tick(compiler: Any, eqn: Any) -> Callable[..., list[Any]]:
    key = eqn.params.get("key")

    def run(agent: Any) -> list[Any]:
        _ticks[key] = _ticks.get(key, 0) + 1
        return []

    return run


def _ticking(eqn: Any, key: Any) -> Any:
    return eqn.replace(primitive=tick_p, invars=[], outvars=[], params={"key": key}, effects=eqn.effects)


def _counts_of(call: Call) -> dict[Any, int]:
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
    return m.index >= 0 and not m.eqn.outvars and (m.path, m.index) not in k.counts


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
    return m.how == "moved earlier" and m.what in WAITS and not names_in(m.past) & _STARTS.get(m.what, set())


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


def _finer_groups(k: Kernel, m: Mutant) -> bool:
    return m.what == "copy_smem_to_gmem" and m.detail == "commit_group=True"


def _closed_later(k: Kernel, m: Mutant) -> bool:
    if m.what != "copy_smem_to_gmem" or m.detail != "commit_group=False":
        return False
    jaxpr = next(j for path, j in walk(k.call.jaxpr) if path == m.path)
    for e in jaxpr.eqns[m.index + 1 :]:
        if str(e.primitive) == "commit_group" or (str(e.primitive) == "copy_smem_to_gmem" and e.params["commit_group"]):
            return True
        if is_effectful(e) and names_in(e) & (mutations.CONTROL | {"wait_smem_to_gmem"}):
            return False
    return False


def _end_of_kernel(k: Kernel, m: Mutant) -> bool:
    if m.detail != "wait_read_only" or len(k.call.operands) > 1:
        return False
    stores = [e for e in equations(k.call.jaxpr) if str(e.primitive) == "copy_smem_to_gmem"]
    stored = frozenset().union(*(k.async_writes(e) for e in stores))
    read = [e for e in equations(k.call.jaxpr) if str(e.primitive) in ("get", "addupdate")]
    loaded = [e for e in equations(k.call.jaxpr) if str(e.primitive) in ASYNC]
    return not stored & frozenset().union(k._union(read), *(k.async_reads(e) for e in loaded))


def _each_for_itself(k: Kernel, m: Mutant) -> bool:
    return m.detail == "not collective" and m.eqn.params["leader_tracked"] is None


def _backed_up(k: Kernel, m: Mutant) -> bool:
    return backup_of(k, m) is not None


def backup_of(k: Kernel, m: Mutant) -> Mutant | None:
    """The synchronisation without which, too, something is found that is not found without it alone."""
    for other in k.backups:
        if (other.path, other.index) == (m.path, m.index) and other.index >= 0:
            continue
        if k.findings([other, m]) - k.alone(other):
            return other
    return None


_RULES: dict[str, Callable[[Kernel, Mutant], bool]] = {
    "never executed": _never,
    "waits in a row": _waits_in_a_row,
    "nothing to do with it": _nothing_to_do_with_it,
    "signals in a row": _signals_in_a_row,
    "waits earlier": _waits_earlier,
    "signals later": _signals_later,
    "fence covers more": _fence_covers_more,
    "fence covers the same": _fence_covers_the_same,
    "finer groups": _finer_groups,
    "group closed later": _closed_later,
    "end of the kernel": _end_of_kernel,
    "each for itself": _each_for_itself,
    "backed up": _backed_up,
}


def reason_of(kernel: Kernel, mutant: Mutant) -> str | None:
    """The first rule by which a mutant is harmless, or None."""
    return next((name for name, holds in _RULES.items() if holds(kernel, mutant)), None)
