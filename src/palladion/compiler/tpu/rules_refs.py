"""Reading and writing Refs.

VMEM is read and written in vectors, from any static place; a run-time place must be provably aligned in the last two
dimensions, which libtpu checks. SMEM holds scalars. What lies in HBM is moved by copies first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxlib.mosaic.python import tpu

from palladion import jaxlink
from palladion.compiler.tpu import build, unaligned, views
from palladion.compiler.tpu.build import index, reshape
from palladion.compiler.tpu.emit import RULES, Emitter, Ref, literal
from palladion.compiler.tpu.kinds import Refusal, is_bool, is_float, memory_element, memref_type, typed
from palladion.compiler.tpu.rules_elementwise import choose
from palladion.compiler.tpu.rules_gather import take
from palladion.compiler.tpu.rules_shapes import UNROLLED, strided
from palladion.compiler.tpu.views import Window
from palladion.language import masked


# --- one window of a memref -------------------------------------------------------------------------------------------
def _load_window(ref: Ref, memory: ir.Value, window: Window, dtype: Any) -> ir.Value:
    if ref.space == "smem":
        return _load_scalar(ref, memory, window, dtype)
    _in_vmem(ref, "read")
    if window.is_strided:
        return _load_strided(ref, memory, window, dtype)
    starts = list(window.starts)
    if dims := unaligned.plan(memory, starts, window.sizes):
        value = unaligned.load(memory, starts, window.sizes, dims)
    else:
        value = vector.load(typed(window.sizes or (1,), memory_element(dtype)), memory, [index(s) for s in starts])
    return _from_memory(reshape(value, window.shape), dtype)


def _from_memory(value: ir.Value, dtype: Any) -> ir.Value:
    return build.as_mask(value) if is_bool(dtype) else value


def _to_memory(value: ir.Value, dtype: Any) -> ir.Value:
    return build.as_words(value) if is_bool(dtype) else value


def _load_scalar(ref: Ref, memory: ir.Value, window: Window, dtype: Any) -> ir.Value:
    if any(n != 1 for n in window.sizes):
        raise Refusal(
            f"{ref.label} is in SMEM, which is read one scalar at a time; shape {window.shape} is asked for.",
            "index it: x_ref[i], or put it in VMEM to compute on vectors",
        )
    value = memref.load(memory, [index(s) for s in window.starts])
    return _from_memory(reshape(value, window.shape), dtype)


def _in_vmem(ref: Ref, verb: str) -> None:
    if ref.space not in ("vmem", "vmem_shared"):
        raise Refusal(
            f"{ref.label} is in memory {ref.space}, and a kernel {verb}s values in VMEM and SMEM only.",
            "copy it to a VMEM scratch buffer: pltpu.sync_copy(x_ref, buffer)",
        )


def _strided_dimension(window: Window) -> int:
    """The first dimension with a stride; the others' turn comes in the parts."""
    return next(d for d, (s, n) in enumerate(zip(window.strides, window.sizes)) if s != 1 and n > 1)


def _one_of(window: Window, axis: int, n: int) -> Window:
    """Element n along a strided axis of a window."""
    starts, sizes, strides = list(window.starts), list(window.sizes), list(window.strides)
    starts[axis] = views.plus(starts[axis], n * strides[axis])
    sizes[axis] = strides[axis] = 1
    return Window(tuple(starts), tuple(sizes), tuple(strides), ())


def _load_strided(ref: Ref, memory: ir.Value, window: Window, dtype: Any) -> ir.Value:
    element = memory_element(dtype)
    if window.sizes[-1] == 128 == memory.type.shape[-1] and window.strides[-1] == 1 and _is_32_bits(element):
        starts = [index(s) for s in window.starts]
        value = tpu.strided_load(typed(window.sizes, element), memory, starts, list(window.strides))
        return _from_memory(reshape(value, window.shape), dtype)
    axis = _strided_dimension(window)
    n = window.sizes[axis]
    _unrolled(n)
    parts = [_load_window(ref, memory, _one_of(window, axis, i), dtype) for i in range(n)]
    return reshape(build.concatenate(parts, axis), window.shape)


def _is_32_bits(element: ir.Type) -> bool:
    return isinstance(element, ir.F32Type) or (isinstance(element, ir.IntegerType) and element.width == 32)


def _unrolled(n: int) -> None:
    if n > UNROLLED:
        raise Refusal(
            f"a slice with a stride has {n} elements, more than are taken one by one.",
            "reshape the value: x_ref[...].reshape(n, stride, …)[:, 0]",
        )


def _store_window(ref: Ref, memory: ir.Value, window: Window, value: ir.Value, dtype: Any, mask: Any = None) -> None:
    value = _to_memory(value, dtype)
    if ref.space == "smem":
        if any(n != 1 for n in window.sizes) or mask is not None:
            raise Refusal(
                f"{ref.label} is in SMEM, which is written one scalar at a time, not shape {window.shape}.",
                "index it: o_ref[i] = …, or put it in VMEM",
            )
        memref.store(reshape(value, ()), memory, [index(s) for s in window.starts])
        return
    _in_vmem(ref, "write")
    value = reshape(value, window.sizes or (1,))
    if window.is_strided:
        _store_strided(ref, memory, window, value, dtype, mask)
        return
    _store_unit(memory, window, value, None if mask is None else reshape(mask, window.sizes))


def _store_unit(memory: ir.Value, window: Window, value: ir.Value, mask: ir.Value | None) -> None:
    """Store in a window of stride 1."""
    starts = list(window.starts)
    if dims := unaligned.plan(memory, starts, window.sizes):
        unaligned.store(memory, starts, value, dims, mask)
    elif mask is None:
        vector.store(value, memory, [index(s) for s in starts])
    else:
        tpu.vector_store(value, memory, [index(s) for s in starts], mask=mask)


def _store_strided(ref: Ref, memory: ir.Value, window: Window, value: ir.Value, dtype: Any, mask: Any) -> None:
    element = memory_element(dtype)
    lanes = window.sizes[-1] == 128 == memory.type.shape[-1] and window.strides[-1] == 1
    if lanes and _is_32_bits(element) and mask is None:
        tpu.strided_store(value, memory, [index(s) for s in window.starts], list(window.strides))
        return
    axis = _strided_dimension(window)
    n = window.sizes[axis]
    _unrolled(n)
    mask = None if mask is None else reshape(mask, window.sizes)
    for i in range(n):
        part = _one_of(window, axis, i)
        starts = [i if d == axis else 0 for d in range(len(part.sizes))]
        here = None if mask is None else build.cut(mask, starts, part.sizes)
        new = build.cut(value, starts, part.sizes)
        if part.is_strided:
            _store_strided(ref, memory, part, new, dtype, here)
        else:
            _store_unit(memory, part, new, here)


# --- chains of views --------------------------------------------------------------------------------------------------
def load(ref: Ref, transforms: Sequence[Any]) -> ir.Value:
    """What a view of a Ref holds."""
    if not transforms and ref.is_plain:  # nearly all accesses are
        kind = typed(ref.aval.shape, memory_element(ref.aval.dtype))
        return _from_memory(vector.load(kind, ref.value, [index(0)] * len(ref.aval.shape)), ref.aval.dtype)
    if jaxlink.is_opaque(ref.aval.dtype):
        return _load_key(ref, transforms)
    if transforms and getattr(transforms[-1], "int_indexer_shape", ()) != ():
        return _load_rows(ref, transforms)
    place = views.follow(ref, transforms)
    value = _load_window(ref, place.memory, place.window, place.dtype)
    for transform in place.rest:
        value = _view(value, transform)
    return value


def _load_rows(ref: Ref, transforms: Sequence[Any]) -> ir.Value:
    """A view by one array of indices, along one dimension: all of that dimension is read, and chosen from."""
    *outer, indexer = transforms
    arrays = [d for d, i in enumerate(indexer.indices) if not isinstance(i, jaxlink.Slice)]
    whole = [isinstance(i, jaxlink.Slice) for i in indexer.indices]
    if len(arrays) != 1 or len(indexer.int_indexer_shape) != 1:
        views.window_of(indexer)  # refuses
    (axis,) = arrays
    value = load(ref, outer)
    for d, index_or_slice in enumerate(indexer.indices):
        if whole[d]:
            if not isinstance(index_or_slice.start, int):
                views.window_of(indexer)
            value = strided(value, d, index_or_slice.start, index_or_slice.size, index_or_slice.stride)
    shape = list(build.shape_of(value))
    places = indexer.indices[axis]
    places: Any = (
        places if isinstance(places, ir.Value) else literal(np.asarray(places), jax.typeof(np.asarray(places)))
    )
    shape[axis] = build.shape_of(places)[0]
    places = build.broadcast(places, shape, [axis])
    last = build.full(places.type, build.shape_of(value)[axis] - 1)
    places = arith.maxsi(arith.minsi(places, last), build.full(places.type, 0))
    return take(value, places, axis)


def _load_key(ref: Ref, transforms: Sequence[Any]) -> ir.Value:
    """A PRNG key as the vector of its words, which are scalars in SMEM."""
    words = tuple(ref.aval.dtype._impl.key_shape)
    memory, index_of = ref.value, ()
    for transform in transforms:
        window = views.window_of(transform)
        if any(n != 1 for n in window.sizes):
            raise Refusal(f"{ref.label} holds keys, which are read one at a time.", "index it: key_ref[i]")
        index_of = window.starts
    if len(index_of) + len(words) != len(memory.type.shape):
        index_of = (0,) * (len(memory.type.shape) - len(words))
    result, number = None, build.numbers(words)
    for n, at in enumerate(np.ndindex(*words)):
        value = build.splat(memref.load(memory, [index(s) for s in (*index_of, *map(int, at))]), words)
        here = arith.cmpi(arith.CmpIPredicate.eq, number, build.full(number.type, n))
        result = value if result is None else choose(here, value, result)
    assert result is not None  # a key has words
    return result


def _view(value: ir.Value, transform: Any) -> ir.Value:
    """A view of a value."""
    match transform:
        case jaxlink.TransposeTransform():
            return build.transpose(value, transform.permutation)
        case jaxlink.ReshapeTransform():
            return reshape(value, transform.shape)
        case jaxlink.BitcastTransform():
            shape = build.shape_of(value)
            element = memory_element(np.dtype(transform.dtype))
            rows = shape[-2] * unaligned.bits(build.element_of(value)) // unaligned.bits(element)
            return tpu.bitcast(typed((*shape[:-2], rows, shape[-1]), element), value)
        case jaxlink.NDIndexer():
            window = views.window_of(transform)
            for axis, (start, size, stride) in enumerate(zip(window.starts, window.sizes, window.strides)):
                if not isinstance(start, int):
                    n = build.shape_of(value)[axis]
                    value = build.rotate(value, arith.subi(build.constant(n), build.as_i32(start)), axis)
                    start = 0
                value = strided(value, axis, start, size, stride)
            return reshape(value, window.shape)
    raise Refusal(f"the view {transform} is not known to the TPU compiler.")


def _put(old: ir.Value, transforms: Sequence[Any], new: ir.Value, mask: Any) -> ir.Value:
    """`old` with what a chain of views of it selects replaced by `new`."""
    if not transforms:
        return new if mask is None else choose(mask, new, old)
    first, rest = transforms[0], transforms[1:]
    if rest or mask is not None:
        new, mask = _put(_view(old, first), rest, new, mask), None
    match first:
        case jaxlink.TransposeTransform():
            return build.transpose(new, [int(d) for d in np.argsort(first.permutation)])
        case jaxlink.ReshapeTransform():
            return reshape(new, build.shape_of(old))
        case jaxlink.NDIndexer():
            window = views.window_of(first)
            if not window.is_strided:
                return _insert(old, reshape(new, window.sizes), window.starts)
    raise Refusal(
        "a store to a strided part of a transposed or strided view is not known to the TPU compiler.",
        "read the view, change the value with jnp.where, and write it back whole",
    )


def _insert(old: ir.Value, new: ir.Value, starts: Sequence[Any]) -> ir.Value:
    """`old` with a window replaced."""
    shape, sizes, here = build.shape_of(old), build.shape_of(new), None
    for axis, (n, start) in enumerate(zip(shape, starts)):
        if sizes[axis] == n:
            continue
        at = build.as_i32(start)
        new = build.rotate(unaligned.widened(new, axis, n), at, axis)
        place = arith.subi(build.iota(shape, axis), build.splat(at, shape))
        inside = arith.cmpi(arith.CmpIPredicate.ult, place, build.full(place.type, sizes[axis]))
        here = inside if here is None else arith.andi(here, inside)
    return new if here is None else choose(here, new, old)


def store(ref: Ref, transforms: Sequence[Any], value: ir.Value, mask: Any = None) -> None:
    """Write a view of a Ref."""
    if not transforms and ref.is_plain and mask is None:
        vector.store(_to_memory(value, ref.aval.dtype), ref.value, [index(0)] * len(ref.aval.shape))
        return
    place = views.follow(ref, transforms)
    if place.rest:
        exact = mask is None and not any(isinstance(t, jaxlink.NDIndexer) for t in place.rest)
        if exact:  # only the shape of what was there counts
            old = _shaped_like(place.window.shape, value)
        else:
            old = _load_window(ref, place.memory, place.window, place.dtype)
        value, mask = _put(old, place.rest, value, mask), None
    _store_window(ref, place.memory, place.window, value, place.dtype, mask)


def _shaped_like(shape: tuple[int, ...], value: ir.Value) -> ir.Value:
    return build.full(typed(shape, build.element_of(value)), 0)


# --- equations --------------------------------------------------------------------------------------------------------
@RULES.rule(jaxlink.get_p)
def _get(ev: Emitter, eqn, ref, *flat):
    return load(ref, jax.tree.unflatten(eqn.params["tree"], flat))


@RULES.rule(jaxlink.swap_p)
def _swap(ev: Emitter, eqn, ref, new, *flat):
    transforms = jax.tree.unflatten(eqn.params["tree"], flat)
    old = load(ref, transforms) if ev.is_used(eqn.outvars[0]) else None
    store(ref, transforms, new)
    return old


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(ev: Emitter, eqn, ref, new, *flat):
    transforms = jax.tree.unflatten(eqn.params["tree"], flat)
    old = load(ref, transforms)
    add: Callable = arith.addf if is_float(eqn.invars[1].aval.dtype) else arith.addi
    store(ref, transforms, add(old, new))
    return []


@RULES.rule(jaxlink.ref_p)
def _new_ref(ev: Emitter, eqn, x):
    ref = _local(eqn.outvars[0].aval)
    store(ref, (), x)
    return ref


@RULES.rule(jaxlink.empty_ref_p)
def _empty_ref(ev: Emitter, eqn):
    return _local(eqn.outvars[0].aval)


def _local(aval: Any) -> Ref:
    """A buffer for a Ref that the kernel makes (`jax.new_ref`): VMEM, or SMEM for a scalar."""
    kind = memref_type(aval.shape, memory_element(aval.dtype), "vmem" if aval.shape else "smem")
    return Ref(memref.alloca(kind, [], []), aval, getattr(aval, "label", "a Ref"))


RULES.rule(jaxlink.freeze_p)(lambda ev, eqn, ref: load(ref, ()))
RULES.rule(jaxlink.free_ref_p)(lambda ev, eqn, ref: [])


@RULES.rule(masked.masked_load_p)
def _masked_load(ev: Emitter, eqn, ref, *flat):
    transforms, mask, other = jax.tree.unflatten(eqn.params["tree"], flat)
    value = load(ref, transforms)
    return value if mask is None or other is None else choose(mask, value, other)


@RULES.rule(masked.masked_store_p)
def _masked_store(ev: Emitter, eqn, ref, value, *flat):
    transforms, mask = jax.tree.unflatten(eqn.params["tree"], flat)
    store(ref, transforms, value, mask)
    return []


@RULES.rule(jaxlink.ref_broadcast_to_p)
def _ref_broadcast(ev: Emitter, eqn, x):
    shape = eqn.params["shape"]
    return build.broadcast(x, shape, range(len(shape) - len(build.shape_of(x)), len(shape)))
