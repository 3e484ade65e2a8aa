"""Semaphores: counters that cores, devices and copies signal, and that a kernel waits for.

A semaphore lives in a memory of its own. Its Ref has an extended dtype, which prints as `sem`, so that it cannot be
read or written as data; `sem.at[i]` picks one of an array of them. The operations here are those that every machine
has; dialects add kinds of semaphore (`pltpu.SemaphoreType`), and whoever runs a kernel gives them their meaning.

Equations (operands are the leaves of a pytree, whose structure is `params["tree"]`; a Ref comes before the dynamic
indices of its view, and unflattens to a `RefView`):

    semaphore_signal  tree of Signal(sem, value, device_id, core_index)      params: tree, device_id_type
    semaphore_wait    tree of Wait(sem, value, decrement)                    params: tree
    semaphore_read    tree of (sem,)                                         params: tree     gives an int32 scalar

`value` is an int32 scalar. `device_id` and `core_index` are None for "here"; a device_id is an int32 scalar, a tuple
of them or a dict {axis name: scalar}, whose keys may also be tuples of axes (one index over all of them, row-major) and
axes of a core mesh. `decrement` is a Python bool, part of the structure.

Source: public Pallas documentation of the operations; "Distributed Computing in Pallas for TPUs".
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import frames, printing
from palladion.language.dtypes import SemaphoreDType, barrier_semaphore
from palladion.language.dtypes import semaphore as semaphore
from palladion.language.dtypes import semaphore_dtype as semaphore_dtype
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import RefView
from palladion.rules import only_on

# --- types ------------------------------------------------------------------------------------------------------------
REGULAR = SemaphoreDType("sem", semaphore)
BARRIER = SemaphoreDType("barrier_sem", barrier_semaphore)


def is_semaphore(x: Any) -> bool:
    """Whether a Ref or view is a semaphore, or an array of them."""
    return is_ref(x) and isinstance(x.dtype, SemaphoreDType)


class DeviceIdType(enum.Enum):
    """How a device is named: by its place in the mesh of the surrounding `shard_map`, or by its number there.

    `MESH`: a dict {axis name: index}, or a tuple with one index for each axis of the mesh. `LOGICAL`: one integer,
    counting the devices of the mesh in row-major order.
    """

    MESH = "mesh"
    LOGICAL = "logical"


class CommunicationEffect(jaxlink.Effect):
    """The effect of a signal or copy to another device: the call is kept, even if no one uses its results."""

    def __str__(self) -> str:
        return "Communication"


communication = CommunicationEffect()
jaxlink.register_effect(CommunicationEffect, lowerable=True)


class WaitEffect(jaxlink.KernelEffect):
    """The effect of a wait on those who run a kernel in order: it may be one that never ends."""


# --- equations --------------------------------------------------------------------------------------------------------
class Signal(NamedTuple):
    """The operands of `semaphore_signal`."""

    sem: RefView
    value: Any
    device_id: Any = None
    core_index: Any = None


@dataclasses.dataclass(frozen=True)
class Wait:
    """The operands of `semaphore_wait`; `decrement` (static) takes the value off the counter."""

    sem: RefView
    value: Any
    decrement: bool = True


jax.tree_util.register_dataclass(Wait, ["sem", "value"], ["decrement"])

_waits = WaitEffect()
_READ, _WRITE = jaxlink.state_types.ReadEffect, jaxlink.state_types.WriteEffect


def ref_effects(tree: Any, count: int, *, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> set:
    """The effects of an equation on those of its operands that are Refs.

    Arguments:
      tree, count: the structure of the operands, and how many leaves it has.
      reads, writes: fields of the structure that hold a RefView or None.
    """
    numbered = jax.tree.unflatten(tree, range(count))

    def positions(fields: Iterable[str]) -> list[int]:
        views = (getattr(numbered, field) for field in fields)
        return [view.ref for view in views if isinstance(view, jaxlink.TransformedRef)]  # an operand may be an array

    return {_READ(i) for i in positions(reads)} | {_WRITE(i) for i in positions(writes)}


semaphore_signal_p = jaxlink.Primitive("semaphore_signal")
semaphore_signal_p.multiple_results = True
semaphore_wait_p = jaxlink.Primitive("semaphore_wait")
semaphore_wait_p.multiple_results = True
semaphore_read_p = jaxlink.Primitive("semaphore_read")


@semaphore_signal_p.def_effectful_abstract_eval
def _signal_type(*avals, tree, device_id_type):
    remote = jax.tree.unflatten(tree, avals).device_id is not None
    return [], ref_effects(tree, len(avals), writes=["sem"]) | ({communication} if remote else set())


@semaphore_wait_p.def_effectful_abstract_eval
def _wait_type(*avals, tree):
    return [], {*ref_effects(tree, len(avals), reads=["sem"], writes=["sem"]), _waits}


@semaphore_read_p.def_effectful_abstract_eval
def _read_type(*avals, tree):
    return jaxlink.ShapedArray((), jnp.dtype("int32")), {_READ(0)}


def where(device_id: Any, core_index: Any = None) -> list[Any]:
    """For printing: `device {x: a}`, `core b`, or nothing for "here"."""
    device = [] if device_id is None else ["device", device_id]
    return device + ([] if core_index is None else ["core", core_index])


printing.print_equations_of(
    semaphore_signal_p, lambda s, _: ["semaphore_signal", s.sem, s.value, *where(s.device_id, s.core_index)]
)
printing.print_equations_of(semaphore_wait_p, lambda w, _: [f"semaphore_wait[decrement={w.decrement}]", w.sem, w.value])
printing.print_equations_of(semaphore_read_p, lambda operands, _: ["semaphore_read", operands[0]])

only_on(("the simulated TPU", "the simulated GPU"), semaphore_signal_p, semaphore_wait_p, semaphore_read_p)


# --- what kernels call ------------------------------------------------------------------------------------------------
def semaphore_signal(
    sem_or_view: Any,
    inc: int | jax.Array = 1,
    *,
    device_id: Any = None,
    device_id_type: DeviceIdType | None = None,
    core_index: int | jax.Array | None = None,
) -> None:
    """Add to a semaphore, here or on another device.

    Arguments:
      sem_or_view: a semaphore Ref of shape (), e.g. `sem` or `sems.at[i]`; another device's has the same name.
      inc: by how much, an integer.
      device_id: the device whose semaphore it is: a dict {axis name: index} (axes not named: one's own index), a
        tuple with an index for each axis of the mesh, or an integer; None: this device.
      device_id_type: `pl.DeviceIdType.MESH` (default) or `.LOGICAL`, the number of the device in the mesh.
      core_index: the core of that device, where devices have several; None: as the kernel's own.

    Raises:
      TypeError, ValueError: not one semaphore, or one that copies signal; a number that is none; a device id that
        does not fit the mesh.
    """
    name = "pl.semaphore_signal"
    view = one_semaphore(name, sem_or_view, "signal")
    device, kind = device_of(name, device_id, device_id_type)
    core = None if core_index is None else int32(name, "core_index", core_index)
    flat, tree = jaxlink.flatten_views(Signal(view, int32(name, "inc", inc), device, core))
    semaphore_signal_p.bind(*flat, tree=tree, device_id_type=kind)


def semaphore_wait(sem_or_view: Any, value: int | jax.Array = 1, *, decrement: bool = True) -> None:
    """Wait until a semaphore holds at least `value`, then take `value` off it.

    Arguments:
      sem_or_view: a semaphore Ref of shape ().
      value: an integer.
      decrement: False leaves the counter as it is.

    Raises:
      TypeError, ValueError: as `semaphore_signal`.
    """
    name = "pl.semaphore_wait"
    view = one_semaphore(name, sem_or_view, "wait for")
    if not isinstance(decrement, (bool, np.bool_)):
        headline = f"The decrement of {name} is {kind_of(decrement)}; it must be True or False."
        raise mistake(TypeError, headline, hint="it is known when the kernel is traced")
    flat, tree = jaxlink.flatten_views(Wait(view, int32(name, "value", value), bool(decrement)))
    semaphore_wait_p.bind(*flat, tree=tree)


def semaphore_read(sem_or_view: Any) -> jax.Array:
    """What a semaphore holds now, an int32 scalar; it may have changed by the time it is used.

    Arguments:
      sem_or_view: a semaphore Ref of shape (), of any kind.
    """
    view = one_semaphore("pl.semaphore_read", sem_or_view, None)
    flat, tree = jaxlink.flatten_views((view,))
    return semaphore_read_p.bind(*flat, tree=tree)


# --- arguments --------------------------------------------------------------------------------------------------------
def as_view(ref: Any) -> RefView:
    """A Ref as a view of all of it, so that every Ref among operands has one form."""
    if isinstance(ref, jaxlink.TransformedRef):
        return ref if isinstance(ref, RefView) else RefView(ref.ref, ref.transforms)
    return RefView(ref, ())


_HARDWARE = "copies signal it, by bytes: wait with the copy's descriptor, pltpu.make_async_copy(…).wait()"


def one_semaphore(name: str, sem: Any, verb: str | None, *, kind: Any = None) -> RefView:
    """A semaphore argument, checked.

    Arguments:
      name: the function that the user called.
      sem: what they gave.
      verb: what is done with it by software ("signal"), or None where any semaphore will do.
      kind: the dtype that it must have; None: as `verb` says.

    Raises:
      TypeError: not a semaphore, or of a kind that cannot do this. ValueError: an array of them.
    """
    frames.required(name)
    if not is_semaphore(sem):
        what = f"the Ref {label_of(sem)}, which holds {sem.dtype}" if is_ref(sem) else kind_of(sem)
        hint = "scratch_shapes=[pltpu.SemaphoreType.REGULAR], or .DMA for copies"
        raise mistake(TypeError, f"{name} takes a semaphore, not {what}.", hint=hint)
    if tuple(sem.shape):
        raise mistake(
            ValueError,
            f"{name} takes one semaphore; {label_of(sem)} is an array of shape {tuple(sem.shape)}.",
            hint="pick one: sems.at[i]",
        )
    if verb is not None and sem.dtype not in (REGULAR, BARRIER):
        hint = getattr(sem.dtype, "advice", _HARDWARE)
        raise mistake(TypeError, f"{name} cannot {verb} {label_of(sem)}, a {sem.dtype}.", hint=hint)
    if kind is not None and sem.dtype != kind:
        headline = f"{name} signals a {kind} when it is done; {label_of(sem)} is a {sem.dtype}."
        raise mistake(TypeError, headline, hint="scratch_shapes=[pltpu.SemaphoreType.DMA]")
    return as_view(sem)


def int32(name: str, what: str, value: Any) -> Any:
    """An integer argument as an int32 scalar.

    Raises:
      TypeError: it is no integer scalar.
    """
    if is_ref(value):
        headline = f"The {what} of {name} is a Ref, {label_of(value)}."
        raise mistake(TypeError, headline, hint="read it: n_ref[0]")
    scalar = isinstance(value, (int, np.generic, np.ndarray, jax.Array)) and np.ndim(value) == 0
    if not scalar or isinstance(value, bool) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        headline = f"The {what} of {name} is {kind_of(value)}; it must be an integer."
        raise mistake(TypeError, headline, hint="// instead of /, .astype(jnp.int32)")
    return value.astype(jnp.int32) if isinstance(value, jaxlink.Tracer) else np.int32(value)  # known: no captured array


def device_of(name: str, device_id: Any, kind: DeviceIdType | None) -> tuple[Any, DeviceIdType]:
    """A device id as a pytree of int32 scalars, checked against the mesh around the kernel, and how to read it.

    Raises:
      TypeError: something else than described. ValueError: it does not fit the mesh, or its kind.
    """
    kind = DeviceIdType.MESH if kind is None else kind
    if not isinstance(kind, DeviceIdType):
        hint = "pl.DeviceIdType.MESH or pl.DeviceIdType.LOGICAL"
        raise mistake(TypeError, f"The device_id_type of {name} is {kind_of(kind)}.", hint=hint)
    if device_id is None:
        return None, kind
    if kind is DeviceIdType.LOGICAL and isinstance(device_id, (tuple, list, Mapping)):
        raise mistake(
            ValueError,
            f"{name} got a device_id with coordinates, {_shown(device_id)}, and DeviceIdType.LOGICAL, which takes one "
            "integer.",
            hint="leave device_id_type out",
        )
    around = jax.sharding.get_abstract_mesh()
    mesh = tuple(around.axis_names) if around.manual_axes else ()  # unknown outside a shard_map
    if isinstance(device_id, Mapping):
        _check_axes(name, device_id, mesh)
        indices = {k: int32(name, f"device_id[{k!r}]", v) for k, v in device_id.items()}
        if any(isinstance(k, tuple) for k in indices):  # one index over several axes; pytrees want keys of one kind
            indices = {k if isinstance(k, tuple) else (k,): v for k, v in indices.items()}
        return indices, kind
    if isinstance(device_id, (tuple, list)):
        _check_coordinates(name, len(device_id), mesh, _shown(device_id))
        return tuple(int32(name, f"device_id[{i}]", v) for i, v in enumerate(device_id)), kind
    if kind is DeviceIdType.MESH:
        _check_coordinates(name, 1, mesh, _shown(device_id))
    return int32(name, "device_id", device_id), kind


def _shown(device_id: Any) -> str:
    if isinstance(device_id, Mapping):
        return "{" + ", ".join(f"{k!r}: {_shown(v)}" for k, v in device_id.items()) + "}"
    if isinstance(device_id, (tuple, list)):
        return f"({', '.join(map(_shown, device_id))}{',' if len(device_id) == 1 else ''})"
    return "…" if isinstance(device_id, jaxlink.Tracer) else repr(device_id)


def _check_axes(name: str, device_id: Mapping[Any, Any], mesh: Sequence[str]) -> None:
    frame = frames.current()
    known = {*mesh, *(frame.cores if frame is not None else ())}
    for key in device_id:
        for axis in key if isinstance(key, tuple) else (key,):
            if known and axis not in known:
                raise mistake(
                    ValueError,
                    f"The device_id of {name} names the axis {axis!r}, which is not bound in this kernel.",
                    axes=", ".join(map(repr, sorted(known))),
                    hint="the axes of the shard_map around the call, and of the kernel's core mesh",
                )


def _check_coordinates(name: str, count: int, mesh: Sequence[str], shown: str) -> None:
    if mesh and count != len(mesh):
        raise mistake(
            ValueError,
            f"The device_id {shown} of {name} has {count_of(count, 'coordinate')}, but the mesh has "
            f"{count_of(len(mesh), 'axis', 'axes')}.",
            axes=", ".join(map(repr, mesh)),
            hint="give an index for each axis, name the axes ({axis: index}), or use pl.DeviceIdType.LOGICAL",
        )
