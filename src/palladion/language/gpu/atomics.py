"""Atomic updates of memory, and stores and reductions over all devices by the NVLINK switch (multimem).

Equations (operands are the leaves of the NamedTuple named; a Ref comes before the dynamic indices of its view):

    atomic               Atomic(ref, value)          op
    multimem_store       MultiStore(value, ref)      collective_axes
    multimem_load_reduce MultiLoad(ref)              collective_axes, reduction_op     gives an array

Source: the API reference of Pallas Mosaic GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language import indexing
from palladion.language.gpu.arguments import a_ref, an_operation, device_axes, print_operands, shape_of
from palladion.language.gpu.copy_rules import ATOMICS
from palladion.language.gpu.memory import GMEM, SMEM
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.gpu.views import split_view
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import RefView

__all__ = [
    "atomic_add",
    "atomic_and",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xor",
    "multimem_load_reduce",
    "multimem_store",
]


# --- equations --------------------------------------------------------------------------------------------------------
class Atomic(NamedTuple):
    """The operands of `atomic`."""

    ref: RefView
    value: Any


class MultiStore(NamedTuple):
    """The operands of `multimem_store`."""

    value: Any
    ref: RefView


class MultiLoad(NamedTuple):
    """The operands of `multimem_load_reduce`."""

    ref: RefView


def _like_the_ref(types: MultiLoad, params: dict[str, Any]) -> list[Any]:
    return [jaxlink.ShapedArray(shape_of(types.ref), types.ref.dtype)]


atomic_p = gpu_primitive("atomic", reads=["ref"], writes=["ref"])
multimem_store_p = gpu_primitive("multimem_store", writes=["ref"])
multimem_load_reduce_p = gpu_primitive("multimem_load_reduce", reads=["ref"], results=_like_the_ref)
print_operands(atomic_p, multimem_store_p, multimem_load_reduce_p)


# --- atomics ----------------------------------------------------------------------------------------------------------
def _atomic(op: str, ref: Any, val: Any, optimized: bool) -> None:
    name = f"plgpu.atomic_{op}"
    view = a_ref(name, "ref", ref, GMEM, SMEM)
    if is_ref(val):
        raise mistake(TypeError, f"The val of {name} is a Ref, {label_of(val)}.", hint="read it: x_ref[...]")
    if not isinstance(optimized, bool):
        raise mistake(TypeError, f"The optimized of {name} is {kind_of(optimized)}.", hint="True or False")
    an_operation(name, "operation", op, ATOMICS, view.dtype)
    bind(name, atomic_p, Atomic(view, indexing.as_stored(view, val, shape_of(view))), op=op)


def atomic_add(ref: Any, val: Any, *, optimized: bool = True) -> None:
    """Add to memory, each element atomically: an element that an index array names twice counts twice.

    Floating-point sums depend on the order in which threads come.

    Arguments:
      ref: a Ref or view in GMEM or SMEM.
      val: an array of its shape and dtype.
      optimized: a promise that the array's layout suits the update; results are the same.

    Raises:
      TypeError: not a Ref. ValueError: another memory, shape or dtype; outside a kernel.
    """
    _atomic("add", ref, val, optimized)


def atomic_max(ref: Any, val: Any, *, optimized: bool = True) -> None:
    """Keep the larger of what memory holds and `val`, each element atomically.

    Arguments: ref, val, optimized: as in `atomic_add`. Errors are those of `atomic_add`.
    """
    _atomic("max", ref, val, optimized)


def atomic_min(ref: Any, val: Any, *, optimized: bool = True) -> None:
    """Keep the smaller of what memory holds and `val`, each element atomically.

    Arguments: ref, val, optimized: as in `atomic_add`. Errors are those of `atomic_add`.
    """
    _atomic("min", ref, val, optimized)


def atomic_and(ref: Any, val: Any, *, optimized: bool = True) -> None:
    """Combine memory with `val` by bitwise and, each element atomically; integers only.

    Arguments: ref, val, optimized: as in `atomic_add`. Errors are those of `atomic_add`.
    """
    _atomic("and", ref, val, optimized)


def atomic_or(ref: Any, val: Any, *, optimized: bool = True) -> None:
    """Combine memory with `val` by bitwise or, each element atomically; integers only.

    Arguments: ref, val, optimized: as in `atomic_add`. Errors are those of `atomic_add`.
    """
    _atomic("or", ref, val, optimized)


def atomic_xor(ref: Any, val: Any, *, optimized: bool = True) -> None:
    """Combine memory with `val` by bitwise exclusive or, each element atomically; integers only.

    Arguments: ref, val, optimized: as in `atomic_add`. Errors are those of `atomic_add`.
    """
    _atomic("xor", ref, val, optimized)


# --- multimem ---------------------------------------------------------------------------------------------------------
def _on_all(name: str, ref: Any) -> RefView:
    view = a_ref(name, "ref", ref, GMEM)
    if split_view(view)[0]:
        headline = f"{name} takes this device's Ref; {label_of(view)} is a view of another place."
        raise mistake(ValueError, headline, hint="collective_axes says which devices are meant")
    return view


def multimem_store(source: jax.Array, ref: Any, collective_axes: Any) -> None:
    """Store an array in the Ref of this name on all devices along mesh axes, this one included.

    Arguments:
      source: the array.
      ref: a Ref or view in GMEM, of its shape and dtype.
      collective_axes: axes of the mesh of devices, a name or a tuple of names.

    Raises:
      TypeError: not an array, not a Ref. ValueError: another memory, shape or dtype, not axes of the mesh; outside a
        kernel.
    """
    name = "plgpu.multimem_store"
    view = _on_all(name, ref)
    if is_ref(source):
        raise mistake(TypeError, f"The source of {name} is a Ref, {label_of(source)}.", hint="read it: x_ref[...]")
    operands = MultiStore(indexing.as_stored(view, source, shape_of(view)), view)
    bind(name, multimem_store_p, operands, collective_axes=device_axes(name, collective_axes))


_FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn)


def multimem_load_reduce(ref: Any, *, collective_axes: Any, reduction_op: str) -> jax.Array:
    """Read the Ref of this name on all devices along mesh axes, and combine what is there.

    Arguments:
      ref: a Ref or view in GMEM of float32, float16, bfloat16, float8 or integers of 32 or 64 bits.
      collective_axes: axes of the mesh of devices, a name or a tuple of names.
      reduction_op: 'add'; 'min' or 'max', not of float32; for integers also 'and', 'or', 'xor'.

    Returns:
      an array of the Ref's shape and dtype.

    Raises:
      TypeError: not a Ref, a dtype or an operation that it does not have. ValueError: another memory, an unknown
        operation, not axes of the mesh; outside a kernel.
    """
    name = "plgpu.multimem_load_reduce"
    view = _on_all(name, ref)
    axes = device_axes(name, collective_axes)
    dtype = jnp.dtype(view.dtype)
    if dtype not in _FLOATS and not (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4):
        hint = "float32, float16, bfloat16, float8, int32, int64"
        raise mistake(TypeError, f"{name} cannot combine {dtype}, which {label_of(view)} holds.", hint=hint)
    op = an_operation(name, "reduction_op", reduction_op, ATOMICS, dtype)
    if op in ("min", "max") and dtype == jnp.float32:
        raise mistake(TypeError, f"The reduction_op {op!r} of {name} is not for float32.", hint="'add', or float16")
    return bind(name, multimem_load_reduce_p, MultiLoad(view), collective_axes=axes, reduction_op=op)[0]
