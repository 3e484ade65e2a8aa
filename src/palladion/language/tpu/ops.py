"""The operations of the TPU dialect that are plain array or Ref semantics: bitcasts, rolls, masks, convolutions.

Those that need a machine (copies, semaphores, pipelines, the hardware's random numbers) come with the simulated TPU.

Source: public documentation of `jax.experimental.pallas.tpu`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import masked
from palladion.language.indices import is_ref
from palladion.language.refs import RefView


def _message(headline: str, hint: str | None = None) -> str:
    return explain(headline, where=locations.current_location(), hint=hint)


def load(ref: Any, *, mask: jax.Array | None = None) -> jax.Array:
    """What a Ref or view holds; lanes where the mask is off are uninitialised (NaN in interpreters).

    Arguments:
      ref: a Ref or a view of one.
      mask: boolean, broadcasts to the view; None for all lanes.

    Raises:
      TypeError, ValueError: not a Ref; a mask that is not boolean or does not fit.
    """
    return masked.load("pltpu.load", ref, mask, None, {})


def store(ref: Any, val: jax.Array, *, mask: jax.Array | None = None) -> None:
    """Store in a Ref or view; lanes where the mask is off keep what they hold.

    Arguments:
      ref: a Ref or a view of one.
      val: an array of the view's shape and dtype.
      mask: boolean, broadcasts to the view; None for all lanes.

    Raises:
      TypeError, ValueError: as `load`; also a value of another shape or dtype.
    """
    masked.store("pltpu.store", ref, val, mask, {})


def bitcast(x: jax.Array, ty: Any, dim: int = -2) -> jax.Array:
    """The same bits as another dtype. Another width packs or unpacks elements along `dim`, lowest bits first.

    f32[8, 128] as int16 has shape [16, 128]: rows 2 i and 2 i + 1 are the low and the high half of row i.

    Arguments:
      x: an array.
      ty: the new dtype.
      dim: the dimension along which widths change: the last but one (as in TPU registers) or the last.

    Raises:
      ValueError: another dimension; one dimension with dim=-2; rows that do not fill whole elements.
    """
    x = jnp.asarray(x)
    old, new = _bits(x.dtype), _bits(ty := jaxlink.canonicalize_dtype(ty))
    axis = dim + x.ndim if dim < 0 else dim
    if not 0 <= axis < x.ndim or axis < x.ndim - 2:
        raise ValueError(
            _message(
                f"pltpu.bitcast changes widths along the last or the last but one dimension, not {dim} of {x.ndim}.",
                "dim=-1 packs along the last dimension" if x.ndim == 1 else None,
            )
        )
    if old == new:
        return lax.bitcast_convert_type(x, ty)
    if x.shape[axis] * old % new:
        raise ValueError(
            _message(
                f"{x.shape[axis]} elements of {old} bits along dimension {axis} are no whole number of {new} bits."
            )
        )
    x = jnp.moveaxis(x, axis, -1)
    if old < new:
        x = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old), ty)
    else:
        x = lax.bitcast_convert_type(x, ty)
        x = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return jnp.moveaxis(x, -1, axis)


def _bits(dtype: Any) -> int:
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        raise ValueError("pltpu.bitcast has no meaning for bool: how many bits it takes depends on the machine.")
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits


def roll(
    x: jax.Array,
    shift: jax.Array | int,
    axis: int,
    *,
    stride: int | None = None,
    stride_axis: int | None = None,
) -> jax.Array:
    """`x` rotated towards higher indices: element i of the result is element (i - shift) modulo the size.

    Arguments:
      x: an array.
      shift: by how many elements; a Python int is not negative, a value known at run time may be.
      axis: along which dimension, counted from 0.
      stride, stride_axis: row r of stride_axis is rotated by shift + r * stride instead.

    Raises:
      ValueError: a negative shift or stride, an axis that is not there, or only one of stride and stride_axis.
    """
    x = jnp.asarray(x)
    if isinstance(shift, (int, np.integer)) and shift < 0:
        raise ValueError(_message("shift must be non-negative.", f"rotating by {shift % x.shape[axis]} does the same"))
    if not 0 <= operator.index(axis) < x.ndim:
        raise ValueError(_message(f"axis is out of range: pltpu.roll got axis {axis} of {x.ndim} dimensions."))
    if (stride is None) != (stride_axis is None):
        raise ValueError(_message("stride and stride_axis must be both specified or not."))
    size = x.shape[axis]
    if stride is None or stride_axis is None:
        return jnp.roll(x, shift, axis)
    if stride < 0:
        raise ValueError(_message("stride must be non-negative."))
    if not 0 <= stride_axis < x.ndim or stride_axis == axis:
        raise ValueError(_message(f"stride_axis must be another dimension than axis {axis}, not {stride_axis}."))
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    row = lax.broadcasted_iota(jnp.int32, x.shape, stride_axis)
    return jnp.take_along_axis(x, jnp.mod(position - shift - row * stride, size), axis)


def reciprocal(x: jax.Array, *, approx: bool = False, full_range: bool = True) -> jax.Array:
    """1 / x; a TPU may use its approximate instruction when `approx` is set, interpreters compute it exactly.

    Arguments:
      x: a floating-point array.
      approx: allow the approximation.
      full_range: whether subnormal and huge values must come out right on a TPU.

    Raises:
      TypeError: `x` is not floating-point.
    """
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(_message(f"pltpu.reciprocal takes floating-point arrays, not {jnp.result_type(x)}."))
    return jnp.reciprocal(x)


def conv(
    lhs: jax.Array,
    rhs: jax.Array,
    acc: jax.Array | None = None,
    *,
    dimension_numbers: Any,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] | None = None,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    window_reversal: Sequence[bool] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """A convolution, added to `acc`: `jax.lax.conv_general_dilated` with an accumulator and reversible windows.

    Arguments:
      lhs: the input, of batch, feature and spatial dimensions.
      rhs: the window, of input-feature, output-feature and spatial dimensions; the dtype of `lhs`.
      acc: what the result is added to, of the result's shape; zeros by default. The result has its dtype.
      dimension_numbers: `("NHWC", "HWIO", "NHWC")` or a `jax.lax.ConvDimensionNumbers`.
      window_strides, lhs_dilation, rhs_dilation: one number for each spatial dimension; 1 by default.
      padding: "SAME", "VALID", or (low, high) for each spatial dimension; none by default.
      window_reversal: for each spatial dimension, whether the window is reversed.
      feature_group_count, batch_group_count, precision: as in `jax.lax.conv_general_dilated`.
      preferred_element_type: the dtype of the result and of the sums; by default that of `acc`, or of `lhs`.

    Raises:
      ValueError, TypeError: shapes or dtypes do not fit.
    """
    spatial = lhs.ndim - 2
    if lhs.dtype != rhs.dtype:
        headline = f"pltpu.conv takes two arrays of one dtype, not {kind_of(lhs)} and {kind_of(rhs)}."
        raise mistake(TypeError, headline, hint="x.astype(…); preferred_element_type= chooses the dtype of the result")
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if window_reversal is not None:
        if len(window_reversal) != spatial:
            dims = count_of(spatial, "spatial dimension")
            headline = (
                f"pltpu.conv: window_reversal has {count_of(len(window_reversal), 'entry', 'entries')} for {dims}."
            )
            raise mistake(ValueError, headline, hint="give one bool for each spatial dimension")
        rhs = lax.rev(rhs, [d for d, reverse in zip(numbers.rhs_spec[2:], window_reversal) if reverse])
    if acc is not None and preferred_element_type is None:
        preferred_element_type = acc.dtype
    result = lax.conv_general_dilated(
        lhs,
        rhs,
        (1,) * spatial if window_strides is None else window_strides,
        [(0, 0)] * spatial if padding is None else padding,
        lhs_dilation,
        rhs_dilation,
        numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
    )
    if acc is None:
        return result
    if (acc.shape, acc.dtype) != (result.shape, result.dtype):
        headline = f"pltpu.conv gives {kind_of(result)}, which cannot be added to acc, {kind_of(acc)}."
        raise mistake(ValueError, headline, hint="the accumulator has the shape and dtype of the result")
    return acc + result


def annotate(
    ref: Any,
    *,
    no_store: bool = False,
    no_bank_conflict: bool = False,
    no_hazard: bool = False,
    no_hazard_no_deps: bool = False,
) -> Any:
    """A view of a Ref about which a TPU's compiler may assume something. It changes how fast, not what is computed.

    Arguments:
      ref: a Ref or a view of one.
      no_store: nothing is stored in it in this kernel (copies by DMA may be).
      no_bank_conflict: accesses in one bundle never meet in a bank.
      no_hazard: a load may follow a store after one cycle.
      no_hazard_no_deps: loads and stores through this view may change their order.

    Raises:
      TypeError: not a Ref. ValueError: assumptions that contradict each other.
    """
    if not is_ref(ref):
        raise mistake(
            TypeError, f"pltpu.annotate takes a Ref or a view of one, not {kind_of(ref)}.", hint="x_ref.at[…]"
        )
    chosen = [
        name
        for name, on in (("no_store", no_store), ("no_hazard", no_hazard), ("no_hazard_no_deps", no_hazard_no_deps))
        if on
    ]
    if len(chosen) > 1:
        headline = f"pltpu.annotate: {' and '.join(chosen)} contradict each other."
        raise mistake(ValueError, headline, hint="choose one of them; no_bank_conflict goes with any")
    return ref if isinstance(ref, jaxlink.TransformedRef) else RefView(ref, ())
