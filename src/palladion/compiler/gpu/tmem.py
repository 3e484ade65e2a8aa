"""Tensor memory (TMEM) of a block: 128 lanes of 512 columns of 32 bits, and how a kernel's buffers lie in it.

Columns are dealt out one buffer after the other, when the kernel is compiled. At the start of the kernel one warp
allocates as many as all need, a power of two; the address comes through shared memory. At the end it gives them back.

The place of an element is told in bytes, as that of shared memory, with 4 bytes a column and 2**18 a lane: so
`views.py` takes slices of buffers here, too. Which row is in which lane:

    128 rows                    row i in lane i
    64 rows                     row i in lane i % 16 + 32 * (i // 16): a quarter for each warp
    64 rows, M64_COLLECTIVE     row i in lane i, the right half of the columns in lanes 64 to 127
    scales                      row i in lane i % 32, four scales of a row in a column, rows i // 32 in the next columns
    metadata of a sparse A      128 rows, for each 128 of K four columns as `plgpu.format_tcgen05_sparse_metadata` says

Source: PTX ISA, "Tensor memory", tcgen05.alloc, data path layouts; facts file, sections 8.1, 8.7, 8.8.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.compiler.gpu import clusters, memory, operands
from palladion.compiler.gpu.views import Axis, View
from palladion.language.dtypes import element_bits
from palladion.language.gpu.layout_values import TMEMLayout, base_of
from palladion.language.gpu.refs import storage_of

COLUMNS, LEAST, LANES = 512, 32, 128
LANE = 1 << 18  # between lanes, in bytes as places are told
CELL = 4  # bytes of a column
BASE = "tmem"  # the C++ name of the address of what the block has
_USED, _MOST, _COLLECTIVE = "tmem used", "tmem most", "tmem collective"
ROWS, QUARTERS, HALVES, SCALES, SPARSE = "128 rows", "64 rows", "64 rows in halves", "scales", "metadata"


@dataclasses.dataclass(frozen=True)
class Tmem:
    """A buffer in tensor memory.

    Attributes:
      aval: its type. label: for messages. column: its first. columns: how many.
      form: which row is in which lane, see above.
      axes: of its dimensions, as of a buffer in shared memory.
      copies: how many there are: one, or one for each Pallas thread of the block.
    """

    aval: Any
    label: str
    column: int
    columns: int
    form: str
    axes: tuple[Axis, ...]
    copies: int = 1

    swizzle, moving, in_smem, base = 0, False, False, BASE

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def step(self) -> int:
        """Bytes between elements of a row."""
        return step_of(self.aval)


def step_of(aval: Any) -> int:
    """Bytes between elements of a row: those of a column, unless elements are packed."""
    bits = element_bits(aval.dtype)
    return bits // 8 if bits == 32 or storage_of(aval).packed else CELL


def scratch(unit: Any, aval: Any, private: bool = False) -> Tmem:
    """A buffer.

    Arguments:
      unit: the unit. aval: its type. private: whether each Pallas thread of the block gets its own.

    Raises: NotImplementedError: tensor memory has no room, or the buffer is of a kind that is not compiled.
    """
    if unit.arch != "sm_100a":
        raise unit.refuse(f"{aval.label} is in TMEM, which {unit.arch} does not have.", "compile for sm_100a")
    storage = storage_of(aval)
    form, batch = _form(unit, aval, storage), aval.shape[:-2]
    rows, n = aval.shape[-2:]
    step = 1 if form in (SCALES, SPARSE) else step_of(aval)
    width = {SCALES: rows // 32 * (n // 4), SPARSE: n // 16, HALVES: n // 2}.get(form, -(-n * step // CELL))
    columns, copies = width * math.prod(batch), unit.num_threads if private else 1
    first = unit.tables.more.get(_USED, 0)
    end = first + columns * copies
    if end > COLUMNS:
        hint = "columns hold 32 bits; let products that do not run at the same time share a buffer"
        raise unit.refuse(
            f"{aval.label} needs {end - first} columns of TMEM, of which {COLUMNS - first} are free.", hint
        )
    unit.tables.more[_USED] = end
    unit.tables.more[_MOST] = max(unit.tables.more.get(_MOST, 0), end)
    unit.tables.more[_COLLECTIVE] = unit.tables.more.get(_COLLECTIVE, False) or bool(storage.collective)
    axes = [Axis(size, ((size, width * CELL * math.prod(batch[k + 1 :])),) if size > 1 else (), size, dim=k)
            for k, size in enumerate(batch)]  # fmt: skip
    digits = {
        ROWS: (((rows, LANE),), ((n, step),)),
        QUARTERS: (((4, 32 * LANE), (16, LANE)), ((n, step),)),
        HALVES: (((rows, LANE),), ((2, 64 * LANE), (n // 2, step))),
        SPARSE: (((rows, LANE),), ((n, 1),)),
        SCALES: (((rows // 32, CELL), (32, LANE)), ((n // 4, rows // 32 * CELL), (4, 1))),
    }[form]
    axes += [Axis(s, d, s, dim=len(batch) + k) for k, (s, d) in enumerate(zip((rows, n), digits))]
    unit.tables.notes.append(f"{aval.label}: {columns} columns of tensor memory from {first} on")
    return Tmem(aval, aval.label, first, columns, form, tuple(axes), copies)


def release(unit: Any, refs: Sequence[Any]) -> None:
    """Give back the columns of buffers of a scope that ends."""
    mine = [r for r in refs if isinstance(r, Tmem)]
    end = max((r.column + r.columns * r.copies for r in mine), default=None)
    if mine and end == unit.tables.more.get(_USED):  # else something that outlives them lies behind them
        unit.tables.more[_USED] = min(r.column for r in mine)


def _form(unit: Any, aval: Any, storage: Any) -> str:
    layout = None if storage.layout is None else base_of(storage.layout)
    if layout is TMEMLayout.SCALES_LAYOUT:
        return SCALES
    if layout is TMEMLayout.SPARSE_METADATA_LAYOUT and aval.shape[-2] == LANES:
        return SPARSE
    if layout is TMEMLayout.M64_COLLECTIVE_LAYOUT:
        return HALVES
    if layout is not None:
        raise unit.refuse(f"{aval.label} has layout {storage.layout}, which is not compiled yet.")
    if aval.shape[-2] == LANES:
        return ROWS
    return HALVES if storage.collective else QUARTERS


def collective(unit: Any) -> bool:
    """Whether the tensor core operations of the kernel are those of two blocks together."""
    return unit.tables.more.get(_COLLECTIVE, False)


def group(unit: Any) -> int:
    """The `cta_group` of all tensor core operations of a kernel, which may not mix."""
    return 2 if collective(unit) else 1


def address(view: View, more: int = 0) -> str:
    """C++ of the address of a view in tensor memory, a u32.

    Arguments: view: with no run-time starts left in its axes. more: bytes further, as places are told.
    """
    ref: Tmem = view.ref
    start = view.offset + sum(int(a.places()[0]) for a in view.axes) + more
    parts = [BASE] if ref.copies == 1 else [BASE, f"wg * {ref.columns}"]
    for term in view.terms:
        if term.factor % CELL:
            parts.append(f"({term.text}) * {term.factor} / {CELL}")
        else:
            parts.append(f"({term.text}) * {term.factor // CELL}")
    constant = ref.column + start // CELL
    return " + ".join([*parts, *([str(constant)] if constant else [])])


def matrix_view(unit: Any, ref_view: Any, what: str) -> View:
    """A view of two dimensions, whose rows and columns are those of tensor memory.

    Raises: NotImplementedError: it is none.
    """
    view = memory.view_of(unit, ref_view).folded()
    if len(view.shape) != 2 or view.gathers or any(a.terms or a.coords is not None for a in view.axes):
        raise unit.refuse(
            f"{what} takes a part of {view.ref.label} of shape {view.shape}, which does not lie as a matrix.",
            "take one buffer with .at[i], and columns that begin at a multiple of what a column holds",
        )
    return view


def lies_as(view: View, rows: tuple[tuple[int, int], ...]) -> bool:
    """Whether the rows of a view lie in lanes as these digits say, its columns one after the other."""
    along = view.axes[0].places()
    from palladion.compiler.gpu.views import spread

    expected = spread(rows, np.arange(len(along)))
    columns = view.axes[1].places()
    consecutive = np.arange(len(columns)) * view.ref.step
    return bool((along - along[0] == expected).all() and (columns - columns[0] == consecutive).all())


def finish(unit: Any) -> None:
    """Allocate at the start of the kernel, and give back at its end."""
    used = unit.tables.more.get(_MOST, 0)
    if not used:
        return
    columns = max(LEAST, 1 << (used - 1).bit_length())
    unit.tables.tmem = columns
    operands.declare(unit)
    at = unit.shared(16, 16)
    n = group(unit)
    meet = "sync_cluster();" if n == 2 else "__syncthreads();"
    before, after = (f'asm volatile("tcgen05.fence::{w}_thread_sync;" ::: "memory");' for w in ("before", "after"))
    if n == 2 and clusters.size(unit) < 2:
        raise unit.refuse("A kernel without clusters has a collective buffer in TMEM.", "cluster=(2,)")
    unit.tables.prologue += [
        "if (threadIdx.x < 32) {",
        f'  asm volatile("tcgen05.alloc.cta_group::{n}.sync.aligned.shared::cta.b32 [%0], {columns};" '
        f'::"r"(shared_address(smem + {at})) : "memory");',
        f'  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::{n}.sync.aligned;" ::: "memory");',
        "}",
        before,
        meet,
        after,
        f"const u32 {BASE} = once<2>(*(volatile u32*)(smem + {at}));",
    ]
    unit.tables.epilogue += [
        before,
        meet,
        after,
        "if (threadIdx.x < 32) {",
        f'  asm volatile("tcgen05.dealloc.cta_group::{n}.sync.aligned.b32 %0, {columns};" ::"r"({BASE}) : "memory");',
        "}",
    ]
