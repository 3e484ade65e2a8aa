"""Mutants of kernels of the Mosaic GPU dialect: one synchronisation removed, moved by one, or given a wrong count.

A mutant is made of the traced kernel (the jaxpr of its `pallas_call`), not of its source: whatever the user wrote, and
whatever a pipeline helper made of it, is an equation there.

Not mutated, since it only waits for more: a wait for stores or products that leaves fewer of them in flight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.language.gpu.partition import CopyPartition
from palladion.language.gpu.refs import BarrierDType
from palladion.simulator.code import location, placeholders
from palladion.simulator.gpu.views import End

SYNCHRONISATION = frozenset({
    "barrier_arrive", "barrier_wait", "commit_smem", "wait_smem_to_gmem", "wait_gmem_to_smem", "commit_group",
    "wgmma_wait", "wait_load_tmem", "commit_tmem", "tcgen05_commit_arrive", "semaphore_signal",
    "semaphore_signal_multicast", "semaphore_wait",
})  # fmt: skip
CONTROL = frozenset({"cond", "scan", "while", "run_scoped", "warp_map", "jit", "pjit"})
_PREDICATED = frozenset({"barrier_arrive", "copy_gmem_to_smem", "tcgen05_commit_arrive"})
_SLOTS = frozenset({"barrier_arrive", "barrier_wait", "copy_gmem_to_smem", "tcgen05_commit_arrive", "tcgen05_mma"})

Edit = Callable[[list[Any], int], list[Any]]  # equations and the number of one of them to new equations
Path = tuple[Any, ...]  # (number of an equation, parameter, position in it or None)* down to an inner jaxpr


@dataclasses.dataclass(frozen=True)
class Mutant:
    """What is done to a kernel.

    Attributes:
      how: "removed", "moved later", "moved earlier", "wrong count", "wrong slot", "negated", "weaker".
      what: the primitive, or "Barrier" / "ClusterBarrier" for their types. detail: what exactly, in a few words.
      where: the user's line. path, index: of the equation; index -1: of the jaxpr's own operands.
      edit: makes the new equations. past: of a moved one, the name of what it was moved past.
      var, aval: of a type, the variable, and its new type.
    """

    how: str
    what: str
    detail: str
    where: str | None
    path: Path
    index: int
    edit: Edit | None = None
    past: Any = None
    eqn: Any = None
    var: Any = None
    aval: Any = None

    def __str__(self) -> str:
        return f"{self.what} {self.how} ({self.detail}) at {self.where}"

    def apply(self, jaxpr: Any) -> Any:
        """The mutated kernel."""
        if (edit := self.edit) is not None:
            return _rewritten(jaxpr, self.path, lambda j: j.replace(eqns=edit(list(j.eqns), self.index)))
        return _rewritten(jaxpr, self.path, lambda j: _retyped(j, {self.var: self.aval}))


# --- jaxprs -------------------------------------------------------------------------------------------------------
def inner_of(eqn: Any) -> Iterator[tuple[str, int | None, Any]]:
    """The inner jaxprs of an equation: the parameter, the position in it or None, the jaxpr."""
    for name, value in eqn.params.items():
        if hasattr(value, "eqns"):
            yield name, None, value
        elif isinstance(value, (tuple, list)):
            yield from ((name, k, v) for k, v in enumerate(value) if hasattr(v, "eqns"))


def walk(jaxpr: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A jaxpr and all inner ones, with the way to each."""
    yield path, jaxpr
    for number, eqn in enumerate(jaxpr.eqns):
        for name, k, inner in inner_of(eqn):
            yield from walk(inner, (*path, (number, name, k)))


def _rewritten(jaxpr: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A jaxpr with `change` applied to the inner one at the end of a path."""
    if not path:
        return change(jaxpr)
    (number, name, k), *rest = path
    eqns = list(jaxpr.eqns)
    eqn = eqns[number]
    value = eqn.params[name]
    if k is None:
        value = _rewritten(value, tuple(rest), change)
    else:
        value = with_item(value, k, _rewritten(value[k], tuple(rest), change))
    eqns[number] = eqn.replace(params={**eqn.params, name: value})
    return jaxpr.replace(eqns=eqns)


def inputs_of(eqn: Any, name: str, inner: Any) -> list[Any]:
    """What an inner jaxpr's first operands stand for: the equation's operands, one by one."""
    if str(eqn.primitive) == "cond":
        return eqn.invars[1:]
    if str(eqn.primitive) == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = eqn.invars[:first] if name == "cond_jaxpr" else eqn.invars[first : first + second]
        return [*consts, *eqn.invars[first + second :]]
    return eqn.invars[: len(inner.invars)]


def _retyped(jaxpr: Any, changes: dict[Any, Any]) -> Any:
    """A jaxpr in which some operands have another type, {variable: type}; each equation must accept it.

    Raises:
      what the language raises of a barrier that does not do.
    """
    new = {var: type(var)(aval) for var, aval in changes.items()}
    eqns = []
    for eqn in jaxpr.eqns:
        if any(v in new for v in eqn.invars if not hasattr(v, "val")):
            params = dict(eqn.params)
            for name, k, inner in inner_of(eqn):
                given = inputs_of(eqn, name, inner)
                there = {w: changes[v] for v, w in zip(given, inner.invars) if not hasattr(v, "val") and v in new}
                changed = _retyped(inner, there)
                params[name] = changed if k is None else with_item(params[name], k, changed)
            invars = [v if hasattr(v, "val") else new.get(v, v) for v in eqn.invars]
            effects = type(eqn.effects)(_renamed(e, new) for e in eqn.effects)
            eqn = eqn.replace(invars=invars, params=params, effects=effects)
            if str(eqn.primitive) in ("tcgen05_mma", "tcgen05_commit_arrive"):
                _check_orders(invars[given_of(eqn).barrier.ref.k].aval)
        eqns.append(eqn)
    return jaxpr.replace(invars=[new.get(v, v) for v in jaxpr.invars], eqns=eqns)


def _check_orders(barrier: Any) -> None:
    """As `plgpu.tcgen05_mma` and `plgpu.tcgen05_commit_arrive` themselves do when a kernel is traced."""
    if not barrier.dtype.orders_tensor_core:
        raise TypeError("missing-fence: the barrier does not order tensor core operations")


def with_item(values: Any, k: int, new: Any) -> Any:
    return type(values)(new if i == k else v for i, v in enumerate(values))


def _renamed(effect: Any, new: dict[Any, Any]) -> Any:
    var = getattr(effect, "input", None)
    return type(effect)(new[var]) if var is not None and not isinstance(var, int) and var in new else effect


def _computed(function: Callable[[Any], Any], x: Any) -> tuple[list[Any], Any]:
    """Equations that compute a function of a scalar variable or literal, and where the result is."""
    if not hasattr(x, "count") and hasattr(x, "val"):
        return [], type(x)(np.asarray(function(np.asarray(x.val))).astype(x.aval.dtype)[()], x.aval)
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), x.aval.dtype))
    (given,) = traced.jaxpr.invars
    names: dict[Any, Any] = {given: x}
    made = []
    for eqn in traced.jaxpr.eqns:
        made.append(eqn.replace(invars=[v if hasattr(v, "val") else names.get(v, v) for v in eqn.invars]))
    return made, traced.jaxpr.outvars[0]


def given_of(eqn: Any) -> Any:
    """The operands of an equation, with placeholders that know their number."""
    return jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))


def is_effectful(eqn: Any) -> bool:
    """Whether an equation does something besides computing a value."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


# --- edits --------------------------------------------------------------------------------------------------------
def _remove(eqns: list[Any], i: int) -> list[Any]:
    return eqns[:i] + eqns[i + 1 :]


def _with_params(**params: Any) -> Edit:
    def edit(eqns: list[Any], i: int) -> list[Any]:
        return [*eqns[:i], eqns[i].replace(params={**eqns[i].params, **params}), *eqns[i + 1 :]]

    return edit


def _each_alone(eqns: list[Any], i: int) -> list[Any]:
    """A collective copy becomes each block's own; where a block got a part, `copy_gmem_to_smem` itself refuses that."""
    given = given_of(eqns[i])
    source, goal = End(eqns[i], given.src), End(eqns[i], given.dst)
    if isinstance(eqns[i].params["leader_tracked"], CopyPartition.PARTITIONED) and source.shape != goal.shape:
        raise ValueError(f"source and destination of the same shape: {source.shape}, {goal.shape}")
    return _with_params(collective_axes=(), leader_tracked=None)(eqns, i)


def _with_operand(k: int, function: Callable[[Any], Any]) -> Edit:
    def edit(eqns: list[Any], i: int) -> list[Any]:
        made, new = _computed(function, eqns[i].invars[k])
        invars = [new if j == k else v for j, v in enumerate(eqns[i].invars)]
        return [*eqns[:i], *made, eqns[i].replace(invars=invars), *eqns[i + 1 :]]

    return edit


def _later(eqns: list[Any], i: int) -> tuple[Edit, Any] | None:
    """Swap with the next equation that does something."""
    for j in range(i + 1, len(eqns)):
        if is_effectful(eqns[j]):
            return (lambda e, i: [*e[:i], *e[i + 1 : j + 1], e[i], *e[j + 1 :]]), eqns[j]
    return None


def _earlier(eqns: list[Any], i: int) -> tuple[Edit, Any] | None:
    """Swap with the equation before that does something, if no operand depends on it."""
    needed, moved = {v for v in eqns[i].invars if not hasattr(v, "val")}, [i]
    for j in range(i - 1, -1, -1):
        made = any(v in needed for v in eqns[j].outvars)
        if is_effectful(eqns[j]):
            if made:
                return None
            first = sorted(moved)
            rest = [k for k in range(j, i) if k not in moved]
            order = [*range(j), *first, *rest]
            return (lambda e, i: [*(e[k] for k in order), *e[i + 1 :]]), eqns[j]
        if made:
            moved.append(j)
            needed |= {v for v in eqns[j].invars if not hasattr(v, "val")}
    return None


# --- all mutants of a kernel --------------------------------------------------------------------------------------
def mutants(jaxpr: Any) -> list[Mutant]:
    """All mutants of a kernel."""
    found: list[Mutant] = []
    for path, inner in walk(jaxpr):
        eqns = list(inner.eqns)
        for i, eqn in enumerate(eqns):
            name = str(eqn.primitive)

            def add(how: str, detail: str, edit: Edit, past: Any = None, i=i, eqn=eqn, name=name, path=path) -> None:
                found.append(Mutant(how, name, detail, location(eqn), path, i, edit, past, eqn))

            if name in SYNCHRONISATION:
                add("removed", "", _remove)
                for how, made in (("moved later", _later(eqns, i)), ("moved earlier", _earlier(eqns, i))):
                    same = made is not None and how == "moved earlier" and str(made[1].primitive) in SYNCHRONISATION
                    if made is not None and not same:  # the other one, moved later, is the same program
                        add(how, f"past {made[1].primitive}", made[0], made[1])
            for how, detail, edit in _counts(eqn, name):
                add(how, detail, edit)
        if not path:
            found += _types(inner, path, inner.invars)
        elif (scope := _scope(jaxpr, path)) is not None:
            found += _types(inner, path, inner.invars[len(inner.invars) - scope :])
    return found


def _scope(jaxpr: Any, path: Path) -> int | None:
    """How many of an inner jaxpr's operands it allocates itself, if it is a scope's."""
    for number, name, k in path:
        eqn = jaxpr.eqns[number]
        jaxpr = eqn.params[name] if k is None else eqn.params[name][k]
    return eqn.params["num_scoped"] if str(eqn.primitive) == "run_scoped" else None


def _counts(eqn: Any, name: str) -> Iterator[tuple[str, str, Edit]]:
    params = eqn.params
    if name in ("wait_smem_to_gmem", "wait_gmem_to_smem", "wgmma_wait"):
        yield "wrong count", f"n={params['n'] + 1}", _with_params(n=params["n"] + 1)
    if name == "wait_smem_to_gmem" and not params["wait_read_only"]:
        yield "weaker", "wait_read_only", _with_params(wait_read_only=True)
    if name == "wgmma_accumulator_load" and params["wait_n"] is not None:
        yield "wrong count", f"wait_n={params['wait_n'] + 1}", _with_params(wait_n=params["wait_n"] + 1)
    if name == "copy_smem_to_gmem":
        yield (
            "weaker",
            f"commit_group={not params['commit_group']}",
            _with_params(commit_group=not params["commit_group"]),
        )
    if name == "copy_gmem_to_smem" and params["collective_axes"]:
        yield "weaker", "not collective", _each_alone
    if name in ("semaphore_signal", "semaphore_signal_multicast", "semaphore_wait"):
        k = given_of(eqn).value.k
        yield "wrong count", "+1", _with_operand(k, lambda v: v + 1)
        yield "wrong count", "-1", _with_operand(k, lambda v: v - 1)
    if name in _SLOTS and (bar := given_of(eqn).barrier) is not None:
        for transform in bar.transforms:
            for d, (index, n) in enumerate(zip(getattr(transform, "indices", ()), getattr(transform, "shape", ()))):
                if hasattr(index, "k") and n > 1:
                    yield (
                        "wrong slot",
                        f"dimension {d}",
                        _with_operand(index.k, functools.partial(_next_slot, n)),
                    )
    if name in _PREDICATED and getattr(given_of(eqn).predicate, "k", None) is not None:
        yield "negated", "predicate", _with_operand(given_of(eqn).predicate.k, jnp.logical_not)
    if name == "cond" and len(params["branches"]) == 2 and not eqn.outvars and _synchronises(params["branches"]):
        yield "negated", "condition", _with_params(branches=tuple(reversed(params["branches"])))


def _next_slot(n: int, v: Any) -> Any:
    return (v + 1) % n if isinstance(v, np.ndarray) else lax.rem(v + 1, jnp.asarray(n, v.dtype))


def _synchronises(branches: Sequence[Any]) -> bool:
    """Whether branches do nothing but synchronise."""
    done = [e for b in branches for e in b.eqns if is_effectful(e)]
    return bool(done) and all(str(e.primitive) in SYNCHRONISATION for e in done)


def _types(jaxpr: Any, path: Path, variables: Sequence[Any]) -> Iterator[Mutant]:
    for var in variables:
        dtype = getattr(var.aval, "dtype", None)
        if not isinstance(dtype, BarrierDType):
            continue
        kind = "Barrier" if dtype.collective_axes is None else "ClusterBarrier"
        now = (dtype.num_arrivals, dtype.orders_tensor_core, dtype.collective_axes, dtype.leader_tracked)
        changed = [("wrong count", f"num_arrivals={now[0] + 1}", (now[0] + 1, *now[1:]))]
        if now[0] > 1:
            changed.append(("wrong count", f"num_arrivals={now[0] - 1}", (now[0] - 1, *now[1:])))
        if now[1]:
            changed.append(("weaker", "orders_tensor_core=False", (now[0], False, *now[2:])))
        if now[2] is not None:
            changed.append(("weaker", "a Barrier", (now[0], now[1], None, False)))
        for how, detail, new in changed:
            inner = var.aval.inner_aval.update(dtype=BarrierDType(*new))
            yield Mutant(how, kind, detail, var.aval.label, path, -1, var=var, aval=var.aval.update(inner_aval=inner))
