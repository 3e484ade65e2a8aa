"""Refs that hold their values in NumPy, for the eager interpreter.

An `EagerRef` is, to JAX, one more value that only a certain trace understands; that trace, `EagerTrace`, evaluates
everything at once and gives meaning to the operations on Refs. So the bracket indexing of `language.indexing`, views,
`jax.ref.get/set/swap/addupdate`, and Refs closed over or passed to `cond`, `jit`, `custom_jvp` or `vmap` take the
same way as in a traced kernel, refusals included, but every value on it is an ordinary `jax.Array`.

Where JAX traces a function although `jax.disable_jit` holds (`jax.checkpoint`; `cond` and `while_loop` on a batched
condition under `vmap`), the jaxpr comes back here as an equation with Refs among its operands and is run on values.

Source: fault kind 5 (a run-time index that leaves its Ref is an error, never a silent clamp); NumPy's indexing rules.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import KernelCheckError, UnsupportedPrimitive, count_of, explain, kind_of, mistake
from palladion.language import ops
from palladion.language.dtypes import unwritten
from palladion.language.indexing import label_of, out_of_range
from palladion.language.semaphores import SemaphoreDType
from palladion.rules import RuleTable, needs_machine

RULES = RuleTable("the eager interpreter", covers=lambda primitive: not needs_machine(primitive))


# --- values ---------------------------------------------------------------------------------------------------------
def to_numpy(x: Any) -> np.ndarray:
    """A concrete array as NumPy; typed PRNG keys become records of their words, so that they index like numbers."""
    if not jaxlink.is_opaque(x.dtype):
        return np.asarray(x)
    keys = np.empty(x.shape, _record(x.dtype))
    keys["key"] = np.asarray(jax.random.key_data(x))
    return keys


def _record(dtype: Any) -> np.dtype:
    """The NumPy record that stands for one typed PRNG key."""
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return np.dtype([("key", words.dtype, words.shape)])


def to_jax(x: np.ndarray, dtype: Any) -> jax.Array:
    """The values of a buffer, or of a view of one, copied; `dtype` is the Ref's."""
    # Not jnp.asarray, a computation to JAX: jax_debug_nans would stop it on memory that nothing has written.
    return jaxlink.wrap_keys(x["key"], dtype) if x.dtype.names else jax.device_put(x.copy())


def fresh(shape: Sequence[int], dtype: Any, mode: str) -> np.ndarray:
    """Memory that nothing has written: NaN, the lowest integer, False; or zeros in the mode "zero". Semaphores: 0."""
    if isinstance(dtype, SemaphoreDType):
        return np.zeros(shape, np.int32)
    dtype = _record(dtype) if jaxlink.is_opaque(dtype) else np.dtype(dtype)
    return np.zeros(shape, dtype) if mode == "zero" or dtype.names else np.full(shape, unwritten(dtype), dtype)


# --- the Ref and the trace ------------------------------------------------------------------------------------------
class EagerRef(jaxlink.Tracer):
    """A Ref of a kernel that runs eagerly: all that a traced kernel's Ref is, and `print` shows what it holds.

    Attributes:
      buffer: the values, a NumPy array; stays readable after the kernel has ended, in a post-mortem debugger say.
      written: whether the program has stored anything.
    """

    __slots__ = ("_refusal", "buffer", "written")

    def __init__(self, trace: EagerTrace, aval: Any, buffer: np.ndarray, refusal: Callable | None = None) -> None:
        """Arguments: the abstract Ref, its memory, and what makes the exception for a store (None allows stores)."""
        super().__init__(trace, aval)
        self.buffer, self.written, self._refusal = buffer, False, refusal

    def __repr__(self) -> str:
        return f"{self.label}: {self.aval.str_short()}\n{self.buffer}"

    def check_writable(self) -> None:
        """Raise the exception for a store, if this Ref takes none."""
        if self._refusal is not None:
            raise self._refusal(locations.current_location())


jaxlink.register_tracer(EagerRef)


class EagerTrace(jaxlink.EvalTrace):
    """What runs one program: JAX's own evaluation, and the meaning of Refs and of the program's place in the grid.

    Arguments:
      ids: the program's index along each grid axis that the kernel sees.
      sizes: the number of programs along each of those axes.
      params: the `pl.EagerParams`.
    """

    __slots__ = ("ids", "params", "sizes")

    def __init__(self, ids: Sequence[int], sizes: Sequence[int], params: Any) -> None:
        super().__init__()
        self.ids, self.sizes, self.params = tuple(ids), tuple(sizes), params

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: dict, /) -> Any:
        has_refs = any(isinstance(a, EagerRef) for a in args)
        rule = RULES.get(primitive)
        if rule is None and (has_refs or needs_machine(primitive)):
            others = RULES.others(primitive)
            raise UnsupportedPrimitive(str(primitive), RULES.target, locations.current_location(), others)
        for outer in (a for a in args if isinstance(a, jaxlink.Tracer) and not isinstance(a, EagerRef)):
            raise mistake(
                ValueError,
                f"The kernel uses a value of a transformation around the call, {kind_of(outer)}, which it captures.",
                hint="vmap, grad and such see a call's operands alone: make the value an operand",
            )
        if rule is None or not (has_refs or primitive in _WITHOUT_REFS):
            return jaxlink.eval_trace.process_primitive(primitive, args, params)
        with jaxlink.set_current_trace(jaxlink.eval_trace):
            return rule(self, params, *args)

    def run_jaxpr(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr on values and Refs."""
        with jaxlink.set_current_trace(self):
            return jaxlink.eval_jaxpr(jaxpr, jaxpr.consts, *args)

    @property
    def clamps(self) -> bool:
        """Whether an index that leaves its Ref is moved inside instead of refused."""
        return self.params.out_of_range == "clamp"

    # What `language` asks of the running program.
    def program_id(self, axis: int) -> jax.Array:
        return jax.device_put(np.int32(self.ids[axis]))

    def scratch(self, aval: Any) -> EagerRef:
        """A new Ref whose memory is not initialised."""
        return EagerRef(self, aval, fresh(aval.shape, aval.dtype, self.params.uninitialized))

    def start_of(self, start: Any, span: int, extent: int) -> int:
        """Where a slice of `span` elements starts: as asked, unless starts that do not fit are to be moved."""
        return _moved_inside(int(start), span, extent) if self.clamps else int(start)

    def check(self, condition: bool, message: str, where: str | None) -> None:
        """Raise KernelCheckError(message) if the condition is false."""
        if not condition:
            raise KernelCheckError(explain(message, where=where, grid_point=self.ids or None))


# --- views and indices ----------------------------------------------------------------------------------------------
def _at(index: Any, d: int, extent: int, label: str, clamp: bool) -> Any:
    """An integer index, or an array of them, counted from the start and inside the dimension."""
    index = np.asarray(index)
    inside = (index >= -extent) & (index < extent)
    if not inside.all() and not clamp:
        raise out_of_range(label, int(index[~inside].flat[0]), d, extent)
    index = np.where(inside & (index < 0), index + extent, index)
    if clamp and index.ndim == 0:
        index = np.clip(index, 0, max(extent - 1, 0))
    return index if index.ndim else int(index)


def _moved_inside(start: int, span: int, extent: int) -> int:
    """Where XLA starts a slice of `span` elements that is asked to start at `start`."""
    return min(max(start + extent * (start < 0), 0), max(extent - span, 0))


def _slice_at(index: Any, d: int, extent: int, label: str, clamp: bool) -> slice:
    start, size, stride = int(index.start), int(index.size), int(index.stride)
    span = (size - 1) * stride + 1 if size else 0
    first = _moved_inside(start, span, extent) if clamp else start + extent * (start < 0)
    if first < 0 or first + span > extent:
        text = f"pl.ds(start={start}, size={size}{f', stride={stride}' if stride != 1 else ''})"
        raise mistake(
            IndexError,
            f"{text} runs past dimension {d} of {label}, which has {count_of(extent, 'element')}.",
            hint="compiled code moves such a slice back inside without a word: make the start fit, pad the operand, or "
            "mask (pltriton.load)",
        )
    return slice(first, first + span, stride)


def _key(indexer: Any, label: str, clamp: bool) -> tuple[Any, ...]:
    """A JAX indexer as the key of a NumPy array. The `...` makes it a view, also where all dimensions are picked."""
    keys = [
        (_slice_at if isinstance(i, jaxlink.Slice) else _at)(i, d, n, label, clamp)
        for d, (i, n) in enumerate(zip(indexer.indices, indexer.shape))
    ]
    return (*keys, ...)


def _in_bounds(x: np.ndarray, key: tuple[Any, ...]) -> bool:
    return all(not isinstance(k, np.ndarray) or not k.size or 0 <= k.min() <= k.max() < n for k, n in zip(key, x.shape))


class _Part:
    """The part of an array that one view selects: `value`, and a way to put it back where NumPy had to copy."""

    def __init__(self, x: np.ndarray, transform: Any, label: str, clamp: bool) -> None:
        self.x, self.transform, self.key = x, transform, None
        match transform:
            case jaxlink.NDIndexer():
                self.key = _key(transform, label, clamp)
                # Only in the mode "clamp" may an index array leave the array; then it means what XLA makes of it.
                self.value = x[self.key] if _in_bounds(x, self.key) else np.array(jnp.asarray(x)[self.key])
            case jaxlink.ReshapeTransform():
                self.value = x.reshape(transform.shape)
            case jaxlink.TransposeTransform():
                self.value = x.transpose(transform.permutation)
            case jaxlink.BitcastTransform():
                self.value = np.array(jaxlink.bitcast_array(jnp.asarray(x), transform.dtype))
            case _:
                raise NotImplementedError(f"{RULES.target} has no rule for the view {transform}")

    def put_back(self) -> None:
        """Store `value` in the array, unless it is the array's own memory."""
        x, new = self.x, self.value
        if np.may_share_memory(x, new):
            return
        if self.key is not None:
            if _in_bounds(x, self.key):
                x[self.key] = new
            else:
                x[...] = np.asarray(jnp.asarray(x).at[self.key].set(new))
        elif isinstance(self.transform, jaxlink.BitcastTransform):
            x[...] = np.asarray(jaxlink.bitcast_array(jnp.asarray(new), x.dtype))
        else:  # reshaped, from memory that is not contiguous
            x[...] = new.reshape(x.shape)


def _parts(ref: EagerRef, transforms: Sequence[Any]) -> list[_Part]:
    """What each of a chain of views selects."""
    parts: list[_Part] = []
    x, label = ref.buffer, label_of(ref)
    for transform in transforms:
        parts.append(_Part(x, transform, f"a view of {label}" if parts else label, ref._trace.clamps))
        x = parts[-1].value
    return parts


def _load(ref: EagerRef, transforms: Sequence[Any]) -> np.ndarray:
    parts = _parts(ref, transforms)
    return parts[-1].value if parts else ref.buffer


def _store(ref: EagerRef, transforms: Sequence[Any], change: Callable[[np.ndarray, Any], None]) -> None:
    """Let `change(array, key)` store in the elements that a chain of views selects; `...` is the key of all."""
    ref.check_writable()
    ref.written = True
    parts = _parts(ref, transforms)
    last = parts[-1] if parts else None
    if last is not None and last.key is not None and not np.may_share_memory(last.x, last.value):
        if _in_bounds(last.x, last.key):  # index arrays: NumPy has a key for them, and repeated ones add up
            change(last.x, last.key)
            parts.pop()
        else:
            change(last.value, ...)
    else:
        change(last.value if last is not None else ref.buffer, ...)
    for part in reversed(parts):
        part.put_back()


# --- rules: Refs ----------------------------------------------------------------------------------------------------
@RULES.rule(jaxlink.get_p)
def _get(trace: EagerTrace, params, ref, *flat):
    return to_jax(_load(ref, jax.tree.unflatten(params["tree"], flat)), ref.dtype)


def _checked(primitive: Any, params, ref, new, flat, part: np.ndarray) -> np.ndarray:
    """`new` as NumPy; `jax.ref.set` and its kin come here unchecked, so JAX has its say on shape and dtype."""
    value = to_numpy(new)
    if value.shape != part.shape or value.dtype != part.dtype:
        primitive.abstract_eval(*map(jaxlink.typeof, (ref, new, *flat)), **params)
    return value


@RULES.rule(jaxlink.swap_p)
def _swap(trace: EagerTrace, params, ref, new, *flat):
    transforms = jax.tree.unflatten(params["tree"], flat)
    old = _load(ref, transforms).copy()
    new = _checked(jaxlink.swap_p, params, ref, new, flat, old)

    def change(x, key):
        x[key] = new

    _store(ref, transforms, change)
    return to_jax(old, ref.dtype)


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(trace: EagerTrace, params, ref, new, *flat):
    transforms = jax.tree.unflatten(params["tree"], flat)
    new = _checked(jaxlink.addupdate_p, params, ref, new, flat, _load(ref, transforms))

    def change(x, key):
        if key is ...:
            x[...] = x + new
        else:
            np.add.at(x, key, new)

    _store(ref, transforms, change)
    return []


@RULES.rule(jaxlink.freeze_p)
def _freeze(trace: EagerTrace, params, ref):
    return to_jax(ref.buffer, ref.dtype)


# --- rules: functions that JAX has traced, with Refs among their operands -------------------------------------------
@RULES.rule(jaxlink.jit_p, jaxlink.remat_p)
def _call(trace: EagerTrace, params, *args):
    return trace.run_jaxpr(params["jaxpr"], args)


@RULES.rule(lax.cond_p)
def _cond(trace: EagerTrace, params, index, *operands):
    branches = params["branches"]
    return trace.run_jaxpr(branches[min(max(int(index), 0), len(branches) - 1)], operands)


@RULES.rule(lax.while_p)
def _while(trace: EagerTrace, params, *operands):
    n = params["cond_nconsts"]
    m = n + params["body_nconsts"]
    carry = list(operands[m:])
    while np.any(go_on := trace.run_jaxpr(params["cond_jaxpr"], [*operands[:n], *carry])[0]):
        new = trace.run_jaxpr(params["body_jaxpr"], [*operands[n:m], *carry])
        carry = [_where(go_on, a, b) for a, b in zip(new, carry)] if np.ndim(go_on) else new
    return carry


def _where(condition: Any, new: Any, old: Any) -> Any:
    """Under vmap an element of the batch whose loop has ended keeps its value."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (np.ndim(new) - condition.ndim)), new, old)


@RULES.rule(lax.scan_p)
def _scan(trace: EagerTrace, params, *operands):
    n_consts, n_carry = jaxlink.scan_counts(types.SimpleNamespace(params=params))
    consts, carry = operands[:n_consts], list(operands[n_consts : n_consts + n_carry])
    xs = operands[n_consts + n_carry :]
    order = range(params["length"])
    rows: dict[int, list[Any]] = {}
    for i in reversed(order) if params["reverse"] else order:
        outs = trace.run_jaxpr(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
        carry, rows[i] = outs[:n_carry], outs[n_carry:]
    empty = [jnp.zeros((0, *a.shape), a.dtype) for a in params["jaxpr"].out_avals[n_carry:]]
    return [*carry, *(jnp.stack([rows[i][k] for i in order]) if rows else e for k, e in enumerate(empty))]


# --- rules: the kernel's own operations, inside such functions ------------------------------------------------------
@RULES.rule(ops.program_id_p)
def _program_id(trace: EagerTrace, params):
    return trace.program_id(params["axis"])


@RULES.rule(ops.num_programs_p)
def _num_programs(trace: EagerTrace, params):
    return jnp.asarray(np.int32(trace.sizes[params["axis"]]))


@RULES.rule(ops.debug_print_p)
def _debug_print(trace: EagerTrace, params, *args):
    print(ops.format_values(params["fmt"], args))
    return []


@RULES.rule(ops.debug_check_p)
def _debug_check(trace: EagerTrace, params, condition):
    trace.check(bool(condition), params["message"], params["where"])
    return []


@RULES.rule(ops.multiple_of_p)
def _multiple_of(trace: EagerTrace, params, x):
    return x


_WITHOUT_REFS = {ops.program_id_p, ops.num_programs_p, ops.debug_print_p, ops.debug_check_p, ops.multiple_of_p}
