"""Types of scratch buffers: what `scratch_shapes`, `scratch_types` and `run_scoped` take.

A buffer type is anything with `get_ref_aval()` (`pltpu.VMEM(shape, dtype)`, a semaphore, a barrier), or a plain shape
and dtype, which is a buffer in the kernel's usual memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language import frames
from palladion.language.refs import KernelRef, MemorySpace


def is_array_type(x: Any) -> bool:
    """Whether `x` has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_buffer_type(x: Any) -> bool:
    """Whether `x` is one buffer type, rather than a pytree of them."""
    return is_array_type(x) or hasattr(x, "get_ref_aval")


def settle_types(types: Any, mesh: Any = None) -> Any:
    """The same buffer types as a kernel's Refs come: a `plgpu.RefUnion` is then a tuple, and all have a memory.

    Arguments:
      types: a pytree of buffer types; None where there is none.
      mesh: of the kernel: it says where a buffer is that has only a shape and a dtype; or None.
    """
    place = getattr(mesh, "scratch_memory_space", None)

    def one(x: Any) -> Any:
        if place is not None and is_array_type(x) and not hasattr(x, "get_ref_aval"):
            return place(x.shape, x.dtype)
        return x

    return jax.tree.map(one, types, is_leaf=is_buffer_type)


def buffer_ref(x: Any, label: str, where: str, *, scoped: bool = False) -> KernelRef:
    """The abstract Ref of a buffer type.

    Arguments:
      x: the type.
      label: what messages call the Ref; a scoped buffer's type may have a name of its own.
      where: what it belongs to, for the message.

    Raises:
      TypeError: it is no buffer type.
    """
    if hasattr(x, "get_ref_aval"):
        ref = x.get_ref_aval().update()  # a copy: the label is this buffer's
        ref.label = (scoped and getattr(x, "label", None)) or label
        return ref
    if is_array_type(x):
        return KernelRef(jaxlink.ShapedArray(tuple(x.shape), jnp.dtype(x.dtype)), MemorySpace.DEFAULT, label=label)
    subject = f"{label.capitalize() if scoped else label} of {where}"
    example = "pl.run_scoped(f, pltpu.VMEM((8, 128), jnp.float32))"
    example = example if scoped else "scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)]"
    raise mistake(
        TypeError,
        f"{subject} is {kind_of(x)}, which is not a buffer type.",
        hint=f"{example}: a memory space, called with shape and dtype",
    )


def shared_along(frame: frames.Frame, axes: Any) -> tuple[Hashable, ...]:
    """The `collective_axes` of `run_scoped` as a tuple.

    Raises:
      ValueError: one of them is not an axis of the kernel's mesh.
    """
    names = () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    for name in names:
        if name not in frame.cores:
            raise mistake(
                ValueError,
                f"pl.run_scoped(collective_axes={axes!r}): {name!r} is not an axis of the kernel's mesh.",
                axes=", ".join(map(repr, frame.cores)) or "none: the kernel runs on a grid",
                hint="plgpu.kernel(…, num_threads=2, thread_name='wg') has the axis 'wg', over whose threads buffers "
                "can be shared",
            )
    return names
