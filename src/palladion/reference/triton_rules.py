"""Reference meaning of masked loads and stores, atomic updates and Triton's hints, for both interpreters.

A window that runs past the end of its Ref is read where it fits and shifted into place, as in `windows.py`: nothing
is padded as a whole. With index arrays, and for atomics, each lane's element is worked out; a lane that is off gets an
index past the end, where XLA drops what is stored. Atomics whose result nobody reads are scatters; otherwise lanes
take their turns in a loop, which is slow and exact.

Not there yet: the eager interpreter looks at `pl.ds(start, size)` when the view is made, so it refuses one that runs
past its Ref although a mask may switch those lanes off. Index arrays under a mask work there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import explain
from palladion.language.masked import ATOMICS, atomic_update_p, masked_load_p, masked_store_p
from palladion.language.triton.asm import debug_barrier_p
from palladion.language.triton.ops import max_contiguous_p
from palladion.reference import eager_refs, evaluate, host
from palladion.reference.evaluate import Cell, Evaluator, uninitialized

RULES = evaluate.RULES
_SCATTERS = ("add", "max", "min")


def _split(transforms: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """The views, and the last indexer; None where a view is the last."""
    if transforms and isinstance(transforms[-1], jaxlink.NDIndexer):
        return transforms[:-1], transforms[-1]
    return transforms, None


# --- the elements that an indexer picks -----------------------------------------------------------------------------
def _elements(indexer: Any, shape: Sequence[int]) -> list[Any]:
    """For each dimension the index of each lane, as arrays that broadcast to the indexed part."""
    if indexer is None:
        return [lax.broadcasted_iota(np.int32, shape, d) for d in range(len(shape))]
    slices = [d for d, i in enumerate(indexer.indices) if isinstance(i, jaxlink.Slice)]
    others = [d for d in range(len(shape)) if d not in slices]
    arrays = indexer.int_indexer_shape
    # NumPy's rule: what index arrays pick stands where they stand, or in front if a slice stands between them.
    together = not others or others == list(range(others[0], others[-1] + 1))
    first = sum(d < others[0] for d in slices) if others and together else 0
    ndim = len(slices) + len(arrays)
    result = []
    for d, index in enumerate(indexer.indices):
        if d in slices:
            n = slices.index(d)
            place = n if n < first else n + len(arrays)
            steps = lax.broadcasted_iota(np.int32, [index.size if p == place else 1 for p in range(ndim)], place)
            result.append(index.start + steps * index.stride)
        else:
            index = jnp.asarray(index, np.int32)
            index = jnp.where(index < 0, index + shape[d], index)
            after = ndim - first - len(arrays)
            result.append(index.reshape(index.shape + (1,) * after) if index.ndim else index)
    return result


def _strays(elements: Sequence[Any], shape: Sequence[int]) -> Any:
    """Which lanes are outside the Ref."""
    outside: Any = False
    for index, size in zip(elements, shape):
        outside = outside | (index < 0) | (index >= size)
    return outside


# --- windows that may run past the end -------------------------------------------------------------------------------
class _Reach:
    """A window of slices and integers, moved back inside along the dimensions where its start is not known.

    Attributes:
      span: elements from its first to its last, for each dimension; fit: those of them that can lie in the Ref.
      place: where the part that fits starts; shift: how far before the window's own start that is (0 if known).
    """

    def __init__(self, indexer: Any) -> None:
        self.span, self.fit, self.place, self.shift, self.stride = [], [], [], [], []
        self.squeezed = []
        for d, (index, extent) in enumerate(zip(indexer.indices, indexer.shape)):
            if isinstance(index, jaxlink.Slice):
                start, size, stride = index.start, index.size, index.stride
            else:
                start, size, stride = index, 1, 1
                start = start + extent * (start < 0)
                self.squeezed.append(d)
            span = (size - 1) * stride + 1 if size else 0
            known = isinstance(start, (int, np.integer))
            fit = min(span, extent)
            place = int(start) if known else jnp.clip(start, 0, extent - fit).astype(np.int32)
            self.span.append(span)
            self.fit.append(fit)
            self.place.append(place)
            self.shift.append(None if known else jnp.clip(jnp.asarray(start, np.int32) - place, -span, span))
            self.stride.append(stride)

    def _cut(self, x: jax.Array) -> jax.Array:
        if tuple(self.fit) == x.shape:
            return x
        return lax.dynamic_slice(
            x, [jnp.asarray(p, np.int32) for p in self.place], self.fit, allow_negative_indices=False
        )

    def load(self, x: jax.Array) -> jax.Array:
        """The window, uninitialised outside `x`."""
        part = self._cut(x)
        for d, shift in enumerate(self.shift):
            if shift is not None:
                padded = _pad(part, d, self.span[d], uninitialized((), x.dtype))
                part = lax.dynamic_slice_in_dim(padded, self.span[d] + shift, self.span[d], d)
        steps = tuple(slice(None, None, s) for s in self.stride)
        return lax.squeeze(part[steps] if any(s != 1 for s in self.stride) else part, self.squeezed)

    def store(self, x: jax.Array, new: jax.Array, mask: jax.Array) -> jax.Array:
        """`x` with the lanes of the window where the mask is on replaced."""
        if 0 in self.span or 0 in x.shape:
            return x
        new, mask = (self._spread(lax.expand_dims(v, self.squeezed)) for v in (new, mask))
        part = jnp.where(mask, new, self._cut(x))
        if part.shape == x.shape:
            return part
        return lax.dynamic_update_slice(
            x, part, [jnp.asarray(p, np.int32) for p in self.place], allow_negative_indices=False
        )

    def _spread(self, v: jax.Array) -> jax.Array:
        """From lanes to the part that fits: strides opened, shifted; zero where there is no lane."""
        zero = jnp.zeros((), v.dtype)
        if any(s != 1 for s in self.stride):
            v = lax.pad(v, zero, [(0, 0, s - 1) for s in self.stride])
        for d, shift in enumerate(self.shift):
            if shift is not None:
                v = lax.dynamic_slice_in_dim(_pad(v, d, self.span[d], zero), self.span[d] - shift, self.fit[d], d)
        return v


def _pad(x: jax.Array, d: int, width: int, value: jax.Array) -> jax.Array:
    return lax.pad(x, value, [(width, width, 0) if i == d else (0, 0, 0) for i in range(x.ndim)])


# --- loads and stores -----------------------------------------------------------------------------------------------
def masked_load(x: jax.Array, transforms: Sequence[Any], mask: Any, other: Any) -> jax.Array:
    """What the lanes of a chain of views hold; `other` (or uninitialised) where the mask is off."""
    views, last = _split(transforms)
    x = evaluate.load(x, views)
    if last is None:
        value = x
    elif last.int_indexer_shape:
        value = x[tuple(_elements(last, x.shape))]
    else:
        value = _Reach(last).load(x)
    if mask is None:
        return value
    return jnp.where(mask, value, uninitialized((), x.dtype) if other is None else jnp.asarray(other, x.dtype))


def masked_store(x: jax.Array, transforms: Sequence[Any], new: jax.Array, mask: Any) -> jax.Array:
    """`x` with the lanes of a chain of views where the mask is on replaced."""
    views, last = _split(transforms)
    part = evaluate.load(x, views)
    new = jnp.asarray(new, part.dtype)  # in a jaxpr, a scalar may be a Python number
    mask = jnp.full(new.shape, True if mask is None else mask)
    if last is None:
        part = jnp.where(mask, new, part)
    elif last.int_indexer_shape:
        part = part.at[_dropped(_elements(last, part.shape), mask, part.shape)].set(new, mode="drop")
    else:
        part = _Reach(last).store(part, new, mask)
    return evaluate.store(x, views, lambda _: part)


def _dropped(elements: Sequence[Any], mask: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of each lane, past the end for those that are off or outside."""
    off = _strays(elements, shape)
    off = off if mask is None else off | ~jnp.asarray(mask, bool)
    return tuple(jnp.where(off, n, i) for i, n in zip(elements, shape))


# --- atomics --------------------------------------------------------------------------------------------------------
def atomic_update(
    x: jax.Array, transforms: Sequence[Any], op: str, values: Sequence[jax.Array], mask: Any, used: bool
) -> tuple[jax.Array, jax.Array]:
    """`x` after the updates of all lanes, and what each found (uninitialised if `used` is false)."""
    views, last = _split(transforms)
    part = evaluate.load(x, views)
    values = [jnp.asarray(v, part.dtype) for v in values]
    shape = values[0].shape
    index = _dropped(_elements(last, part.shape), mask, part.shape)
    found = uninitialized(shape, x.dtype)
    if op in _SCATTERS and not used:
        part = getattr(part.at[index], op)(values[0], mode="drop")
    else:
        lanes = [jnp.broadcast_to(v, shape).reshape(math.prod(shape)) for v in (*index, *values)]

        def turn(part, lane):
            at, operands = tuple(lane[: part.ndim]), lane[part.ndim :]
            old = part[at]
            inside = True if not at else at[0] < part.shape[0]
            new = ATOMICS[op](old, *operands)
            return part.at[at].set(new, mode="drop"), jnp.where(inside, old, uninitialized((), x.dtype))

        part, found = lax.scan(turn, part, lanes)
        found = found.reshape(shape)
    return evaluate.store(x, views, lambda _: part), found


# --- rules of the reference interpreter -----------------------------------------------------------------------------
def _stray(transforms: Sequence[Any], mask: Any) -> Any:
    """Whether a lane that is on points outside its Ref: None if it cannot."""
    _, last = _split(transforms)
    if last is None:
        return None
    outside = _strays(_elements(last, last.shape), last.shape)
    return jnp.any(outside if mask is None else outside & mask)


def _check(ev: Evaluator, eqn: Any, cell: Cell, transforms: Sequence[Any], mask: Any) -> None:
    if ev.checks and (stray := _stray(transforms, mask)) is not None:
        message = f"A lane of {eqn.primitive} whose mask is on points outside {cell.label}."
        action = host.Check(message, 0, locations.location_of(eqn))
        ev.token.value = host.act(ev.token.value, action, ~stray, *ev.ids)


@RULES.rule(masked_load_p)
def _masked_load(ev: Evaluator, eqn, cell, *flat):
    transforms, mask, other = jax.tree.unflatten(eqn.params["tree"], flat)
    _check(ev, eqn, cell, transforms, mask)
    return masked_load(cell.value, transforms, mask, other)


@RULES.rule(masked_store_p)
def _masked_store(ev: Evaluator, eqn, cell, new, *flat):
    transforms, mask = jax.tree.unflatten(eqn.params["tree"], flat)
    _check(ev, eqn, cell, transforms, mask)
    cell.value = masked_store(cell.value, transforms, new, mask)
    return []


@RULES.rule(atomic_update_p)
def _atomic_update(ev: Evaluator, eqn, cell, *flat):
    values, transforms, mask = jax.tree.unflatten(eqn.params["tree"], flat)
    _check(ev, eqn, cell, transforms, mask)
    used = not isinstance(eqn.outvars[0], jaxlink.DropVar)
    cell.value, found = atomic_update(cell.value, transforms, eqn.params["op"], values, mask, used)
    return found


@RULES.rule(max_contiguous_p)
def _max_contiguous(ev: Evaluator, eqn, x):
    return x


@RULES.rule(debug_barrier_p)
def _debug_barrier(ev: Evaluator, eqn):
    return []


# --- rules of the eager interpreter ---------------------------------------------------------------------------------
def _check_now(trace: Any, name: Any, ref: Any, transforms: Sequence[Any], mask: Any) -> None:
    if trace.params.out_of_range != "clamp" and (stray := _stray(transforms, mask)) is not None and stray:
        raise IndexError(
            explain(
                f"A lane of {name} whose mask is on points outside {ref.aval.label}.",
                where=locations.current_location(),
                grid_point=trace.ids or None,
            )
        )


def _put(ref: Any, new: jax.Array) -> None:
    ref.check_writable()
    ref.written = True
    ref.buffer[...] = np.asarray(new)


@eager_refs.RULES.rule(masked_load_p)
def _masked_load_now(trace, params, ref, *flat):
    transforms, mask, other = jax.tree.unflatten(params["tree"], flat)
    _check_now(trace, masked_load_p, ref, transforms, mask)
    return masked_load(jnp.asarray(ref.buffer), transforms, mask, other)


@eager_refs.RULES.rule(masked_store_p)
def _masked_store_now(trace, params, ref, new, *flat):
    transforms, mask = jax.tree.unflatten(params["tree"], flat)
    _check_now(trace, masked_store_p, ref, transforms, mask)
    _put(ref, masked_store(jnp.asarray(ref.buffer), transforms, new, mask))
    return []


@eager_refs.RULES.rule(atomic_update_p)
def _atomic_update_now(trace, params, ref, *flat):
    values, transforms, mask = jax.tree.unflatten(params["tree"], flat)
    _check_now(trace, atomic_update_p, ref, transforms, mask)
    new, found = atomic_update(jnp.asarray(ref.buffer), transforms, params["op"], values, mask, True)
    _put(ref, new)
    return found
