"""The 128 bytes of a tensor map in the emulated device's memory, and `tensormap.replace` of one field of them.

NVIDIA does not document the bits of a `CUtensorMap`; this layout is the emulator's own. Facts file 2.2.
"""

import struct
from dataclasses import replace

from palladion.emulator.swizzle import SWIZZLES
from palladion.emulator.tensor_map import ELEMENT_TYPES, TensorMap, TensorMapError

# `tensormap.replace.elemtype` numbers f32.ftz and f64 differently (PTX manual), the others alike.
_REPLACE_ELEMENT = {**{n: n for n in range(16)}, 8: 10, 9: 8, 10: 9}

_MAGIC = 0x50414C54  # "PALT"
_LAYOUT = struct.Struct("<IBBBBBBxx Q 4Q 5I 5H 5B")
assert _LAYOUT.size <= 128


def _padded(values, n, least=0):
    return (*values, *([least] * (n - len(values))))


def pack(m: TensorMap) -> bytes:
    """The 128 bytes that stand for a map in the emulated device's memory."""
    head = (_MAGIC, m.element, m.rank - 1, m.interleave, m.swizzle_mode, m.l2_promotion, m.fill, m.address)
    dims = [n - 1 for n in m.dims]  # a dimension may be 2^32
    return _LAYOUT.pack(
        *head, *_padded(m.strides, 4), *_padded(dims, 5), *_padded(m.box, 5), *_padded(m.element_strides, 5)
    ).ljust(128, b"\0")


def unpack(blob) -> TensorMap | None:
    """The map that 128 bytes stand for, or None if they hold no map."""
    fields = _LAYOUT.unpack(bytes(blob)[: _LAYOUT.size])
    magic, element, rank, interleave, swizzle, promotion, fill, address = fields[:8]
    if magic != _MAGIC or element not in ELEMENT_TYPES or swizzle not in SWIZZLES:
        return None
    strides, dims, box, steps = fields[8:12], fields[12:17], fields[17:22], fields[22:27]
    n = rank + 1
    return TensorMap(
        element,
        address,
        tuple(d + 1 for d in dims[:n]),
        tuple(strides[: n - 1]),
        tuple(box[:n]),
        tuple(steps[:n]),
        interleave,
        swizzle,
        promotion,
        fill,
    )


_ATOMICITY = {0: 3, 1: 4, 2: 5, 3: 6}


def replace_field(blob, field: str, ordinal: int, value: int) -> bytes:
    """`tensormap.replace`: the 128 bytes with one field changed.

    Arguments: blob: a packed map, or 128 zero bytes, which the first replacement makes an (empty) map, as
        kernels that build maps on the device do; field: as PTX spells it; ordinal: the dimension, for the
        fields that have one (0 for strides is dimension 1); value: in PTX's encoding (facts file 2.2).
    Raises: TensorMapError if the bytes are no map, or the value is out of its range."""
    full = _full(blob)
    n = int(value)

    def with_item(name):
        items = list(getattr(full, name))
        if not 0 <= ordinal < len(items):
            raise TensorMapError(f"tensormap.replace.{field}: there is no dimension {ordinal}")
        items[ordinal] = n
        return replace(full, **{name: tuple(items)})

    rank = bytes(blob)[5] + 1 if any(bytes(blob)) else 1
    if field == "rank":
        if not 0 <= n <= 4:
            raise TensorMapError(f"tensormap.replace.rank: {n}; it is the rank less one, from 0 to 4")
        rank, changed = n + 1, full
    elif field == "global_address":
        changed = replace(full, address=n)
    elif field in _VECTOR_FIELDS:
        changed = with_item(_VECTOR_FIELDS[field])
    elif field in _SCALAR_FIELDS:
        name, codes = _SCALAR_FIELDS[field]
        if n not in codes:
            raise TensorMapError(f"tensormap.replace.{field}: {n} is not one of {sorted(codes)}")
        changed = replace(full, **{name: codes[n]})
    elif field == "swizzle_atomicity":
        if n not in _ATOMICITY or (n and full.swizzle_mode < 3):
            raise TensorMapError(f"tensormap.replace.swizzle_atomicity: {n} needs swizzle 128B, and 0 to 3")
        changed = replace(full, swizzle_mode=_ATOMICITY[n]) if full.swizzle_mode >= 3 else full
    else:
        raise TensorMapError(f"tensormap.replace: no field {field!r}")
    try:
        packed = bytearray(pack(changed))
    except struct.error:
        raise TensorMapError(f"tensormap.replace.{field}: {n} is out of range") from None
    packed[5] = rank - 1
    return bytes(packed)


_VECTOR_FIELDS = {
    "box_dim": "box",
    "global_dim": "dims",
    "global_stride": "strides",
    "element_stride": "element_strides",
}
_SCALAR_FIELDS = {
    "elemtype": ("element", _REPLACE_ELEMENT),
    "interleave_layout": ("interleave", {0: 0, 1: 1, 2: 2}),
    "swizzle_mode": ("swizzle_mode", {0: 0, 1: 1, 2: 2, 3: 3}),
    "fill_mode": ("fill", {0: 0, 1: 1}),
}


def _full(blob) -> TensorMap:
    """All five dimensions of the fields, so that they may be replaced before the rank is."""
    data = bytearray(bytes(blob))
    if not any(data):
        return TensorMap(0, 0, (1,) * 5, (0,) * 4, (0,) * 5, (0,) * 5)
    data[5] = 4
    found = unpack(data)
    if found is None:
        raise TensorMapError("tensormap.replace: these 128 bytes are not a tensor map (nor all zero)")
    return found
