"""What a kernel does with its Refs, and what divides its integers: found before any code is written.

A walk over the jaxpr, into calls, loops and branches, that follows each Ref to the operand, scratch buffer or
`run_scoped` that it is (its *root*). What is known of a root lets the compiler leave out synchronisation that cannot
matter, and choose how buffers lie (`smem_inference`). Of integers it keeps a number that divides them, so that a start
`64 * i` is known to be one of a tile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from palladion import jaxlink
from palladion.language import ops
from palladion.language.gpu import control, mma, tcgen05
from palladion.language.gpu.atomics import atomic_p
from palladion.language.gpu.layouts import layout_cast_p
from palladion.language.gpu.refs import BarrierDType
from palladion.language.masked import atomic_update_p, masked_load_p, masked_store_p

BY_THREADS = (
    jaxlink.get_p,
    jaxlink.swap_p,
    jaxlink.addupdate_p,
    masked_load_p,
    masked_store_p,
    atomic_p,
    atomic_update_p,
)
_PRODUCTS = {mma.wgmma_p: ("a", "b"), tcgen05.tcgen05_mma_p: ("a", "b")}
ROUNDS = 8  # over loops, for what divides what they carry


@dataclasses.dataclass
class Facts:
    """What is done with a root.

    Attributes:
      stores, loads: how many places of the kernel write and read it by ordinary stores and loads.
      copies: whether something else reads or writes it (copies, products).
      operands: of matrix products: (operand's name, shape of the view, whether its last two dimensions are exchanged).
    """

    stores: int = 0
    loads: int = 0
    copies: bool = False
    operands: list[tuple[str, tuple[int, ...], bool]] = dataclasses.field(default_factory=list)


class Usage:
    """What the walk found.

    Attributes: facts: {root: Facts}. multiples: {Var: what divides it}; 0 divides none but zero.
      casts: {Var: the layout that a `layout_cast` gives it}.
      barriers: (how many, whether in a scope) of each group.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.facts: dict[Any, Facts] = {}
        self.multiples: dict[Any, int] = {}
        self.casts: dict[Any, Any] = {}
        self._roots: dict[Any, Any] = {}
        self._barriers: dict[Any, tuple[int, bool]] = {}
        self._global: set[Any] = set()
        for k, var in enumerate(jaxpr.invars):
            if isinstance(var.aval, jaxlink.AbstractRef):
                self._found(var, k, False)
        for _ in range(ROUNDS):
            for facts in self.facts.values():
                facts.stores = facts.loads = 0
                facts.operands = []
            before = dict(self.multiples)
            self._walk(_plain(jaxpr))
            if before == self.multiples:
                break
        else:
            self.multiples = {}  # still changing: nothing is known
            return

    def _found(self, var: Any, root: Any, scoped: bool) -> None:
        self._roots[var] = root
        self.facts.setdefault(root, Facts())
        if getattr(var.aval.memory_space, "name", "") in ("GMEM", "ANY", "HBM"):
            self._global.add(root)
        if isinstance(var.aval.dtype, BarrierDType):
            self._barriers[root] = math.prod(var.aval.shape), scoped

    @property
    def barriers(self) -> list[tuple[int, bool]]:
        return list(self._barriers.values())

    @property
    def mixes(self) -> bool:
        """Whether threads store to global memory that copies read or write."""
        spaces = [f for root, f in self.facts.items() if root in self._global]
        return any(f.stores and f.copies for f in spaces)

    def multiple(self, var: Any) -> int:
        """A number that divides an integer; 1 if nothing is known."""
        if isinstance(var, jaxlink.Literal):
            return abs(int(var.val))
        return self.multiples.get(var, 1)

    def of(self, root: Any) -> Facts:
        """What is known of a root; of an unknown one that anything may happen to it."""
        return self.facts.get(root) or Facts(2, 2, True)

    # --- the walk -------------------------------------------------------------------------------------------------
    def _walk(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            self._note(eqn)
            for inner, given in _inner(eqn):
                self._enter(eqn, inner, given)
            self._integers(eqn)

    def _enter(self, eqn: Any, inner: Any, given: Sequence[Any]) -> None:
        inner = _plain(inner)
        for var in inner.constvars:
            self.multiples[var] = 1
        for var, outer in zip(inner.invars, given):
            if outer is None:
                self.multiples[var] = 1
                continue
            if not isinstance(outer, jaxlink.Literal) and outer in self._roots:
                self._roots[var] = self._roots[outer]
            self._join(var, outer)
        if eqn.primitive is ops.run_scoped_p:
            for k, var in enumerate(inner.invars[len(given) :]):
                root = id(eqn.params["jaxpr"]), k
                self._found(var, root, True)
        self._walk(inner)
        if eqn.primitive is not lax.while_p:
            for var, out in zip(eqn.outvars, inner.outvars):
                self._join(var, out)
        if eqn.primitive in (lax.scan_p, lax.while_p):
            carried, outs = _carried(eqn, inner)
            for var, out, result in zip(carried, outs, eqn.outvars):
                self._join(var, out)
                self._join(result, out)

    def _join(self, var: Any, other: Any) -> None:
        if _is_integer(var):
            new = self._known(other)
            self.multiples[var] = math.gcd(self.multiples.get(var, 0), new)

    def _known(self, x: Any) -> int:
        return abs(int(x.val)) if isinstance(x, jaxlink.Literal) else self.multiples.get(x, 0)

    def _note(self, eqn: Any) -> None:
        written, read = jaxlink.written_vars(eqn), jaxlink.read_vars(eqn)
        for var in {v for v in eqn.invars if not isinstance(v, jaxlink.Literal) and v in self._roots}:
            facts = self.facts[self._roots[var]]
            if eqn.primitive in BY_THREADS:
                facts.stores += var in written
                facts.loads += var in read
            elif not _inner(eqn):
                facts.copies = True
        if eqn.primitive is layout_cast_p:
            self.casts.setdefault(eqn.invars[0], eqn.params["layout"])
        if eqn.primitive in _PRODUCTS:
            given = jax.tree.unflatten(eqn.params["tree"], [_Leaf(v) for v in eqn.invars])
            for name in _PRODUCTS[eqn.primitive]:
                view = getattr(given, name, None)
                if isinstance(view, jaxlink.TransformedRef):
                    root = self._roots.get(view.ref.var)
                    if root in self.facts:
                        self.facts[root].operands.append((name, _shape(view), _turned(view)))

    # --- integers ---------------------------------------------------------------------------------------------------
    def _integers(self, eqn: Any) -> None:
        if not eqn.outvars or not _is_integer(eqn.outvars[0]) or _inner(eqn):
            return
        found = _RULES.get(eqn.primitive)
        known = [self._known(v) if _is_integer(v) else 1 for v in eqn.invars]
        for var in eqn.outvars:
            self.multiples[var] = 1 if found is None else found(eqn, known)


class _Leaf:
    """Stands for an operand in the structure of an equation's operands."""

    def __init__(self, var: Any) -> None:
        self.var = var
        self.aval = var.aval
        self.shape, self.dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)


def _shape(view: Any) -> tuple[int, ...]:
    shape = tuple(view.ref.shape)
    for t in view.transforms:
        if isinstance(t, jaxlink.NDIndexer):
            shape = tuple(t.get_indexer_shape())
        elif isinstance(t, jaxlink.ReshapeTransform):
            shape = tuple(t.shape)
        elif isinstance(t, jaxlink.TransposeTransform):
            shape = tuple(shape[d] for d in t.permutation)
    return shape


def _turned(view: Any) -> bool:
    """Whether the last dimension of the buffer is not that of the view."""
    turned = False
    for t in view.transforms:
        if isinstance(t, jaxlink.TransposeTransform):
            turned ^= t.permutation[-1] != len(t.permutation) - 1
    return turned


def _plain(jaxpr: Any) -> Any:
    """A jaxpr without its constants, if it is a closed one."""
    return jaxpr if hasattr(jaxpr, "constvars") else jaxpr.jaxpr


def _is_integer(var: Any) -> bool:
    aval = var.aval
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "") in "iu"


def _inner(eqn: Any) -> list[tuple[Any, list[Any]]]:
    """Jaxprs in an equation, with the operands that are their arguments; None: another value each time."""
    name, p = eqn.primitive, eqn.params
    if name in jaxlink.CALLED:
        return [(p[jaxlink.CALLED[name]], list(eqn.invars))]
    if name is lax.cond_p:
        return [(b, list(eqn.invars[1:])) for b in p["branches"]]
    if name is lax.scan_p:
        n_consts, n_carry = jaxlink.scan_counts(eqn)
        return [(p["jaxpr"], [*eqn.invars[: n_consts + n_carry], *(None for _ in eqn.invars[n_consts + n_carry :])])]
    if name is lax.while_p:
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        return [(p["body_jaxpr"], list(eqn.invars[n:])), (p["cond_jaxpr"], [*eqn.invars[:n], *eqn.invars[m:]])]
    if name is ops.run_scoped_p or name is control.warp_map_p:
        return [(p["jaxpr"], list(eqn.invars))]
    return []


def _carried(eqn: Any, inner: Any) -> tuple[list[Any], list[Any]]:
    if eqn.primitive is lax.scan_p:
        n_consts, n_carry = jaxlink.scan_counts(eqn)
        return list(inner.invars[n_consts : n_consts + n_carry]), list(inner.outvars[:n_carry])
    body = _plain(eqn.params["body_jaxpr"])
    if inner is not body:
        return [], []
    return list(inner.invars[eqn.params["body_nconsts"] :]), list(inner.outvars)


def _sum(eqn: Any, known: list[int]) -> int:
    return math.gcd(*known)


_RULES = {
    lax.add_p: _sum,
    lax.sub_p: _sum,
    lax.rem_p: _sum,
    lax.max_p: _sum,
    lax.min_p: _sum,
    lax.clamp_p: _sum,
    lax.neg_p: _sum,
    lax.mul_p: lambda eqn, known: known[0] * known[1],
    lax.convert_element_type_p: lambda eqn, known: known[0],
    lax.squeeze_p: lambda eqn, known: known[0],
    lax.reshape_p: lambda eqn, known: known[0],
    lax.broadcast_in_dim_p: lambda eqn, known: known[0],
    lax.select_n_p: lambda eqn, known: math.gcd(*known[1:]),
    lax.shift_left_p: lambda eqn, known: known[0] << _shift(eqn),
}


def _least_multiple(eqn: Any, known: list[int]) -> int:
    (number,) = eqn.params["values"]
    return math.lcm(number, known[0])


_RULES[ops.multiple_of_p] = _least_multiple


def _shift(eqn: Any) -> int:
    return int(eqn.invars[1].val) if isinstance(eqn.invars[1], jaxlink.Literal) else 0
