"""`plgpu.inline_ptx`: PTX in the middle of a kernel, applied to arrays element by element.

    y = plgpu.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, dtype=jnp.float32)

Ours, not JAX's: the Mosaic GPU reference leaves inline code open. Only the Mosaic GPU compiler gives it a meaning.

Source: PTX ISA; CUDA's inline assembly (constraints by the operands' types).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language.gpu.arguments import a_dtype, an_array, print_operands
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.rules import only_on

__all__ = ["inline_ptx"]

NAME = "plgpu.inline_ptx"
# What fits a PTX register: "h", "r", "l", "f", "d" of CUDA's constraints.
HELD = {
    "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "int64", "uint64", "float32", "float64",
}  # fmt: skip


class Inputs(NamedTuple):
    """The operands of `inline_ptx`: arrays of one shape, or scalars."""

    args: tuple[Any, ...]


def _results(operands: Inputs, params: dict[str, Any]) -> list[Any]:
    return [jaxlink.ShapedArray(params["shape"], d) for d in params["dtypes"]]


inline_ptx_p = gpu_primitive("inline_ptx", results=_results, effect=False)
print_operands(inline_ptx_p)
only_on("the Mosaic GPU compiler", inline_ptx_p)


def inline_ptx(code: str, *args: Any, dtype: Any) -> Any:
    """Run PTX for each element of arrays.

    Arguments:
      code: instructions. `$0`, `$1` … are the results and then the operands, in registers of their dtypes; scratch
        registers are declared in braces: `"{ .reg .b32 t; … }"`. It may not touch memory, and may run any number of
        times.
      *args: arrays of one shape, or scalars, of 16, 32 or 64 bits (no bool).
      dtype: of the result, or a sequence of dtypes for several.

    Returns:
      an array of the operands' shape, or a tuple of them.

    Raises:
      TypeError: no text, an operand or dtype that no PTX register holds. ValueError: no operand, shapes that differ,
        or a number after `$` that nothing has. UnsupportedPrimitive: when the kernel runs on anything else than the
        Mosaic GPU compiler (the simulated GPU, say).
    """
    if not isinstance(code, str) or not code.strip():
        raise mistake(TypeError, f"The code of {NAME} is {kind_of(code)}.", hint='"add.f32 $0, $1, $2;"')
    several = isinstance(dtype, Sequence) and not isinstance(dtype, str)
    dtypes = tuple(a_dtype(NAME, "dtype", d) for d in (dtype if several else (dtype,)))
    arrays = tuple(an_array(NAME, x) for x in args)
    if not arrays or not dtypes:
        raise mistake(ValueError, f"{NAME} needs an operand and a result.", hint="x + 0 makes an operand of a constant")
    for what in [*(a.dtype for a in arrays), *dtypes]:
        if str(what) not in HELD:
            hint = "convert it: x.astype(jnp.float32)"
            raise mistake(TypeError, f"{NAME} has no register for {what}.", hint=hint)
    shapes = {tuple(a.shape) for a in arrays if a.ndim}
    if len(shapes) > 1:
        shown = " and ".join(map(str, sorted(shapes)))
        raise mistake(ValueError, f"The operands of {NAME} have shapes {shown}.", hint="broadcast them to one shape")
    numbers = [int(n) for n in re.findall(r"\$(\d+)", code)]
    count = len(arrays) + len(dtypes)
    if any(n >= count for n in numbers):
        headline = f"The code of {NAME} names ${max(numbers)}, but there are {count} results and operands."
        raise mistake(ValueError, headline, hint="results come first: $0 is the first result")
    shape = next(iter(shapes)) if shapes else ()
    found = bind(NAME, inline_ptx_p, Inputs(arrays), code=code, dtypes=dtypes, shape=shape)
    return tuple(found) if several else found[0]
