"""Running a kernel's jaxpr with its plain meaning: Refs are mutable cells, all else is JAX again.

The evaluator walks a jaxpr over Refs and re-binds each equation under whatever JAX trace is active. A Ref is a
`Cell` that holds its current array. `cond`, `while` and `scan` are traced anew by the public `lax` functions, which
close over program ids and over cells that are only read; the cells that a branch or body writes are carried. JAX's
own state discharge would do for simple kernels, but gives the condition of a `while_loop` a stale copy of what its
body writes, has no meaning for `program_id` inside control flow, and lacks transposed views (spikes/tracing.md).

Not optimal: an integer-array store goes through a scatter on a copy of the indexed window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import UnsupportedPrimitive, count_of
from palladion.language import ops
from palladion.language.dtypes import unwritten
from palladion.language.semaphores import SemaphoreDType
from palladion.reference import host
from palladion.rules import RuleTable, needs_machine

RULES = RuleTable("the reference interpreter", covers=lambda primitive: not needs_machine(primitive))

# What a kernel changes besides Refs: kind of effect -> what there is at first. It is carried from program to program.
HIDDEN: dict[type, Callable[[], Any]] = {jaxlink.DebugEffect: host.first_token}  # orders prints and checks


class Cell:
    """What a Ref holds, and how messages call it."""

    __slots__ = ("label", "value")

    def __init__(self, value: Any, label: str = "a Ref") -> None:
        self.value, self.label = value, label


def uninitialized(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What memory holds before it is written, made easy to see: NaN, the lowest integer, False (tutorial 3.2).

    Typed PRNG keys have no such value; theirs are of zero words. Semaphores are counters, and start at 0.
    """
    if isinstance(dtype, SemaphoreDType):
        return jnp.zeros(shape, jnp.int32)
    if jaxlink.is_opaque(dtype):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return jaxlink.wrap_keys(jnp.zeros(words.shape, words.dtype), dtype)
    return jnp.full(shape, unwritten(dtype), dtype)


def pad(x: jax.Array, edges: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` with uninitialised elements around it: (before, after) in each dimension."""
    if jaxlink.is_opaque(x.dtype):  # JAX has no pad of typed keys that can be compiled
        return jaxlink.wrap_keys(jnp.pad(jax.random.key_data(x), [*edges, *[(0, 0)] * _key_rank(x.dtype)]), x.dtype)
    return lax.pad(x, uninitialized((), x.dtype), [(*pair, 0) for pair in edges])


def _key_rank(dtype: Any) -> int:
    return len(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape)


# --- views and indices of a Ref -------------------------------------------------------------------------------------
class _Plan:
    """An indexer as a rectangular window (dynamic starts), static strides in it, and index arrays in that."""

    def __init__(self, indexer: Any) -> None:
        arrays = indexer.int_indexer_shape != ()
        self.starts: list[Any] = []
        self.sizes: list[Any] = []
        self.steps: list[slice] = []
        self.scalars: list[int] = []  # dimensions that an integer indexes, to be squeezed
        self.arrays: tuple | None = None
        picks: list[Any] = []
        for d, (index, extent) in enumerate(zip(indexer.indices, indexer.shape)):
            is_slice = isinstance(index, jaxlink.Slice)
            if is_slice:
                start, size, stride = index.start, index.size, index.stride
            elif arrays:
                start, size, stride = 0, extent, 1
            else:
                start, size, stride = index, 1, 1
                self.scalars.append(d)
            if isinstance(start, (int, np.integer)):
                start = int(start) + extent * (start < 0)
            self.starts.append(start)
            self.sizes.append((size - 1) * stride + 1 if size else 0)
            self.steps.append(slice(None, None, stride))
            picks.append(slice(None) if is_slice else index)
        if arrays:
            self.arrays = tuple(picks)

    def cut(self, x: jax.Array) -> jax.Array:
        """The window, before strides."""
        if all(isinstance(s, int) for s in self.starts):
            if tuple(self.sizes) == x.shape:
                return x
            return lax.slice(x, self.starts, [s + n for s, n in zip(self.starts, self.sizes)])
        return lax.dynamic_slice(x, self.starts, self.sizes)

    @property
    def strided(self) -> bool:
        return any(s.step != 1 for s in self.steps)


def _view(x: jax.Array, transform: Any) -> jax.Array:
    """The part of `x` that one view selects."""
    match transform:
        case jaxlink.BitcastTransform():
            return jaxlink.bitcast_array(x, transform.dtype)
        case jaxlink.ReshapeTransform():
            return x.reshape(transform.shape)
        case jaxlink.TransposeTransform():
            return x.transpose(transform.permutation)
        case jaxlink.NDIndexer():
            plan = _Plan(transform)
            window = plan.cut(x)
            window = window[tuple(plan.steps)] if plan.strided else window
            return lax.squeeze(window, plan.scalars) if plan.arrays is None else window[plan.arrays]
    raise NotImplementedError(f"the reference interpreter has no rule for the view {transform}")


def _put(x: jax.Array, transform: Any, new: jax.Array, *, add: bool = False) -> jax.Array:
    """`x` with the part that a view selects replaced by `new`; `add` sums into what index arrays select."""
    match transform:
        case jaxlink.BitcastTransform():
            return jaxlink.bitcast_array(new, x.dtype)
        case jaxlink.ReshapeTransform():
            return new.reshape(x.shape)
        case jaxlink.TransposeTransform():
            return new.transpose(np.argsort(transform.permutation))
        case jaxlink.NDIndexer():
            plan = _Plan(transform)
            if 0 in plan.sizes:
                return x
            window = plan.cut(x)  # XLA drops it where `new` covers it
            if plan.arrays is None:
                new = lax.expand_dims(new, plan.scalars)
            else:
                part = window[tuple(plan.steps)] if plan.strided else window
                new = part.at[plan.arrays].add(new) if add else part.at[plan.arrays].set(new)
            if plan.strided:
                new = window.at[tuple(plan.steps)].set(new)
            return new if new.shape == x.shape else lax.dynamic_update_slice(x, new, plan.starts)
    raise NotImplementedError(f"the reference interpreter has no rule for the view {transform}")


def load(x: jax.Array, transforms: Sequence[Any]) -> jax.Array:
    """The part of `x` that a chain of views selects."""
    return functools.reduce(_view, transforms, x)


def store(x: jax.Array, transforms: Sequence[Any], update: Callable[[Any], Any]) -> jax.Array:
    """`x` with the part that a chain of views selects replaced by `update(part)`."""
    if not transforms:
        return update(x)
    return _put(x, transforms[0], store(_view(x, transforms[0]), transforms[1:], update))


# --- the evaluator --------------------------------------------------------------------------------------------------
class Evaluator:
    """Runs a kernel's jaxpr for one program.

    Arguments:
      ids: the program's index along each grid axis that the kernel sees.
      sizes: the number of programs along each of those axes.
      checks: whether run-time indices are checked (`pl.enable_debug_checks`).
      hidden: cells of the hidden state, by kind of effect; carried like Refs that equations with the effect write.
      mesh: {axis name: size} of the cores that run the kernel, of which this is the one at `ids`; or None.
    """

    def __init__(
        self,
        ids: Sequence[Any],
        sizes: Sequence[Any],
        checks: bool = False,
        hidden: dict[type, Cell] | None = None,
        mesh: Mapping[Any, int] | None = None,
    ) -> None:
        self.ids, self.sizes, self.checks, self.mesh = ids, sizes, checks, mesh or {}
        self.hidden: dict[type, Cell] = hidden or {jaxlink.DebugEffect: Cell(host.first_token())}

    @property
    def token(self) -> Cell:
        """What orders prints and checks."""
        return self.hidden[jaxlink.DebugEffect]

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """The results of `jaxpr` on values and cells."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts)) | dict(zip(jaxpr.invars, args, strict=True))

        def read(atom):
            return atom.val if isinstance(atom, jaxlink.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            with locations.as_traced(eqn):
                if (rule := RULES.get(eqn.primitive)) is not None:
                    outputs = rule(self, eqn, *inputs)
                elif needs_machine(eqn.primitive) or any(isinstance(x, Cell) for x in inputs):
                    raise RULES.unsupported(eqn)
                else:
                    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            env.update(zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs]))
        return [read(a) for a in jaxpr.outvars]

    def carried(self, eqn: Any, operands: Sequence[Any]) -> list[Cell]:
        """The cells that an equation may write, once each; JAX's control flow has to carry their values."""
        written = jaxlink.written_vars(eqn)
        cells = [c for v, c in zip(eqn.invars, operands) if isinstance(c, Cell) and v in written]
        cells += [c for kind, c in self.hidden.items() if any(isinstance(e, kind) for e in eqn.effects)]
        if self.checks:
            cells.append(self.token)
        return list(dict.fromkeys(cells))

    def run_on_copies(self, jaxpr, args, cells, values) -> tuple[list[Any], list[Any]]:
        """Run `jaxpr` with copies of `cells` that hold `values`: its results, and the values at the end."""
        copies = {c: Cell(v, c.label) for c, v in zip(cells, values, strict=True)}
        hidden, self.hidden = self.hidden, {kind: copies.get(c, c) for kind, c in self.hidden.items()}
        try:
            outs = self.run(jaxpr, [copies.get(a, a) if isinstance(a, Cell) else a for a in args])
        finally:
            self.hidden = hidden
        return outs, [copies[c].value for c in cells]


def discharge(jaxpr: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Run a jaxpr over Refs on values: its results, and what every argument holds at the end."""
    is_ref = [isinstance(v.aval, jaxlink.AbstractRef) for v in jaxpr.invars]
    args = [Cell(x, getattr(v.aval, "label", "a Ref")) if r else x for x, r, v in zip(values, is_ref, jaxpr.invars)]
    outs = Evaluator([], []).run(jaxpr, args)
    return outs, [a.value if isinstance(a, Cell) else a for a in args]


# --- rules: control flow --------------------------------------------------------------------------------------------
def _assign(cells: Sequence[Cell], values: Sequence[Any]) -> None:
    for cell, value in zip(cells, values, strict=True):
        cell.value = value


@RULES.rule(lax.cond_p)
def _cond(ev: Evaluator, eqn, *operands):
    cells = ev.carried(eqn, operands)
    branches = [functools.partial(ev.run_on_copies, b, operands[1:], cells) for b in eqn.params["branches"]]
    outs, values = lax.switch(operands[0], branches, [c.value for c in cells])
    _assign(cells, values)
    return outs


@RULES.rule(lax.while_p)
def _while(ev: Evaluator, eqn, *operands):
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    cond_jaxpr, body_jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    cells = ev.carried(eqn, operands)

    def cond(carry, values):  # sees the Refs as the body left them
        (go_on,), values = ev.run_on_copies(cond_jaxpr, [*operands[:n], *carry], cells, values)
        return go_on, values

    batch = cond_jaxpr.outvars[0].aval.ndim  # vmap of a loop: each element has a condition of its own

    def body(carry, values, going):
        outs, values = ev.run_on_copies(body_jaxpr, [*operands[n:m], *carry], cells, values)
        if batch:  # elements that are done keep what they have
            outs = [jnp.where(lax.expand_dims(going, range(batch, o.ndim)), o, c) for o, c in zip(outs, carry)]
        return outs, values

    init = list(operands[m:]), [c.value for c in cells]
    acts = ev.checks or any(isinstance(e, tuple(ev.hidden)) for e in cond_jaxpr.effects)
    if not acts and not jaxlink.written_vars(cond_jaxpr):
        outs, values = lax.while_loop(
            lambda s: jnp.any(cond(*s)[0]), lambda s: body(*s, cond(*s)[0] if batch else None), init
        )
    else:  # the condition is run once a round, and what it writes is kept, its last round's too

        def round_(state):
            going, carry, values = state
            carry, values = body(carry, values, going)
            return (*_after(cond(carry, values), carry),)

        def _after(result, carry):
            go_on, values = result
            return go_on, carry, values

        _, outs, values = lax.while_loop(lambda s: jnp.any(s[0]), round_, _after(cond(*init), init[0]))
    _assign(cells, values)
    return outs


@RULES.rule(lax.scan_p)
def _scan(ev: Evaluator, eqn, *operands):
    params, (n_consts, n_carry) = eqn.params, jaxlink.scan_counts(eqn)
    m = n_consts + n_carry
    cells = ev.carried(eqn, operands)

    def body(state, x):
        values, carry = state
        outs, values = ev.run_on_copies(params["jaxpr"], [*operands[:n_consts], *carry, *x], cells, values)
        return (values, outs[:n_carry]), outs[n_carry:]

    init = [c.value for c in cells], list(operands[n_consts:m])
    (values, carry), ys = lax.scan(
        body, init, list(operands[m:]), params["length"], params["reverse"], params["unroll"]
    )
    _assign(cells, values)
    return [*carry, *ys]


def _inline(param: str) -> Callable:
    """A call; by now the derivative rules of custom_jvp and custom_vjp have done their work."""
    return lambda ev, eqn, *args: ev.run(eqn.params[param], args)


RULES.rule(jaxlink.jit_p)(_inline("jaxpr"))
RULES.rule(jaxlink.remat_p)(_inline("jaxpr"))
RULES.rule(jaxlink.custom_jvp_call_p)(_inline("call_jaxpr"))
RULES.rule(jaxlink.custom_vjp_call_p)(_inline("call_jaxpr"))


# --- rules: Refs ----------------------------------------------------------------------------------------------------
def _transforms(ev: Evaluator, eqn, cell: Cell, flat) -> Sequence[Any]:
    transforms = jax.tree.unflatten(eqn.params["tree"], flat)
    if ev.checks:
        for transform in transforms:
            if isinstance(transform, jaxlink.NDIndexer):
                _check_indices(ev, eqn, cell, transform)
    return transforms


def _check_indices(ev: Evaluator, eqn, cell: Cell, indexer) -> None:
    for d, (index, extent) in enumerate(zip(indexer.indices, indexer.shape)):
        is_slice = isinstance(index, jaxlink.Slice)
        start = index.start if is_slice else index
        if isinstance(start, (int, np.integer)):
            continue
        last = (index.size - 1) * index.stride if is_slice else 0
        low, high = jnp.min(start), jnp.max(start)
        fits = (low >= -extent) & (high + last < extent) if not is_slice else (low >= 0) & (high + last < extent)
        stride = f", stride={index.stride}" if is_slice and index.stride != 1 else ""
        text = f"pl.ds(start={{}}, size={index.size}{stride})" if is_slice else "Index {}"
        message = f"{text} runs past dimension {d} of {cell.label}, which has {count_of(extent, 'element')}."
        report(ev, fits, message, locations.location_of(eqn), jnp.where(low < 0, low, high))


@RULES.rule(jaxlink.get_p)
def _get(ev: Evaluator, eqn, cell, *flat):
    return load(cell.value, _transforms(ev, eqn, cell, flat))


@RULES.rule(jaxlink.swap_p)
def _swap(ev: Evaluator, eqn, cell, new, *flat):
    transforms = _transforms(ev, eqn, cell, flat)
    old = None if isinstance(eqn.outvars[0], jaxlink.DropVar) else load(cell.value, transforms)
    cell.value = store(cell.value, transforms, lambda _: new)
    return old


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(ev: Evaluator, eqn, cell, new, *flat):
    transforms = _transforms(ev, eqn, cell, flat)
    if transforms and getattr(transforms[-1], "int_indexer_shape", ()):  # a repeated index counts each time
        *outer, last = transforms
        cell.value = store(cell.value, outer, lambda old: _put(old, last, new, add=True))
    else:
        cell.value = store(cell.value, transforms, lambda old: old + new)
    return []


@RULES.rule(jaxlink.ref_p)
def _new_ref(ev: Evaluator, eqn, x):
    return Cell(x)


@RULES.rule(jaxlink.empty_ref_p)
def _empty_ref(ev: Evaluator, eqn):
    aval = eqn.outvars[0].aval
    return Cell(uninitialized(aval.shape, aval.dtype))


@RULES.rule(jaxlink.freeze_p)
def _freeze(ev: Evaluator, eqn, cell):
    return cell.value


@RULES.rule(jaxlink.free_ref_p)
def _free_ref(ev: Evaluator, eqn, cell):
    return []


@RULES.rule(ops.run_scoped_p)
def _run_scoped(ev: Evaluator, eqn, *operands):
    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    if any(ev.mesh.get(axis, 1) > 1 for axis in eqn.params["collective_axes"]):
        what = "run_scoped with buffers that several threads share"
        raise UnsupportedPrimitive(what, RULES.target, locations.location_of(eqn), ["the simulated GPU"])
    refs = [v.aval for v in jaxpr.invars[len(jaxpr.invars) - n :]]
    scoped = [Cell(uninitialized(r.shape, r.dtype), r.label) for r in refs]
    return ev.run(jaxpr, [*operands, *scoped])


# --- rules: the kernel's own operations -----------------------------------------------------------------------------
@RULES.rule(ops.program_id_p)
def _program_id(ev: Evaluator, eqn):
    return ev.ids[eqn.params["axis"]]


@RULES.rule(ops.num_programs_p)
def _num_programs(ev: Evaluator, eqn):
    return jnp.asarray(ev.sizes[eqn.params["axis"]], jnp.int32)


@RULES.rule(ops.debug_print_p)
def _debug_print(ev: Evaluator, eqn, *args):
    ev.token.value = host.act(ev.token.value, host.Print(eqn.params["fmt"]), *args)
    return []


@RULES.rule(ops.debug_check_p)
def _debug_check(ev: Evaluator, eqn, condition):
    message = eqn.params["message"].replace("{", "{{").replace("}", "}}")
    report(ev, condition, message, eqn.params["where"])
    return []


def report(ev: Evaluator, condition, message: str, where: str | None, *values) -> None:
    action = host.Check(message, len(values), where)
    ev.token.value = host.act(ev.token.value, action, condition, *values, *ev.ids)


@RULES.rule(ops.delay_p)
def _delay(ev: Evaluator, eqn, nanos):
    return []


@RULES.rule(ops.multiple_of_p)
def _multiple_of(ev: Evaluator, eqn, x):
    return x
