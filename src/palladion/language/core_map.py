"""pl.core_map: a function without parameters that every core of a mesh runs once, on Refs that it closes over.

The stateful form of `pl.kernel`, for programs that hold their arrays in Refs already (`pl.run_state`, `jax.new_ref`).
It binds `core_map_p`, whose operands are the Refs and arrays that the function uses. Where Refs become values (JAX's
state discharge under jit, or Palladion's `run_state`) it turns into a `pallas_call_p` with a mesh, in which each Ref
that the function writes is an operand aliased to an output. Executors meet that alone.

Equation:

    core_map  operands: Refs and arrays    params: jaxpr (over the operands, then scratch), written (for each operand,
              whether the function writes it), scratch (abstract Refs), call (a `_Call`: the other arguments)

Source: public documentation, "Pallas Core-specific Programming"; the Mosaic GPU reference, "Using core_map".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.errors import suggesting_keywords
from palladion.language import specs
from palladion.language.blocks import BlockSpec, GridSpec
from palladion.language.buffers import settle_types
from palladion.language.call import Setup, make_call, tracing
from palladion.language.check import refuse_result
from palladion.language.cost import CostEstimate
from palladion.language.kernel import check_mesh, refuse_eager
from palladion.language.refs import MemorySpace

core_map_p = jaxlink.Primitive("core_map")
core_map_p.multiple_results = True


@core_map_p.def_effectful_abstract_eval
def _core_map_type(*avals, jaxpr, written, scratch, call):
    effects = jaxlink.positional_ref_effects(jaxpr)
    return [], {e for e in effects if not isinstance(e, jaxlink.JaxprInputEffect) or e.input < len(avals)}


_compiled = jaxlink.compile_and_run(core_map_p)
core_map_p.def_impl(_compiled)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of `core_map` that the call is made with."""

    function: Callable
    mesh: Any
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"core_map({self.function.__name__}, {self.mesh})"


@suggesting_keywords
def core_map(
    mesh: Any,
    *,
    compiler_params: Any = None,
    interpret: Any = False,
    debug: bool = False,
    cost_estimate: CostEstimate | None = None,
    name: str | None = None,
    metadata: dict[str, str] | None = None,
    scratch_shapes: Any = (),
) -> Callable[[Callable[..., None]], None]:
    """Decorator: run a function on every core of a mesh, at once, for its effects on Refs that it closes over.

        @pl.core_map(pltpu.TensorCoreMesh(axis_name="core", num_cores=2))
        def _():
            rows = pl.ds(lax.axis_index("core") * 8, 8)
            pltpu.sync_copy(x_ref.at[rows], y_ref.at[rows])

    Arguments:
      mesh: the cores; inside a kernel for a GPU, the warps of its thread (`plgpu.WarpMesh`).
      compiler_params, interpret, debug, cost_estimate, name, metadata: as in `pallas_call`.
      scratch_shapes: buffer types, a tuple (the function's parameters) or a dict (by keyword); each core has its own.

    Raises:
      ValueError, TypeError: an argument or the function is not as described.
    """
    if hasattr(mesh, "run_inside"):  # parts of a core: inside a kernel
        return mesh.run_inside
    check_mesh("pl.core_map", mesh)
    refuse_eager("pl.core_map", interpret)
    options = dict(
        compiler_params=compiler_params, interpret=interpret, debug=debug, cost_estimate=cost_estimate,
        metadata=metadata,
    )  # fmt: skip

    def run(function: Callable[..., None]) -> None:
        called = name or specs.kernel_name(function)
        spec = GridSpec(scratch_shapes=settle_types(scratch_shapes, mesh))
        no_operands = jax.tree.structure(())
        layout = specs.Layout.make(function, called, spec, (), no_operands, (), specs.out_tree(()))

        def body(*scratch):
            args, kwargs = layout.arguments(scratch)
            refuse_result(function, function(*args, **kwargs))

        info = jaxlink.debug_info("core_map", function, layout.scratch_refs)
        with tracing((), called, mesh):
            jaxpr, _ = jaxlink.trace_to_jaxpr(body, layout.scratch_refs, info)
        jaxpr, operands = jaxlink.convert_consts_to_invars(jaxpr)
        changed = jaxlink.written_vars(jaxpr)
        core_map_p.bind(
            *operands,
            jaxpr=jaxpr,
            written=tuple(v in changed for v in jaxpr.invars[: len(operands)]),
            scratch=layout.scratch_refs,
            call=_Call(function, mesh, dict(options, name=called)),
        )

    return run


def on_values(*values: Any, jaxpr: Any, written: Sequence[bool], scratch: Sequence[Any], call: _Call) -> list[Any]:
    """Run a `core_map` on what its operands hold.

    Arguments:
      *values: the operands; for a Ref, what it holds.
      jaxpr, written, scratch, call: the equation's parameters.

    Returns:
      for each operand what it holds afterwards; None for those that are not written.
    """
    n, targets = len(values), [i for i, w in enumerate(written) if w]
    is_ref = [isinstance(v.aval, jaxlink.AbstractRef) for v in jaxpr.invars[:n]]

    def kernel(*refs):
        inputs, outputs, rest = refs[:n], refs[n : n + len(targets)], refs[n + len(targets) :]
        operands = [ref if holds else ref[...] for ref, holds in zip(inputs, is_ref)]
        for ref, i in zip(outputs, targets):
            operands[i] = ref
        jaxlink.eval_jaxpr(jaxpr, (), *operands, *rest)

    place = call.mesh.default_memory_space
    spaces = [getattr(v.aval, "memory_space", None) if r else MemorySpace.DEFAULT for v, r in zip(jaxpr.invars, is_ref)]
    unsaid = (None, jax.memory.Space.Device, MemorySpace.ANY)
    whole = [BlockSpec(memory_space=place if s in unsaid else s) for s in spaces]
    setup = Setup.make(
        kernel,
        GridSpec(
            grid=tuple(call.mesh.shape.values()),
            in_specs=tuple(whole),
            out_specs=tuple(whole[i] for i in targets),
            scratch_shapes=tuple(_Typed(ref) for ref in scratch),
        ),
        tuple(jax.ShapeDtypeStruct(values[i].shape, values[i].dtype) for i in targets),
        aliases={i: k for k, i in enumerate(targets)},
        mesh=call.mesh,
        **call.options,
    )
    after: list[Any] = [None] * n
    for i, value in zip(targets, make_call(setup)(*values)):
        after[i] = value
    return after


@dataclasses.dataclass(frozen=True)
class _Typed:
    """A buffer type of a given abstract Ref."""

    ref: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def dtype(self) -> Any:
        return self.ref.dtype

    def get_ref_aval(self) -> Any:
        return self.ref


jaxlink.register_discharge(core_map_p, on_values)
