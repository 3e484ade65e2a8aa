"""The operations of the Triton dialect that mean something to a GPU only: inline assembly and barriers of threads.

Source: public documentation of `jax.experimental.pallas.triton`; the Triton language reference
(`inline_asm_elementwise`, `debug_barrier`); the PTX manual for the assembly itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from palladion import jaxlink, rules
from palladion.errors import kind_of, mistake

elementwise_inline_asm_p = jaxlink.Primitive("elementwise_inline_asm")
elementwise_inline_asm_p.multiple_results = True
rules.only_on("the Triton compiler", elementwise_inline_asm_p)


@elementwise_inline_asm_p.def_abstract_eval
def _inline_asm_type(*avals, asm, constraints, pack, result_types):
    return [jaxlink.ShapedArray(shape, dtype) for shape, dtype in result_types]


def elementwise_inline_asm(
    asm: str,
    *,
    args: Sequence[jax.Array],
    constraints: str,
    pack: int,
    result_shape_dtypes: Sequence[jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """Run PTX on every element of blocks of one shape.

        (y,) = pltriton.elementwise_inline_asm(
            "tanh.approx.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )

    Arguments:
      asm: PTX; $0, $1, ... are the results, then the arguments.
      args: arrays of one shape.
      constraints: as in LLVM: "=r" for a result in a 32-bit register, "r" for such an argument, "h" 16, "l" 64 bits,
        "f" float32, separated by commas.
      pack: how many elements one run of the assembly takes: narrow ones share a register.
      result_shape_dtypes: what comes out, in the shape of the arguments.

    Returns:
      a list of arrays, one for each of `result_shape_dtypes`.

    Raises:
      TypeError, ValueError: the assembly or constraints are no strings; pack is not positive; shapes differ.
    """
    if not isinstance(asm, str) or not isinstance(constraints, str):
        raise mistake(TypeError, f"elementwise_inline_asm takes PTX and constraints as strings, not {kind_of(asm)}.")
    if not isinstance(pack, int) or pack < 1:
        raise mistake(ValueError, f"pack of elementwise_inline_asm is a positive integer, not {kind_of(pack)}.")
    arrays = [jnp.asarray(a) for a in args]
    types = tuple((tuple(s.shape), jnp.dtype(s.dtype)) for s in result_shape_dtypes)
    shapes = {tuple(a.shape) for a in arrays} | {shape for shape, _ in types}
    if len(shapes) > 1:
        listed = ", ".join(map(str, sorted(shapes)))
        headline = f"elementwise_inline_asm takes and gives arrays of one shape, but these are {listed}."
        raise mistake(ValueError, headline, hint="broadcast the arguments first")
    return elementwise_inline_asm_p.bind(*arrays, asm=asm, constraints=constraints, pack=pack, result_types=types)


class BarrierEffect(jaxlink.KernelEffect):
    """A barrier must stay, and stay where it is."""

    def __str__(self) -> str:
        return "Barrier"


_barrier_effect = BarrierEffect()
jaxlink.register_effect(BarrierEffect)
debug_barrier_p = jaxlink.Primitive("debug_barrier")
debug_barrier_p.multiple_results = True
debug_barrier_p.def_effectful_abstract_eval(lambda: ([], {_barrier_effect}))
debug_barrier_p.def_impl(list)


def debug_barrier() -> None:
    """Let the threads of a program wait for each other. Elsewhere a program has one thread, and nothing happens.

    The compiler sets barriers itself where a kernel reads what it has stored; this one is for inline assembly.
    """
    debug_barrier_p.bind()
