"""The lowering rule of `pallas_call` for NVIDIA GPUs: the Triton module in the custom call that XLA compiles.

XLA carries a Triton of its own and takes the module as MLIR bytecode, with the grid and the compiler's parameters
beside it, in the attributes of `__gpu$xla.gpu.triton`. This needs no triton package and no GPU:
`jax.jit(f).trace(…).lower(lowering_platforms=("cuda",))` works on any machine. It has not run on hardware yet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from palladion import jaxlink
from palladion.compiler.triton.module import Kernel, lower_call
from palladion.errors import explain
from palladion.language.triton.info import get_gpu_info
from palladion.language.triton.params import CUSTOM_CALL_TARGET_NAME

DEFAULT_SM = 90  # where lowering does not know for which GPU


def lower(ctx: Any, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a kernel call.

    Arguments: ctx: JAX's lowering context; *args: MLIR values of the operands; **params: of the `pallas_call` equation.
    Raises: what `lower_call` raises; NotImplementedError: the grid is known only at run time.
    """
    gm = params["grid_mapping"]
    if gm.num_dynamic:
        headline = f"The grid of {params['name']} is known only at run time; XLA's call for Triton has a fixed one."
        raise NotImplementedError(explain(headline, hint="launch the most programs that there may be, and mask"))
    if gm.num_programs == 0 or all(0 in a.shape for a in params["out_avals"]):
        return jaxlink.lower_as(functools.partial(_nothing, params), ctx, *args)
    kernel = lower_call(params, compute_capability())
    call = jax.ffi.ffi_lowering(
        CUSTOM_CALL_TARGET_NAME,
        backend_config=_attributes(kernel),
        operand_output_aliases=dict(params["input_output_aliases"]),
    )
    return call(ctx, *args)


def _nothing(params: dict[str, Any], *operands: jax.Array) -> list[jax.Array]:
    """A call without programs, or without elements to fill: outputs hold what their aliased inputs do, or zeros."""
    aliases = {out: k for k, out in params["input_output_aliases"]}
    return [
        operands[aliases[n]] if n in aliases else jnp.zeros(a.shape, a.dtype) for n, a in enumerate(params["out_avals"])
    ]


def compute_capability() -> int:
    """Of the GPU that JAX runs on or that an abstract mesh stands for; `DEFAULT_SM` where there is none."""
    try:
        return get_gpu_info().compute_capability
    except ValueError:
        return DEFAULT_SM


def _attributes(kernel: Kernel) -> dict[str, Any]:
    i32 = ir.IntegerType.get_signless(32)
    numbers = {
        **dict(zip(("grid_x", "grid_y", "grid_z"), kernel.grid)),
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
    }
    return {
        "debug": ir.BoolAttr.get(False),
        "ir": ir.StringAttr.get(kernel.bytecode),
        "name": ir.StringAttr.get(kernel.name),
        **{name: ir.IntegerAttr.get(i32, n) for name, n in numbers.items()},
    }
