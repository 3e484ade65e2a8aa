"""Checks of arguments that operations of the Mosaic GPU dialect have in common, at the user's line.

A Ref whose memory space is not said (`DEFAULT`, or none: a block of `pl.pallas_call`, a Ref under `pl.run_state` before
its kernel is called) passes the checks of spaces; whoever runs the kernel knows where it is.

Source: the Pallas Mosaic GPU reference, sections on barriers and asynchronous copies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language import frames, printing
from palladion.language.gpu.memory import MemorySpace
from palladion.language.gpu.refs import is_barrier, space_of
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import MemorySpace as AnySpace
from palladion.language.refs import RefView
from palladion.language.semaphores import as_view, is_semaphore

_SPACES = (*MemorySpace, AnySpace.ANY)
_ONLY_INTEGERS = ("inc", "dec", "and", "or", "xor")


def print_operands(*primitives: Any) -> None:
    """Jaxprs show these equations as `name[params] field operand …`, without the structure of the operands."""
    for primitive in primitives:

        def words(operands: Any, params: dict[str, Any], name: str = primitive.name) -> list[Any]:
            said = [f"{k}={v}" for k, v in params.items() if k != "tree" and v is not None and v != ()]
            given = [(k, v) for k, v in operands._asdict().items() if v is not None]
            return [f"{name}[{' '.join(said)}]" if said else name, *(x for pair in given for x in pair)]

        printing.print_equations_of(primitive, words)


# --- Refs -------------------------------------------------------------------------------------------------------------
def a_ref(name: str, what: str, ref: Any, *spaces: MemorySpace, or_barrier: bool = False) -> RefView:
    """A Ref of data, in one of these memories.

    Arguments:
      name: the function that the user called.
      what: the argument, "source".
      ref: what they gave.
      spaces: where it may be; none: anywhere.
      or_barrier: whether it may be a barrier.

    Raises:
      TypeError: no Ref, or one of semaphores or barriers. ValueError: a Ref in another memory.
    """
    frames.required(name)
    if not is_ref(ref):
        hint = "a Ref, x_ref, or a view of one, x_ref.at[pl.ds(i, 8)]; x_ref[...] reads its value"
        raise mistake(TypeError, f"The {what} of {name} is {kind_of(ref)}; it must be a Ref.", hint=hint)
    if is_semaphore(ref) and not (or_barrier and is_barrier(ref)):
        kind = "barriers" if is_barrier(ref) else "semaphores"
        raise mistake(
            TypeError,
            f"The {what} of {name} is {label_of(ref)}, which holds {kind}, not data.",
            hint="the order of arguments is source, destination, barrier",
        )
    where = space_of(ref)
    allowed = {*spaces, AnySpace.ANY} if MemorySpace.GMEM in spaces else set(spaces)
    if spaces and where in _SPACES and where not in allowed:
        places = " or ".join(s.name for s in spaces)
        raise mistake(
            ValueError,
            f"The {what} of {name} must be in {places}; {label_of(ref)} is in {where.name}.",
            hint="plgpu.copy_gmem_to_smem(gmem_ref, smem_ref, barrier) and plgpu.copy_smem_to_gmem(smem_ref, gmem_ref) "
            "move data between the two",
        )
    return as_view(ref)


def shape_of(view: RefView) -> tuple[int, ...]:
    """The shape of a view; sizes of Refs are known."""
    return tuple(int(n) for n in view.shape)


def one_barrier(name: str, barrier: Any) -> RefView:
    """A barrier argument.

    Raises:
      TypeError: something else. ValueError: an array of barriers.
    """
    frames.required(name)
    if not (is_ref(barrier) and is_barrier(barrier)):
        what = f"the Ref {label_of(barrier)}, which holds {barrier.dtype}" if is_ref(barrier) else _described(barrier)
        hint = "scratch_shapes=[plgpu.Barrier()] gives the kernel a Ref of one"
        raise mistake(TypeError, f"{name} takes a barrier, not {what}.", hint=hint)
    if tuple(barrier.shape):
        raise mistake(
            ValueError,
            f"{name} takes one barrier; {label_of(barrier)} is an array of shape {tuple(barrier.shape)}.",
            hint="pick one: barriers.at[i]",
        )
    for axes in barrier.dtype.collective_axes or ():
        cluster_axes("plgpu.ClusterBarrier", axes)
    return as_view(barrier)


def _described(x: Any) -> str:
    is_type = isinstance(x, type) or hasattr(x, "get_ref_aval")
    return f"the type {getattr(x, '__name__', type(x).__name__)}" if is_type else kind_of(x)


def same_type(src: Any, dst: Any, shape: Sequence[int], what: str) -> None:
    """Source and destination of a copy hold the same dtype, and `dst` has the shape that the copy delivers.

    Raises:
      ValueError: different shapes. TypeError: different dtypes.
    """
    if tuple(dst.shape) != tuple(shape):
        whole = tuple(src.shape)
        share = "" if whole == tuple(shape) else f", of which each block gets {tuple(shape)}"
        raise mistake(
            ValueError,
            f"{what} needs a source and a destination of the same shape: {label_of(src)} has {whole}{share}, "
            f"{label_of(dst)} has {tuple(dst.shape)}.",
            hint="take views of the same size: x_ref.at[pl.ds(i, 8)]; an integer index drops a dimension",
        )
    if src.dtype != dst.dtype:
        raise mistake(
            TypeError,
            f"{what} does not convert: {label_of(src)} holds {src.dtype}, {label_of(dst)} holds {dst.dtype}.",
            hint="give both the same dtype, and convert in registers: o_ref[...] = x_ref[...].astype(o_ref.dtype)",
        )


# --- values -----------------------------------------------------------------------------------------------------------
def an_array(name: str, x: Any) -> jax.Array:
    """An array argument.

    Raises:
      TypeError: a Ref, or something that is no array.
    """
    if is_ref(x):
        raise mistake(TypeError, f"{name} takes an array; {label_of(x)} is a Ref.", hint="read it first: x_ref[...]")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise mistake(
            TypeError, f"{name} takes an array, not {_described(x)}.", hint="a value: x_ref[...], jnp.zeros(shape)"
        ) from None


def a_dtype(name: str, what: str, dtype: Any) -> np.dtype:
    """A dtype argument.

    Raises:
      TypeError: it is none.
    """
    try:
        if dtype is None or is_ref(dtype) or isinstance(dtype, (jax.Array, np.ndarray, np.generic)):
            raise TypeError
        found = jnp.dtype(dtype)
        if found.names is not None or (found.kind in "SUVOMm" and not jnp.issubdtype(found, np.number)):
            raise TypeError
    except (TypeError, ValueError):
        raise mistake(TypeError, f"The {what} of {name} is {_described(dtype)}; it must be a dtype.",
                      hint="jnp.float32, jnp.int32, x.dtype …") from None  # fmt: skip
    return found


def integers(name: str, what: str, given: Any, hint: str) -> tuple[int, ...]:
    """A sequence of Python integers, none negative.

    Raises:
      TypeError: something else. ValueError: a negative one.
    """
    try:
        found = tuple(operator.index(n) for n in given) if isinstance(given, (tuple, list)) else None
    except TypeError:
        found = None
    if found is None:
        headline = f"The {what} of {name} is {_described(given)}; it must be a tuple of integers."
        raise mistake(TypeError, headline, hint=hint)
    if any(n < 0 for n in found):
        raise mistake(ValueError, f"The {what} of {name} is {found}; sizes cannot be negative.", hint=hint)
    return found


def a_predicate(name: str, predicate: Any) -> Any:
    """A boolean scalar as an operand; None for None and True: the operation always happens.

    Raises:
      TypeError: something else.
    """
    if predicate is None or predicate is True:
        return None
    if is_ref(predicate):
        headline = f"The predicate of {name} is a Ref, {label_of(predicate)}."
        raise mistake(TypeError, headline, hint="read it: flag_ref[0]")
    scalar = isinstance(predicate, (bool, np.bool_, np.ndarray, jax.Array)) and np.ndim(predicate) == 0
    if not scalar or jnp.result_type(predicate) != np.bool_:
        headline = f"The predicate of {name} is {kind_of(predicate)}; it must be a boolean scalar."
        raise mistake(TypeError, headline, hint="a comparison gives one: predicate=i < n")
    if isinstance(predicate, jaxlink.Tracer):
        return predicate
    return None if predicate else np.bool_(False)  # known: no captured array


def a_count(name: str, n: Any) -> int:
    """How many groups may stay in flight: a Python integer, not negative.

    Raises:
      TypeError, ValueError: something else.
    """
    try:
        count = operator.index(n) if not isinstance(n, bool) else None
    except TypeError:
        count = None
    if count is None:
        hint = "it is known when the kernel is traced: 0 waits for all"
        raise mistake(TypeError, f"The n of {name} is {kind_of(n)}; it must be a Python integer.", hint=hint)
    if count < 0:
        raise mistake(ValueError, f"The n of {name} is {count}; it cannot be negative.", hint="0 waits for all")
    return count


def an_operation(name: str, what: str, op: Any, allowed: Sequence[str], dtype: Any) -> str:
    """The name of a reduction, checked against the dtype: bitwise ones and counters want integers.

    Raises:
      ValueError: an unknown one. TypeError: one that the dtype does not have.
    """
    if not isinstance(op, str) or op not in allowed:
        raise mistake(
            ValueError,
            f"The {what} of {name} is {kind_of(op)}, which is not one.",
            hint=f"one of {', '.join(map(repr, allowed))}",
        )
    if op in _ONLY_INTEGERS and not jnp.issubdtype(dtype, jnp.integer):
        hint = "'add', 'min' and 'max' take floating-point numbers, too"
        raise mistake(TypeError, f"The {what} {op!r} of {name} is for integers, not for {dtype}.", hint=hint)
    return op


# --- axes -------------------------------------------------------------------------------------------------------------
def axis_names(name: str, what: str, axes: Any) -> tuple[Any, ...]:
    """One axis name or a tuple of them, as a flat tuple; None is ().

    Raises:
      TypeError: no names. ValueError: a name that comes twice.
    """
    names: list[Any] = []

    def add(entry: Any) -> None:
        if isinstance(entry, (tuple, list)):
            for part in entry:
                add(part)
        elif isinstance(entry, str) or (entry is not None and not hasattr(entry, "dtype") and _hashable(entry)):
            names.append(entry)
        else:
            hint = f"{what}='cluster', or a tuple of names"
            raise mistake(TypeError, f"The {what} of {name} cannot be {kind_of(axes)}.", hint=hint)

    if axes is not None:
        add(axes)
    if len(set(names)) != len(names):
        raise mistake(ValueError, f"The {what} of {name} names an axis twice: {axes!r}.", hint="once each")
    return tuple(names)


def _hashable(x: Any) -> bool:
    return getattr(x, "__hash__", None) is not None


def cluster_axes(name: str, axes: Any, what: str = "collective_axes") -> tuple[Any, ...]:
    """Names of cluster axes of the kernel's mesh (of any of its axes, where the frame does not know the mesh).

    Raises:
      TypeError: no names. ValueError: not cluster axes of this kernel.
    """
    names = axis_names(name, what, axes)
    frame = frames.required(name)
    known = getattr(getattr(frame, "mesh", None), "cluster_names", None)
    known = tuple(frame.cores) if known is None else tuple(known)
    for axis in names:
        if axis not in known:
            raise mistake(
                ValueError,
                f"The {what} of {name} must be cluster axes of the kernel; {axis!r} is none.",
                axes=", ".join(map(repr, known)) or "none",
                hint="plgpu.kernel(…, cluster=(2,), cluster_names=('cluster',)) has the cluster axis 'cluster'",
            )
    return names


def blocks_along(axes: Sequence[Any]) -> int:
    """How many blocks of a cluster there are along axes of the kernel's mesh."""
    frame = frames.current()
    assert frame is not None  # `cluster_axes` has asked
    return math.prod(frame.cores[axis] for axis in axes)


def device_axes(name: str, axes: Any) -> tuple[Any, ...]:
    """Names of axes of the mesh of devices, that of the `shard_map` around the kernel.

    Raises:
      TypeError: no names. ValueError: none given, or not axes of the mesh.
    """
    names = axis_names(name, "collective_axes", axes)
    frames.required(name)
    around = jax.sharding.get_abstract_mesh()
    known = tuple(around.axis_names) if around.manual_axes else None  # unknown outside a shard_map
    if not names:
        raise mistake(ValueError, f"{name} needs collective_axes: the axes of devices.", hint="collective_axes='x'")
    for axis in names:
        if known is not None and axis not in known:
            raise mistake(
                ValueError,
                f"The collective_axes of {name} must be axes of the mesh of devices; {axis!r} is none.",
                axes=", ".join(map(repr, known)),
                hint="the axes of the shard_map around the call",
            )
    return names
