"""The instruction descriptor of tcgen05.mma: its fields for each kind, and which shapes and types are legal.

Sources: facts file 8.5 and 8.6; PTX manual, "Instruction descriptor" and "Valid combinations of data type,
shape". What the descriptor asks for beyond these tables is `IllegalDescriptor`, whose message names the
field.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from palladion.emulator.descriptors import IllegalDescriptor


@dataclass(frozen=True)
class Kind:
    """What `.kind::K` fixes: element formats by code, K in elements (dense), result formats by code."""

    name: str
    formats: dict[int, str]
    depth: int
    results: dict[int, str]
    scaled: bool = False


_F32 = {1: "f32"}
_NARROW = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
KINDS: dict[str, Kind] = {
    "f16": Kind("f16", {0: "f16", 1: "bf16"}, 16, {0: "f16", 1: "f32"}),
    "tf32": Kind("tf32", {2: "tf32"}, 8, _F32),
    "f8f6f4": Kind("f8f6f4", _NARROW, 32, {0: "f16", 1: "f32"}),
    "i8": Kind("i8", {0: "u8", 1: "s8"}, 32, {2: "s32"}),
    "mxf8f6f4": Kind("mxf8f6f4", _NARROW, 32, _F32, True),
    "mxf4": Kind("mxf4", {1: "e2m1"}, 64, _F32, True),
    "mxf4nvf4": Kind("mxf4nvf4", {1: "e2m1"}, 64, _F32, True),
}


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction descriptor. `depth` is K of one instruction; `a`, `b`, `d` are format names."""

    kind: Kind
    m: int
    n: int
    depth: int
    a: str
    b: str
    d: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool
    sparse: bool
    selector: int
    scale: str  # format of the scales: ue8m0 or ue4m3; "" where the kind has none
    scale_a_id: int
    scale_b_id: int
    raw: int


def _bits(raw: int, high: int, low: int) -> int:
    return (raw >> low) & ((1 << (high - low + 1)) - 1)


def _wrong(raw: int, text: str) -> IllegalDescriptor:
    return IllegalDescriptor(f"instruction descriptor {raw:#010x}: {text}")


def _format(raw: int, kind: Kind, code: int, operand: str) -> str:
    if code not in kind.formats:
        known = ", ".join(f"{c} {name}" for c, name in kind.formats.items())
        raise _wrong(raw, f"type code {code} of {operand} means nothing for kind::{kind.name} ({known})")
    return kind.formats[code]


@lru_cache(maxsize=1024)
def decode(raw: int, kind_name: str, group: int, sparse: bool, ws: bool = False) -> Instruction:
    """Decodes and checks the 32-bit instruction descriptor.

    Arguments: raw: the register; kind_name: what follows `.kind::`; group: 1 or 2 CTAs; sparse: `.sp`; ws: `.ws`.
    Returns: the Instruction. Raises: IllegalDescriptor.
    """
    kind = KINDS[kind_name]
    if bool(_bits(raw, 2, 2)) != sparse:
        raise _wrong(raw, f"the sparsity bit is {_bits(raw, 2, 2)}, the instruction is {'' if sparse else 'not '}.sp")
    found = _scaled(raw, kind, sparse) if kind.scaled else _plain(raw, kind, sparse, ws)
    _check_shape(found, group, ws)
    _check_major(found)
    return found


def _plain(raw: int, kind: Kind, sparse: bool, ws: bool) -> Instruction:
    if raw & (1 << 6 | 1 << 23 | 1 << 29) or (_bits(raw, 31, 30) and not ws):
        raise _wrong(raw, "a reserved bit (6, 23, 29, or 31:30 without .ws) is set")
    code = _bits(raw, 5, 4)
    a, b = _format(raw, kind, _bits(raw, 9, 7), "A"), _format(raw, kind, _bits(raw, 12, 10), "B")
    if code not in kind.results:
        known = ", ".join(f"{c} {name}" for c, name in kind.results.items())
        raise _wrong(raw, f"type code {code} of D means nothing for kind::{kind.name} ({known})")
    if kind.results[code] == "f16" and kind.name == "f16" and (a, b) != ("f16", "f16"):
        raise _wrong(raw, f"an f16 D needs f16 operands, these are {a} and {b}")
    if kind.name == "f16" and a != b:
        raise _wrong(raw, f"A is {a} and B is {b}; kind::f16 does not mix them")
    if kind.name == "i8" and _bits(raw, 14, 13):
        raise _wrong(raw, "kind::i8 cannot negate A or B")
    if kind.name != "i8" and _bits(raw, 3, 3):
        raise _wrong(raw, "only kind::i8 saturates")
    return Instruction(
        kind,
        _bits(raw, 28, 24) << 4,
        _bits(raw, 22, 17) << 3,
        kind.depth * (2 if sparse else 1),
        a,
        b,
        kind.results[code],
        bool(_bits(raw, 13, 13)),
        bool(_bits(raw, 14, 14)),
        bool(_bits(raw, 15, 15)),
        bool(_bits(raw, 16, 16)),
        bool(_bits(raw, 3, 3)),
        sparse,
        _bits(raw, 1, 0),
        "",
        0,
        0,
        raw,
    )


def _scaled(raw: int, kind: Kind, sparse: bool) -> Instruction:
    if _bits(raw, 1, 0) or _bits(raw, 3, 3) or _bits(raw, 6, 6) or _bits(raw, 26, 24):
        raise _wrong(raw, "a reserved bit (1:0, 3, 6 or 26:24) is set")
    if kind.name == "mxf8f6f4":
        a, b = _format(raw, kind, _bits(raw, 9, 7), "A"), _format(raw, kind, _bits(raw, 12, 10), "B")
        if not _bits(raw, 23, 23):
            raise _wrong(raw, "kind::mxf8f6f4 needs scales of type ue8m0 (bit 23 set)")
        if _bits(raw, 31, 31):
            raise _wrong(raw, "bit 31 is reserved")
    else:
        a, b = _format(raw, kind, _bits(raw, 9, 7), "A"), _format(raw, kind, _bits(raw, 11, 10), "B")
        if _bits(raw, 12, 12) or _bits(raw, 16, 15):
            raise _wrong(raw, f"kind::{kind.name} has no transposed operands, and bit 12 is reserved")
        if _bits(raw, 31, 31):
            raise _wrong(raw, "K = 96 exists on sm_103a only")
        if kind.name == "mxf4" and not _bits(raw, 23, 23):
            raise _wrong(raw, "kind::mxf4 needs scales of type ue8m0 (bit 23 set)")
    return Instruction(
        kind,
        _bits(raw, 28, 27) << 7,
        _bits(raw, 22, 17) << 3,
        kind.depth * (2 if sparse else 1),
        a,
        b,
        "f32",
        bool(_bits(raw, 13, 13)),
        bool(_bits(raw, 14, 14)),
        bool(_bits(raw, 15, 15)),
        bool(_bits(raw, 16, 16)),
        False,
        sparse,
        0,
        "ue8m0" if _bits(raw, 23, 23) else "ue4m3",
        _bits(raw, 30, 29),
        _bits(raw, 5, 4),
        raw,
    )


def _check_shape(i: Instruction, group: int, ws: bool) -> None:
    name = f"kind::{i.kind.name} {'.ws ' if ws else ''}cta_group::{group}"
    if ws:
        rows, columns = (32, 64, 128), (64, 128) if i.sparse else (64, 128, 256)
        legal = i.n in columns
    elif i.kind.scaled:
        rows = (128,) if group == 1 else (256,) if i.sparse else (128, 256)
        legal = 8 * group <= i.n <= 256 and i.n % (8 * group) == 0
    else:
        rows = (64, 128) if group == 1 else (128, 256)
        legal = 8 * group <= i.n <= 256 and i.n % (8 * group) == 0
        if i.kind.name == "i8":
            legal = i.n % 32 == 0 if group == 2 else i.n in (8, 16, 24, 32) or (i.n >= 48 and i.n % 16 == 0)
            legal = legal and 0 < i.n <= 256
        if i.b_mn_major and i.kind.depth == 32:
            legal = legal and i.n % (16 * group) == 0
    if i.m not in rows:
        raise _wrong(i.raw, f"M = {i.m}; {name} takes M in {rows}")
    if not legal:
        raise _wrong(i.raw, f"N = {i.n} is not legal with M = {i.m} for {name}")


def _check_major(i: Instruction) -> None:
    for operand, form, mn in (("A", i.a, i.a_mn_major), ("B", i.b, i.b_mn_major)):
        if mn and form in ("e2m1", "e2m3", "e3m2"):
            raise _wrong(i.raw, f"{operand} is {form} and MN-major; 4- and 6-bit operands must be K-major")


def scale_counts(kind: str, qualifiers: frozenset[str], raw: int) -> int:
    """Scales of one row in one instruction: `.scale_vec::1X/2X/4X`, or `.block32` / `.block16`.

    Raises: IllegalDescriptor where a kind does not take the vector size.
    """
    size = next((q for q in qualifiers if q.startswith("scale_vec::") or q in ("block16", "block32")), "")
    table = {
        "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
        "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
        "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
    }[kind]
    if size not in table:
        raise _wrong(raw, f"kind::{kind} does not take .{size or 'block_scale without a vector size'}")
    return table[size]


def check_scale_ids(i: Instruction, count: int) -> None:
    """Scale ids: any of 0..3 for one scale, 0 or 2 for two, 0 for four; ue4m3 only with four."""
    legal = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[count]
    for operand, number in (("A", i.scale_a_id), ("B", i.scale_b_id)):
        if number not in legal:
            raise _wrong(i.raw, f"scale id {number} of {operand}; with {count} scales a row it is one of {legal}")
    if i.scale == "ue4m3" and count != 4:
        raise _wrong(i.raw, "ue4m3 scales need .block16 (.scale_vec::4X)")
