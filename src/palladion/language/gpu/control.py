"""Operations that steer a kernel's threads: registers, dependent launches, taking over blocks, single warps.

    set_max_registers_p     no operands; params: n, action ("increase" or "decrease")
    griddepcontrol_p        no operands; params: which ("wait" or "launch_dependents")
    try_cluster_cancel_p    result, barrier; params: collective_axes
    query_cluster_cancel_p  result; params: grid_names; gives an int32 for each name, then a bool
    warp_map_p              operands: Refs and arrays; params: jaxpr (over them), axis_name

Source: the Mosaic GPU reference, "Cluster launch control"; PTX ISA: setmaxnreg, griddepcontrol,
clusterlaunchcontrol.try_cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import UnsupportedPrimitive, explain, kind_of, mistake
from palladion.language import frames
from palladion.language.check import refuse_result
from palladion.language.gpu.arguments import a_ref, axis_names, cluster_axes, one_barrier, print_operands
from palladion.language.gpu.memory import SMEM, GPUMemoryRef, storage_transforms
from palladion.language.gpu.mesh import WARPS
from palladion.language.gpu.primitives import MACHINE, bind, gpu_primitive, on_gpu
from palladion.language.indexing import label_of
from palladion.rules import only_on


class Nothing(NamedTuple):
    """No operands."""


# --- registers and dependent launches -------------------------------------------------------------------------------
set_max_registers_p = gpu_primitive("set_max_registers")
griddepcontrol_p = gpu_primitive("griddepcontrol")


def set_max_registers(n: int, *, action: str) -> None:
    """Change how many registers each CUDA thread of this Pallas thread may use, from here on.

    Threads that only start copies give registers back, so that those that compute can have more.

    Arguments:
      n: registers for each CUDA thread: a multiple of 8 from 24 to 256.
      action: "increase" (waits until as many are free) or "decrease" (gives the others back).

    Raises:
      TypeError, ValueError: an argument is not as described; outside a kernel.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        headline = f"plgpu.set_max_registers takes a Python integer, not {kind_of(n)}."
        raise mistake(TypeError, headline, hint="plgpu.set_max_registers(40, action='decrease')")
    if n % 8 or not 24 <= n <= 256:
        hint = "plgpu.set_max_registers(40, action='decrease') for a thread that only copies"
        headline = f"plgpu.set_max_registers: n must be a multiple of 8 from 24 to 256, but it is {n}."
        raise mistake(ValueError, headline, hint=hint)
    if action not in ("increase", "decrease"):
        headline = f"plgpu.set_max_registers: action must be 'increase' or 'decrease', not {action!r}."
        raise mistake(ValueError, headline, hint="plgpu.set_max_registers(40, action='decrease')")
    bind("plgpu.set_max_registers", set_max_registers_p, Nothing(), n=int(n), action=action)


def griddepcontrol_wait() -> None:
    """Wait until the kernels that this one depends on have ended, and see what they wrote.

    Raises:
      ValueError: outside a kernel.
    """
    bind("plgpu.griddepcontrol_wait", griddepcontrol_p, Nothing(), which="wait")


def griddepcontrol_launch_dependents() -> None:
    """Allow kernels that depend on this one to start, where they wait with `griddepcontrol_wait`.

    Raises:
      ValueError: outside a kernel.
    """
    bind("plgpu.griddepcontrol_launch_dependents", griddepcontrol_p, Nothing(), which="launch_dependents")


# --- cluster launch control -----------------------------------------------------------------------------------------
_RESULT = (4,)  # int32 words: the hardware's answer has 16 bytes


class Cancel(NamedTuple):
    """Operands of `try_cluster_cancel_p`: RefViews."""

    result: Any
    barrier: Any


class Query(NamedTuple):
    """Operands of `query_cluster_cancel_p`: a RefView."""

    result: Any


try_cluster_cancel_p = gpu_primitive("try_cluster_cancel", reads=["barrier"], writes=["result", "barrier"])
query_cluster_cancel_p = gpu_primitive(
    "query_cluster_cancel",
    reads=["result"],
    results=lambda operands, params: [
        *(jaxlink.ShapedArray((), jnp.dtype("int32")) for _ in params["grid_names"]),
        jaxlink.ShapedArray((), jnp.dtype("bool")),
    ],
)


def TryClusterCancelResult(num_buffers: int | None = None) -> GPUMemoryRef:
    """The type of a scratch Ref that holds what `try_cluster_cancel` found: 16 bytes of shared memory.

    Arguments:
      num_buffers: how many such results; None: one. `ref.at[i]` is one of several.

    Raises:
      TypeError, ValueError: it is not a positive integer.
    """
    if num_buffers is None:
        return SMEM(_RESULT, jnp.int32)
    hint = "plgpu.TryClusterCancelResult(2) for two results in turn"
    if isinstance(num_buffers, bool) or not isinstance(num_buffers, (int, np.integer)):
        headline = f"plgpu.TryClusterCancelResult: num_buffers is an integer or None, not {kind_of(num_buffers)}."
        raise mistake(TypeError, headline, hint=hint)
    if num_buffers < 1:
        headline = f"plgpu.TryClusterCancelResult: num_buffers is {num_buffers}; it must be positive."
        raise mistake(ValueError, headline, hint=hint)
    return SMEM((int(num_buffers), *_RESULT), jnp.int32)


TryCancelResultRef = TryClusterCancelResult  # the reference's name


def _one_result(function: str, ref: Any) -> Any:
    view = a_ref(function, "result", ref, SMEM)
    if len(ref.shape) == 2 and tuple(ref.shape[1:]) == _RESULT and ref.dtype == np.int32:
        headline = f"{function} takes one result, but {label_of(ref)} holds {ref.shape[0]}."
        raise mistake(ValueError, headline, hint="choose one: result_ref.at[i]")
    if tuple(ref.shape) != _RESULT or ref.dtype != np.int32:
        headline = f"{function}: {label_of(ref)} is no result of a cancellation, but {ref.dtype}{list(ref.shape)}."
        raise mistake(TypeError, headline, hint="allocate it in scratch: plgpu.TryClusterCancelResult()")
    return view


def try_cluster_cancel(result_ref: Any, barrier: Any, *, collective_axes: Hashable | tuple[Hashable, ...] = ()) -> None:
    """Try to take over the work of a cluster that has not started; its launch is then cancelled. Blackwell only.

    It runs on its own: `barrier` gets one arrival when the result is there, to be read by `query_cluster_cancel`.

    Arguments:
      result_ref: a scratch Ref of type `plgpu.TryClusterCancelResult()`.
      barrier: a barrier.
      collective_axes: axes of the cluster whose blocks all make this call; one request is made for them, and each
        gets the result.

    Raises:
      TypeError, ValueError: an argument is not as described; outside a kernel.
    """
    function = "plgpu.try_cluster_cancel"
    axes = cluster_axes(function, collective_axes)
    operands = Cancel(_one_result(function, result_ref), one_barrier(function, barrier))
    bind(function, try_cluster_cancel_p, operands, collective_axes=axes)


def query_cluster_cancel(result_ref: Any, grid_names: Sequence[Hashable]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """What a `try_cluster_cancel` found.

    Arguments:
      result_ref: the Ref that it wrote.
      grid_names: axes of the grid.

    Returns:
      the index along each of these axes of the cluster that was taken over (int32 scalars; without meaning if there
      was none), and whether there was one (a bool scalar).

    Raises:
      TypeError, ValueError: an argument is not as described; outside a kernel.
    """
    function = "plgpu.query_cluster_cancel"
    frame = frames.required(function)
    result = _one_result(function, result_ref)
    names = axis_names(function, "grid_names", grid_names)
    of_grid = tuple(getattr(frame.mesh, "grid_names", ()))
    for name in names:
        if name not in of_grid:
            headline = f"{function}: {name!r} is not an axis of the kernel's grid."
            hint = "the grid_names of the kernel, or some of them"
            raise mistake(ValueError, headline, axes=", ".join(map(repr, of_grid)) or "none", hint=hint)
    *indices, taken = bind(function, query_cluster_cancel_p, Query(result), grid_names=names)
    return tuple(indices), taken


print_operands(set_max_registers_p, griddepcontrol_p, try_cluster_cancel_p, query_cluster_cancel_p)


# --- single warps ---------------------------------------------------------------------------------------------------
warp_map_p = jaxlink.Primitive("warp_map")
warp_map_p.multiple_results = True
only_on(MACHINE, warp_map_p)


@warp_map_p.def_effectful_abstract_eval
def _warp_map_type(*avals, jaxpr, axis_name):
    return [], {*jaxlink.positional_ref_effects(jaxpr), on_gpu}


def warp_map(f: Callable[[jax.Array], None], /) -> None:
    """Run a function on each of the four warps of this thread, all at once; also a decorator.

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: plgpu.copy_gmem_to_smem(x_ref, x_smem, barrier))

    Arguments:
      f: a function of the warp's number, an int32 scalar, that returns None.

    Raises:
      ValueError: outside a kernel, inside another warp_map, or the function returns something.
    """
    frames.check_arity(
        f,
        1,
        lambda takes: explain(
            f"The function under plgpu.warp_map takes {takes}, but it is called with the warp's number.",
            where=locations.defined_at(f),
            hint="`def _(warp): …`",
        ),
    )
    map_warps("plgpu.warp_map", lambda: f(lax.axis_index(_WARP)), _WARP, f)


class _Warp:
    """The axis of `warp_map`; no name of the kernel's can be the same."""

    def __repr__(self) -> str:
        return "warp"


_WARP = _Warp()


def map_warps(function: str, body: Callable[[], None], axis_name: Any, named: Callable | None = None) -> None:
    """Bind `warp_map_p` to a function without parameters.

    Arguments:
      function: the public name, for messages.
      body: the function; the warp's number is `lax.axis_index(axis_name)`.
      named: the user's function, for messages; `body` by default.

    Raises:
      ValueError: outside a kernel, inside another warp_map, or the function returns something.
    """
    frame = frames.required(function)
    user = named or body
    if frame.warps is not None:
        headline = f"{function} inside the function of one warp: a warp cannot be split further."
        raise mistake(ValueError, headline, hint="call it where the whole thread runs")
    if axis_name in frame.cores:
        headline = f"{function}: {axis_name!r} is an axis of the kernel's mesh already."
        raise mistake(ValueError, headline, hint="give the warps a name of their own: axis_name='warp'")

    def flat():
        refuse_result(user, body())
        return []

    with frames.single_warp(axis_name), jaxlink.axis_in_trace_key(axis_name, WARPS):
        jaxpr, _ = jaxlink.trace_to_jaxpr(flat, (), jaxlink.debug_info("warp_map", user, ()))
    jaxpr, consts = jaxlink.convert_consts_to_invars(jaxpr)
    warp_map_p.bind(*consts, jaxpr=jaxpr, axis_name=axis_name)


@dataclasses.dataclass(frozen=True)
class RefType:
    """A Ref among the `arg_types` of `inline_mgpu`, stored with these transforms.

    Arguments:
      transforms: storage transforms.

    Raises:
      TypeError: they are something else.
    """

    transforms: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", storage_transforms(self.transforms, "a plgpu.RefType"))


def inline_mgpu(*, arg_types: Any = (), return_type: Any = None) -> Any:
    """Code of the Mosaic GPU compiler in the middle of a kernel, which no other machine can run.

    Arguments: arg_types, return_type: of the function that it decorates, as in JAX 0.12; not looked at.

    Raises:
      UnsupportedPrimitive: always, where the kernel calls the function that this decorates.
    """
    del arg_types, return_type

    def decorate(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            frames.required("plgpu.inline_mgpu")
            error = UnsupportedPrimitive("inline_mgpu", MACHINE, locations.current_location())
            error.args = (
                f"{error}\n  fix: Palladion's compiler has no Mosaic GPU dialect to write in; plgpu.inline_ptx runs "
                "PTX, and the other functions of plgpu do the rest",
            )
            raise error

        return call

    return decorate
