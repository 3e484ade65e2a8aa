"""What a matrix product of the tensor core may be: shapes, dtypes, memories, tiles, swizzles.

Each instruction has a table of rules: small functions of the operands as `Operand`s, each of which gives a `Problem`
or nothing. `check` raises the first as a finding ("illegal-shape" for sizes and dtypes, "illegal-layout" for where and
how operands lie) while the kernel is traced, at the user's line. Buffers without transforms get them by inference, so
that no rule about tiles concerns them.

Source: the Pallas Mosaic GPU reference, section "MMA"; PTX ISA, wgmma and tcgen05.mma: shapes, canonical layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.errors import Finding, KernelFinding, kind_of, mistake
from palladion.language.gpu.layout_values import Layout
from palladion.language.gpu.memory import MemorySpace, SwizzleTransform, TilingTransform, TransposeTransform
from palladion.language.gpu.refs import space_of, storage_of
from palladion.language.indices import is_ref, label_of
from palladion.locations import current_location


# --- operands ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a matrix product.

    Attributes:
      name: "A", "B", "the accumulator" …
      label: how messages call it.
      shape: as the product sees it. dtype: of its elements.
      space: "smem", "tmem", "acc" (a wgmma accumulator), "regs" (an array) or another memory's name.
      tile, swizzle: of a buffer in SMEM: as its transforms say, or None.
      transposed: whether the product sees the transpose of how the buffer lies.
      packed: of a buffer in TMEM.
    """

    name: str
    label: str
    shape: tuple[int, ...]
    dtype: Any
    space: str
    tile: tuple[int, ...] | None = None
    swizzle: int | None = None
    transposed: bool = False
    packed: bool | None = None

    @property
    def bits(self) -> int:
        """The width of an element."""
        return jax.dtypes.itemsize_bits(self.dtype)

    def __str__(self) -> str:
        how = "an array in registers" if self.space == "regs" else f"{self.label} in {self.space.upper()}"
        return f"{self.name} ({how}, {self.dtype}{list(self.shape)})"


def operand(function: str, name: str, x: Any) -> Operand:
    """An operand as the rules see it: `x` is a Ref, a view, or an array.

    Raises:
      TypeError: it is something else.
    """
    if not is_ref(x):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise mistake(TypeError, f"{name} of {function} is {kind_of(x)}, which is neither a Ref nor an array.")
        return Operand(name, "an array", tuple(x.shape), jnp.dtype(x.dtype), "regs")
    shape, space, storage = tuple(x.shape), space_of(x), storage_of(x)
    memory = space.value if isinstance(space, MemorySpace) else str(space)
    # A block of `pl.pallas_call` whose memory is not said is in SMEM.
    memory = {"default": "smem", "None": "smem"}.get(memory, memory)
    memory = "acc" if storage.layout is Layout.WGMMA else memory
    tiles = [t for t in storage.transforms if isinstance(t, TilingTransform)]
    swizzles = [t.swizzle for t in storage.transforms if isinstance(t, SwizzleTransform)]
    return Operand(
        name,
        label_of(x),
        shape,
        x.dtype,
        memory,
        tuple(tiles[0].tiling) if tiles else None,
        swizzles[0] if swizzles else None,
        _transposed(x, storage.transforms),
        storage.packed,
    )


def _views(x: Any) -> Sequence[Any]:
    return x.transforms if isinstance(x, jaxlink.TransformedRef) else ()


def _transposed(x: Any, stored: Sequence[Any]) -> bool:
    """Whether the last two dimensions of a view are those of memory the other way round."""
    root = x.ref if isinstance(x, jaxlink.TransformedRef) else x
    dims: list[Any] = list(range(len(root.shape)))  # for each dimension of the view, that of memory
    for layer in stored:
        if isinstance(layer, TransposeTransform) and len(layer.permutation) == len(dims):
            dims = [layer.permutation.index(d) for d in dims]
    for layer in _views(x):
        if isinstance(layer, jaxlink.NDIndexer):
            dims = [d for d, i in zip(dims, layer.indices, strict=False) if isinstance(i, jaxlink.Slice)]
        elif isinstance(layer, jaxlink.TransposeTransform):
            dims = [dims[p] for p in layer.permutation] if len(layer.permutation) == len(dims) else dims
        elif isinstance(layer, jaxlink.ReshapeTransform):
            kept = dims[-2:] if len(layer.shape) >= 2 else []
            dims = [None] * (len(layer.shape) - len(kept)) + kept
    known = len(dims) >= 2 and None not in dims[-2:]
    return known and dims[-2] > dims[-1]


# --- problems ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Problem:
    """A rule that is broken: kind of the finding, what is wrong, the rule in words."""

    kind: str
    message: str
    rule: str


def shape(message: str, rule: str) -> Problem:
    """A size or dtype that the instruction does not have."""
    return Problem("illegal-shape", message, rule)


def layout(message: str, rule: str) -> Problem:
    """An operand that lies where, or as, the instruction cannot read it."""
    return Problem("illegal-layout", message, rule)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product: D (M, N) += A (M, K) @ B (K, N).

    Attributes:
      function: the public name.
      d, a, b: operands; of a collective product, those of one block.
      collective: whether two blocks do it together.
      sparse: whether A holds half of its K elements.
      scales: of A and of B, or None.
    """

    function: str
    d: Operand
    a: Operand
    b: Operand
    collective: bool = False
    sparse: bool = False
    scales: tuple[Operand, Operand] | None = None

    @property
    def m(self) -> int:
        """Rows of the product, over both blocks."""
        return self.d.shape[0] * (2 if self.collective else 1)

    @property
    def n(self) -> int:
        """Columns of the product."""
        return self.d.shape[1]

    @property
    def k(self) -> int:
        """The contracted size."""
        return self.b.shape[0]


def product(function: str, acc: Any, a: Any, b: Any, **options: Any) -> Product:
    """The product that a call asks for.

    Arguments:
      function: the public name. acc, a, b: Refs, views or arrays. options: other fields of `Product`.

    Raises:
      TypeError: an operand is something else.
    """
    d = operand(function, "the accumulator", acc)
    return Product(function, d, operand(function, "A", a), operand(function, "B", b), **options)


Rule = Callable[[Product], Problem | None]


def check(rules: Sequence[Rule], p: Product) -> None:
    """Hold a product against the rules of its instruction.

    Raises:
      KernelFinding: the first rule that is broken, at the user's line.
    """
    for rule in rules:
        problem = rule(p)
        if problem is not None:
            where = current_location()
            message = f"{p.function}: {problem.message}"
            raise KernelFinding(Finding(problem.kind, "error", message, where=where, hint=problem.rule))


def check_place(function: str, name: str, space: str, allowed: Sequence[str], x: Any) -> None:
    """An operand that is no part of the product, by the memory it must be in.

    Raises:
      KernelFinding: it is elsewhere (`illegal-layout`).
    """
    if space not in allowed:
        places = " or ".join(s.upper() for s in allowed)
        what = label_of(x) if is_ref(x) else "an array in registers"
        message = f"{function}: {name} is {what}, in {space.upper()}."
        hint = f"{name} must be in {places}"
        raise KernelFinding(Finding("illegal-layout", "error", message, where=current_location(), hint=hint))


# --- rules that both generations share --------------------------------------------------------------------------------
def matrices(p: Product) -> Problem | None:
    for x in (p.d, p.a, p.b):
        if len(x.shape) != 2:
            rule = "operands are matrices: D (M, N), A (M, K), B (K, N); pick one buffer with .at[i]"
            return shape(f"{x} has {len(x.shape)} dimensions.", rule)
    return None


def sizes_agree(p: Product) -> Problem | None:
    rows, inner = p.a.shape[0], p.a.shape[1] * (2 if p.sparse else 1)
    columns = p.b.shape[1] * (2 if p.collective else 1)
    if (p.d.shape, inner) == ((rows, columns), p.b.shape[0]):
        return None
    rule = "D is (M, N), A (M, K), B (K, N)" + (", of a sparse A (M, K // 2)" if p.sparse else "")
    if p.collective:
        rule = "of a collective product each block has D (M // 2, N), A (M // 2, K), B (K, N // 2)"
    a, b, d = (tuple(x.shape) for x in (p.a, p.b, p.d))
    return shape(f"shapes do not agree: A {a}, B {b}, accumulator {d}.", rule)


def same_dtype(p: Product) -> Problem | None:
    if p.a.dtype == p.b.dtype or {str(p.a.dtype), str(p.b.dtype)} == {"float8_e4m3fn", "float8_e5m2"}:
        return None  # the two of 8 bits mix freely
    return shape(f"A is {p.a.dtype}, but B is {p.b.dtype}.", "A and B have the same dtype: convert one with .astype")


def dtypes(table: dict[str, tuple[str, ...]]) -> Rule:
    """The dtypes of operands, and those that the accumulator can have with each."""

    def rule(p: Product) -> Problem | None:
        accumulators = table.get(str(p.a.dtype))
        if accumulators is None:
            return shape(f"operands of dtype {p.a.dtype} are not supported.", f"operands are {', '.join(table)}")
        if str(p.d.dtype) not in accumulators:
            words = f"with operands of dtype {p.a.dtype} the accumulator is {' or '.join(accumulators)}"
            return shape(f"the accumulator of {p.a.dtype} operands is {p.d.dtype}.", words)
        return None

    return rule


def tiles(p: Product) -> Problem | None:
    """Buffers that have transforms have those of matrix products: tiles of 8 rows, as wide as the swizzle."""
    for x in (p.a, p.b):
        if x.space != "smem" or (x.tile is None and x.swizzle in (None, 16)):
            continue
        swizzle = x.swizzle or 16
        width = 8 * swizzle // x.bits
        memory = x.shape[::-1] if x.transposed else x.shape
        given = x.tile
        if given is None and memory[-1] == width:
            continue  # rows as wide as the swizzle are the tiles already
        rule = (
            f"tiles are (8, swizzle bytes / element bytes): plgpu.TilingTransform((8, {width})) "
            f"with plgpu.SwizzleTransform({swizzle})"
        )
        if given is None or given[-2:] != (8, width) or any(n != 1 for n in given[:-2]):
            tiling = "no tiles" if given is None else f"tiles of {given}"
            return layout(f"{x} has {tiling} with a swizzle of {swizzle} bytes.", rule)
        if memory[-2] % 8 or memory[-1] % width:
            return layout(f"{x} is not a whole number of tiles of (8, {width}).", rule)
    return None


def majors(*either: int) -> Rule:
    """Only operands with these numbers of bits may lie with the contracted dimension outermost."""

    def rule(p: Product) -> Problem | None:
        for x, inner_last in ((p.a, True), (p.b, False)):
            if x.space != "smem" or x.bits in either or x.transposed != inner_last:
                continue
            words = (
                f"{x.dtype} operands lie in memory with K last; only {' and '.join(map(str, either))}-bit operands can "
                f"be transposed: store {x.name} as {'(M, K)' if inner_last else '(N, K)'}"
                + ("" if inner_last else " and pass plgpu.transpose_ref(b, (1, 0))")
            )
            lies = x.shape[::-1] if x.transposed else x.shape
            return layout(f"{x} lies in memory as {tuple(lies)}, with K first.", words)
        return None

    return rule


def inner_size(p: Product) -> Problem | None:
    """K is a whole number of swizzle widths, and of instructions."""
    known = [x.swizzle for x in (p.a, p.b) if x.space == "smem" and x.swizzle is not None]
    swizzle = max([*known, 32])  # an instruction takes 32 bytes
    step = 8 * swizzle // p.b.bits
    if p.k and p.k % step == 0:
        return None
    rule = "K is a multiple of the swizzle, divided by the bytes of an element"
    return shape(f"K is {p.k}, no multiple of {step} ({swizzle} bytes of {p.b.dtype}).", rule)


def int8_columns(p: Product) -> Problem | None:
    if p.a.dtype in (jnp.int8, jnp.uint8) and p.n not in (8, 24) and p.n % 16:
        rule = "N of integer products is 8, 16, 24, 32, or a larger multiple of 16"
        return shape(f"N is {p.n} with {p.a.dtype} operands.", rule)
    return None


# --- Hopper -----------------------------------------------------------------------------------------------------------
_FLOAT_16 = ("float32", "float16")
_WGMMA_DTYPES = {
    "float32": ("float32",),
    "bfloat16": ("float32",),
    "float16": _FLOAT_16,
    "float8_e4m3fn": _FLOAT_16,
    "float8_e5m2": _FLOAT_16,
    "int8": ("int32",),
    "uint8": ("int32",),
}


def _wgmma_spaces(p: Product) -> Problem | None:
    if p.d.space != "acc":
        return layout(
            f"{p.d} is not a register accumulator.",
            "allocate it by pl.run_scoped(f, plgpu.ACC((m, n))); of one in TMEM: plgpu.tcgen05_mma",
        )
    if p.a.space not in ("smem", "regs"):
        return layout(f"{p.a} is not readable by wgmma.", "A is in SMEM, or an array in registers")
    if p.b.space != "smem":
        return layout(
            f"{p.b} is not readable by wgmma.", "B is always in SMEM: store it there, then plgpu.commit_smem()"
        )
    return None


def _wgmma_m(p: Product) -> Problem | None:
    bad = p.m == 0 or p.m % 64
    return shape(f"M is {p.m}, no multiple of 64.", "M of wgmma is a multiple of 64") if bad else None


def _wgmma_n(p: Product) -> Problem | None:
    if p.n and p.n % 8 == 0 and p.n <= 256:
        return None
    return shape(f"N is {p.n}.", "N of wgmma is a multiple of 8, at most 256")


WGMMA: tuple[Rule, ...] = (
    _wgmma_spaces, matrices, sizes_agree, same_dtype, dtypes(_WGMMA_DTYPES), _wgmma_m, _wgmma_n, int8_columns,
    majors(16), tiles, inner_size,
)  # fmt: skip

# `plgpu.mma`: warps multiply arrays in registers.
_MMA_DTYPES = {"bfloat16": ("float32",), "float16": _FLOAT_16, "int8": ("int32",), "float32": ("float32",)}


def _mma_spaces(p: Product) -> Problem | None:
    for x in (p.d, p.a, p.b):
        if x.space != "regs":
            return layout(f"{x} is not an array.", "plgpu.mma multiplies arrays in registers: load them first")
    return None


def _mma_m(p: Product) -> Problem | None:
    bad = p.m == 0 or p.m % 64 or p.n == 0 or p.n % 8 or p.k * p.a.bits % 256 or p.k == 0
    rule = "M is a multiple of 64, N of 8, and K of 32 bytes"
    return shape(f"M, N and K are {p.m}, {p.n} and {p.k}.", rule) if bad else None


MMA: tuple[Rule, ...] = (_mma_spaces, matrices, sizes_agree, same_dtype, dtypes(_MMA_DTYPES), _mma_m)
