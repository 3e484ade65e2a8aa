"""The lowering rule of `pallas_call` for TPU: the kernel's Mosaic module in a `tpu_custom_call`.

JAX's own `lower_module_to_custom_call` serialises the module and makes the call. Masks cross its border as int32, and
typed PRNG keys as their words. Every field of `pltpu.CompilerParams` that the compiler knows is passed on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from palladion import jaxlink
from palladion.compiler.tpu import rules as rules
from palladion.compiler.tpu.kinds import is_bool
from palladion.compiler.tpu.module import build_module, has_elements
from palladion.compiler.tpu.windows import space_of
from palladion.errors import count_of, explain
from palladion.language.dtypes import unwritten
from palladion.language.grid import GridMapping
from palladion.language.tpu.params import CompilerParams, LoweringException

_DEFAULTS = CompilerParams()


def lower(ctx: Any, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a kernel call.

    Arguments:
      ctx: JAX's lowering context, of the platform "tpu".
      *args: MLIR values of the operands.
      **params: of the `pallas_call` equation.

    Raises:
      ValueError: block shapes or parameters that TPUs do not take. UnsupportedPrimitive, LoweringException: what the
        compiler does not take, at the user's line.
    """
    mapping: GridMapping = params["grid_mapping"]
    _check_static(mapping, params["name"])
    if mapping.num_programs == 0 or all(0 in a.shape for a in params["out_avals"]):
        return jaxlink.lower_as(functools.partial(_nothing, params), ctx, *args)
    module = build_module(params, _devices(ctx))
    if params["debug"]:
        print(f"Mosaic module of {params['name']}:\n{module}")
    used = [i for i, m in enumerate(_operands(mapping)) if m is None or has_elements(m)]
    made = [o for o, m in enumerate(mapping.outputs) if has_elements(m)]
    given = [ctx.avals_in[i] for i in used]
    avals_out = [_at_border(params["out_avals"][o]) for o in made]
    results = mosaic.lower_module_to_custom_call(
        ctx.replace(avals_in=[_at_border(a) for a in given], avals_out=avals_out),
        *[_as_words(args[i]) if is_bool(a.dtype) else args[i] for i, a in zip(used, given)],
        module=module,
        out_type=avals_out,
        kernel_name=params["name"],
        cost_estimate=_cost(params["cost_estimate"]),
        input_output_aliases=tuple(
            (used.index(i + mapping.num_dynamic), made.index(o)) for i, o in params["input_output_aliases"] if o in made
        ),
        metadata=None if params["metadata"] is None else dict(params["metadata"]),
        **options(params),
    )
    outs = [jaxlink.mlir.ir_constant(np.zeros(a.shape, a.dtype)) if 0 in a.shape else None for a in params["out_avals"]]
    for o, x in zip(made, results):
        outs[o] = _as_mask(x) if is_bool(params["out_avals"][o].dtype) else x
    return outs


def _operands(mapping: GridMapping) -> list[Any]:
    """The mapping of each operand; None for a size of a dynamic grid."""
    return [*[None] * mapping.num_dynamic, *mapping.prefetch_mappings, *mapping.inputs]


def options(params: Any) -> dict[str, Any]:
    """What of the compiler parameters goes to the compiler, by the names of `lower_module_to_custom_call`."""
    mapping: GridMapping = params["grid_mapping"]
    given = params["compiler_params"]
    given = given if isinstance(given, CompilerParams) else _DEFAULTS
    fusion = given.allow_input_fusion
    if fusion is not None:
        n = mapping.num_inputs + mapping.num_prefetch
        if len(fusion) not in (mapping.num_inputs, n):
            raise ValueError(
                explain(
                    f"allow_input_fusion has {count_of(len(fusion), 'entry', 'entries')}, but {params['name']} has "
                    f"{count_of(mapping.num_inputs, 'input')}.",
                    hint="give one bool for each operand",
                )
            )
        fusion = (False,) * (mapping.num_dynamic + n - len(fusion)) + tuple(fusion)
        fusion = tuple(f for f, m in zip(fusion, _operands(mapping)) if m is None or has_elements(m))
    _check_tensor_core(given)
    _check_sizes(given)
    effects = given.has_side_effects
    if not isinstance(effects, bool):
        effects = getattr(mosaic.TpuSideEffectType, effects.name)
    return dict(
        vmem_limit_bytes=given.vmem_limit_bytes,
        flags=None if given.flags is None else dict(given.flags),
        allow_input_fusion=fusion,
        internal_scratch_in_bytes=given.internal_scratch_in_bytes,
        collective_id=given.collective_id,
        has_side_effects=effects,
        serialization_format=given.serialization_format,
        disable_bounds_checks=given.disable_bounds_checks,
        disable_semaphore_checks=given.disable_semaphore_checks,
        skip_device_barrier=given.skip_device_barrier,
        allow_collective_id_without_custom_barrier=given.allow_collective_id_without_custom_barrier,
        shape_invariant_numerics=given.shape_invariant_numerics,
        needs_layout_passes=given.needs_layout_passes,
        input_memory_spaces=_named_spaces(_operands(mapping)),
        output_memory_spaces=_named_spaces(mapping.outputs),
    )


def _check_tensor_core(given: CompilerParams) -> None:
    if given.opt_level is None:
        return
    headline = "pltpu.CompilerParams(opt_level=…) is for SparseCore kernels; this one runs on a TensorCore."
    raise ValueError(explain(headline, opt_level=given.opt_level, hint="leave opt_level out"))


def _check_sizes(given: CompilerParams) -> None:
    for name in ("vmem_limit_bytes", "internal_scratch_in_bytes", "collective_id"):
        value, bits = getattr(given, name), 31 if name == "collective_id" else 63
        if value is not None and value >> bits:
            headline = f"pltpu.CompilerParams({name}={value}) is more than the {bits} bits that the compiler takes."
            raise ValueError(explain(headline, hint="no TPU has so much: leave it out, or ask for less"))


def _named_spaces(mappings: Sequence[Any]) -> tuple[Any, ...] | None:
    """HBM where an operand is to be there; elsewhere XLA may put it where it likes."""
    passed = [m for m in mappings if m is None or has_elements(m)]
    spaces = [mosaic.TpuMemorySpace.HBM if m is not None and space_of(m) == "hbm" else None for m in passed]
    return tuple(spaces) if any(spaces) else None


def _cost(estimate: Any) -> Any:
    if estimate is None:
        return None
    return dict(
        flops=estimate.flops,
        transcendentals=estimate.transcendentals,
        bytes_accessed=estimate.bytes_accessed,
        remote_bytes_transferred=estimate.remote_bytes_transferred,
    )


def _devices(ctx: Any) -> Any:
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return None if mesh is None else dict(mesh.shape)


def _check_static(mapping: GridMapping, name: str) -> None:
    for m in (*mapping.prefetch_mappings, *mapping.block_mappings):
        if any(jaxlink.is_symbolic_dim(n) for n in m.array.shape):
            raise LoweringException(
                explain(
                    f"The TPU compiler needs the shapes of {name}; {m.origin} has the symbolic shape {m.array.shape}.",
                    hint="export it for one shape, or interpret=True",
                )
            )


def _nothing(params: Any, *args: Any) -> list[jax.Array]:
    """The outputs of a call that runs no program or has no elements: what an aliased input holds, or nothing."""
    home = {o: i for i, o in params["input_output_aliases"]}
    return [
        args[params["grid_mapping"].num_dynamic + home[n]]
        if n in home
        else jnp.full(a.shape, unwritten(a.dtype), a.dtype)
        for n, a in enumerate(params["out_avals"])
    ]


# --- types that the border has not ------------------------------------------------------------------------------------
def _at_border(aval: Any) -> Any:
    if jaxlink.is_opaque(aval.dtype):
        return jaxlink.ShapedArray((*aval.shape, *aval.dtype._impl.key_shape), np.dtype("uint32"))
    return aval.update(dtype=np.dtype("int32")) if is_bool(aval.dtype) else aval


def _converted(x: ir.Value, bits: int) -> ir.Value:
    kind = ir.RankedTensorType(x.type)
    return stablehlo.convert(ir.RankedTensorType.get(kind.shape, ir.IntegerType.get_signless(bits)), x)


def _as_words(x: ir.Value) -> ir.Value:
    return _converted(x, 32)


def _as_mask(x: ir.Value) -> ir.Value:
    return _converted(x, 1)
