"""What a fusion closes over, made explicit: arrays to be cut into blocks, and scalars to be known before.

`get_fusion_values` turns a function of nothing (an input fusion), or of the kernel's results (an output fusion), into
a function of the arrays that it closes over. Scalars that decide where a slice starts decide which block is fetched,
so they stay closed over and go to the kernel ahead of everything else, by scalar prefetch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from palladion import executors, jaxlink
from palladion.errors import mistake
from palladion.language.blocks import BlockSpec, NoBlockSpec
from palladion.language.fuser import graph as graphs
from palladion.language.fuser.passes import is_spec


def _index_scalars(graph: graphs.Graph) -> list[Any]:
    """The closed-over scalars that block indices are computed from, in the order in which the function uses them."""
    starts = []
    for eqn in graph.eqns:
        if eqn.primitive is lax.dynamic_slice_p:
            operand, *indices = eqn.invars
            moving = zip(indices, operand.aval.shape, eqn.params["slice_sizes"])
            starts += [a for a, n, size in moving if n != size]
    reached = graph.reaching(starts)
    found = [v for v in graph.constvars if v in reached]
    for var in found:
        if var.aval.shape:
            raise mistake(
                ValueError,
                f"The fusion {graph.name} computes a block index from a value of shape {var.aval.shape}: only scalars "
                "can be prefetched.",
                hint="index into the array outside the fused function, and let it close over the scalar",
            )
    used = list(dict.fromkeys(a for eqn in graph.eqns for a in eqn.invars if not graphs.is_literal(a)))
    return sorted(found, key=used.index)


def _partition(graph: graphs.Graph, keep: Sequence[Any] = ()) -> tuple[Callable, list[Any], list[Any]]:
    """A graph as (function of values and arguments, variables of the values, variables of the scalars).

    Arguments:
      keep: closed-over variables that are values even if nothing reads them.
    """
    scalars = _index_scalars(graph)
    held = dict(zip(graph.constvars, graph.consts))
    used = graph.reaching([*graph.outvars, *(a for e in graph.eqns for a in e.invars)]).union(keep)
    regular = [v for v in graph.constvars if v not in scalars and v in used]

    def new_fusion(values: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        flat, tree = jax.tree.flatten((args, kwargs))
        if tree != graph.in_tree or len(values) != len(regular):
            message = f"The fusion {graph.name} takes {len(regular)} value(s) and arguments {graph.in_tree}"
            raise mistake(ValueError, f"{message}; it is called with {len(values)} value(s) and {tree}.")
        env = {v: held[v] for v in scalars} | dict(zip(regular, values)) | dict(zip(graph.invars, flat))
        return jax.tree.unflatten(graph.out_tree, graphs.run(graph.eqns, env, graph.outvars))

    return new_fusion, regular, scalars


def _held(graph: graphs.Graph, variables: Sequence[Any]) -> tuple[Any, ...]:
    values = dict(zip(graph.constvars, graph.consts))
    return tuple(values[v] for v in variables)


def get_fusion_values(fusion: Callable, *args: Any, **kwargs: Any) -> tuple[Callable, tuple[Any, ...], tuple[Any, ...]]:
    """Make what a fusion closes over explicit.

    Arguments:
      fusion: a `Fusion` or another pure function.
      *args, **kwargs: its arguments, arrays or array types: none for an input fusion, the types of the kernel's
        results for an output fusion.

    Returns:
      (new_fusion, values, scalars): `new_fusion(values, *args, **kwargs)` computes the fusion; `values` are the arrays
      to pass to the kernel with pulled BlockSpecs; `scalars` those to pass by scalar prefetch.

    Raises:
      ValueError: the fusion reads or writes Refs, or computes a block index from an array that is not a scalar.
    """
    graph = graphs.trace(fusion, args, kwargs)
    refs = [v for v in graph.constvars if graphs.is_ref(v)]
    if refs or graph.effects:
        what = f"closes over {len(refs)} Ref(s)" if refs else "has side effects"
        raise mistake(
            ValueError,
            f"The fusion {graph.name} {what}, and get_fusion_values takes pure functions.",
            hint="for Refs use get_stateful_input_fusion_values or get_stateful_output_fusion_values",
        )
    new_fusion, regular, scalars = _partition(graph)
    return new_fusion, _held(graph, regular), _held(graph, scalars)


# --- fusions that close over Refs -----------------------------------------------------------------------------------
def _discharged(fusion: Callable, args: Any, kwargs: Any) -> tuple[graphs.Graph, list[int]]:
    """A fusion over Refs as a pure graph of (result, new values of written Refs); which constants are written.

    The graph's constants that were Refs are still the Refs; their variables have the type of what they hold.
    """
    flat, in_tree = jax.tree.flatten((args, kwargs))

    def flat_fun(*leaves):
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        return fusion(*args, **kwargs)

    jaxpr, consts, out_tree = graphs.hoisted(flat_fun, flat, "stateful fusion")
    written = [n for n, v in enumerate(jaxpr.invars) if v in jaxlink.written_vars(jaxpr)]

    def pure(held, *args, **kwargs):
        outs, at_end = executors.discharge(jaxpr, [*held, *jax.tree.leaves((args, kwargs))])
        out = jax.tree.unflatten(out_tree, outs)
        return (out, tuple(at_end[n] for n in written)) if written else out

    functools.update_wrapper(pure, fusion, assigned=("__name__",), updated=())
    types = [v.aval.inner_aval if graphs.is_ref(v) else v.aval for v in jaxpr.invars[: len(consts)]]
    return _closing_over(graphs.trace(pure, (types, *args), kwargs), consts, in_tree), written


def _closing_over(graph: graphs.Graph, values: Sequence[Any], in_tree: Any) -> graphs.Graph:
    """A graph of (values, …) as one that closes over them."""
    n = len(values)
    return graphs.Graph(
        graph.eqns,
        (*graph.invars[:n], *graph.constvars),
        (*values, *graph.consts),
        graph.invars[n:],
        graph.outvars,
        in_tree,
        graph.out_tree,
        graph.name,
        graph.effects,
    )


def get_stateful_input_fusion_values(fusion: Callable, *args: Any, **kwargs: Any) -> tuple[Callable, Any, Any]:
    """`get_fusion_values` for an input fusion that reads Refs.

    Arguments:
      fusion, *args, **kwargs: as in `get_fusion_values`; writes to Refs are dropped.

    Returns:
      as `get_fusion_values`; `values` holds the Refs that the fusion reads, and `new_fusion` takes arrays for them.
    """

    graph, written = _discharged(fusion, args, kwargs)
    if written:
        out_tree, _ = graph.out_tree.children()
        outvars = graph.outvars[: out_tree.num_leaves]
        graph = graphs.Graph(
            tuple(graphs.needed(graph.eqns, outvars)),
            graph.constvars,
            graph.consts,
            graph.invars,
            outvars,
            graph.in_tree,
            out_tree,
            graph.name,
        )
    new_fusion, regular, scalars = _partition(graph)
    return new_fusion, _held(graph, regular), _held(graph, scalars)


def get_stateful_output_fusion_values(
    fusion: Callable, *args: Any, **kwargs: Any
) -> tuple[Callable, Any, Any, dict[int, int]]:
    """`get_fusion_values` for an output fusion that may write Refs.

    Arguments:
      fusion, *args, **kwargs: as in `get_fusion_values`.

    Returns:
      (new_fusion, values, scalars, aliases). `values` holds the Refs that the fusion uses, and `new_fusion` takes
      arrays for them. Where Refs are written, it gives (result, new values of the written Refs), and `aliases` maps the
      number of each of these among all flat results to the number of its Ref among `values`.
    """
    graph, written = _discharged(fusion, args, kwargs)
    refs = [graph.constvars[n] for n in written]
    new_fusion, regular, scalars = _partition(graph, keep=refs)
    first = len(graph.outvars) - len(refs)
    aliases = {first + n: regular.index(ref) for n, ref in enumerate(refs)}
    return new_fusion, _held(graph, regular), _held(graph, scalars), aliases


# --- scalar prefetch and trees of specs -----------------------------------------------------------------------------
def make_scalar_prefetch_handler(*args: Any) -> Callable[..., Any]:
    """Where a fusion finds its scalars among the kernel's scalar-prefetch operands.

    Arguments:
      *args: indices or keys, applied one after the other to the tuple of operands: `(1,)` for the second operand.

    Returns:
      a function of the operands (as index maps and kernels get them), to this fusion's scalars.
    """
    return lambda *operands: functools.reduce(lambda held, key: held[key], args, operands)


def block_spec_with_prefetch(block_specs: Any, scalar_prefetch_smem_refs: Sequence[Any]) -> Any:
    """Bind scalar-prefetch Refs to index maps, for a pipeline inside a kernel that has these Refs.

    Arguments:
      block_specs: a pytree of BlockSpecs whose index maps take grid indices, then these Refs.
      scalar_prefetch_smem_refs: the Refs.

    Returns:
      the same tree, with index maps that take grid indices only.
    """

    def bound(spec):
        if not isinstance(spec, BlockSpec) or spec.index_map is None:
            return spec
        index_map = spec.index_map
        return spec.replace(index_map=lambda *ids: index_map(*ids, *scalar_prefetch_smem_refs))

    return jax.tree.map(bound, block_specs, is_leaf=is_spec)


def filter_no_block_specs(values: Any, block_specs: Any) -> tuple[Any, Any]:
    """Drop what has no BlockSpec.

    Arguments:
      values, block_specs: pytrees of one structure.

    Returns:
      the two trees, with None (an empty subtree) where the spec is `no_block_spec`.
    """
    kept = jax.tree.map(lambda s, v: None if isinstance(s, NoBlockSpec) else v, block_specs, values, is_leaf=is_spec)
    specs = jax.tree.map(lambda s: None if isinstance(s, NoBlockSpec) else s, block_specs, is_leaf=is_spec)
    return kept, specs
