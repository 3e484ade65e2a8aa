"""Rules: where a program is, prints, checks, barriers, inline assembly, and hints for other machines."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.elementwise import cast
from palladion.compiler.triton.lowering import RULES, Lowering, dtype_of, refusal
from palladion.compiler.triton.refs import barrier
from palladion.language import ops
from palladion.language.tpu import hints
from palladion.language.triton.asm import debug_barrier_p, elementwise_inline_asm_p


@RULES.rule(ops.program_id_p)
def _program_id(ctx: Lowering, eqn) -> Any:
    at = ctx.ids[eqn.params["axis"]]
    return emit.const(at, jnp.int32) if isinstance(at, int) else at


@RULES.rule(ops.num_programs_p)
def _num_programs(ctx: Lowering, eqn) -> Any:
    size = ctx.sizes[eqn.params["axis"]]
    return emit.const(size, jnp.int32) if isinstance(size, int) else size


# --- prints and checks ------------------------------------------------------------------------------------------------
def _print(eqn: Any, fmt: str, values: Any) -> list[Any]:
    """Triton's print: a text, then the values, one line for each element; formats are the text's."""
    held, signs = [], []
    for v, var in zip(values, eqn.invars):
        dtype = dtype_of(var)
        if emit.is_float(dtype) and emit.bits_of(dtype) < 32:
            v, dtype = cast(v, dtype, jnp.float32), jnp.dtype(jnp.float32)
        held.append(v)
        signs.append(int(emit.is_signed(dtype)))
    text = fmt.replace("{{", "{").replace("}}", "}")
    tt.print_(f" {text.strip()} ", False, held, signs)
    return []


@RULES.rule(ops.debug_print_p)
def _debug_print(ctx: Lowering, eqn, *values) -> list[Any]:
    return _print(eqn, eqn.params["fmt"], values)


@RULES.rule(jaxlink.jax_debug_print_p)
def _jax_debug_print(ctx: Lowering, eqn, *values) -> list[Any]:
    if eqn.params["static_args"]:
        raise RULES.unsupported(eqn)
    return _print(eqn, eqn.params["fmt"], values)


@RULES.rule(ops.debug_check_p)
def _debug_check(ctx: Lowering, eqn, ok) -> list[Any]:
    """An assertion of Triton's, which acts in code compiled for debugging."""
    where = eqn.params["where"]
    tt.assert_(ok, eqn.params["message"] + (f" at {where}" if where else ""))
    return []


# --- threads and assembly ---------------------------------------------------------------------------------------------
@RULES.rule(debug_barrier_p)
def _debug_barrier(ctx: Lowering, eqn) -> list[Any]:
    barrier(ctx)
    return []


@RULES.rule(elementwise_inline_asm_p)
def _inline_asm(ctx: Lowering, eqn, *args) -> list[Any]:
    p = eqn.params
    kinds = [emit.typed(v.aval.shape, emit.element_type(v.aval.dtype)) for v in eqn.outvars]
    shapes = {tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)}
    if len(shapes) != 1:
        headline = f"elementwise_inline_asm takes and gives blocks of one shape, not {', '.join(map(str, shapes))}."
        raise refusal(ValueError, headline, eqn, "broadcast the arguments first")
    op = tt.ElementwiseInlineAsmOp(kinds, p["asm"], p["constraints"], True, p["pack"], list(args))
    return list(op.results)


# --- for other machines: nothing to do here ---------------------------------------------------------------------------
RULES.rule(ops.delay_p, hints.touch_p, hints.trace_value_p)(lambda ctx, eqn, *operands: [])
RULES.rule(hints.with_memory_space_constraint_p)(lambda ctx, eqn, x: x)
