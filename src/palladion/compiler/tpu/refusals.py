"""What libtpu says of a kernel that it does not compile, in the terms of its author and at the author's line.

A table: a pattern in libtpu's message, and what it means. Its own words stay in the message, for they can be searched
for. libtpu gives the MLIR location of the operation, which the lowering has made the user's file and line.

Source: messages of libtpu 0.0.51 and 0.0.52, collected by compiling one-operation kernels.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from palladion import locations
from palladion.compiler import child
from palladion.compiler.tpu.topologies import Chip
from palladion.errors import count_of, explain
from palladion.language.grid import BlockMapping, GridMapping


class TpuRefusal(Exception):
    """libtpu does not compile the kernel. `where` is the user's `file:line (function)`, or None."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


class VmemOverflow(TpuRefusal):
    """The kernel needs more VMEM than it may use."""


class SmemOverflow(TpuRefusal):
    """The kernel keeps more scalars than SMEM holds."""


class SemaphoreOverflow(TpuRefusal):
    """The kernel has more semaphores than the chip."""


class HbmOverflow(TpuRefusal):
    """The arrays of the call do not fit into the chip's HBM."""


class UnprovenAlignment(TpuRefusal):
    """A run-time index into the last two dimensions, or of a block, that the compiler cannot prove to be on a tile."""


class IllegalBlock(TpuRefusal):
    """A block shape that does not fit the tiles in which the array lies."""


class UnsupportedByMosaic(TpuRefusal):
    """An operation, or a form of one, that the Mosaic compiler has not."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What was compiled, and for what.

    Attributes:
      chip, target: compiled for.
      vmem_limit: bytes of VMEM that the kernel may use.
      grid_mapping: of the call, for the names and index maps of operands; None: they are not known.
    """

    chip: Chip
    target: str
    vmem_limit: int
    grid_mapping: GridMapping | None = None

    def operand(self, text: str) -> BlockMapping | None:
        """The operand whose window a message is about."""
        found = re.search(r"window params for (input|output) (\d+)", text)
        if found is None or self.grid_mapping is None:
            return None
        blocks = getattr(self.grid_mapping, f"{found[1]}s")
        return blocks[int(found[2])] if int(found[2]) < len(blocks) else None


def explained(failure: child.CompilerFailure, of: Compiled) -> TpuRefusal:
    """A failure of libtpu as a refusal.

    Arguments: failure: what came out of the child process. of: what was compiled.
    """
    text = str(failure) if isinstance(failure, child.CompilerError) else f"{failure}\n{failure.output}"
    where = location_in(text)
    if isinstance(failure, child.CompilerError):
        for pattern, make in _TABLE:
            if match := re.search(pattern, text, re.DOTALL):
                return make(match, text, where, of)
        return _unsupported(text, where, of)
    # It crashed, hung, or ran out of memory: the message says so.
    head, *rest = str(failure).splitlines()
    at = [f"  at: {where}"] if where else []
    renamed = type(type(failure).__name__, (TpuRefusal,), {"__doc__": type(failure).__doc__})
    return renamed("\n".join([head, *at, *rest]), where)


def location_in(text: str) -> str | None:
    """The user's `file:line (function)` in a message of libtpu, or None."""
    found = re.search(r"at location: loc\((.*)\)$", text, re.MULTILINE)
    if found is None:
        return None
    place = re.search(r'(?:"([^"]*)"\()?"([^"]+)":(\d+)', found[1])
    if place is None or place[2] == "-":
        return None
    function, file, line = place.groups()
    return f"{locations.shortened(file)}:{line}" + (f" ({function})" if function else "")


def said(text: str) -> str:
    """libtpu's message without what is not about the kernel: one line."""
    text = re.sub(r"The MLIR operation involved:.*", "", text, flags=re.DOTALL)
    text = re.sub(r"at location: loc\(.*", "", text)
    text = re.sub(r"^[A-Z_]+: ", "", text)
    text = re.sub(r"Mosaic failed to compile TPU kernel .*?HLO name `[^`]*`: ", "", text, flags=re.DOTALL)
    text = re.sub(r"for %\S+ = .*?stack_frame_id=\d+\}", "for the call", text, flags=re.DOTALL)
    text = re.sub(r"\s+- *$", "", re.sub(r"See https?:\S+ for more details\.?", "", text).strip())
    text = re.sub(r"Please report a bug at: \S+", "", text)
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:397]}..."


# --- the table --------------------------------------------------------------------------------------------------------
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _size(text: str) -> int:
    """Bytes of "64.00M"."""
    return int(float(text.rstrip("KMG")) * _UNITS[text[-1] if text[-1] in _UNITS else ""])


def _mib(n: int) -> str:
    return f"{n / (1 << 20):,.1f} MiB" if n >= 1 << 20 else f"{n / (1 << 10):,.1f} KiB" if n >= 1 << 10 else f"{n} B"


def overflow(need: int, of: Compiled, *, at_least: bool = False, **facts: Any) -> VmemOverflow:
    """The refusal of a kernel that needs `need` bytes of VMEM, or at least so many."""
    capacity = of.chip.info.vmem_capacity_bytes
    may_have = f"of which it may use {_mib(of.vmem_limit)}" if need <= capacity else f"which has {_mib(capacity)}"
    hint = "smaller blocks; blocks of inputs and outputs are held twice (pipeline_mode=pl.Buffered(1) holds one)"
    if need <= capacity and of.vmem_limit < capacity:
        hint = f"pltpu.CompilerParams(vmem_limit_bytes=…) allows up to {_mib(capacity)} on this chip; or {hint}"
    headline = f"The kernel needs {'at least ' if at_least else ''}{_mib(need)} of VMEM on {of.target}, {may_have}."
    return VmemOverflow(explain(headline, hint=hint, **facts), facts.get("where"))


def _overflow(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    return overflow(_size(match[1]), of, where=where, libtpu_says=said(text))


def _scalars(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    need, has = (_mib(_size(n)) for n in match.groups())
    headline = f"The kernel needs {need} of SMEM on {of.target}, which has {has}."
    hint = "SMEM is for few scalars: keep arrays in VMEM, or in HBM (pl.ANY) and copy parts of them; block large tables"
    return SmemOverflow(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _semaphores(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    need, has = (_size(n) // 4 for n in match.groups())
    headline = f"The kernel has about {need:,} semaphores; {of.target} has {has:,}, a few of which the compiler needs."
    hint = "a copy needs a semaphore only while it is under way: use those of earlier copies again"
    return SemaphoreOverflow(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _cores(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    axis, programs, cores = match.groups()
    has = count_of(int(cores), "TensorCore")
    headline = f"Grid axis {axis} is core_parallel with {programs} programs, one for each core; {of.target} has {has}."
    hint = 'dimension_semantics="parallel" lets the compiler divide an axis of any size; or pltpu.TensorCoreMesh'
    return UnsupportedByMosaic(explain(headline, where=where, hint=hint), where)


def _subcores(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    headline = "dimension_semantics has subcore_parallel, which is for SparseCores; this kernel runs on a TensorCore."
    return UnsupportedByMosaic(explain(headline, where=where, hint='write "parallel" or "arbitrary"'), where)


def _parameter(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    headline = f"libtpu does not know the {match[1]}, which pltpu.CompilerParams has passed to it."
    hint = "leave it out: flags and serialization_format go to the compiler as they are"
    return UnsupportedByMosaic(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _arrays(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    need, has = (f"{_size(n) / 2**30:,.1f} GiB" for n in match.groups())
    headline = f"The arrays of the call take {need} of HBM; {of.target} has {has}."
    hint = "smaller arrays, or a part on each device (jax.shard_map); input_output_aliases for what is updated in place"
    return HbmOverflow(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _alignment(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    dimension, multiple = match[1], match[2]
    headline = f"The compiler cannot prove that a run-time index in dimension {dimension} is a multiple of {multiple}."
    promise = f"pl.multiple_of(i, {multiple})"
    hint = f"write the index as i * {multiple}, or promise it with {promise}; or load whole tiles and pltpu.roll them"
    return UnprovenAlignment(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _window(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    multiple, dimension, operand = match[1], match[2], of.operand(text)
    name = "an operand" if operand is None else operand.origin
    where = where if operand is None else operand.map_location
    what = f"returns a multiple of {multiple} in dimension {dimension}"
    headline = f"The compiler cannot prove that the index map of {name} {what}."
    hint = f"return i * {multiple}, so that blocks begin on tiles; or leave the operand in HBM (pl.ANY) and copy it"
    return UnprovenAlignment(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _block(match: re.Match, text: str, where: str | None, of: Compiled) -> TpuRefusal:
    operand = of.operand(text)
    where = where if operand is None else operand.map_location
    headline = f"The block shape of {operand.origin if operand else 'an operand'} does not fit the tiles of its array."
    hint = "the last two dimensions of a block are multiples of the tile, or the array's own"
    return IllegalBlock(explain(headline, where=where, hint=hint, libtpu_says=said(text)), where)


def _unsupported(text: str, where: str | None, of: Compiled) -> TpuRefusal:
    operation = re.search(r'"(?:xir|tpu|vector|arith|math|scf|memref|llo)\.(\w+)"', text)
    what = f"`{operation[1]}`" if operation else "the kernel"
    first, _, more = said(text).partition(". ")
    headline = f"The Mosaic compiler does not take {what} as it stands here, on {of.target}: {first.rstrip('.')}."
    hint = next((fix for pattern, fix in _FIXES if re.search(pattern, text)), _FIXES[-1][1])
    return UnsupportedByMosaic(explain(headline, where=where, hint=hint, libtpu_says=more or None), where)


_FIXES = (  # by libtpu's words; the first that fits
    (r"unsupported shape cast", "merge or split the last dimension in multiples of 128, or reshape outside the kernel"),
    (r"scalars are supported|\((?:[^()]*, )?(?:bf16|i8|i16)\b", "scalars have 32 bits: compute in float32 or int32"),
    (r"[Bb]ad lhs|[Uu]nsupported (?:element )?type|Invalid vector type|source element type|Conversion to",
     "compute in a type that the chip has, such as float32, bfloat16 or int32: x.astype(…)"),
    (r"", "other operations, types (float32, int32) or shapes (multiples of 8 and 128) may pass; or do it in "
     "jax.numpy, outside the kernel"),
)  # fmt: skip


_TABLE: tuple[tuple[str, Callable[[re.Match, str, str | None, Compiled], TpuRefusal]], ...] = (
    (r"Scoped allocation with size ([\d.]+[KMG]?) and limit", _overflow),
    (r"Used ([\d.]+[KMG]?) of [\d.]+[KMG]? vmem", _overflow),
    (r"Allocation \(size=(\d+)\) would exceed memory \(size=\d+\).*?space=vmem", _overflow),
    (r"Used ([\d.]+[KMG]?) of ([\d.]+[KMG]?) smem", _scalars),
    (r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=smem", _scalars),
    (r"Used ([\d.]+[KMG]?) of ([\d.]+[KMG]?) sflag", _semaphores),
    (r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=sflag", _semaphores),
    (r"Core-parallel dimension (\d+) has iteration bound: (\d+), .*?active cores: (\d+)", _cores),
    (r"subcore_parallel is only", _subcores),
    (r"to proto: unknown (enum value: '[^']*')", _parameter),
    (r"Unsupported (serialization format): \d+", _parameter),
    (r"memory on HBM.*?\(([\d.]+[KMG]?)\) exceeds available HBM \(([\d.]+[KMG]?)\)", _arrays),
    (r"index in dimension (\d+) is a multiple of (\d+)", _alignment),
    (r"index at dimension (\d+) is divisible by the tile dimension (\d+)", _alignment),
    (r"tiling \((\d+)\) divides index returned by transform_indices on dimension (\d+)", _window),
    (r"CompileTimeMosaicMisalignedBlockAndTiling", _block),
)
