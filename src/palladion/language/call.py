"""pallas_call: a Python function on Refs becomes a traced kernel call.

Calling what `pallas_call` returns flattens the operands, makes a `GridMapping`, traces the kernel to a jaxpr over
Refs, checks it, and binds `pallas_call_p`. Tracing happens once for each combination of operand types and of JAX's
trace-time configuration: the same parameters come back, so that JAX's compile caches are hit.

With `interpret=pl.EagerParams()` the kernel's body is not traced: its Python function is a parameter of the call.

Source: tutorial sections 0 to 2 (signature, what a kernel may do, words of the errors).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from palladion import config, executors, jaxlink, locations
from palladion.errors import kind_of, mistake, suggesting_keywords
from palladion.language import frames, specs
from palladion.language.blocks import GridSpec, no_block_spec
from palladion.language.check import check_kernel, refuse_result
from palladion.language.compiler_params import CompilerParams
from palladion.language.cost import CostEstimate
from palladion.language.foreign import refuse_foreign
from palladion.language.grid import GridMapping, make_block_mapping
from palladion.language.index_maps import warn_out_of_range
from palladion.language.intern import intern
from palladion.language.primitive import EagerKernel, notify, pallas_call_p

_GRID_AXIS = "palladion grid"


@suggesting_keywords
def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid_spec: GridSpec | None = None,
    grid: Any = (),
    in_specs: Any = no_block_spec,
    out_specs: Any = no_block_spec,
    scratch_shapes: Any = (),
    input_output_aliases: Mapping[int, int] = {},
    debug: bool = False,
    interpret: Any = False,
    name: str | None = None,
    compiler_params: CompilerParams | None = None,
    cost_estimate: CostEstimate | None = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Make a JAX function of a kernel.

    Arguments:
      kernel: a function of Refs that returns None. It gets a Ref for each operand (pytrees keep their structure),
        then for each output, then for each scratch buffer (a dict of scratch shapes is passed by keyword).
      out_shape: a pytree of things with shape and dtype, such as `jax.ShapeDtypeStruct`; a tuple or list gives the
        kernel one argument an entry.
      grid_spec: a `GridSpec` (or `pltpu.PrefetchScalarGridSpec`) in place of grid, in_specs, out_specs and
        scratch_shapes.
      grid: how many programs run along each axis, the last varying fastest: an int, a tuple of ints or of traced
        int32 scalars, or () for one program.
      in_specs, out_specs: pytree prefixes of the operands and of out_shape with `BlockSpec` leaves.
      scratch_shapes: buffer types, a tuple or a dict; scratch keeps its contents from program to program.
      input_output_aliases: {operand number: output number}, counting array leaves (scalar-prefetch operands
        included); the output starts as the operand and may reuse its memory.
      debug: print the traced kernel and the grid mapping.
      interpret: True, `pl.EagerParams(...)`, or a simulated machine's parameters; False compiles for the platform.
      name: for messages, profiles and HLO names.
      compiler_params: of the dialect that is to compile the kernel, e.g. `pltpu.CompilerParams(...)`.
      cost_estimate: what a call costs, for the compiler's scheduler and for `estimate_cost`.
      metadata: string pairs kept with the call.

    Returns:
      a function of the operands: one array for each leaf of out_shape, in its structure (lists become tuples).

    Raises:
      ValueError, TypeError: an argument or the kernel is not as described; the message names the operand and the line.
    """
    if not callable(kernel):
        hint = "pl.pallas_call(kernel, out_shape, …)(operands)"
        raise mistake(TypeError, f"The kernel must be a function of Refs, not {kind_of(kernel)}.", hint=hint)
    given = dict(grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes)
    refuse_foreign(grid_spec=grid_spec)
    setup = Setup.make(
        kernel, _grid_spec(grid_spec, given), out_shape, aliases=input_output_aliases, debug=debug,
        interpret=interpret, name=name, compiler_params=compiler_params, cost_estimate=cost_estimate,
        metadata=metadata,
    )  # fmt: skip
    return make_call(setup)


def make_call(setup: Setup) -> Callable[..., Any]:
    """The function of a kernel's operands that `pallas_call` and `kernel` return."""
    grid_sizes, dynamic_sizes = specs.normalise_grid(setup.spec.grid, setup.name)

    @jaxlink.trace_cache
    def parameters(in_tree, avals, debug_checks):
        return _trace(setup, grid_sizes, in_tree, avals, debug_checks)

    def call(*operands, **named):
        if named:
            headline = f"The kernel call {setup.name} takes operands by position, not by name ({', '.join(named)})."
            raise mistake(TypeError, headline, hint="operands come in the order of the kernel's parameters")
        flat, in_tree = jax.tree.flatten(operands)
        flat = [specs.as_operand(x, i, setup.name) for i, x in enumerate(flat)]
        avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat)
        params = parameters(in_tree, avals, config.get("debug_checks"))
        notify((*dynamic_sizes, *flat), params)
        outs = pallas_call_p.bind(*dynamic_sizes, *flat, **params)
        return jax.tree.unflatten(setup.out_shape.tree, outs)

    functools.update_wrapper(call, setup.kernel, assigned=("__name__", "__qualname__", "__module__"), updated=())
    call.__doc__ = f"The kernel call {setup.name!r} (palladion.pallas_call): a function of the kernel's operands."
    del call.__wrapped__
    return jaxlink.api_boundary(call)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """The arguments of `pallas_call` or `kernel`, checked.

    Attributes:
      mesh: the cores that run the kernel, at once, in place of a grid's programs; None for `pallas_call`.
    """

    kernel: Callable
    name: str
    spec: Any
    out_shape: Any
    aliases: tuple[tuple[int, int], ...]
    debug: bool
    interpret: Any
    compiler_params: Any
    cost_estimate: Any
    metadata: Any
    mesh: Any = None

    @classmethod
    def make(
        cls,
        kernel: Callable,
        spec: GridSpec,
        out_shape: Any,
        *,
        aliases: Mapping[int, int] = types.MappingProxyType({}),
        debug: Any,
        interpret: Any,
        name: Any,
        compiler_params: Any,
        cost_estimate: Any,
        metadata: Any,
        mesh: Any = None,
    ) -> Setup:
        """Check the arguments that do not depend on the operands.

        Raises:
          ValueError, TypeError: an argument is not as `pallas_call` describes.
        """
        refuse_foreign(out_shape=out_shape, interpret=interpret)
        refuse_foreign(compiler_params=compiler_params, cost_estimate=cost_estimate)
        return cls(
            kernel=kernel,
            name=_checked("name", name, str) or specs.kernel_name(kernel),
            spec=spec,
            out_shape=specs.out_tree(out_shape),
            aliases=specs.normalise_aliases(aliases),
            debug=bool(debug),
            interpret=executors.normalise_interpret(interpret),
            compiler_params=_checked("compiler_params", compiler_params, CompilerParams),
            cost_estimate=_checked("cost_estimate", cost_estimate, CostEstimate),
            metadata=_metadata(metadata),
            mesh=mesh,
        )


def _grid_spec(grid_spec: Any, given: dict[str, Any]) -> Any:
    if grid_spec is None:
        return GridSpec(**given)
    if not isinstance(grid_spec, GridSpec):
        hint = "grid_spec=pl.GridSpec(grid=…, in_specs=…, out_specs=…), or grid=… without a grid_spec"
        raise mistake(TypeError, f"grid_spec must be a pl.GridSpec, not {kind_of(grid_spec)}.", hint=hint)
    defaults = dict(grid=(), in_specs=no_block_spec, out_specs=no_block_spec, scratch_shapes=())
    for field, value in given.items():
        if value is not defaults[field] and not (isinstance(value, tuple) and value == defaults[field]):
            headline = (
                f"`grid_spec` and `{field}` are both given to pallas_call; with a grid_spec, {field} belongs in it."
            )
            raise mistake(ValueError, headline, hint=f"pl.GridSpec({field}=…)")
    return grid_spec


def _checked(what: str, value: Any, kind: type) -> Any:
    if value is not None and not isinstance(value, kind):
        hint = {
            "name": "name='matmul'",
            "compiler_params": "an instance: plcpu.CompilerParams(), pltpu.CompilerParams(…) and so on",
            "cost_estimate": "pl.CostEstimate(flops=…, transcendentals=…, bytes_accessed=…)",
        }[what]
        raise mistake(TypeError, f"{what} cannot be {kind_of(value)}.", hint=hint)
    return value


def _metadata(metadata: Any) -> Any:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping) or not all(isinstance(x, str) for kv in metadata.items() for x in kv):
        headline = f"metadata must map strings to strings, not {kind_of(metadata)}."
        raise mistake(TypeError, headline, hint="metadata={'layer': '3'}")
    return tuple(sorted(metadata.items()))


def _trace(setup: Setup, grid: tuple[int | None, ...], in_tree: Any, avals: Any, debug_checks: bool) -> dict:
    """The parameters of the equation, for operands of these types."""
    layout = specs.Layout.make(setup.kernel, setup.name, setup.spec, grid, in_tree, avals, setup.out_shape)
    prefetch_refs = [m.ref_aval() for m in layout.prefetch]

    def mapping(operand):
        return make_block_mapping(
            operand.spec,
            operand.array,
            grid,
            prefetch_refs,
            origin=operand.label,
            prefetch_tree=layout.prefetch_tree,
        )

    inputs, outputs = [mapping(o) for o in layout.inputs], [mapping(o) for o in layout.outputs]
    grid_mapping = GridMapping(grid, (*inputs, *outputs), len(inputs), layout.prefetch)
    specs.check_aliases(setup.aliases, grid_mapping)
    if not executors.finds_blocks_outside(setup.interpret):
        warn_out_of_range(grid_mapping)
    refs = [*prefetch_refs, *(m.ref_aval() for m in grid_mapping.block_mappings), *layout.scratch_refs]
    if executors.is_eager(setup.interpret):
        body: Any = EagerKernel(setup.kernel, layout.arguments, tuple(refs), setup.name)
    else:
        body = trace_kernel(setup.kernel, layout.arguments, refs, grid, setup.name, setup.mesh)
        run_time = setup.mesh is not None and executors.finds_stores_to_inputs(setup.interpret)
        check_kernel(body, grid_mapping, setup.aliases, setup.name, stores=not run_time)
    if setup.debug:
        print(f"pallas_call {setup.name}: {grid_mapping}\n{body}")
    params = dict(
        jaxpr=body,
        grid_mapping=grid_mapping,
        out_avals=tuple(jaxlink.ShapedArray(m.array.shape, m.array.dtype) for m in outputs),
        input_output_aliases=setup.aliases,
        interpret=setup.interpret,
        name=setup.name,
        debug=setup.debug,
        debug_checks=debug_checks,
        compiler_params=setup.compiler_params,
        cost_estimate=setup.cost_estimate,
        metadata=setup.metadata,
        mesh=setup.mesh,
    )
    return params if isinstance(body, EagerKernel) else intern(params, locations.function_location(setup.kernel))


def trace_kernel(
    kernel: Callable, arguments: Callable, refs: Any, grid: tuple[int | None, ...], name: str, mesh: Any = None
) -> Any:
    """Trace a kernel on abstract Refs.

    Arguments:
      kernel: the user's function.
      arguments: regroups flat Refs into the kernel's (args, kwargs).
      refs: abstract Refs, in order.
      grid: None for dynamic axes.
      name: of the call, for messages.
      mesh: the cores that run the kernel, in place of a grid, or None.

    Returns:
      a closed jaxpr without constants, whose arguments are the Refs and which returns nothing.

    Raises:
      ValueError: the kernel returns a value or captures arrays.
    """
    where = f"The kernel function in the pallas_call {locations.function_location(kernel)}"

    def checked(*flat):
        args, kwargs = arguments(flat)
        # The result is looked at here, before JAX has words of its own for a returned Ref or string.
        refuse_result(kernel, kernel(*args, **kwargs))

    info = jaxlink.debug_info("pallas_call kernel", kernel, refs)
    with tracing(grid, name, mesh):
        jaxpr, _ = jaxlink.trace_to_jaxpr(checked, refs, info)
    if jaxpr.consts:
        captured = ", ".join(v.aval.str_short(short_dtypes=True) for v in jaxpr.constvars)
        refs = any(isinstance(v.aval, jaxlink.AbstractRef) for v in jaxpr.constvars)
        hint = "a Ref of another kernel: pass its value, x_ref[...]" if refs else "Python numbers may be captured"
        raise ValueError(
            f"{where} captures constants [{captured}]. You should pass them as inputs.\n"
            f"{_captured_lines(jaxpr)}"
            f"  fix: make what is captured an operand of the call ({hint})"
        )
    return jaxpr


@contextlib.contextmanager
def tracing(grid: tuple[int | None, ...], name: str, mesh: Any = None) -> Iterator[None]:
    """Trace the body of a kernel in the block: operations know its grid or its mesh of cores, `lax` the cores' axes."""
    cores = {} if mesh is None else dict(mesh.shape)
    frame = frames.Frame(grid if mesh is None else (), name, cores=cores, mesh=mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(frames.kernel(frame))
        stack.enter_context(jaxlink.axis_in_trace_key((_GRID_AXIS, frame.grid)))
        for axis, size in cores.items():
            stack.enter_context(jaxlink.axis_in_trace_key(axis, size))
        stack.enter_context(jaxlink.untracked_mesh_axes())
        try:
            yield
        except NameError as error:
            first = str(error).split(". ")[0]
            if mesh is None or "unbound axis name" not in first or "\n" in str(error):
                raise
            axes = ", ".join(map(repr, cores)) or "none"
            hint = "take one of these, or name the axis: grid_names, cluster_names, thread_name (of plgpu.kernel)"
            where = locations.location_of_error(error)
            raise mistake(NameError, f"{first}.", where=where, axes_of_the_kernel=axes, hint=hint) from error


def _captured_lines(jaxpr: Any) -> str:
    lines = []
    for var in jaxpr.constvars:
        user = next((e for e in jaxpr.eqns if any(v is var for v in e.invars)), None)
        if user is not None:
            kind = var.aval.str_short(short_dtypes=True)
            lines.append(f"  at: {locations.location_of(user)} (first use of {kind})\n")
    return "".join(lines)
