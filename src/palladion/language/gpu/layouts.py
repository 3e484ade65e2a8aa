"""Operations with array layouts: casts, loads and stores, iota, reductions, and what goes with them.

An array's layout is no part of its type: it is what a `layout_cast` says, or what `layout_inference` finds from the
operations that made it. Here is how a kernel says it.

    layout_cast    tree of Cast(x)    params: layout    gives the same array
    print_layout   tree of Show(x)    params: fmt       shown when the kernel's layouts are checked

Source: the Pallas Mosaic GPU reference, section on array layouts; signatures of JAX 0.12.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.errors import kind_of, mistake
from palladion.language.gpu.arguments import a_dtype, an_array, integers, print_operands
from palladion.language.gpu.layout_values import Layout as Layout
from palladion.language.gpu.layout_values import ParameterizedLayout as ParameterizedLayout
from palladion.language.gpu.layout_values import ReducedLayout as ReducedLayout
from palladion.language.gpu.layout_values import Replicated as Replicated
from palladion.language.gpu.layout_values import ShapeDtypeStruct as ShapeDtypeStruct
from palladion.language.gpu.layout_values import Tiling as Tiling
from palladion.language.gpu.layout_values import TMEMLayout as TMEMLayout
from palladion.language.gpu.layout_values import check_fits, checked_layout
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.gpu.refs import storage_of
from palladion.language.indices import is_ref


class Cast(NamedTuple):
    """The operand of `layout_cast`."""

    x: Any


class Show(NamedTuple):
    """The operand of `print_layout`."""

    x: Any


layout_cast_p = gpu_primitive("layout_cast", results=lambda cast, _: [cast.x], effect=False)
print_layout_p = gpu_primitive("print_layout")
print_operands(layout_cast_p, print_layout_p)


def layout_cast(x: Any, new_layout: Any) -> Any:
    """Say which layout arrays have from here on.

    A constant, or an array whose layout is open, takes the layout for free; one that has another layout is moved only
    where the hardware has a cheap way. Store to SMEM and load with the other layout otherwise.

    Arguments:
      x: an array, or a pytree of arrays.
      new_layout: a `plgpu.Layout`, or one with parameters, or reduced.

    Returns:
      the arrays.

    Raises:
      TypeError: no layout. KernelFinding: the layout does not fit the shape (`illegal-layout`).
    """
    layout = checked_layout("plgpu.layout_cast", new_layout)

    def one(leaf: Any) -> jax.Array:
        array = an_array("plgpu.layout_cast", leaf)
        check_fits(layout, array.shape)
        return bind("plgpu.layout_cast", layout_cast_p, Cast(array), layout=layout)[0]

    return jax.tree.map(one, x, is_leaf=is_ref)


# --- loads and stores -------------------------------------------------------------------------------------------------
def load(src: Any, idx: Any = (), *, layout: Any = None, optimized: bool = True) -> jax.Array:
    """Read a Ref into registers, with a layout.

    Arguments:
      src: a Ref in SMEM or GMEM, or a view of one.
      idx: which part, as between brackets (the reference's spelling; `src.at[idx]` is the newer).
      layout: a `plgpu.Layout`; None leaves it open.
      optimized: whether the compiler must find a way without bank conflicts.

    Returns:
      the array.

    Raises:
      TypeError: `src` is not a Ref. Those of an indexed read, and of `layout_cast`.
    """
    _check_flag("plgpu.load", optimized)
    if not is_ref(src):
        raise mistake(TypeError, f"plgpu.load reads a Ref, not {kind_of(src)}.", hint="plgpu.load(x_ref, layout=…)")
    value = src[...] if isinstance(idx, tuple) and not idx else src[idx]
    return value if layout is None else layout_cast(value, layout)


_MISSING: Any = object()


def store(dst: Any, idx: Any = _MISSING, value: Any = _MISSING, *, optimized: bool = True) -> None:
    """Write an array to a Ref: `store(dst, value)`, or `store(dst, idx, value)` as the reference spells it.

    Arguments:
      dst: a Ref in SMEM or GMEM, or a view of one.
      idx: which part, as between brackets.
      value: an array of that part's shape and dtype.
      optimized: whether the compiler must find a way without bank conflicts.

    Raises:
      TypeError: `dst` is not a Ref, or there is no value. Those of an indexed write.
    """
    _check_flag("plgpu.store", optimized)
    if value is _MISSING:
        idx, value = (), idx
    idx = () if idx is _MISSING else idx
    if not is_ref(dst) or value is _MISSING:
        what = f"writes to a Ref, not to {kind_of(dst)}" if not is_ref(dst) else "needs a value"
        raise mistake(TypeError, f"plgpu.store {what}.", hint="plgpu.store(o_ref, value)")
    dst[... if isinstance(idx, tuple) and not idx else idx] = value


def _check_flag(function: str, optimized: Any) -> None:
    if not isinstance(optimized, bool):
        hint = "the index of a load is its second argument, the layout a keyword"
        raise mistake(TypeError, f"{function}: optimized is True or False, not {kind_of(optimized)}.", hint=hint)


def broadcasted_iota(dtype: Any, shape: Sequence[int], dimension: int, *, layout: Any = None) -> jax.Array:
    """An array whose elements are their index along a dimension, with a layout.

    Arguments:
      dtype, shape, dimension: as `jax.lax.broadcasted_iota`.
      layout: a `plgpu.Layout`; None leaves it open.

    Raises:
      TypeError, ValueError: no dtype, no shape, or a dimension that it does not have.
    """
    name = "plgpu.broadcasted_iota"
    sizes = integers(name, "shape", shape, "shape=(64, 128)")
    if not isinstance(dimension, (int, np.integer)) or not 0 <= dimension < len(sizes):
        headline = f"The dimension of {name} is {kind_of(dimension)}, which the shape {sizes} does not have."
        raise mistake(ValueError, headline, hint="count from 0")
    kind = a_dtype(name, "dtype", dtype)
    if not jnp.issubdtype(kind, np.number):
        raise mistake(TypeError, f"The dtype of {name} is {kind}; indices are numbers.", hint="jnp.int32")
    result = lax.broadcasted_iota(kind, sizes, int(dimension))
    return result if layout is None else layout_cast(result, layout)


def print_layout(fmt: str, x: Any) -> None:
    """Show the layout of an array, or how a Ref's buffer is stored, when the kernel is checked.

    Arguments:
      fmt: a text with one `{}`.
      x: an array or a Ref.

    Raises:
      ValueError: no place for it in the text.
    """
    try:
        same = isinstance(fmt, str) and fmt.format("a") == fmt.format("b")
    except (IndexError, KeyError, ValueError):
        same = True
    if not isinstance(fmt, str) or same:
        raise mistake(
            ValueError,
            f"plgpu.print_layout takes a text with one {{}}, not {kind_of(fmt)}.",
            hint='plgpu.print_layout("acc: {}", acc)',
        )
    if is_ref(x):
        print(fmt.format(", ".join(map(repr, storage_of(x).transforms)) or "row-major"))
        return
    bind("plgpu.print_layout", print_layout_p, Show(an_array("plgpu.print_layout", x)), fmt=fmt)


# --- reductions -------------------------------------------------------------------------------------------------------
def _reduction(name: str, reduce: Callable[..., jax.Array]) -> Callable[..., Any]:
    def call(
        x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False, *, accumulator_ilp: int | None = None
    ) -> Any:
        if accumulator_ilp is not None:
            try:
                valid = not isinstance(accumulator_ilp, bool) and operator.index(accumulator_ilp) >= 1
            except TypeError:
                valid = False
            if not valid:
                headline = f"plgpu.{name}: accumulator_ilp is a positive integer or None, not {accumulator_ilp!r}."
                raise mistake(ValueError, headline, hint="how many partial results each lane keeps at once: 2, 4 …")
        if isinstance(axis, list):
            axis = tuple(axis)
        dims: tuple[Any, ...] = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        if not all(isinstance(d, (int, np.integer)) for d in dims) or not isinstance(keepdims, (bool, np.bool_)):
            wrong = kind_of(axis if isinstance(keepdims, (bool, np.bool_)) else keepdims)
            headline = f"plgpu.{name} takes axis=an integer or a tuple of them and keepdims=True or False, not {wrong}."
            raise mistake(TypeError, headline, hint="axis=1 gives a value for each row")

        def one(leaf: Any) -> jax.Array:
            array = an_array(f"plgpu.{name}", leaf)
            if len({d % array.ndim if -array.ndim <= d < array.ndim else None for d in dims} - {None}) != len(dims):
                headline = f"plgpu.{name}: axis={axis!r} of an array of shape {array.shape}."
                raise mistake(ValueError, headline, hint=f"each axis once, from 0 to {array.ndim - 1}")
            return reduce(array, axis=axis, keepdims=keepdims)

        return jax.tree.map(one, x, is_leaf=is_ref)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"""`jnp.{name}` of arrays in registers.

    Arguments:
      x: an array, or a pytree of arrays.
      axis: which dimensions go: an int, several, or None for all.
      keepdims: leave them, with size 1.
      accumulator_ilp: how many partial results each lane keeps at once, to hide latency; None: the compiler's choice.

    Returns:
      the reduced arrays; their layout is the operand's, reduced along `axis`.

    Raises:
      ValueError: `accumulator_ilp` is no positive integer. TypeError: `x` is a Ref.
    """
    return call


sum = _reduction("sum", jnp.sum)
max = _reduction("max", jnp.max)
min = _reduction("min", jnp.min)
prod = _reduction("prod", jnp.prod)


# --- helpers for shared memory ----------------------------------------------------------------------------------------
def find_swizzle(minor_dim_bits: int, what: str = "") -> Literal[128, 64, 32, 16]:
    """The widest swizzle for a buffer.

    Arguments:
      minor_dim_bits: size of its last dimension, in bits.
      what: the buffer, for the message.

    Returns:
      the swizzle in bytes: 128, 64, 32, or 16 (none); the largest whose bits divide `minor_dim_bits`.

    Raises:
      ValueError: not a multiple of 16 bytes.
    """
    if isinstance(minor_dim_bits, bool) or not isinstance(minor_dim_bits, (int, np.integer)) or minor_dim_bits < 1:
        headline = f"The minor_dim_bits of plgpu.find_swizzle is {kind_of(minor_dim_bits)}; it is a positive integer."
        raise mistake(TypeError, headline, hint="x.shape[-1] * jax.dtypes.itemsize_bits(x.dtype)")
    for swizzle in (128, 64, 32, 16):
        if minor_dim_bits % (swizzle * 8) == 0:
            return swizzle  # pyright: ignore[reportReturnType]
    raise mistake(
        ValueError,
        f"No swizzle fits {what or 'the buffer'}: its last dimension has {minor_dim_bits} bits, no multiple of 128.",
        hint="make the last dimension a multiple of 16 bytes (8 elements of 16 bits)",
    )


def format_tcgen05_sparse_metadata(meta: jax.Array, operand_dtype: Any) -> jax.Array:
    """Arrange the metadata of a sparse operand as `async_copy_sparse_metadata_to_tmem` wants it in SMEM.

    Arguments:
      meta: (M, K // 4, 2) of uint2: of each four elements of a row, the places of the two that are there.
      operand_dtype: of the sparse operand; 16 or 8 bits wide.

    Returns:
      (M // 128, K // 128, 128, 64) of uint2.

    Raises:
      ValueError: another shape, or sizes that are no multiples of 128. TypeError: another width.
    """
    name = "plgpu.format_tcgen05_sparse_metadata"
    meta = an_array(name, meta)
    bits = jax.dtypes.itemsize_bits(a_dtype(name, "operand_dtype", operand_dtype))
    if bits not in (8, 16):
        headline = f"Metadata of sparse operands is for 16-bit and 8-bit dtypes, not {jnp.dtype(operand_dtype)}."
        raise mistake(TypeError, headline, hint="jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn …")
    if meta.ndim != 3 or meta.shape[2] != 2 or meta.shape[0] % 128 or meta.shape[1] % 32:
        headline = f"Metadata of a sparse operand has shape (M, K // 4, 2), M and K multiples of 128, not {meta.shape}."
        raise mistake(ValueError, headline, hint="two entries for each four elements of a row of K")
    rows, steps = meta.shape[0] // 128, meta.shape[1] // 32
    if bits == 8:
        return meta.reshape(rows, 128, steps, 64).transpose(0, 2, 1, 3)
    # PTX: rows m and m + 8 share a 32-bit cell, and 32 of K are one instruction, whose halves lie 8 lanes apart.
    parts = meta.reshape(rows, 8, 2, 8, steps, 4, 2, 8).transpose(0, 4, 1, 6, 3, 5, 2, 7)
    return parts.reshape(rows, steps, 128, 64)
