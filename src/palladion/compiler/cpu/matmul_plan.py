"""How to form one matrix product: which operand is broadcast, what is packed, and the sizes of tiles and slices.

Everything about a product is known when it is compiled: sizes, strides, dtypes, machine. So the few sensible ways to
form it are listed and the one with the least estimated time is taken. The estimates are in cycles of a core that loads
two vectors and multiplies two vectors a cycle; they need only rank the ways, and were checked against measurements
(benchmarks/cpu_matmul.py).

The nest of loops is that of BLIS with two simplifications. The rows of A are broadcast element by element, which works
from any strides, so A is packed only to convert it or to keep its rows from falling on the same few lines of the L1
cache. And a block of B, kept in L2, is the outermost thing packed: programs of a grid already cut the operands.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from palladion.compiler.cpu import target
from palladion.compiler.cpu.builder import is_float, size_of
from palladion.compiler.cpu.matmul_tile import Kind, kinds
from palladion.compiler.cpu.pack import STORED, Operand

SLICE_BYTES = 2048  # of a row of A in a slice of k; 1024 to 4096 are within a few per cent
L1_SETS, LINE = 64, 64  # of the L1 cache: sets and bytes of a line; together a page, on all current cores


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """C[m, n] (=|+=) sum over k of A[m, k] B[k, n], for each element of a batch.

    Attributes:
      m, n, k: sizes, 0 and more.
      a, b, c: strides in elements from row to row and from column to column; any integers. The elements of C must not
        overlap each other, nor A or B.
      a_dtype, b_dtype, c_dtype: NumPy names of dtypes: all floats ("float32", "float64", "bfloat16", "float16",
        "float8_e4m3fn", "float8_e5m2") or all integers ("int8" … "uint64"). C is none of the float8. Sums are formed
        in f64 if any is float64, else in f32; in 32-bit or, if any is 64-bit, 64-bit integers that wrap. They are
        rounded (cut off, for integers) to C's dtype once.
      accumulate: C += the product, else C = the product.
      batch: number of products; batch_strides: elements of A, B and C from one to the next.
    """

    m: int
    n: int
    k: int
    a: tuple[int, int]
    b: tuple[int, int]
    c: tuple[int, int]
    a_dtype: str = "float32"
    b_dtype: str = "float32"
    c_dtype: str = "float32"
    accumulate: bool = False
    batch: int = 1
    batch_strides: tuple[int, int, int] = (0, 0, 0)

    def transposed(self) -> MatmulSpec:
        """The same product seen as C^T = B^T A^T."""
        sa, sb, sc = self.batch_strides
        return dataclasses.replace(
            self, m=self.n, n=self.m, a=self.b[::-1], b=self.a[::-1], c=self.c[::-1], a_dtype=self.b_dtype,
            b_dtype=self.a_dtype, batch_strides=(sb, sa, sc),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to form a product.

    Attributes:
      spec: the product, seen as C^T = B^T A^T if `swapped`; kind: the instructions; lanes: of a vector of sums.
      dots: inner products, else tiles.
      a_mode: "direct"; or packed "rows", "side" (side by side) or by "elements".
      b_mode: "direct" (converted as it is read, if need be); or packed "side", "transpose" or "elements".
      rows, vectors: of the largest tile (dots: rows, columns).
      depth: elements of k in a slice; columns: columns of B in a block.
      partial: sums over slices are kept in the workspace and rounded at the end.
      cost: estimated cycles.
    """

    spec: MatmulSpec
    swapped: bool
    kind: Kind
    lanes: int
    dots: bool
    a_mode: str
    b_mode: str
    rows: int
    vectors: int
    depth: int
    columns: int
    partial: bool
    cost: float
    host: target.Host = dataclasses.field(repr=False)

    @property
    def a(self) -> Operand:
        """A's rows as lines to pack."""
        s, k = self.spec, self.kind
        return Operand(s.a_dtype, s.a[0], s.a[1], k.stored, k.group, self.lanes, k.flip_a, self.host)

    @property
    def b(self) -> Operand:
        """B's columns as lines to pack."""
        s, k = self.spec, self.kind
        return Operand(s.b_dtype, s.b[1], s.b[0], k.stored, k.group, self.lanes, False, self.host)

    @property
    def steps(self) -> int:
        """Steps along k in a slice."""
        return -(-self.depth // self.kind.group)

    @property
    def a_stride(self) -> tuple[int, int]:
        """Lanes of A from row to row and from step to step, as the tile reads it."""
        if self.a_mode == "direct":
            return self.spec.a[0] // self.kind.group, self.spec.a[1] if self.kind.group == 1 else 1
        if self.a_mode == "side":
            return 1, -(-self.rows // self.lanes) * self.lanes
        return -(-self.steps // self.lanes) * self.lanes + self.lanes, 1  # a vector more: rows on different cache lines

    def areas(self) -> dict[str, tuple[int, int]]:
        """Offset and size in bytes of each part of the workspace."""
        lane, at, out = size_of(self.kind.lane), 0, {}
        sizes = {"a": 0, "b": 0, "c": 0}
        if self.dots:
            sizes["a"] = self.spec.m * self.spec.k * size_of(STORED[self.spec.a_dtype]) * (self.a_mode != "direct")
        else:
            row, step = self.a_stride
            # "elements" with groups and "rows" both end within the last row's stride
            sizes["a"] = lane * (self.steps * step if self.a_mode == "side" else self.rows * row)
            sizes["a"] *= self.a_mode != "direct"
            wide = -(-self.columns // self.lanes) * self.lanes
            sizes["b"] = lane * wide * (self.steps + bool(self.kind.correction)) * (self.b_mode != "direct")
            sizes["c"] = self.spec.m * self.spec.n * size_of(self.kind.acc) * self.partial
        for part, size in sizes.items():
            out[part] = (at, size)
            at = -(-(at + size) // 64) * 64
        return out


def tile_shape(host: target.Host, kind: Kind, m: int) -> tuple[int, int]:
    """Rows and vectors of the tile: sums, a row's vectors of B and one broadcast of A must fit in the registers.

    12 x 2 on AVX-512, 6 x 2 on AVX2, 8 x 3 on NEON; fewer rows leave room for more vectors. Rows are shared out evenly
    among the panels: 64 are four panels of 11 and two of 10, not five of 12 and one of 4.
    """
    spare = 1 if (host.fma and is_float(kind.acc)) or kind.group > 1 else 3  # a product that is not fused needs room
    free = host.registers - spare
    most = 4 if free < 15 else 6 if free < 30 else 8 if host.vector_bytes == 16 else 12
    rows = -(-m // -(-m // most))
    if rows == 1:  # bound by memory: long runs of each row of B, whose vectors need no registers of their own
        return 1, max(1, free - 4) * 3 // 4
    return rows, max(1, min(8, free // (rows + 1)))


_CONVERSION = {"float8_e5m2": 1.5, "float8_e4m3fn": 4.0}  # cycles a vector, where it is more than an instruction or two


# With 48 KB of L1 data cache, 12 lines for each place in a page; others have 32 KB and 8 lines, or more. By name and
# not read from the system, so that equal machines get equal plans: code cached by one may run on another.
_TWELVE_WAYS = tuple(
    "icelake tigerlake rocketlake alderlake raptorlake meteorlake arrowlake lunarlake sapphirerapids emeraldrapids "
    "graniterapids znver5".split()
)


def _crowded(line: int, element: int, lines: int, elements: int, nbytes: int, host: target.Host) -> bool:
    """Whether so many lines, read in step along k, fall on too few sets of the L1 cache for all to stay there."""
    seen = {(i * line + k * element) * nbytes // LINE for i in range(lines) for k in range(elements)}
    sets = [0] * L1_SETS
    for cache_line in seen:
        sets[cache_line % L1_SETS] += 1
    return max(sets) > (12 if host.cpu.startswith(_TWELVE_WAYS) else 8)


def _split(total: int, most: int, multiple: int) -> int:
    """The size of equal parts of at most `most`, rounded up to a multiple."""
    part = math.ceil(total / max(1, math.ceil(total / most)))
    return math.ceil(part / multiple) * multiple


def _mode_of_a(spec: MatmulSpec, kind: Kind, host: target.Host, rows: int, steps: int, tiles: int) -> str:
    """How a panel of `rows` rows is read, `steps` lanes deep and by so many tiles."""
    row, col = spec.a
    lies_packed = STORED[spec.a_dtype] == kind.stored and not kind.flip_a
    if kind.group > 1:  # the elements of a lane must lie side by side, all there, at whole lanes from the row above
        lies_packed &= col == 1 and spec.k % kind.group == 0 and (row % kind.group == 0 or spec.m == 1)
    if lies_packed and tiles > 4:  # else packing would not pay
        nbytes = size_of(STORED[spec.a_dtype])
        if abs(col) == 1:
            lies_packed = not _crowded(row, col, rows, 1, nbytes, host)
        else:
            lies_packed = abs(row) == 1 and not _crowded(row, col, rows, min(steps, 64), nbytes, host)
    return "direct" if lies_packed else "rows" if col == 1 else "side" if row == 1 else "elements"


def _tiles(spec: MatmulSpec, swapped: bool, kind: Kind, host: target.Host) -> list[Plan]:
    """The ways that go by tiles: B as it lies, or packed in the way that its strides ask for."""
    lanes, group = host.lanes(size_of(kind.acc)), kind.group
    wide, all_steps = -(-spec.n // lanes), -(-spec.k // group)
    rows, vectors = tile_shape(host, kind, spec.m)
    vectors = min(vectors, wide)
    panels, tiles = -(-spec.m // rows), -(-wide // vectors)
    # Slices of k keep a panel of B in the L2 cache however large the block; fewer mean fewer additions to C.
    most = SLICE_BYTES // size_of(kind.lane)
    slices = -(-all_steps // most)
    depth = spec.k if slices == 1 else _split(spec.k, most * group, 8 * group)
    steps = -(-depth // group)
    nr = lanes * vectors
    room = (512 if host.vector_bytes == 64 else 256) * 1024  # half of a usual L2 cache
    columns = _split(spec.n, max(nr, room // (steps * size_of(kind.lane)) // nr * nr), nr)

    a_mode = _mode_of_a(spec, kind, host, rows, steps, tiles)
    a_cost = {"direct": 0.0, "rows": 1.5 / lanes, "side": 1.5 * group / rows, "elements": 2.5 * group}[a_mode]
    a_cost *= -(-spec.n // columns) * spec.m * all_steps
    loads = max(1.0, (rows + vectors) / (rows * vectors))
    compute = spec.m * wide * all_steps * loads / 2
    store = slices * spec.m * (wide if spec.c[1] == 1 else 2.0 * spec.n)
    calls = 12.0 * slices * panels * tiles

    as_it_is = STORED[spec.b_dtype] == kind.stored
    usual = 0.35 if host.vector_bytes == 64 else 1.0  # AVX-512 cores convert while they multiply
    reread = 0.35 if as_it_is else _CONVERSION.get(spec.b_dtype, usual)
    ways = {
        "direct": all_steps * wide * panels * reread,
        "side": all_steps * wide * (1.5 + group * (2.0 if as_it_is else 2.5)),
        "transpose": all_steps * wide * 4.0,
        "elements": 2.0 * spec.k * spec.n,
    }
    row, col = spec.b
    modes = ["side", "direct"][: 2 if group == 1 else 1] if col == 1 else ["transpose"] if row == 1 else ["elements"]
    partial = slices > 1 and is_float(kind.acc) and size_of(STORED[spec.c_dtype]) < size_of(kind.acc)
    rest = a_cost + compute + store + calls
    return [
        Plan(
            spec, swapped, kind, lanes, False, a_mode, mode, rows, vectors, depth, columns, partial,
            rest + ways[mode], host,
        )
        for mode in modes
    ]  # fmt: skip


def _dots(spec: MatmulSpec, swapped: bool, kind: Kind, host: target.Host) -> list[Plan]:
    """The ways that go by inner products: B must be contiguous along k."""
    if spec.b[0] != 1 or kind.name == "i8":
        return []
    lanes = host.lanes(size_of(kind.acc))
    most = 4 if host.registers >= 32 else 2
    rows, columns = min(spec.m, most), min(spec.n, 4)
    a_mode = "direct" if spec.a[1] == 1 else "elements"
    steps = -(-spec.k // (lanes * kind.group))
    convert = 0.5 * (STORED[spec.a_dtype] != kind.stored) * rows + (STORED[spec.b_dtype] != kind.stored) * columns
    each = max(1.0, (rows + columns + convert) / (rows * columns)) / 2
    cost = spec.m * spec.n * (steps * each + 4.0) + (2.0 * spec.m * spec.k if a_mode != "direct" else 0)
    return [Plan(spec, swapped, kind, lanes, True, a_mode, "direct", rows, columns, spec.k, spec.n, False, cost, host)]


def plans(spec: MatmulSpec, host: target.Host) -> list[Plan]:
    """All ways considered, the best first. Sizes must be at least 1."""
    found: list[Plan] = []
    for swapped in (False, True):
        s = spec.transposed() if swapped else spec
        for kind, ways in itertools.product(kinds(s.a_dtype, s.b_dtype, s.c_dtype, host), (_tiles, _dots)):
            found += ways(s, swapped, kind, host)
    return sorted(found, key=lambda p: p.cost)
