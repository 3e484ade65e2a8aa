"""What copies by the TMA engine can be: where their ends are, how they are shared out, gathered and reduced.

Source: the Pallas Mosaic GPU reference, "Leader-tracked collective copies" and "Async gather".
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language.gpu.arguments import an_operation, blocks_along, shape_of
from palladion.language.gpu.partition import CopyPartition
from palladion.language.gpu.views import Im2Col, split_view
from palladion.language.indices import is_array, label_of
from palladion.language.refs import RefView

ATOMICS = ("add", "max", "min", "and", "or", "xor")
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_SIGNED = {"smin": "min", "smax": "max"}  # spellings that say which integers are meant
_UNSIGNED = {"umin": "min", "umax": "max"}


def refuse_places(name: str, view: RefView, *kinds: type) -> None:
    for place in split_view(view)[0]:
        if isinstance(place, kinds):
            raise mistake(
                ValueError,
                f"{name} cannot copy {label_of(view)}, which is {place.place}.",
                hint="copies are between the GMEM of one device and this block's SMEM; plgpu.async_store_smem writes "
                "to another block",
            )


def shape_for_each(name: str, src: RefView, leader_tracked: Any, axes: tuple[Any, ...]) -> tuple[int, ...]:
    """What a block gets of `src`."""
    shape = shape_of(src)
    if leader_tracked is None:
        return shape
    if not isinstance(leader_tracked, CopyPartition):
        hint = "plgpu.CopyPartition.PARTITIONED(axis) or plgpu.CopyPartition.REPLICATED"
        raise mistake(TypeError, f"The leader_tracked of {name} is {kind_of(leader_tracked)}.", hint=hint)
    if not axes:
        headline = f"{name}: leader_tracked={leader_tracked} needs collective_axes, over which the leader is the first."
        raise mistake(ValueError, headline, hint="collective_axes='cluster'")
    if (blocks := blocks_along(axes)) != 2:
        raise mistake(
            ValueError,
            f"{name}: leader_tracked copies are for clusters of two blocks; there are {blocks} along "
            f"{', '.join(map(repr, axes))}.",
            hint="plgpu.kernel(…, cluster=(2,), cluster_names=('cluster',))",
        )
    axis = getattr(leader_tracked, "axis", None)
    if axis is None:
        return shape
    if not -len(shape) <= axis < len(shape):
        headline = f"{name}: {leader_tracked} is no axis of {label_of(src)}, which has shape {shape}."
        raise mistake(ValueError, headline, hint="integer indices drop axes: count those of the view")
    if shape[axis] % blocks:
        headline = f"{name}: {label_of(src)} of shape {shape} cannot be halved along axis {axis}."
        raise mistake(ValueError, headline, hint="the source is twice as large as the destination along this axis")
    halved = list(shape)
    halved[axis] //= blocks
    return tuple(halved)


def arrays_at(view: RefView) -> list[tuple[Any, int]]:
    """The indexers of a view that have index arrays, with how many."""
    indexers = [t for t in split_view(view)[1] if isinstance(t, jaxlink.NDIndexer)]
    counted = [(t, sum(is_array(i) for i in t.indices)) for t in indexers]
    return [(t, n) for t, n in counted if n]


def check_gather(name: str, src: RefView) -> None:
    """Index arrays: one, of one dimension, along the first dimension of a matrix."""
    found = arrays_at(src)
    if not found:
        return
    last = split_view(src)[1][-1]
    kept: list[Any] = [i for i in found[0][0].indices if is_array(i) or isinstance(i, jaxlink.Slice)]
    good = len(found) == 1 and found[0] == (last, 1) and len(kept) == 2 and is_array(kept[0]) and np.ndim(kept[0]) == 1
    if not good:
        raise mistake(
            ValueError,
            f"{name} gathers rows of a matrix; {label_of(src)} is indexed by arrays in another way.",
            hint="one index array of one dimension, for the first of two dimensions, as the last step of the view: "
            "x_ref.at[indices] or x_ref.at[indices, pl.ds(j, 64)]",
        )


def check_windows(name: str, src: RefView) -> None:
    """A view of windows is indexed by rows, a pixel of the window, and channels."""
    transforms = split_view(src)[1]
    for number, transform in enumerate(transforms):
        if isinstance(transform, Im2Col) and (len(transforms) != number + 2 or len(src.shape) != 2):
            pixels = ", ".join(f"d{i}" for i in range(len(transform.window_shape)))
            raise mistake(
                ValueError,
                f"{name} copies rows and channels of one pixel of the windows; {label_of(src)} has shape "
                f"{shape_of(src)}.",
                hint=f"windows.at[pl.ds(row, 128), {pixels}, pl.ds(channel, 64)]",
            )


def reduction(name: str, op: Any, dtype: Any) -> str:
    allowed = (*REDUCTIONS, *_SIGNED, *_UNSIGNED)
    for spelled, kind in ((_SIGNED, jnp.signedinteger), (_UNSIGNED, jnp.unsignedinteger)):
        if isinstance(op, str) and op in spelled:
            if not jnp.issubdtype(dtype, kind):
                headline = f"The reduction_op {op!r} of {name} is not for {dtype}."
                raise mistake(TypeError, headline, hint=f"{spelled[op]!r}, which goes by the dtype")
            op = spelled[op]
    return an_operation(name, "reduction_op", op, allowed, dtype)
