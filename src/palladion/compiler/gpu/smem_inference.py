"""How buffers in shared memory are stored that matrix products read, where the kernel does not say.

The tensor core wants tiles of 8 rows as wide as a swizzle. The widest one is taken that divides the rows of the buffer
and those of every view of it that is an operand.
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.gpu import narrow
from palladion.compiler.gpu.smem import itemsize as itemsize_of
from palladion.compiler.gpu.usage import Facts
from palladion.language.gpu.memory import SwizzleTransform, TilingTransform

WIDTHS = (128, 64, 32)  # bytes


def inferred(facts: Facts, aval: Any) -> tuple[Any, ...]:
    """Transforms for a buffer; () if no product reads it, or no tiles fit: products then refuse it.

    Arguments:
      facts: what the kernel does with the buffer. aval: its type.
    """
    if not facts.operands or len(aval.shape) < 2:
        return ()
    itemsize = itemsize_of(aval.dtype)
    rows, columns = aval.shape[-2:]
    widths = [columns, *(shape[-2 if turned else -1] for _, shape, turned in facts.operands if len(shape) >= 2)]
    for width in WIDTHS:
        wide = width * narrow.in_byte(aval.dtype) // itemsize
        if rows % 8 == 0 and all(n % wide == 0 for n in widths):
            return TilingTransform((8, wide)), SwizzleTransform(width)
    return ()


__all__ = ["inferred"]
