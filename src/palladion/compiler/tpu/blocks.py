"""Which blocks a TPU takes: the rules of tutorial 6.1, checked before anything is compiled.

The last two dimensions of a block are multiples of 8 and 128, or those of the whole array. A block of one dimension is
the whole array, or a multiple of 1024, or a power of two that fills 128 lanes of 32 bits. Both hold for blocks that
the compiler copies, into VMEM or SMEM; operands in `pl.ANY` and HBM are left whole.
"""

from __future__ import annotations

from palladion.compiler.tpu.kinds import bits_of, space_name
from palladion.errors import explain
from palladion.language.blocks import BoundedSlice, Indirect, Squeezed, spelled
from palladion.language.grid import BlockMapping
from palladion.language.tpu.params import LoweringException

LEFT_IN_PLACE = ("any", "hbm")
_RULE_2D = (
    "The Pallas TPU lowering currently requires that the last two dimensions of your block shape are divisible by 8 "
    "and 128 respectively, or be equal to the respective dimensions of the overall array."
)
_RULE_1D = (
    "The Pallas TPU lowering currently requires that a block shape of one dimension is equal to the array's, or a "
    "multiple of 1024, or a power of 2 that is at least 128 * (32 / bits of the dtype)."
)


def check_block(mapping: BlockMapping) -> None:
    """Raise ValueError unless a TPU can take the operand in blocks of this shape.

    Raises:
      ValueError: in the tutorial's words, naming the operand. LoweringException: a kind of block that TPUs have not.
    """
    for b in mapping.block_shape:
        if isinstance(b, (BoundedSlice, Indirect)):
            raise LoweringException(
                explain(
                    f"The block shape of {mapping.origin} has {b!r}, which the TPU compiler has only in pipelines.",
                    where=mapping.map_location,
                    hint="pltpu.emit_pipeline takes such blocks, of operands in pl.ANY",
                )
            )
    if space_name(mapping.memory_space) in LEFT_IN_PLACE:
        if not mapping.covers_array:
            raise _mistake(
                f"{mapping.origin} is left in place by memory_space={mapping.memory_space}, so it has no blocks.",
                mapping,
                "leave the block shape out, and copy parts of it: pltpu.sync_copy(x_ref.at[…], buffer)",
            )
        return
    _check_buffers(mapping)
    check_shape(mapping)


def check_shape(mapping: BlockMapping) -> None:
    """Raise ValueError, in the tutorial's words, for a block that does not lie on tiles."""
    if mapping.covers_array:
        return
    sizes, array = mapping.sizes, mapping.array.shape
    if len(sizes) == 1:
        n, least = sizes[0], 128 * (32 // bits_of(mapping.array.dtype))
        if n != array[0] and n % 1024 and not (n >= least and n & (n - 1) == 0):
            raise _mistake(_RULE_1D, mapping, f"use a block of {_up(n, least)} or of the whole {array[0]}")
    elif len(sizes) > 1:
        fits = [n == whole or n % unit == 0 for n, whole, unit in zip(sizes[-2:], array[-2:], (8, 128))]
        if not all(fits):
            raise _mistake(_RULE_2D, mapping, _hint(mapping, fits))


def _check_buffers(mapping: BlockMapping) -> None:
    """The compiler's own pipeline has two buffers for an operand, or one."""
    mode = mapping.pipeline_mode
    if mode is None:
        return
    if mode.buffer_count not in (1, 2) or mode.use_lookahead or mode.prefetched_count:
        raise LoweringException(
            explain(
                f"The pipeline of {mapping.origin} is {mode}; the TPU compiler's own has one buffer or two.",
                where=mapping.map_location,
                hint="pl.Buffered(1) or pl.Buffered(2); pltpu.emit_pipeline takes more, of operands in pl.ANY",
            )
        )


def _up(n: int, least: int) -> int:
    size = least
    while size < n:
        size *= 2
    return size


def _hint(mapping: BlockMapping, fits: list[bool]) -> str:
    shape = list(mapping.block_shape)
    if any(isinstance(b, Squeezed) for b, ok in zip(shape[-2:], fits) if not ok):
        return "squeeze a leading dimension: None counts as 1, so transpose the array, or take 8 rows at a time"
    near = [str(n) for n in mapping.sizes[:-2]]
    for n, whole, unit, ok in zip(mapping.sizes[-2:], mapping.array.shape[-2:], (8, 128), fits):
        near.append(str(n if ok else min(-(-n // unit) * unit, whole)))
    return f"a block that fits: ({', '.join(near)})"


def _mistake(rule: str, mapping: BlockMapping, hint: str) -> ValueError:
    return ValueError(
        explain(
            rule,
            where=mapping.map_location,
            operand=mapping.origin,
            block_shape=spelled(mapping.block_shape),
            array=f"{mapping.array.dtype}{list(mapping.array.shape)}",
            hint=hint,
        )
    )
