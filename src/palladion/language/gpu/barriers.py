"""Barriers: where the threads of a block, and the copies and matrix products they started, meet.

A barrier lives in SMEM. It completes when it has got the number of arrivals that it was made with, and begins anew; a
thread that waits takes the completions one by one, so that it must wait once for each. A cluster barrier completes in
all blocks along its axes at once.

Equations (operands are the leaves of `Bar(barrier, predicate)`; `predicate` is None or a boolean scalar):

    barrier_arrive    barrier_wait    barrier_test (gives a boolean scalar)      params: tree

Source: the Pallas Mosaic GPU reference, "Barrier" and "ClusterBarrier"; the PTX ISA on `mbarrier`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.language.fields import Check, check_fields, flag, integer
from palladion.language.gpu.arguments import a_predicate, one_barrier, print_operands
from palladion.language.gpu.memory import SMEM
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.gpu.refs import BarrierDType, GPURef
from palladion.language.refs import RefView

__all__ = [
    "Barrier",
    "ClusterBarrier",
    "barrier_arrive",
    "barrier_arrive_and_wait",
    "barrier_test",
    "barrier_wait",
]


# --- types ------------------------------------------------------------------------------------------------------------
def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(n, bool) for n in sizes):
        raise TypeError
    dims = tuple(operator.index(n) for n in sizes)
    if any(n < 0 for n in dims):
        raise ValueError
    return dims


def _axes(value: Any) -> tuple[Any, ...]:
    axes = (value,) if isinstance(value, str) else value
    if not isinstance(axes, (tuple, list)):
        raise TypeError
    stored = tuple(tuple(a) if isinstance(a, list) else a for a in axes)
    for axis in stored:
        for name in axis if isinstance(axis, tuple) else (axis,):
            if not isinstance(name, str):
                raise TypeError
    if not stored or () in stored:
        raise ValueError("it names no axis")
    return stored


_CHECKS: dict[str, Check] = {
    "num_arrivals": integer(1, "number of arrivals"),
    "num_barriers": Check("a number of barriers, or a tuple of them", _sizes, "plgpu.Barrier(num_barriers=2)"),
    "orders_tensor_core": flag(),
}
_CLUSTER_CHECKS: dict[str, Check] = {
    "collective_axes": Check("a tuple of cluster axes", _axes, "collective_axes=('cluster',)"),
    **_CHECKS,
    "leader_tracked": flag(),
}


class _BarrierType:
    """What both kinds of barrier are to `scratch_shapes` and `pl.run_scoped`: the type of a Ref."""

    num_barriers: Any
    memory_space = SMEM

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of barriers, () for one."""
        return self.num_barriers

    @property
    def dtype(self) -> BarrierDType:
        """The dtype of such a Ref."""
        raise NotImplementedError

    @property
    def inner_aval(self) -> Any:
        return self.get_array_aval()

    def get_array_aval(self) -> Any:
        """The type of the barriers as an array."""
        return jaxlink.ShapedArray(self.shape, self.dtype)

    def get_ref_aval(self, label: str = "scratch") -> GPURef:
        """The abstract Ref that a kernel sees."""
        return GPURef(self.get_array_aval(), SMEM, label=label)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Barrier(_BarrierType):
    """The type of barriers for the threads of a block, for `scratch_shapes` and `pl.run_scoped`.

    Arguments:
      num_arrivals: how many arrivals complete it: of threads (`plgpu.barrier_arrive`), copies (one each) and matrix
        products of Blackwell's tensor core.
      num_barriers: () or ints: an array of barriers, of which `barriers.at[i]` is one.
      orders_tensor_core: whether a thread's tensor-core operations are done when it arrives, and begin after a wait;
        needed to tell other threads, or to learn, that such operations are complete (Blackwell).

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    num_arrivals: int = 1
    num_barriers: int | Sequence[int] = ()
    orders_tensor_core: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.Barrier", _CHECKS)

    @property
    def dtype(self) -> BarrierDType:
        return BarrierDType(self.num_arrivals, self.orders_tensor_core)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterBarrier(_BarrierType):
    """The type of barriers that several blocks of a cluster share.

    An arrival counts in every block along the axes; the barrier completes in each of them when all have arrived.

    Arguments:
      collective_axes: cluster axes over which the blocks meet, names or tuples of names.
      num_barriers: () or ints: an array of barriers.
      num_arrivals: how many arrivals each block contributes.
      orders_tensor_core: as of `plgpu.Barrier`.
      leader_tracked: whether arrivals count in the first block only.

    Raises:
      TypeError, ValueError: naming the field, what it may be and what it is.
    """

    collective_axes: tuple[str | tuple[str, ...], ...]
    num_barriers: int | Sequence[int] = ()
    num_arrivals: int = 1
    orders_tensor_core: bool = False
    leader_tracked: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "plgpu.ClusterBarrier", _CLUSTER_CHECKS)

    @property
    def dtype(self) -> BarrierDType:
        axes = tuple(a if isinstance(a, tuple) else (a,) for a in self.collective_axes)
        return BarrierDType(self.num_arrivals, self.orders_tensor_core, axes, self.leader_tracked)


# --- equations --------------------------------------------------------------------------------------------------------
class Bar(NamedTuple):
    """The operands."""

    barrier: RefView
    predicate: Any = None


def _one_bool(types: Bar, params: dict[str, Any]) -> list[Any]:
    return [jaxlink.ShapedArray((), jnp.dtype("bool"))]


barrier_arrive_p = gpu_primitive("barrier_arrive", writes=["barrier"])
barrier_wait_p = gpu_primitive("barrier_wait", reads=["barrier"], writes=["barrier"])
barrier_test_p = gpu_primitive("barrier_test", reads=["barrier"], results=_one_bool)
print_operands(barrier_arrive_p, barrier_wait_p, barrier_test_p)


# --- what kernels call ------------------------------------------------------------------------------------------------
def barrier_arrive(barrier: Any, *, predicate: bool | jax.Array | None = None) -> None:
    """Arrive on a barrier: what this thread has done so far is known to those who wait for the completion.

    Arguments:
      barrier: a Ref of one barrier, shape (): `barrier` or `barriers.at[i]`.
      predicate: a boolean scalar; the thread arrives only if it is true. None: always.

    Raises:
      TypeError: not a barrier, or a predicate that is no boolean scalar. ValueError: an array of barriers; outside a
        kernel.

    Reference: "Explicit arrival".
    """
    name = "plgpu.barrier_arrive"
    bind(name, barrier_arrive_p, Bar(one_barrier(name, barrier), a_predicate(name, predicate)))


def barrier_wait(barrier: Any) -> None:
    """Wait for the next completion of a barrier: the k-th wait of a thread is for the k-th completion.

    Every thread that waits on a barrier must wait for each of its completions, and none may come before the one before
    has been waited for.

    Arguments:
      barrier: a Ref of one barrier, shape ().

    Raises:
      TypeError, ValueError: as `barrier_arrive`.

    Reference: "Barrier".
    """
    name = "plgpu.barrier_wait"
    bind(name, barrier_wait_p, Bar(one_barrier(name, barrier)))


def barrier_test(barrier: Any) -> jax.Array:
    """Whether the completion that this thread would wait for next has come; it does not wait, nor take it.

    Arguments:
      barrier: a Ref of one barrier, shape ().

    Returns:
      a boolean scalar.

    Raises:
      TypeError, ValueError: as `barrier_arrive`.
    """
    name = "plgpu.barrier_test"
    return bind(name, barrier_test_p, Bar(one_barrier(name, barrier)))[0]


def barrier_arrive_and_wait(barrier: Any) -> None:
    """Arrive on a barrier and wait for its completion.

    Arguments:
      barrier: a Ref of one barrier, shape ().

    Raises:
      TypeError, ValueError: as `barrier_arrive`.

    Reference: "ClusterBarrier", which pairs the two.
    """
    operands = Bar(one_barrier("plgpu.barrier_arrive_and_wait", barrier))
    bind("plgpu.barrier_arrive_and_wait", barrier_arrive_p, operands)
    bind("plgpu.barrier_arrive_and_wait", barrier_wait_p, operands)
