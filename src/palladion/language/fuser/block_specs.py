"""pull_block_spec, push_block_spec, push_pull_block_spec: which blocks of its inputs a block of a function needs.

Pulling starts from the blocks of the results and walks the traced function backwards; what comes out are BlockSpecs
for the arguments, and a function that computes the results' blocks from the arguments' blocks inside a kernel. Pushing
starts from the blocks of some arguments and walks forwards. Source: the public documentation of
`jax.experimental.pallas.fuser`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palladion.errors import mistake
from palladion.language.blocks import BlockSpec, no_block_spec
from palladion.language.fuser import custom, elementwise, graph, reductions, reshape, rules, shapes
from palladion.language.fuser.passes import Pass, Prefetch, Program, has_block, reshaped, spec_leaves
from palladion.language.fuser.transforms import ref_shape

_TABLES = (custom, elementwise, reductions, reshape, shapes)  # importing them fills rules.RULES


def _traced(f: Callable, args: Sequence[Any], kwargs: dict[str, Any], handler: Any, grid_len: int | None) -> Prefetch:
    traced = graph.trace(f, args, kwargs)
    if traced.effects:
        raise mistake(
            ValueError,
            f"The fusion {traced.name} has side effects: {', '.join(sorted(map(str, traced.effects)))}.",
            hint="a fusion may only compute; fuser.get_stateful_output_fusion_values turns writes to Refs into results",
        )
    return Prefetch(traced, handler, grid_len)


def _pulled(prefetch: Prefetch, specs: Sequence[Any], strict: bool) -> Pass:
    """The pass that has walked a graph backwards from the blocks of its results."""
    moved, traced = Pass(prefetch.graph, prefetch, strict), prefetch.graph
    for n, (var, spec) in enumerate(zip(traced.outvars, specs, strict=True)):
        if not graph.is_literal(var):
            spec = spec if has_block(spec) else BlockSpec()
            moved.add_root(var, spec, f"result {n} of {traced.name}")
    for eqn in reversed(traced.eqns):
        outs = [moved.blocks.get(v) for v in eqn.outvars]
        if any(b is not None for b in outs):
            for operand, found in zip(eqn.invars, rules.find(eqn, "pull")(moved, eqn, outs), strict=True):
                if found is not None and not graph.is_literal(operand):
                    moved.put(operand, found, eqn)
    return moved


def _kernel_function(moved: Pass) -> Callable[..., Any]:
    """What runs a pulled graph inside a kernel."""
    traced = moved.graph

    def kernel_fn(program_ids: Any, scalar_prefetch: Any, *args: Any, **kwargs: Any) -> Any:
        flat, tree = jax.tree.flatten((args, kwargs))
        if tree != traced.in_tree:
            raise mistake(
                ValueError,
                f"The kernel function of {traced.name} is called with arguments {tree}, but was made for "
                f"{traced.in_tree}.",
                hint="call it as kernel_fn(program_ids, scalar_prefetch, *args), args being blocks in the structure of "
                "the arrays that the specs were pulled for",
            )
        env = {v: _as_block(x, v, moved, n) for n, (v, x) in enumerate(zip(traced.invars, flat)) if v in moved.blocks}
        return jax.tree.unflatten(traced.out_tree, Program(moved, program_ids, scalar_prefetch).run(env))

    return kernel_fn


def _as_block(value: Any, var: Any, moved: Pass, n: int) -> Any:
    shape = ref_shape(moved.blocks[var].block_shape or ())
    if np.size(value) != int(np.prod(shape)):
        raise mistake(
            ValueError,
            f"Argument {n} of the kernel function of {moved.graph.name} is a block of shape {np.shape(value)}, but the "
            f"pulled BlockSpec has blocks of {shape}.",
            hint="read the whole Ref that pallas_call makes for the pulled BlockSpec: ref[...]",
        )
    return reshaped(value, shape)


def pull_block_spec(
    f: Callable,
    out_block_specs: Any,
    *,
    scalar_prefetch_handler: Any | None = None,
    grid_len: int | None = None,
    strict_mode: bool = True,
) -> Callable[..., tuple[Callable, tuple[Any, ...], dict[str, Any]]]:
    """Which blocks of its arguments a function needs for given blocks of its results.

    Arguments:
      f: a function of arrays, such as what `get_fusion_values` gives.
      out_block_specs: the blocks of its results: a pytree (prefix) of BlockSpecs; `no_block_spec` for a whole array.
      scalar_prefetch_handler: where the kernel finds the scalars that block indices depend on
        (`make_scalar_prefetch_handler`).
      grid_len: how many grid axes the kernel has; needed when there is scalar prefetch, to tell grid indices from it.
      strict_mode: whether two uses of one value must agree in their index maps, or only in their block shapes.

    Returns:
      a function of f's arguments (arrays or their types), which gives (kernel_fn, arg_specs, kwarg_specs):
      `kernel_fn(program_ids, scalar_prefetch, *args, **kwargs)` computes the results' blocks from the arguments'
      blocks inside a kernel; the specs have the structure of the arguments, `no_block_spec` for scalars.

    Raises:
      NotImplementedError: an operation has no rule, or cannot pass these blocks; names it and its line.
      ValueError: one value is needed in two different blocks, or the specs do not fit the results.
    """

    def pulled(*args: Any, **kwargs: Any) -> tuple[Callable, tuple[Any, ...], dict[str, Any]]:
        prefetch = _traced(f, args, kwargs, scalar_prefetch_handler, grid_len)
        traced = prefetch.graph
        moved = _pulled(prefetch, spec_leaves(out_block_specs, traced.out_tree, f"{traced.name}"), strict_mode)
        specs = jax.tree.unflatten(traced.in_tree, [moved.spec(v) for v in traced.invars])
        return _kernel_function(moved), *specs

    return pulled


def _pushed(prefetch: Prefetch, specs: Sequence[Any], strict: bool) -> Pass:
    """The pass that has walked a graph forwards from the blocks of its arguments."""
    moved, traced = Pass(prefetch.graph, prefetch, strict), prefetch.graph
    for n, (var, spec) in enumerate(zip(traced.invars, specs, strict=True)):
        if has_block(spec):
            moved.add_root(var, spec, f"argument {n} of {traced.name}")
    for eqn in traced.eqns:
        ins = [None if graph.is_literal(a) else moved.blocks.get(a) for a in eqn.invars]
        if any(b is not None for b in ins):
            for var, found in zip(eqn.outvars, rules.find(eqn, "push")(moved, eqn, ins), strict=True):
                if found is not None:
                    moved.put(var, found, eqn)
    return moved


def _push_specs(prefetch: Prefetch, specs: Sequence[Any], strict: bool) -> list[Any]:
    """The BlockSpecs of a graph's results."""
    traced, moved = prefetch.graph, _pushed(prefetch, specs, strict)
    for n, var in enumerate(traced.outvars):
        if graph.is_literal(var) or var not in moved.blocks:
            raise mistake(
                ValueError,
                f"No block spec found for output {n} of {traced.name}: it depends on nothing that has a block.",
                hint="compute results that do not depend on the kernel outside the fused function",
            )
    return [moved.spec(v) for v in traced.outvars]


def _types(prefetch: Prefetch) -> Any:
    return jax.tree.unflatten(prefetch.graph.out_tree, [graph.as_type(v.aval) for v in prefetch.graph.outvars])


def push_block_spec(
    f: Callable,
    *in_spec_args: Any,
    scalar_prefetch_handler: Any | None = None,
    grid_len: int | None = None,
    strict_mode: bool = True,
    return_out_type: bool = False,
    **in_spec_kwargs: Any,
) -> Callable[..., Any]:
    """Which blocks of a function's results follow from given blocks of its arguments.

    Arguments:
      f: a function of arrays.
      *in_spec_args, **in_spec_kwargs: the blocks of its arguments, pytrees (prefixes) of BlockSpecs; `no_block_spec`
        for arguments that are taken as the results' blocks ask for them.
      scalar_prefetch_handler, grid_len: as in `pull_block_spec`.
      strict_mode: whether operands of one operation must agree in their index maps, or only in their block shapes.
      return_out_type: also give the types of the results.

    Returns:
      a function of f's arguments (arrays or their types), which gives the BlockSpecs of the results, or (these, the
      results as `jax.ShapeDtypeStruct`s).

    Raises:
      NotImplementedError: an operation has no rule, or cannot pass these blocks; names it and its line.
      ValueError: a result depends on no argument that has a block.
    """

    def pushed(*args: Any, **kwargs: Any) -> Any:
        prefetch = _traced(f, args, kwargs, scalar_prefetch_handler, grid_len)
        traced = prefetch.graph
        leaves = spec_leaves((in_spec_args, in_spec_kwargs), traced.in_tree, f"the arguments of {traced.name}")
        specs = jax.tree.unflatten(traced.out_tree, _push_specs(prefetch, leaves, strict_mode))
        return (specs, _types(prefetch)) if return_out_type else specs

    return pushed


def push_pull_block_spec(
    f: Callable,
    *block_specs: Any,
    scalar_prefetch_handler: Any | None = None,
    grid_len: int | None = None,
    **block_spec_kwargs: Any,
) -> Callable[..., tuple[Callable, Any, dict[str, Any], Any, Any]]:
    """Everything a kernel needs to run an output fusion: push the kernel's blocks forwards, then pull for the rest.

    Arguments:
      f: an output fusion, a function of (values, *args, **kwargs): closed-over arrays, then the kernel's results.
      *block_specs, **block_spec_kwargs: the blocks of the kernel's results.
      scalar_prefetch_handler, grid_len: as in `pull_block_spec`.

    Returns:
      a function of (values, *args, **kwargs) or their types, which gives (kernel_fn, values_specs, kwarg_specs,
      out_type, out_specs); `kernel_fn(program_ids, scalar_prefetch, values, *args, **kwargs)` computes final blocks.

    Raises:
      as `push_block_spec` and `pull_block_spec`.
    """
    options: dict[str, Any] = dict(scalar_prefetch_handler=scalar_prefetch_handler, grid_len=grid_len)

    def push_pulled(values: Any, *args: Any, **kwargs: Any) -> tuple[Callable, Any, dict[str, Any], Any, Any]:
        none = jax.tree.map(lambda _: no_block_spec, values)
        push = push_block_spec(f, none, *block_specs, return_out_type=True, **options, **block_spec_kwargs)
        out_specs, out_type = push(values, *args, **kwargs)
        # Strict: a value in two different blocks would be computed wrongly, whatever the blocks' shapes.
        kernel_fn, (values_specs, *_), kwarg_specs = pull_block_spec(f, out_specs, **options)(values, *args, **kwargs)
        return kernel_fn, values_specs, kwarg_specs, out_type, out_specs

    return push_pulled
