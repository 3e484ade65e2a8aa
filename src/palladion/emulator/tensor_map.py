"""Tensor maps: what `cuTensorMapEncodeTiled` accepts.

The rules of the encoder are a table of small functions, one a rule, each giving the sentence to show. How a map
is kept in memory: `map_bytes.py`. Facts file 2.1; CUDA driver API, "Tensor Map Object Management".
"""

from dataclasses import dataclass

import numpy as np

from palladion.emulator.swizzle import SWIZZLES, Swizzle


class TensorMapError(ValueError):
    """The driver would return CUDA_ERROR_INVALID_VALUE: the first line says which rule is broken."""


@dataclass(frozen=True)
class ElementType:
    """An element type of tensor maps. `bits` an element in global memory; `padded`: a group of 16 elements is
    widened to 16 bytes in shared memory; `nan`: the fill pattern when NaN is asked for (None: not a float)."""

    name: str
    bits: int
    dtype: str
    nan: int | None = None
    padded: bool = False
    flush: bool = False


ELEMENT_TYPES = {
    0: ElementType("u8", 8, "u1"),
    1: ElementType("u16", 16, "u2"),
    2: ElementType("u32", 32, "u4"),
    3: ElementType("s32", 32, "i4"),
    4: ElementType("u64", 64, "u8"),
    5: ElementType("s64", 64, "i8"),
    # Which NaN is written is not documented: all-ones payloads here.
    6: ElementType("f16", 16, "f2", nan=0x7FFF),
    7: ElementType("f32", 32, "f4", nan=0x7FFFFFFF),
    8: ElementType("f64", 64, "f8", nan=0x7FFFFFFFFFFFFFFF),
    9: ElementType("bf16", 16, "bf16", nan=0x7FFF),
    10: ElementType("f32.ftz", 32, "f4", nan=0x7FFFFFFF, flush=True),
    11: ElementType("tf32", 32, "f4", nan=0x7FFFFFFF),
    12: ElementType("tf32.ftz", 32, "f4", nan=0x7FFFFFFF, flush=True),
    13: ElementType("b4x16", 4, "u1"),
    14: ElementType("b4x16_p64", 4, "u1", padded=True),
    15: ElementType("b6x16_p32", 6, "u1", padded=True),
}
"""Element types by the number that the CUDA driver's `CUtensorMapDataType` gives them."""

_NAMES = {t.name: n for n, t in ELEMENT_TYPES.items()}
_NAMES |= {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6}
_NAMES |= {"float32": 7, "float64": 8, "bfloat16": 9, "int8": 0, "int16": 1}
_NAMES |= {"float8_e4m3fn": 0, "float8_e5m2": 0}


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves.

    `dims`, `box`, `element_strides`: elements, innermost first. `strides`: bytes, of dimensions 1, 2, …"""

    element: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle_mode: int = 0
    l2_promotion: int = 0
    fill: int = 0

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def type(self) -> ElementType:
        return ELEMENT_TYPES[self.element]

    @property
    def swizzle(self) -> Swizzle:
        return SWIZZLES[self.swizzle_mode]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that one copy moves in each dimension: the box over the element strides, rounded up."""
        steps = (1, *self.element_strides[1:]) if self.interleave == 0 else self.element_strides
        return tuple(-(-b // s) for b, s in zip(self.box, steps))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the box in global memory (packed)."""
        return self.counts[0] * self.type.bits // 8

    @property
    def row_pitch(self) -> int:
        """Bytes of one row of the box in shared memory: more than `row_bytes` for padded types."""
        return self.counts[0] if self.type.padded else self.row_bytes

    @property
    def rows(self) -> int:
        return int(np.prod(self.counts[1:], dtype=np.int64))

    @property
    def box_bytes(self) -> int:
        """Bytes that a copy announces to its mbarrier: the whole box, its out-of-bounds part included. For
        padded types the packed payload is counted (sources disagree; two of three count it so)."""
        return self.rows * self.row_bytes


def element_number(dtype) -> int:
    """The driver's number of an element type.

    Arguments: dtype: that number, a PTX name ("bf16"), a NumPy name ("float16") or dtype.
    Raises: TensorMapError for a type that tensor maps do not have."""
    if isinstance(dtype, int | np.integer) and int(dtype) in ELEMENT_TYPES:
        return int(dtype)
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    if name not in _NAMES:
        raise TensorMapError(f"tensor map: no element type {dtype!r}; there are {', '.join(_NAMES)}")
    return _NAMES[name]


# --------------------------------------------------------------------------------------------- the encoder's rules


def _aligned_to(m: TensorMap) -> int:
    return 32 if m.interleave == 2 or m.type.padded else 16


def _address(m, _):
    if m.address % _aligned_to(m):
        return f"globalAddress {m.address:#x} is not a multiple of {_aligned_to(m)} bytes"


def _rank(m, _):
    if m.interleave and m.rank < 3:
        return f"tensorRank is {m.rank}, but an interleaved layout needs at least 3"


def _dims(m, _):
    for d, n in enumerate(m.dims):
        if not 1 <= n <= 1 << 32:
            return f"globalDim[{d}] is {n}; it must be from 1 to 2^32 elements"


def _packed_dims(m, _):
    step = 128 if m.type.padded else 2 if m.type.bits == 4 else 1
    if m.dims[0] % step:
        return f"globalDim[0] is {m.dims[0]}; for {m.type.name} it must be a multiple of {step} elements"


def _strides(m, _):
    for d, s in enumerate(m.strides):
        if s % _aligned_to(m) or not 0 <= s < 1 << 40:
            return (
                f"globalStrides[{d}] (of dimension {d + 1}) is {s} bytes; it must be a multiple of "
                f"{_aligned_to(m)} and below 2^40"
            )


def _box(m, _):
    for d, n in enumerate(m.box):
        if not 1 <= n <= 256:
            return f"boxDim[{d}] is {n}; it must be from 1 to 256 elements"
    if m.type.padded and m.box[0] != 128:
        return f"boxDim[0] is {m.box[0]}; for {m.type.name} it must be 128 elements"


def _box_row(m, _):
    if m.interleave == 0 and (m.box[0] * m.type.bits) % 128:
        return (
            f"boxDim[0] is {m.box[0]} elements of {m.type.name}, {m.box[0] * m.type.bits / 8:g} bytes; "
            "the inner side of the box must be a multiple of 16 bytes"
        )


def _element_strides(m, _):
    for d, s in enumerate(m.element_strides):
        if not 1 <= s <= 8 and not (d == 0 and m.interleave == 0):
            return f"elementStrides[{d}] is {s}; it must be from 1 to 8"


def _swizzle_span(m, _):
    span, row = m.swizzle.span, m.row_pitch
    if m.interleave == 0 and span and row > span:
        return f"the box's inner side is {row} bytes; swizzle {m.swizzle.name} allows at most {span}"


def _swizzle_interleave(m, _):
    if m.interleave == 2 and m.swizzle_mode != 1:
        return f"interleave 32B needs swizzle 32B, not {m.swizzle.name}"


def _swizzle_type(m, _):
    if m.type.padded:
        allowed = (0, 3, 4, 6) if m.element == 15 else (0, 3, 4)
        if m.interleave:
            return f"{m.type.name} has no interleaved layout"
        if m.swizzle_mode not in allowed:
            return f"{m.type.name} has no swizzle {m.swizzle.name}"


def _blackwell(m, arch):
    if arch < 100 and m.swizzle_mode > 3:
        return f"swizzle {m.swizzle.name} needs compute capability 10; the device has {arch // 10}.{arch % 10}"
    if arch < 100 and m.element > 12:
        return f"{m.type.name} needs compute capability 10; the device has {arch // 10}.{arch % 10}"


def _fill(m, _):
    if m.fill and m.type.nan is None:
        return f"oobFill NaN is for floating-point types, not {m.type.name}"


RULES = (
    _rank,
    _address,
    _dims,
    _packed_dims,
    _strides,
    _box,
    _box_row,
    _element_strides,
    _swizzle_span,
    _swizzle_interleave,
    _swizzle_type,
    _blackwell,
    _fill,
)
"""Each takes (map, compute capability * 10) and gives the sentence about what is wrong, or None."""

_ENUMS = {"interleave": 2, "swizzle": 6, "l2_promotion": 3, "oob_fill": 1}


def broken_rule(tensor_map: TensorMap, arch: int = 90) -> str | None:
    """The first rule that a map breaks, as a sentence, or None."""
    return next((text for text in (rule(tensor_map, arch) for rule in RULES) if text), None)


def encode_tiled(
    dtype,
    rank: int,
    address: int,
    dims,
    strides_bytes,
    box,
    element_strides,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
    arch: int = 90,
) -> TensorMap:
    """A tensor map, with every rule of `cuTensorMapEncodeTiled` checked.

    Arguments: dtype: driver's number, or a name; rank: 1 to 5; address: of the tensor, bytes; dims, box,
        element_strides: rank elements, innermost first; strides_bytes: rank - 1 bytes; interleave, swizzle,
        l2_promotion, oob_fill: the driver's numbers; arch: compute capability times ten.
    Raises: TensorMapError, naming the argument and the rule."""
    if not 1 <= rank <= 5:
        raise TensorMapError(f"tensor map: tensorRank is {rank}; it must be from 1 to 5")
    lengths = {"globalDim": (dims, rank), "globalStrides": (strides_bytes, rank - 1)}
    lengths |= {"boxDim": (box, rank), "elementStrides": (element_strides, rank)}
    for name, (values, wanted) in lengths.items():
        if len(values) != wanted:
            raise TensorMapError(f"tensor map: {name} has {len(values)} entries; rank {rank} needs {wanted}")
    given = {"interleave": interleave, "swizzle": swizzle, "l2_promotion": l2_promotion, "oob_fill": oob_fill}
    for name, value in given.items():
        if not 0 <= int(value) <= _ENUMS[name]:
            raise TensorMapError(f"tensor map: {name} is {value}; it must be from 0 to {_ENUMS[name]}")
    tensor_map = TensorMap(
        element_number(dtype),
        int(address),
        tuple(map(int, dims)),
        tuple(map(int, strides_bytes)),
        tuple(map(int, box)),
        tuple(map(int, element_strides)),
        int(interleave),
        int(swizzle),
        int(l2_promotion),
        int(oob_fill),
    )
    if wrong := broken_rule(tensor_map, arch):
        raise TensorMapError(f"tensor map: {wrong}")
    return tensor_map
