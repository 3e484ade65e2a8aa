"""Batching and differentiation rules of `pallas_call`.

vmap: the grid gains a leading axis and each batched block a squeezed dimension; the kernel is untouched (tutorial
5.2). An operand that is not batched keeps its array, and its index map just ignores the new axis.

jvp: the kernel's body is differentiated into one kernel that computes values and tangents. As the reference says
(tutorial 5.3), tangents for only some inputs and kernels that use `program_id` are refused, and reverse mode stops
at linearisation; the messages name the ways out.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from palladion import executors, jaxlink, locations
from palladion.errors import explain
from palladion.language import ops
from palladion.language.blocks import squeezed
from palladion.language.check import equations
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.primitive import EagerKernel, pallas_call_p


# --- vmap -----------------------------------------------------------------------------------------------------------
@functools.lru_cache(4096)  # vmapping the same call twice gives equal parameters, so that compile caches are hit
def _batched(mapping: BlockMapping, dim: int | None, size: int) -> BlockMapping:
    """One more leading grid index; unless `dim` is None, it picks a squeezed dimension inserted at `dim`."""
    old = mapping.index_map
    n_before = sum(mapping.results_per_dim[:dim]) if dim is not None else 0

    def index_map(b, *args):
        out = jaxlink.eval_jaxpr(old, (), *args)
        return list(out) if dim is None else [*out[:n_before], b, *out[n_before:]]

    avals = [jaxlink.ShapedArray((), jnp.dtype("int32")), *(v.aval for v in old.invars)]
    jaxpr, _ = jaxlink.trace_to_jaxpr(index_map, avals, jaxlink.debug_info("index map", index_map, avals))
    if dim is None:
        return dataclasses.replace(mapping, index_map=jaxpr)
    shape = list(mapping.array.shape)
    shape.insert(dim, size)
    block = list(mapping.block_shape)
    block.insert(dim, squeezed)
    array = jax.ShapeDtypeStruct(tuple(shape), mapping.array.dtype)
    return dataclasses.replace(mapping, index_map=jaxpr, array=array, block_shape=tuple(block))


jaxlink.clear_caches_with_jax(_batched, "batched block mappings")


def _batching_rule(args, dims, *, grid_mapping: GridMapping, out_avals, input_output_aliases, **params):
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    args, dims = list(args), list(dims)
    n_dynamic, n_prefetch = grid_mapping.num_dynamic, grid_mapping.num_prefetch
    params.update(out_avals=out_avals, input_output_aliases=input_output_aliases)
    on_machine = params["mesh"] is not None and executors.runs_in_python(params["interpret"])
    if on_machine or any(d is not None for d in dims[:n_dynamic]):  # cores and threads meet within one kernel only
        return _one_by_one(args, dims, dict(params, grid_mapping=grid_mapping))
    for i, _ in input_output_aliases:  # outputs are batched, so what they alias must be too
        if dims[n_dynamic + i] is None:
            args[n_dynamic + i] = jnp.broadcast_to(args[n_dynamic + i], (size, *args[n_dynamic + i].shape))
            dims[n_dynamic + i] = 0
    out_dims = [0] * len(out_avals)
    prefetch_dims, block_dims = dims[n_dynamic:][:n_prefetch], [*dims[n_dynamic + n_prefetch :], *out_dims]

    def batch(mappings, dims):
        return tuple(_batched(m, d, size) for m, d in zip(mappings, dims, strict=True))

    batched = GridMapping(
        grid=(size, *grid_mapping.grid),
        block_mappings=batch(grid_mapping.block_mappings, block_dims),
        num_inputs=grid_mapping.num_inputs,
        prefetch_mappings=batch(grid_mapping.prefetch_mappings, prefetch_dims),
        vmapped_dims=(0, *(d + 1 for d in grid_mapping.vmapped_dims)),
    )
    params["out_avals"] = tuple(a.update(shape=(size, *a.shape)) for a in out_avals)
    return pallas_call_p.bind(*args, grid_mapping=batched, **params), out_dims


def _one_by_one(args, dims, params):
    """Grids of different sizes, and the meshes of a machine, cannot share one grid: a call for each of the batch."""
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    batched = [x for x, d in zip(moved, dims) if d is not None]

    def one(slices):
        rest = iter(slices)
        return pallas_call_p.bind(*(x if d is None else next(rest) for x, d in zip(moved, dims)), **params)

    in_python = executors.runs_in_python(params["interpret"]) and not any(isinstance(x, jaxlink.Tracer) for x in args)
    if in_python or isinstance(params["jaxpr"], EagerKernel):  # which cannot run inside lax.map
        size = batched[0].shape[0]
        if not size:
            return [jnp.zeros((0, *a.shape), a.dtype) for a in params["out_avals"]], [0] * len(params["out_avals"])
        outs = [one([x[i] for x in batched]) for i in range(size)]
        return [jnp.stack(column) for column in zip(*outs)], [0] * len(params["out_avals"])
    return lax.map(one, batched), [0] * len(params["out_avals"])


jaxlink.batching.primitive_batchers[pallas_call_p] = _batching_rule


# --- differentiation ------------------------------------------------------------------------------------------------
_WAYS_OUT = (
    "wrap the call in jax.custom_vjp and write the backward pass as a kernel too (or jax.custom_jvp for forward mode); "
    "check it with jax.test_util.check_grads"
)


def _refuse_jvp(name: str, why: str, where: str | None = None) -> Exception:
    return ValueError(
        explain(
            f"Forward-mode differentiation of the kernel {name} is not possible: {why}.", where=where, hint=_WAYS_OUT
        )
    )


def _jvp_rule(primals, tangents, *, jaxpr, grid_mapping: GridMapping, out_avals, input_output_aliases, **params):
    """The kernel's own jvp, with its tangent Refs moved in among the inputs, the outputs and the scratch."""
    name = params["name"]
    if isinstance(jaxpr, EagerKernel):
        raise _refuse_jvp(name, "interpret=pl.EagerParams() runs Python that is not traced")
    if input_output_aliases:
        raise _refuse_jvp(name, "it updates an operand in place (input_output_aliases)")
    for eqn in equations(jaxpr):
        if eqn.primitive in (ops.program_id_p, ops.num_programs_p):
            raise _refuse_jvp(name, f"it uses {eqn.primitive}", locations.location_of(eqn))
    n_lead = grid_mapping.num_dynamic + grid_mapping.num_prefetch
    blocked = list(zip(primals, tangents))[n_lead:]
    missing = [
        m.origin
        for m, (p, t) in zip(grid_mapping.inputs, blocked)
        if isinstance(t, jaxlink.ad.Zero) and jnp.issubdtype(p.dtype, jnp.inexact)
    ]
    if missing:
        raise _refuse_jvp(name, f"tangents are given for some inputs only, not for {', '.join(missing)}")

    n_pre, n_in, n_out = grid_mapping.num_prefetch, grid_mapping.num_inputs, len(out_avals)
    n_refs = len(jaxpr.invars)
    given = [False] * n_pre + [type(t) is not jaxlink.ad.Zero for _, t in blocked]
    differentiated = given + [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in jaxpr.invars[n_pre + n_in :]]
    jvp_jaxpr, _ = jaxlink.ad.jvp_jaxpr(jaxpr, differentiated, [])
    tangent_of = dict(zip([i for i in range(n_refs) if differentiated[i]], jvp_jaxpr.invars[n_refs:]))
    bounds = (0, n_pre, n_pre + n_in, n_pre + n_in + n_out, n_refs)
    order = [
        (i, is_tangent)
        for group in map(range, bounds, bounds[1:])
        for is_tangent in (False, True)
        for i in group
        if differentiated[i] or not is_tangent
    ]
    jvp_jaxpr = jvp_jaxpr.replace(
        invars=[tangent_of[i] if t else jvp_jaxpr.invars[i] for i, t in order],
        debug_info=jvp_jaxpr.debug_info.with_unknown_names(),
    )
    maps = {
        role: tuple(grid_mapping.block_mappings[i - n_pre] for i, _ in order if low <= i < high)
        for role, low, high in (("in", bounds[1], bounds[2]), ("out", bounds[2], bounds[3]))
    }
    args = [*primals, *(t for _, t in blocked if type(t) is not jaxlink.ad.Zero)]
    mapping = dataclasses.replace(grid_mapping, block_mappings=(*maps["in"], *maps["out"]), num_inputs=len(maps["in"]))
    has_tangent = differentiated[n_pre + n_in :][:n_out]
    tangent_avals = tuple(a for a, has in zip(out_avals, has_tangent) if has)
    outs = pallas_call_p.bind(
        *args,
        jaxpr=jvp_jaxpr,
        grid_mapping=mapping,
        input_output_aliases=(),
        out_avals=(*out_avals, *tangent_avals),
        **params,
    )
    rest = iter(outs[n_out:])
    tangents_out = [
        next(rest) if has else jaxlink.ad.Zero(a.to_tangent_aval()) for a, has in zip(out_avals, has_tangent)
    ]
    return outs[:n_out], tangents_out


jaxlink.ad.primitive_jvps[pallas_call_p] = _jvp_rule


def _linearize_rule(is_vjp, nonzeros, *primals, name, **params):
    # The reference's words first (tutorial 5.3), which programs match on; then the ways out.
    raise ValueError(
        explain(
            "Linearization failed to produce known values for all output primals: reverse-mode differentiation (grad, "
            f"vjp, linearize) cannot go through the kernel {name}, which has a forward rule only.",
            hint=_WAYS_OUT,
        )
    )


jaxlink.ad.primitive_linearizations[pallas_call_p] = _linearize_rule
