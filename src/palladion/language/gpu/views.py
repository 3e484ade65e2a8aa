"""Views that say where a Ref is: on another device, on all devices, in another block of the cluster; and other views.

They are transforms of a view, as its indices are, and may come before or after those. What is dynamic in them (the
index of a device or block) are leaves of the view.

Source: the Pallas Mosaic GPU reference, "Semaphore" (remote_ref), "NVLINK transfers" and "Transposed operands".
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames
from palladion.language.dtypes import element_bits
from palladion.language.gpu.arguments import a_ref, cluster_axes, device_axes
from palladion.language.gpu.memory import GMEM, SMEM
from palladion.language.gpu.refs import is_barrier
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import RefView
from palladion.language.semaphores import DeviceIdType, as_view, device_of, int32, is_semaphore

__all__ = [
    "PeerMemRef",
    "cluster_ref",
    "im2col_ref",
    "multicast_ref",
    "peer_ref",
    "remote_ref",
    "transpose_ref",
]


# --- transforms -------------------------------------------------------------------------------------------------------
class _Place:
    """A transform that says where; what is seen there has the same type."""

    place: ClassVar[str] = ""  # for messages

    def transform_type(self, x: Any) -> Any:
        return x

    def undo(self, x: Any) -> Any:
        raise NotImplementedError(f"The view {self} cannot be undone.")

    def pretty_print(self, context: Any) -> Any:
        return jaxlink.pretty_printer.text(f"{{{self._words(context)}}}")

    def _words(self, context: Any) -> str:
        raise NotImplementedError


def _shown(value: Any, context: Any) -> str:
    """Variables and numbers of a pytree, as jaxprs show them."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_axis(k)}={_shown(v, context)}" for k, v in value.items())
    if isinstance(value, tuple):
        return ", ".join(_shown(v, context) for v in value)
    return str(jaxlink.core.pp_var(value, context)) if hasattr(value, "aval") else str(value)


def _axis(name: Any) -> str:
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeerMemRef(_Place):
    """The Ref of this name on another device.

    Arguments:
      device_id: a pytree of int32 scalars.
      device_id_type: a `pl.DeviceIdType`, how to read it.
    """

    place: ClassVar[str] = "on another device"
    device_id: Any
    device_id_type: DeviceIdType = dataclasses.field(metadata=dict(static=True))

    def _words(self, context: Any) -> str:
        return f"device {_shown(self.device_id, context)}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MulticastRef(_Place):
    """The Refs of this name on all devices along mesh axes."""

    place: ClassVar[str] = "on several devices"
    collective_axes: tuple[Any, ...] = dataclasses.field(metadata=dict(static=True))

    def _words(self, context: Any) -> str:
        return f"devices along {', '.join(map(str, self.collective_axes))}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClusterRef(_Place):
    """The Ref of this name in another block of the cluster.

    Arguments:
      block_id: {cluster axis: int32 scalar}; along the others, one's own index.
    """

    place: ClassVar[str] = "in another block"
    block_id: dict[Any, Any]

    def _words(self, context: Any) -> str:
        return f"block {_shown(self.block_id, context)}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Im2Col(_Place):
    """Images as the windows in them, see `im2col_ref`."""

    window_shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    padding: tuple[tuple[int, int], ...] = dataclasses.field(metadata=dict(static=True))

    def transform_type(self, x: Any) -> Any:
        if isinstance(x, jaxlink.AbstractRef):
            return x.update(inner_aval=self.transform_type(x.inner_aval))
        images, *sizes, channels = x.shape
        rows = images * math.prod(n + sum(p) - w + 1 for n, p, w in zip(sizes, self.padding, self.window_shape))
        return x.update(shape=(rows, *self.window_shape, channels))

    def _words(self, context: Any) -> str:
        return f"windows {self.window_shape} padding {self.padding}"


_PLACES = (PeerMemRef, MulticastRef, ClusterRef)


def split_view(view: Any) -> tuple[list[Any], list[Any]]:
    """The transforms of a view (or Ref) that say where it is, and the others, each in order."""
    transforms = view.transforms if isinstance(view, jaxlink.TransformedRef) else ()
    where = [t for t in transforms if isinstance(t, _PLACES)]
    return where, [t for t in transforms if not isinstance(t, _PLACES)]


def _moved(name: str, view: RefView, transform: Any) -> RefView:
    """The view with one transform more; it can have one place."""
    if (before := split_view(view)[0]) and isinstance(transform, _PLACES):
        headline = f"{name}: {label_of(view)} is {before[0].place} already."
        raise mistake(ValueError, headline, hint="take one view, of the Ref itself")
    return RefView(view.ref, (*view.transforms, transform))


# --- what kernels call ------------------------------------------------------------------------------------------------
def remote_ref(ref: Any, device_id: Any, device_id_type: DeviceIdType | None = None) -> RefView:
    """The same Ref on another device; `peer_ref` is another name of it. Devices see each other's GMEM over NVLINK.

    Arguments:
      ref: a Ref or view of data in GMEM.
      device_id: an integer (its number in a mesh of one axis), a tuple with an index for each axis of the mesh, or a
        dict {axis name: index}, where axes not named are one's own.
      device_id_type: `pl.DeviceIdType.MESH` (default) or `.LOGICAL`, the number of the device in the mesh.

    Returns:
      a view of the same shape and dtype.

    Raises:
      TypeError: not a Ref, or no device id. ValueError: another memory; a device id that does not fit the mesh;
        outside a kernel.

    Reference: "Semaphore", "NVLINK transfers".
    """
    name = "plgpu.remote_ref"
    frames.required(name)
    if is_ref(ref) and is_semaphore(ref):
        headline = f"{name} is for data; {label_of(ref)} holds {'barriers' if is_barrier(ref) else 'semaphores'}."
        raise mistake(TypeError, headline, hint="pl.semaphore_signal(sem, device_id=…) signals another device's")
    view = a_ref(name, "ref", ref, GMEM)
    if device_id is None:
        headline = f"{name} needs a device_id: the device whose {label_of(view)} is meant."
        raise mistake(ValueError, headline, hint="plgpu.remote_ref(y_ref, {'x': 1 - lax.axis_index('x')})")
    return _moved(name, view, PeerMemRef(*device_of(name, device_id, device_id_type)))


peer_ref = remote_ref


def multicast_ref(ref: Any, collective_axes: Any) -> RefView:
    """The same Ref on all devices along mesh axes: a store to it is made on each of them.

    Arguments:
      ref: a Ref or view in GMEM.
      collective_axes: axes of the mesh of devices, a name or a tuple of names.

    Returns:
      a view of the same shape and dtype.

    Raises:
      TypeError, ValueError: as `remote_ref`; not axes of the mesh.
    """
    name = "plgpu.multicast_ref"
    view = a_ref(name, "ref", ref, GMEM)
    return _moved(name, view, MulticastRef(device_axes(name, collective_axes)))


def cluster_ref(ref: Any, block_id: dict[Any, Any]) -> RefView:
    """The same Ref in another block of the cluster.

    Arguments:
      ref: a Ref or view in SMEM, or a barrier.
      block_id: {cluster axis: integer scalar}; along axes not named, one's own index.

    Returns:
      a view of the same shape and dtype.

    Raises:
      TypeError: not a Ref, a dict, or an integer. ValueError: another memory; not cluster axes; outside a kernel.
    """
    name = "plgpu.cluster_ref"
    view = a_ref(name, "ref", ref, SMEM, or_barrier=True)
    if not isinstance(block_id, Mapping) or not block_id:
        hint = "plgpu.cluster_ref(smem_ref, {'cluster': 0})"
        raise mistake(TypeError, f"The block_id of {name} is {kind_of(block_id)}.", hint=hint)
    for axis in block_id:
        cluster_axes(name, axis, "block_id")
    indices = {axis: int32(name, f"block_id[{axis!r}]", i) for axis, i in block_id.items()}
    return _moved(name, view, ClusterRef(indices))


def transpose_ref(ref: Any, permutation: Sequence[int]) -> RefView:
    """A view with its dimensions in another order; nothing moves.

    Arguments:
      ref: a Ref or view of any memory.
      permutation: which dimension of `ref` each dimension of the view is, ints.

    Returns:
      a view, whose shape is that of `ref` permuted.

    Raises:
      TypeError: not a Ref. ValueError: not an order of its dimensions; outside a kernel.

    Reference: "Transposed operands".
    """
    frames.required("plgpu.transpose_ref")
    if not is_ref(ref):
        headline = f"plgpu.transpose_ref takes a Ref, not {kind_of(ref)}."
        raise mistake(TypeError, headline, hint="of a value: x.T, jnp.transpose(x, order)")
    return as_view(ref).transpose(tuple(permutation) if isinstance(permutation, (list, tuple)) else permutation)


def im2col_ref(ref: Any, *, window_shape: Sequence[int], padding: Sequence[tuple[int, int]] | None = None) -> RefView:
    """Images as the windows in them, for `plgpu.copy_gmem_to_smem`.

    Of images of shape (N, *spatial, C) the view has shape (N * positions, *window_shape, C), where the positions of the
    window are counted row-major: along each dimension size + padding - window + 1 of them. Row r, pixel d is zero where
    the window reaches past the image. The view is copied one pixel of the windows at a time, as
    `view.at[rows, *pixel, channels]`: up to 1024 rows, one integer for each spatial dimension, up to 256 channels.

    Arguments:
      ref: a whole Ref in GMEM with one, two or three spatial dimensions.
      window_shape: sizes of the window, ints.
      padding: for each spatial dimension (before, after), how many zeros are around the image; None: none.

    Returns:
      a view.

    Raises:
      TypeError: not a Ref, not integers. ValueError: another memory, a view, sizes that do not fit; outside a kernel.
    """
    name = "plgpu.im2col_ref"
    view = a_ref(name, "ref", ref, GMEM)
    if split_view(view)[1]:
        raise mistake(ValueError, f"{name} takes a whole Ref, not {label_of(view)}.", hint="index its result")
    shape = tuple(view.shape)
    spatial = len(shape) - 2
    if not 1 <= spatial <= 3 or element_bits(view.dtype) < 8:
        raise mistake(
            ValueError,
            f"{name} takes images of shape (N, *spatial, C) with one to three spatial dimensions and elements of whole "
            f"bytes; {label_of(view)} has shape {shape} and dtype {view.dtype}.",
            hint="x.reshape(N, H, W, C) before the call",
        )
    window = _integers(name, "window_shape", window_shape, spatial)
    padding = ((0, 0),) * spatial if padding is None else padding
    if not isinstance(padding, (tuple, list)) or len(padding) != spatial:
        headline = f"The padding of {name} is {kind_of(padding)}; the images have {count_of(spatial, 'dimension')}."
        raise mistake(ValueError, headline, hint="a pair (before, after) for each")
    pads = tuple((a, b) for i, p in enumerate(padding) for a, b in [_integers(name, f"padding[{i}]", p, 2)])
    for size, w, (before, after) in zip(shape[1:-1], window, pads):
        if w < 1 or before < 0 or after < 0 or size + before + after < w:
            raise mistake(
                ValueError,
                f"{name}: windows of {window} with padding {pads} do not fit images of {shape[1:-1]}.",
                hint="windows have at least one pixel, padding is not negative, and a window fits at least once",
            )
    return _moved(name, view, Im2Col(window, pads))


def _integers(name: str, what: str, values: Any, count: int) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(v) for v in values)
    except TypeError:
        hint = "sizes are static: Python integers"
        raise mistake(TypeError, f"The {what} of {name} is {kind_of(values)}.", hint=hint) from None
    if len(found) != count:
        headline = f"The {what} of {name} is {found}; it must have {count_of(count, 'entry', 'entries')}."
        raise mistake(ValueError, headline, hint="one for each spatial dimension of the images")
    return found


def is_gather(ref_view: Any) -> bool:
    """Whether a view has an index array."""
    indexers = [t for t in split_view(ref_view)[1] if isinstance(t, jaxlink.NDIndexer)]
    return any(not isinstance(i, jaxlink.Slice) and getattr(i, "shape", ()) for t in indexers for i in t.indices)
