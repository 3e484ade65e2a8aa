"""Descriptors of matrix instructions: the bit patterns of the hardware's documentation, and where views lie."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from palladion.compiler.gpu import descriptors, smem
from palladion.compiler.gpu.views import View, fold
from palladion.language.gpu.memory import SwizzleTransform, TilingTransform

HOPPER, BLACKWELL = "sm_90a", "sm_100a"


@pytest.mark.parametrize(
    ("arch", "lbo", "sbo", "swizzle", "bits"),
    [
        (HOPPER, 16, 1024, 128, 0x4000004000010040),
        (HOPPER, 16, 512, 64, 0x8000002000010040),
        (HOPPER, 16, 256, 32, 0xC000001000010040),
        (HOPPER, 128, 256, 0, 0x0000001000080040),
        (HOPPER, 8192, 1024, 128, 0x4000004002000040),
        (BLACKWELL, 16, 1024, 128, 0x4000404000010040),
        (BLACKWELL, 16, 512, 64, 0x8000402000010040),
        (BLACKWELL, 16, 256, 32, 0xC000401000010040),
        (BLACKWELL, 16, 256, 0, 0x0000401000010040),
    ],
)
def test_bits_of_matrix_descriptors(arch, lbo, sbo, swizzle, bits):
    assert descriptors.descriptor(0x400, lbo, sbo, swizzle, arch) == bits


BF16, F16, F32, E4M3, E5M2 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"
E2M1, E8M0 = "float4_e2m1fn", "float8_e8m0fnu"


@pytest.mark.parametrize(
    ("given", "more", "bits"),
    [
        (("f16", BF16, BF16, F32, 128, 256), {}, 0x08400490),
        (("f16", BF16, BF16, F32, 256, 256), {}, 0x10400490),
        (("f16", BF16, BF16, F32, 128, 256), {"b_mn_major": True}, 0x08410490),
        (("f16", F16, F16, F16, 64, 64), {}, 0x04100000),
        (("f16", F16, F16, F32, 128, 128), {}, 0x08200010),
        (("tf32", F32, F32, F32, 128, 128), {}, 0x08200910),
        (("f8f6f4", E4M3, E5M2, F32, 128, 128), {}, 0x08200410),
        (("i8", "int8", "int8", "int32", 128, 128), {"saturate": True}, 0x082004A8),
        (("mxf8f6f4", E4M3, E4M3, F32, 128, 128), {"scale": E8M0}, 0x08A00000),
        (("mxf8f6f4", E4M3, E4M3, F32, 128, 128), {"scale": E8M0, "ids": (1, 1)}, 0x28A00010),
        (("mxf4", E2M1, E2M1, F32, 128, 128), {"scale": E8M0}, 0x08A00480),
        (("mxf4nvf4", E2M1, E2M1, F32, 128, 256), {"scale": E4M3}, 0x08400480),
        (("mxf4nvf4", E2M1, E2M1, F32, 256, 256), {"scale": E4M3}, 0x10400480),
    ],
)
def test_bits_of_instruction_descriptors(given, more, bits):
    assert descriptors.instruction(*given, **more) == bits


# --- views ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Buffer:
    """As much of a Ref as a descriptor needs."""

    swizzle: int
    base: str = "smem"


def a_view(shape, dtype, swizzle, transposed=False):
    size = np.dtype(dtype).itemsize
    transforms = [TilingTransform((8, (swizzle or 16) // size))]
    transforms += [SwizzleTransform(swizzle)] if swizzle else []
    axes, swizzle = smem.stored_axes(shape, size, transforms)
    return View(Buffer(swizzle), np.dtype(dtype), axes[::-1] if transposed else axes)


def read(found, row, k, size, rows, depth):
    """The byte at which an instruction reads an element, by the formulas of the facts file (4.3)."""
    wide = (found.swizzle or 16) // 16  # chunks of a row
    chunk, m = 16 // size, row % rows
    start = found.offset + found.lines[row // rows] + found.steps[k // depth]
    k %= depth
    line, along, rest = (k, m // chunk, m % chunk) if found.mn_major else (m, k // chunk, k % chunk)
    if not found.mn_major and found.swizzle:
        units = line % 8 * wide * 16 + line // 8 * found.sbo + along * 16
    elif not found.mn_major:
        units = line % 8 * 16 + line // 8 * found.sbo + along * found.lbo
    elif found.swizzle:
        units = along % wide * 16 + along // wide * found.lbo + line % 8 * wide * 16 + line // 8 * found.sbo
    else:
        units = along * found.sbo + line % 8 * 16 + line // 8 * found.lbo
    return int(smem.swizzled(np.array(start + units + rest * size), found.swizzle))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "transposed"), [("int16", False), ("int16", True), ("int8", False), ("int32", False)]
)
def test_an_instruction_reads_each_element_where_it_lies(swizzle, dtype, transposed):
    size = np.dtype(dtype).itemsize
    shape = (64, 128) if transposed else (128, 256 // size)  # (K, M) or (M, K)
    view = a_view(shape, dtype, swizzle, transposed)
    depth = 32 // size
    found = descriptors.matrix(view, 1, 64, depth)
    assert found.mn_major == transposed
    places = smem.swizzled(view.table(), view.ref.swizzle)
    rows, inner = places.shape
    for row, k in [(0, 0), (1, 3), (8, 0), (63, inner - 1), (64, depth), (77, 5), (rows - 1, inner - 1)]:
        assert read(found, row, k, size, 64, depth) == places[row, k], (row, k)


def test_a_next_step_of_k_adds_two_to_the_low_word():
    found = descriptors.matrix(a_view((64, 64), "int16", 128), 1, 64, 16)
    assert [descriptors.encoded(s) for s in found.steps] == [0, 2, 4, 6]
    assert found.lines == (0,) and found.sbo == 1024


def test_what_no_descriptor_describes_is_refused():
    plain = View(Buffer(0), np.dtype("int16"), smem.stored_axes((64, 64), 2, ())[0])
    with pytest.raises(descriptors.Misfit, match=r"not stored in tiles of \(8, 8\)"):
        descriptors.matrix(plain, 1, 64, 16)
    whole = a_view((128, 64), "int16", 128)
    axis, offset, _ = fold(dataclasses.replace(whole.axes[0], first=4, n=64))
    inside = dataclasses.replace(whole, axes=(axis, whole.axes[1]), offset=offset)
    with pytest.raises(descriptors.Misfit, match="within a tile"):
        descriptors.matrix(inside, 1, 64, 16)
