"""pl.kernel: a function that every core of a mesh runs once, on whole arrays.

What `pallas_call` is to a grid of blocks, `kernel` is to the cores of a chip: nothing is cut into blocks or copied, the
kernel gets Refs of whole operands where they lie and moves data itself. It binds the same primitive, `pallas_call_p`,
with a `mesh` (`primitive.py` says what that means), so that every transformation and executor of calls knows it.

Source: public documentation, "Pallas Core-specific Programming" and the API reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from palladion import executors, jaxlink
from palladion.errors import TargetNotBuilt, kind_of, mistake, suggesting_keywords
from palladion.language import frames
from palladion.language.blocks import BlockSpec, GridSpec
from palladion.language.buffers import is_array_type, settle_types
from palladion.language.call import Setup, make_call
from palladion.language.cost import CostEstimate
from palladion.language.foreign import refuse_foreign
from palladion.language.refs import MemoryRef
from palladion.rules import only_on

_later: Any = object()  # no body yet: `kernel` is used as a decorator


@suggesting_keywords
def kernel(
    body: Any = _later,
    out_type: Any = (),
    *,
    mesh: Any,
    scratch_types: Any = (),
    compiler_params: Any = None,
    interpret: Any = False,
    cost_estimate: CostEstimate | None = None,
    debug: bool = False,
    name: str | None = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Make a JAX function of a kernel that all cores of a mesh run; also a decorator, `@pl.kernel(out_type=…, mesh=…)`.

    Arguments:
      body: a function of Refs that returns None: of the operands, then the outputs, then the scratch buffers (a dict
        of scratch types is passed by keyword). Operands and outputs are whole, and the same for all cores; scratch
        is each core's own.
      out_type: a pytree of things with shape and dtype; a memory type such as `pltpu.VMEM(shape, dtype)` says where
        the output's Ref is, `mesh.default_memory_space` otherwise.
      mesh: the cores, e.g. `pltpu.TensorCoreMesh(axis_name="core")`; `lax.axis_index("core")` in the body is the
        core's number.
      scratch_types: buffer types, a tuple or a dict.
      compiler_params, interpret, cost_estimate, debug, name, metadata: as in `pallas_call`.

    Returns:
      a function of the operands: one array for each leaf of out_type, in its structure.

    Raises:
      ValueError, TypeError: an argument or the kernel is not as described.
    """
    if body is _later:

        def decorate(function: Callable) -> Callable:
            return kernel(
                function, out_type, mesh=mesh, scratch_types=scratch_types, compiler_params=compiler_params,
                interpret=interpret, cost_estimate=cost_estimate, debug=debug, name=name, metadata=metadata,
            )  # fmt: skip

        return decorate
    if isinstance(body, Sequence):
        (body,), (mesh,) = _only(body, "bodies"), _only(mesh, "meshes")
    mesh = _only(mesh, "meshes")[0] if isinstance(mesh, Sequence) else mesh
    check_mesh("pl.kernel", mesh)
    return make_kernel(
        body, function="pl.kernel", out_type=out_type, mesh=mesh, scratch_types=scratch_types,
        compiler_params=compiler_params, interpret=interpret, cost_estimate=cost_estimate, debug=debug, name=name,
        metadata=metadata,
    )  # fmt: skip


def make_kernel(
    body: Callable[..., None],
    *,
    function: str,
    out_type: Any,
    mesh: Any,
    scratch_types: Any,
    interpret: Any,
    **options: Any,
) -> Callable[..., Any]:
    """What `kernel` returns, for checked `body` and `mesh`.

    Arguments:
      function: the public name, for messages.
      **options: the other arguments of `Setup.make`.
    """
    if not callable(body):
        headline = f"The body of {function} must be a function of Refs, not {kind_of(body)}."
        raise mistake(TypeError, headline, hint=f"{function}(body, out_type=…)(operands)")
    refuse_foreign(out_type=out_type, scratch_types=scratch_types)
    refuse_eager(function, interpret)
    spec = GridSpec(
        grid=tuple(mesh.shape.values()),
        in_specs=BlockSpec(memory_space=mesh.default_memory_space),
        out_specs=_out_specs(out_type, mesh),
        scratch_shapes=settle_types(scratch_types, mesh),
    )
    setup = Setup.make(body, spec, out_type, interpret=interpret, mesh=mesh, **options)
    if isinstance(out_type, list):  # unlike pallas_call, the call returns a list
        out_shape = dataclasses.replace(setup.out_shape, tree=jax.tree.structure(out_type, is_leaf=is_array_type))
        setup = dataclasses.replace(setup, out_shape=out_shape)
    return make_call(setup)


def _out_specs(out_type: Any, mesh: Any) -> Any:
    """A spec for each output: in the memory that its type names, whole."""

    def one(leaf: Any) -> BlockSpec:
        named = isinstance(leaf, MemoryRef)
        return BlockSpec(memory_space=leaf.memory_space if named else mesh.default_memory_space)

    out_type = tuple(out_type) if isinstance(out_type, list) else out_type
    return jax.tree.map(one, out_type, is_leaf=is_array_type)


def _only(given: Any, what: str) -> Any:
    given = given if isinstance(given, Sequence) else (given,)
    if len(given) != 1:
        raise TargetNotBuilt(
            f"pl.kernel with several {what} (different cores running different functions) is later work."
        )
    return given


def check_mesh(function: str, mesh: Any) -> None:
    """Raise TypeError unless `mesh` is a mesh of cores."""
    if isinstance(mesh, jax.sharding.Mesh):
        headline = f"The mesh of {function} is one of cores in a device, not of devices."
        raise mistake(
            TypeError, headline, hint="pltpu.TensorCoreMesh(axis_name='core'); devices: jax.shard_map around it"
        )
    if not isinstance(getattr(mesh, "shape", None), Mapping) or not hasattr(mesh, "default_memory_space"):
        headline = f"The mesh of {function} cannot be {kind_of(mesh)}."
        raise mistake(TypeError, headline, hint="pltpu.TensorCoreMesh(axis_name='core', num_cores=2)")
    refuse_foreign(mesh=mesh)


def refuse_eager(function: str, interpret: Any) -> None:
    """Raise NotImplementedError for the eager interpreter, which runs the programs of grids."""
    if executors.is_eager(executors.normalise_interpret(interpret)):
        headline = f"{function} does not run under interpret=pl.EagerParams(): cores are no programs of a grid."
        raise mistake(NotImplementedError, headline, hint="interpret=True, or interpret=pltpu.InterpretParams()")


# --- allocations of the whole call ------------------------------------------------------------------------------------
get_global_p = jaxlink.Primitive("get_global")  # no operands; params: what (an abstract Ref); gives a Ref
get_global_p.ref_allocating = True


@get_global_p.def_effectful_abstract_eval
def _get_global_type(*, what):
    return what, set()


only_on(("the simulated TPU", "the simulated GPU"), get_global_p)


def get_global(what: Any) -> Any:
    """A Ref that all programs and cores of a call share; each place in the kernel that asks for one gets another.

    Arguments:
      what: a buffer type, such as `pltpu.SemaphoreType.REGULAR`.

    Raises:
      TypeError: it is no buffer type. ValueError: outside a kernel.
    """
    frames.required("get_global")
    if not hasattr(what, "get_ref_aval"):
        hint = "pl.get_global(pltpu.SemaphoreType.REGULAR)"
        raise mistake(TypeError, f"pl.get_global takes a buffer type, not {kind_of(what)}.", hint=hint)
    return get_global_p.bind(what=what.get_ref_aval())
