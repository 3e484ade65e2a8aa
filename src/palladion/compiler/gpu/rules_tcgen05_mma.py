"""Blackwell's matrix products: `tcgen05.mma` with its accumulators in tensor memory, copies to it, and completion.

All of that is issued by one CUDA thread; what it issues runs in order. A product is one instruction for each 256
columns and each 32 bytes of K. Of a collective one each of two blocks has half of A's rows and half of B's columns, at
the same places of its memory; the first block issues it for both.

Scales lie as `tcgen05.cp` puts them: four scales of a row (of consecutive blocks of K) in a column, of which the
instruction's descriptor picks one; the next four in columns further on.

Source: PTX ISA, tcgen05.mma, tcgen05.cp, tcgen05.commit; facts file, section 8.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu import clusters, descriptors, memory, operands, rules_barriers, tcgen05_code, tmem
from palladion.compiler.gpu.dtypes import kind
from palladion.compiler.gpu.issue import leader
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.views import View
from palladion.language.gpu.tcgen05 import async_copy_smem_to_tmem_p, tcgen05_commit_arrive_p, tcgen05_mma_p

MAX_N = 256  # columns of an instruction


# How many scales of a row an instruction takes, and how PTX calls that.
_SCALES = {"mxf8f6f4": (1, "1X"), "mxf4": (2, "2X"), "mxf4nvf4": (4, "4X")}


# --- products ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Left:
    """A of a product, in shared or in tensor memory.

    Attributes: view. matrix, words: how it lies in shared memory; None: it is in tensor memory.
    """

    view: View
    matrix: descriptors.Matrix | None = None
    words: operands.Words | None = None

    @property
    def mn_major(self) -> bool:
        return self.matrix is not None and self.matrix.mn_major

    def at(self, step: int) -> str:
        """C++ of the arguments that say where an instruction reads."""
        if self.matrix is None or self.words is None:
            return tmem.address(self.view, step * descriptors.STEP)
        return self.words.at(self.matrix.steps[step])


@RULES.rule(tcgen05_mma_p)
def _mma(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    name, axis = "plgpu.tcgen05_mma", eqn.params["collective_axis"]
    given = memory.arguments(unit, eqn, values)
    _check_group(unit, axis, name)
    group = tmem.group(unit)
    acc, b_view = tmem.matrix_view(unit, given.acc, name), memory.view_of(unit, given.b)
    (rows, n), own_n = acc.shape, b_view.shape[1]
    parts, sparse = -(-n // MAX_N), given.a_sparse_metadata is not None
    b = operands.lies(unit, "B", b_view, 0, own_n // parts, (1 + sparse) * descriptors.STEP // b_view.itemsize)
    right = operands.words(unit, "b", b, b_view)
    left = _left(unit, given.a, rows, name)
    metadata = _metadata(unit, given.a_sparse_metadata) if sparse else None
    scales = _scales(unit, given)
    scale = None if scales is None else str(np.dtype(scales[0].dtype))
    types = (_dtype(given.a), _dtype(given.b), str(np.dtype(acc.dtype)))
    which = descriptors.kind_of(types[0], scale)
    each, vector = _SCALES.get(which, (0, ""))
    function = tcgen05_code.product_function(unit, group, which, left.matrix is None, vector, sparse)
    add = given.accumulate.value.text
    columns = 2 if sparse and left.view.itemsize == 1 else 1  # of metadata for an instruction

    def word(step: int) -> int:
        number = step * each % 4
        return descriptors.instruction(
            which,
            *types,
            rows * group,
            n // parts,
            a_mn_major=left.mn_major,
            b_mn_major=b.mn_major,
            scale=scale,
            ids=(number, number),
            sparse=(step * columns % 2 if columns == 1 else 0) if sparse else None,
        )

    with leader(unit):
        for part in range(parts):
            first = part * (n // parts)
            d = tmem.address(acc, first * tmem.CELL)
            for step in range(len(b.steps)):
                where = [d, left.at(step), right.at(b.lines[part] + b.steps[step])]
                arguments = [*where, f"{word(step)}u", "true" if step else add]
                if metadata is not None:
                    arguments.append(tmem.address(metadata, step * columns // 2 * 2 * tmem.CELL))
                for view, lines, line in zip(scales or (), (rows, n), (0, first)):
                    column = step * each // 4 * (lines // 32) + line // 32
                    arguments.append(tmem.address(view, column * tmem.CELL))
                unit.line(f"{function}({', '.join(arguments)});")
        if given.barrier is not None:
            _commit(unit, rules_barriers.one_of(unit, given.barrier), axis)
    return []


def _left(unit: Unit, given: Any, rows: int, name: str) -> Left:
    if isinstance(given.ref, tmem.Tmem):
        return Left(tmem.matrix_view(unit, given, name))
    view = memory.view_of(unit, given)
    matrix = operands.lies(unit, "A", view, 1, rows, descriptors.STEP // view.itemsize)
    return Left(view, matrix, operands.words(unit, "a", matrix, view))


def _dtype(given: Any) -> str:
    """The name of an operand's dtype, also of narrow elements, whose view is one of bytes."""
    dtype = given.ref.dtype
    for transform in given.transforms:
        if isinstance(transform, jaxlink.BitcastTransform):
            dtype = transform.dtype
    return str(np.dtype(dtype))


def _metadata(unit: Unit, given: Any) -> View:
    """The view of a sparse operand's metadata, a whole buffer."""
    view = memory.view_of(unit, given).folded()
    if view.ref.form != tmem.SPARSE or view.offset:
        raise unit.refuse(f"The metadata of a sparse operand is a part of {view.ref.label}.", "give the whole buffer")
    return view


def _scales(unit: Unit, given: Any) -> tuple[View, View] | None:
    """The views of both operands' scales, whole buffers."""
    if given.a_scale is None:
        return None
    found = []
    for what in (given.a_scale, given.b_scale):
        view = memory.view_of(unit, what).folded()
        if view.ref.form != tmem.SCALES or view.shape != view.ref.shape[-2:]:
            raise unit.refuse(f"Scales are a part of {view.ref.label}.", "give all of a buffer of scales")
        found.append(view)
    return found[0], found[1]


def _check_group(unit: Unit, axis: Any, name: str) -> None:
    if (axis is not None) != tmem.collective(unit):
        raise unit.refuse(
            f"{name} is {'collective' if axis is not None else 'of one block'}, but the kernel's buffers in TMEM are "
            f"{'not collective' if axis is not None else 'collective'}.",
            "all tensor core operations of a kernel are collective, or none: plgpu.TMEM(…, collective=True)",
        )


def _commit(unit: Unit, barrier: Any, axis: Any) -> None:
    """An arrival, in the block or in both, when all that this thread has issued is complete."""
    group = tmem.group(unit)
    name = tcgen05_code.commit_function(unit, group, axis is not None)
    more = "" if axis is None else f", {clusters.along(unit, [axis]).mask()}"
    unit.line(f"{name}({barrier.address}{more});")


@RULES.rule(tcgen05_commit_arrive_p)
def _commit_arrive(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given, axis = memory.arguments(unit, eqn, values), eqn.params["collective_axis"]
    if axis is not None:
        _check_group(unit, axis, "plgpu.tcgen05_commit_arrive")
    happens = memory.predicate(given.predicate)
    with leader(unit, happens):
        _commit(unit, rules_barriers.one_of(unit, given.barrier), axis)
    return []


# --- copies from shared memory ----------------------------------------------------------------------------------------
@RULES.rule(async_copy_smem_to_tmem_p)
def _copy(unit: Unit, eqn: Any, *values: Any) -> list[Any]:
    given, axis, what = memory.arguments(unit, eqn, values), eqn.params["collective_axis"], eqn.params["kind"]
    _check_group(unit, axis, "A copy to TMEM")
    source, target = memory.view_of(unit, given.smem), memory.view_of(unit, given.tmem).folded()
    if what == "scales":
        _copy_scales(unit, source, target)
    elif what == "plain":
        _copy_plain(unit, source, target)
    else:
        _copy_metadata(unit, source, target)
    return []


def _copy_scales(unit: Unit, source: View, target: View) -> None:
    """Blocks of 128 rows and 4 scales, 512 bytes each, to the four quarters of the lanes."""
    blocks, words = _blocks(unit, source, 512)
    rows = target.shape[0]
    name = tcgen05_code.copy_function(unit, tmem.group(unit), "32x128b.warpx4")
    with leader(unit):
        for (r, c), at in np.ndenumerate(blocks):
            to = tmem.address(target, (c * (rows // 32) + 4 * r) * tmem.CELL)
            unit.line(f"{name}({to}, {words.at(int(at))});")


def _copy_metadata(unit: Unit, source: View, target: View) -> None:
    """Blocks of 128 rows and 128 elements of K, 2048 bytes each, to four columns."""
    blocks, words = _blocks(unit, source, 2048)
    name = tcgen05_code.copy_function(unit, tmem.group(unit), "128x128b")
    with leader(unit):
        for step, at in enumerate(blocks[0]):
            unit.line(f"{name}({tmem.address(target, step * 4 * tmem.CELL)}, {words.at(int(at))});")


def _blocks(unit: Unit, source: View, size: int) -> tuple[np.ndarray, operands.Words]:
    """Where blocks of so many bytes begin, in an array of the first two dimensions; the descriptors of the first."""
    source = source.folded()
    places = source.table() - source.table().reshape(-1)[0]
    blocks = places.reshape(*places.shape[:2], -1)
    consecutive = np.arange(blocks.shape[2])
    if len(consecutive) != size or (blocks - blocks[:, :, :1] != consecutive).any() or source.ref.swizzle:
        raise unit.refuse(f"{source.ref.label} does not lie in blocks of {size} bytes.", "store it without transforms")
    if any(a.terms for a in source.axes) or any(t.divisor % 16 for t in source.terms):
        raise unit.refuse(f"The part of {source.ref.label} that is copied begins within a block.", "copy all of it")
    start = int(source.table().reshape(-1)[0])
    matrix = descriptors.Matrix(source.ref.base, start, source.terms, 0, 16, 128, False, (0,), (0,))
    return blocks[:, :, 0], operands.words(unit, "a", matrix, source)


def _copy_plain(unit: Unit, source: View, target: View) -> None:
    """Rows to lanes, 32 bytes at a time."""
    size = kind(target.dtype).bits // 8
    if target.ref.form != tmem.ROWS or target.ref.step != size or target.shape[0] != tmem.LANES:
        raise unit.refuse(
            f"plgpu.async_copy_smem_to_tmem to {target.ref.label}: it is not a packed buffer of 128 rows.",
            "load it and plgpu.async_store_tmem it",
        )
    matrix = operands.lies(unit, "The source", source, 1, tmem.LANES, descriptors.STEP // size)
    words = operands.words(unit, "a", matrix, source)
    name = tcgen05_code.copy_function(unit, tmem.group(unit), "128x256b")
    with leader(unit):
        for step, at in enumerate(matrix.steps):
            unit.line(f"{name}({tmem.address(target, step * descriptors.STEP)}, {words.at(at)});")
