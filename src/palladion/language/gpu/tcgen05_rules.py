"""What a matrix product of Blackwell's tensor core may be: the table of `tcgen05.mma`, on the rules of `mma_rules`.

Source: the Pallas Mosaic GPU reference, section "Blackwell (tcgen05)"; PTX ISA, tcgen05.mma: shapes, block scaling,
sparsity.
"""

from __future__ import annotations

from palladion.language.gpu.mma_rules import (
    Problem,
    Product,
    Rule,
    dtypes,
    inner_size,
    int8_columns,
    layout,
    majors,
    matrices,
    same_dtype,
    shape,
    sizes_agree,
    tiles,
)

_FLOAT_16 = ("float32", "float16")
_DTYPES = {
    "bfloat16": ("float32",),
    "float16": _FLOAT_16,
    "float8_e5m2": _FLOAT_16,
    "float8_e4m3fn": _FLOAT_16,
    "int8": ("int32",),
}
# Block-scaled: dtype of the operands -> dtype of the scales -> how many elements of K share one.
_SCALED: dict[str, dict[str, int]] = {
    "float8_e5m2": {"float8_e8m0fnu": 32},
    "float8_e4m3fn": {"float8_e8m0fnu": 32},
    "float4_e2m1fn": {"float8_e8m0fnu": 32, "float8_e4m3fn": 16},
}
_SPARSE = ("float16", "bfloat16", "int8", "float8_e5m2", "float8_e4m3fn")


def _spaces(p: Product) -> Problem | None:
    if p.d.space != "tmem":
        return layout(
            f"{p.d} is not in TMEM.", "the accumulator is a buffer in TMEM: plgpu.TMEM((128, n), jnp.float32)"
        )
    if p.a.space not in ("smem", "tmem"):
        return layout(f"{p.a} is not readable by tcgen05.", "A is in SMEM, or packed in TMEM")
    if p.b.space != "smem":
        return layout(f"{p.b} is not readable by tcgen05.", "B is always in SMEM")
    return None


def _packing(p: Product) -> Problem | None:
    if p.d.bits < 32 and p.d.packed:
        return layout(f"{p.d} is packed.", "accumulators are never packed: plgpu.TMEM(…, packed=False)")
    if p.a.space == "tmem" and p.a.bits < 32 and not p.a.packed:
        return layout(f"{p.a} is not packed.", "A in TMEM is always packed: plgpu.TMEM(…, packed=True)")
    return None


def _operand_dtypes(p: Product) -> Problem | None:
    if p.scales is None:
        if str(p.a.dtype) == "float4_e2m1fn":
            return shape("float4 operands have no scales.", "float4_e2m1fn operands need a_scale and b_scale")
        return dtypes(_DTYPES)(p)
    table = _SCALED.get(str(p.a.dtype))
    if table is None:
        return shape(f"operands of dtype {p.a.dtype} have no scales.", f"scaled operands are {', '.join(_SCALED)}")
    if str(p.d.dtype) != "float32":
        return shape(f"the accumulator of scaled operands is {p.d.dtype}.", "it is float32")
    for scale in p.scales:
        if str(scale.dtype) not in table or scale.dtype != p.scales[0].dtype:
            rule = f"scales of {p.a.dtype} operands are {' or '.join(table)}, both the same"
            return shape(f"{scale} has another dtype.", rule)
    return None


def _scales(p: Product) -> Problem | None:
    if p.scales is None:
        return None
    block = _SCALED[str(p.a.dtype)][str(p.scales[0].dtype)]
    for scale, lines in zip(p.scales, (p.d.shape[0], p.n), strict=True):
        if scale.space != "tmem":
            rule = "scales are copied to TMEM first: plgpu.async_copy_scales_to_tmem"
            return layout(f"{scale} is not in TMEM.", rule)
        if scale.shape != (lines, p.k // block):
            rule = f"scales of A are (M, K // {block}), of B (N, K // {block})"
            return shape(f"{scale} should have shape {(lines, p.k // block)}.", rule)
    return None


def _sparsity(p: Product) -> Problem | None:
    if p.sparse and str(p.a.dtype) not in _SPARSE:
        return shape(f"sparse operands of dtype {p.a.dtype} are not supported.", f"sparse A is {', '.join(_SPARSE)}")
    return None


def _rows(p: Product) -> Problem | None:
    legal = (128, 256) if p.collective else (64, 128)
    if p.scales is not None and not p.collective:
        legal = (128,)
    if p.m in legal:
        return None
    which = "of a collective tcgen05_mma, over both blocks," if p.collective else "of tcgen05_mma"
    which = "of a block-scaled tcgen05_mma" if p.scales is not None and not p.collective else which
    return shape(f"M is {p.m}.", f"M {which} is {' or '.join(map(str, legal))}")


def _columns(p: Product) -> Problem | None:
    if p.collective:
        # The reference asks for multiples of 8; the instruction, of which each block has half, for 16.
        legal, rule = (
            p.n % 16 == 0 and p.n <= 256,
            "a collective tcgen05_mma is a multiple of 16 (8 a block), at most 256",
        )
    else:
        legal, rule = p.n % 8 == 0 and p.n <= 512, "tcgen05_mma is a multiple of 8, at most 512"
    return None if legal and p.n else shape(f"N is {p.n}.", f"N of {rule}")


def _transposed_columns(p: Product) -> Problem | None:
    step = 32 if p.collective else 16
    if p.b.bits == 8 and not p.b.transposed and p.n % step:
        rule = f"with a B of 8 bits that lies with N last, N is a multiple of {step}"
        return shape(f"N is {p.n}.", rule)
    return None


TCGEN05: tuple[Rule, ...] = (
    _spaces, matrices, _packing, sizes_agree, same_dtype, _operand_dtypes, _sparsity, _rows, _columns, int8_columns,
    majors(16, 8), _transposed_columns, tiles, inner_size, _scales,
)  # fmt: skip
