"""Copies by the DMA engines of a TPU: between its memories, and to another device.

`make_async_copy` describes a copy; the descriptor's `start()` sets it going and `wait()` waits for it. A copy signals
a DMA semaphore with the bytes that it has moved, and a wait takes as many off, so that any descriptor of the same
size may wait for a copy that another one started. A remote copy writes the Ref of the same name on another device
and signals two semaphores: `send_sem` here, when the source has been read, and `recv_sem` there, when the data has
arrived; `wait_recv` waits for what the others send here.

Equations (operands are the leaves of `DMA(src, dst, dst_sem, src_sem, device_id)`, in this order; a Ref comes before
the dynamic indices of its view, and unflattens to a `RefView`; a semaphore that is not there, and the device_id of a
local copy, is None):

    dma_start  params: tree, device_id_type, priority (0 is the first), add (sum into the destination)
    dma_wait   params: tree, device_id_type, wait: "recv" takes dst's bytes off `dst_sem`, "send" src's off `src_sem`

A local copy has its semaphore in `dst_sem`; with `src_sem` it also says when the source has been read.

Source: public documentation of Pallas TPU, "Distributed Computing in Pallas for TPUs" and the API reference.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language import frames, ops, printing
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import RefView
from palladion.language.semaphores import (
    DeviceIdType,
    as_view,
    communication,
    device_of,
    is_semaphore,
    one_semaphore,
    ref_effects,
    where,
)
from palladion.language.tpu import semaphores
from palladion.rules import only_on

__all__ = [
    "AsyncCopyDescriptor",
    "async_copy",
    "async_remote_copy",
    "dma_start_p",
    "dma_wait_p",
    "make_async_copy",
    "make_async_remote_copy",
    "sync_copy",
]


# --- equations --------------------------------------------------------------------------------------------------------
class DMA(NamedTuple):
    """The operands of both equations."""

    src: RefView
    dst: RefView
    dst_sem: RefView | None
    src_sem: RefView | None = None
    device_id: Any = None


dma_start_p = jaxlink.Primitive("dma_start")
dma_start_p.multiple_results = True
dma_wait_p = jaxlink.Primitive("dma_wait")
dma_wait_p.multiple_results = True


@dma_start_p.def_effectful_abstract_eval
def _start_type(*avals, tree, device_id_type, priority, add):
    reads = ["src", "dst"] if add else ["src"]
    effects = ref_effects(tree, len(avals), reads=reads, writes=["dst", "dst_sem", "src_sem"])
    remote = jax.tree.unflatten(tree, avals).device_id is not None
    return [], effects | ({communication} if remote else set())


@dma_wait_p.def_effectful_abstract_eval
def _wait_type(*avals, tree, device_id_type, wait):
    # The copy wrote the data. To wait only counts, and `src` and `dst` only say how many bytes: programs wait with
    # descriptors that name other Refs of the same size, an input as a destination among them.
    sem = {"recv": "dst_sem", "send": "src_sem"}[wait]
    return [], ref_effects(tree, len(avals), reads=[sem], writes=[sem])


def _start_words(copy: DMA, params: dict[str, Any]) -> list[Any]:
    name = f"dma_start[priority={params['priority']} add={params['add']}]"
    sems = [x for name in ("dst_sem", "src_sem") if (sem := getattr(copy, name)) is not None for x in (name, sem)]
    return [name, copy.src, "->", copy.dst, *sems, *where(copy.device_id)]


def _wait_words(copy: DMA, params: dict[str, Any]) -> list[Any]:
    if params["wait"] == "recv":
        return ["dma_wait[recv]", copy.dst, "dst_sem", copy.dst_sem]
    return ["dma_wait[send]", copy.src, "src_sem", copy.src_sem]


printing.print_equations_of(dma_start_p, _start_words)
printing.print_equations_of(dma_wait_p, _wait_words)
only_on("the simulated TPU", dma_start_p, dma_wait_p)


# --- descriptors ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class AsyncCopyDescriptor:
    """A copy that may be started, and waited for.

    Attributes:
      src_ref, dst_ref: views; for a remote copy `dst_ref` is the other device's.
      dst_sem: signalled where the data arrives, or None.
      src_sem: signalled here when the source has been read, or None.
      device_id: the receiving device, or None for a local copy.
      device_id_type: how to read it.
    """

    src_ref: RefView
    dst_ref: RefView
    dst_sem: RefView | None
    src_sem: RefView | None = None
    device_id: Any = None
    device_id_type: DeviceIdType = DeviceIdType.MESH

    @property
    def is_remote(self) -> bool:
        return self.device_id is not None

    def start(self, priority: int = 0, *, add: bool = False) -> None:
        """Start the copy.

        Arguments:
          priority: 0 or 1, which of the DMA engine's queues it joins.
          add: add to what the destination holds instead of replacing it.

        Raises:
          TypeError: a priority that is no integer. ValueError: a negative one.
        """
        if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)):
            raise mistake(TypeError, f"The priority of a copy is {kind_of(priority)}; it must be a Python integer.")
        if priority < 0:
            raise mistake(ValueError, f"The priority of a copy is {priority}; it cannot be negative.", hint="0 or 1")
        flat, tree = self._operands()
        kind = self.device_id_type
        dma_start_p.bind(*flat, tree=tree, device_id_type=kind, priority=int(priority), add=bool(add))

    def wait(self) -> None:
        """Wait until the copy is done: for a remote one, until what is sent has left and what is awaited is here."""
        if self.src_sem is not None:
            self.wait_read()
        self.wait_write()

    def wait_send(self) -> None:
        """Wait until the source has been read, so that it may be overwritten.

        Raises:
          RuntimeError: the copy is local.
        """
        if not self.is_remote:
            raise mistake(
                RuntimeError,
                f"wait_send is for remote copies; this one, of {label_of(self.src_ref)}, is local.",
                hint="wait(), or wait_read() of a copy with a src_sem",
            )
        self._wait("send", self.src_sem)

    def wait_recv(self) -> None:
        """Wait until the data is here: for a remote copy, that which another device sends to this one."""
        self._wait("recv", self.dst_sem)

    def wait_read(self) -> None:
        """Wait until the source has been read.

        Raises:
          ValueError: the copy signals nothing then.
        """
        self._wait("send", self.src_sem)

    def wait_write(self) -> None:
        """Wait until the destination has been written, as `wait_recv`."""
        self._wait("recv", self.dst_sem)

    def _wait(self, which: str, sem: RefView | None) -> None:
        if sem is None:
            name = {"recv": "sem", "send": "src_sem"}[which]
            raise mistake(
                ValueError,
                f"There is nothing to wait for: the copy of {label_of(self.src_ref)} to {label_of(self.dst_ref)} has "
                f"no {name}.",
                hint=f"pltpu.make_async_copy(src, dst, {'' if which == 'recv' else 'sem, src_sem='}sem), with a "
                "pltpu.SemaphoreType.DMA",
            )
        flat, tree = self._operands()
        dma_wait_p.bind(*flat, tree=tree, device_id_type=self.device_id_type, wait=which)

    def _operands(self) -> tuple[list[Any], Any]:
        return jaxlink.flatten_views(DMA(self.src_ref, self.dst_ref, self.dst_sem, self.src_sem, self.device_id))


# --- what kernels call ------------------------------------------------------------------------------------------------
def make_async_copy(src_ref: Any, dst_ref: Any, sem: Any = None, *, src_sem: Any = None) -> AsyncCopyDescriptor:
    """Describe a copy within this device; `start()` and `wait()` are the descriptor's.

    Arguments:
      src_ref, dst_ref: Refs or views in any memories, of the same shape and dtype.
      sem: a DMA semaphore of shape (), signalled when the copy is done; None: no one can wait for it.
      src_sem: another one, signalled when the source has been read.

    Raises:
      TypeError: not Refs, not a DMA semaphore, or different dtypes. ValueError: different shapes, an array of
        semaphores.
    """
    return _local("pltpu.make_async_copy", src_ref, dst_ref, sem, src_sem)


def async_copy(
    src_ref: Any, dst_ref: Any, sem: Any = None, *, src_sem: Any = None, priority: int = 0, add: bool = False
) -> AsyncCopyDescriptor:
    """Start a copy within this device: `make_async_copy(…).start(…)`; wait with the descriptor that comes back.

    Arguments:
      src_ref, dst_ref, sem, src_sem: as `make_async_copy`.
      priority, add: as `AsyncCopyDescriptor.start`.
    """
    copy = _local("pltpu.async_copy", src_ref, dst_ref, sem, src_sem)
    copy.start(priority, add=add)
    return copy


def sync_copy(src_ref: Any, dst_ref: Any, *, add: bool = False) -> None:
    """Copy and wait, with a semaphore of its own.

    Arguments:
      src_ref, dst_ref: Refs or views of the same shape and dtype, or pytrees of them with the same structure.
      add: add to what the destinations hold instead of replacing it.

    Raises:
      ValueError: different structures; also as `make_async_copy`.
    """
    frames.required("pltpu.sync_copy")
    sources, structure = jax.tree.flatten(src_ref, is_leaf=is_ref)
    targets, other = jax.tree.flatten(dst_ref, is_leaf=is_ref)
    if structure != other:
        headline = f"pltpu.sync_copy got pytrees of different structures: {structure} and {other}."
        raise mistake(ValueError, headline, hint="one destination for each source")
    for src, dst in zip(sources, targets):
        _check_ends("pltpu.sync_copy", src, dst)  # at the user's line, rather than in the scope below

    def copy_all(sems):
        copies = [async_copy(s, d, sems.at[i], add=add) for i, (s, d) in enumerate(zip(sources, targets))]
        for copy in copies:
            copy.wait()

    ops.run_scoped(copy_all, semaphores.SemaphoreType.DMA((len(sources),)))


def make_async_remote_copy(
    src_ref: Any,
    dst_ref: Any,
    send_sem: Any,
    recv_sem: Any,
    device_id: Any,
    device_id_type: DeviceIdType | None = None,
) -> AsyncCopyDescriptor:
    """Describe a copy from this device to another (or to itself). All devices of the mesh run the same kernel.

    Arguments:
      src_ref: a Ref or view on this device.
      dst_ref: where it goes: the Ref or view with that name on the other device, of the same shape and dtype.
      send_sem: a DMA semaphore, signalled here when the source has been read.
      recv_sem: a DMA semaphore, signalled on the other device when the data is there.
      device_id: a dict {axis name: index} (axes not named: one's own index), a tuple with an index for each axis of
        the mesh, or an integer.
      device_id_type: `pl.DeviceIdType.MESH` (default), or `.LOGICAL`: the device's number in the mesh.

    Raises:
      TypeError, ValueError: as `make_async_copy`; a device id that does not fit the mesh.
    """
    return _remote("pltpu.make_async_remote_copy", src_ref, dst_ref, send_sem, recv_sem, device_id, device_id_type)


def async_remote_copy(
    src_ref: Any,
    dst_ref: Any,
    send_sem: Any,
    recv_sem: Any,
    device_id: Any,
    device_id_type: DeviceIdType | None = None,
) -> AsyncCopyDescriptor:
    """Start a copy to another device: `make_async_remote_copy(…).start()`.

    Arguments:
      src_ref, dst_ref, send_sem, recv_sem, device_id, device_id_type: as `make_async_remote_copy`.

    Returns:
      the descriptor, to wait with.
    """
    copy = _remote("pltpu.async_remote_copy", src_ref, dst_ref, send_sem, recv_sem, device_id, device_id_type)
    copy.start()
    return copy


def _local(name: str, src: Any, dst: Any, sem: Any, src_sem: Any) -> AsyncCopyDescriptor:
    frames.required(name)
    _check_ends(name, src, dst)
    sems = [None if s is None else one_semaphore(name, s, None, kind=semaphores.DMA) for s in (sem, src_sem)]
    return AsyncCopyDescriptor(as_view(src), as_view(dst), dst_sem=sems[0], src_sem=sems[1])


def _remote(name, src, dst, send_sem, recv_sem, device_id, device_id_type) -> AsyncCopyDescriptor:
    frames.required(name)
    _check_ends(name, src, dst)
    send, recv = (one_semaphore(name, s, None, kind=semaphores.DMA) for s in (send_sem, recv_sem))
    if device_id is None:
        hint = "device_id={'x': 1}; within this device use pltpu.make_async_copy"
        raise mistake(ValueError, f"{name} needs a device_id: the device that the copy goes to.", hint=hint)
    device, kind = device_of(name, device_id, device_id_type)
    return AsyncCopyDescriptor(as_view(src), as_view(dst), recv, send, device, kind)


def _check_ends(name: str, src: Any, dst: Any) -> None:
    """The source and the destination are Refs of the same shape and dtype."""
    for what, ref in (("source", src), ("destination", dst)):
        if not is_ref(ref):
            hint = "a Ref, x_ref, or a view of one, x_ref.at[pl.ds(i, 8)]; x_ref[...] reads its value"
            raise mistake(TypeError, f"The {what} of {name} is {kind_of(ref)}; it must be a Ref.", hint=hint)
        if is_semaphore(ref):
            headline = f"The {what} of {name} is {label_of(ref)}, a semaphore; copies move data."
            raise mistake(TypeError, headline, hint="semaphores are signalled: pl.semaphore_signal(sem)")
    shapes, dtypes = [tuple(r.shape) for r in (src, dst)], [r.dtype for r in (src, dst)]
    if shapes[0] != shapes[1]:
        raise mistake(
            ValueError,
            f"A copy needs a source and a destination of the same shape: {label_of(src)} has {shapes[0]}, "
            f"{label_of(dst)} has {shapes[1]}.",
            hint="take views of the same size: x_ref.at[pl.ds(i, 8)]; an integer index drops a dimension",
        )
    if dtypes[0] != dtypes[1]:
        raise mistake(
            TypeError,
            f"A copy does not convert: {label_of(src)} holds {dtypes[0]}, {label_of(dst)} holds {dtypes[1]}.",
            hint="give both the same dtype, or move the bits: ref.bitcast(dtype)",
        )
