"""One wgmma.mma_async: its form, its operands and its product, started at one time and finished at another.

A `Product` keeps what the instruction named: descriptors by value, A's registers, the accumulator's registers or
the product before it that they come from. `finish` reads shared memory and multiplies. Until the program has waited
for it, its registers hold tags, NaNs that name the product and the register: they may be copied, and a wgmma that
accumulates into them is recognised; the wait replaces them wherever they are.

The accumulator stays a matrix from one product to the next of a chain, so that a loop over K costs one
product a step and not a trip through 128 registers. Sources: facts file 4; PTX manual, "wgmma.mma_async".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from palladion.emulator.descriptors import IllegalDescriptor, MatrixDescriptor, gather, tile_index
from palladion.emulator.matrices import operand, warpgroup_accumulator, warpgroup_registers
from palladion.emulator.numbers import FORMATS, elements, to_f16, to_s32

Array = np.ndarray


@dataclass(frozen=True)
class Form:
    """What an opcode says: D is 64 x `n`, K is `depth`; types; whether sums saturate. Item: bytes of an element."""

    n: int
    depth: int
    d: str
    a: str
    b: str
    saturate: bool

    @property
    def registers(self) -> int:
        return self.n // 4 if self.d == "f16" else self.n // 2


_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
_RESULTS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "s8": ("s32",),
    "b1": ("s32",),
}
_FAMILY = {"e5m2": "e4m3", "u8": "s8"}


@cache
def parse(opcode: str) -> Form | None:
    """The form of a dense wgmma.mma_async; None where the opcode is not one that the hardware has."""
    found = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)(\.satfinite|\.and\.popc)?", opcode
    )
    if not found:
        return None
    n, depth, d, a, b, last = int(found[1]), int(found[2]), found[3], found[4], found[5], found[6]
    family = _FAMILY.get(a, a)
    if _DEPTH.get(a) != depth or _FAMILY.get(b, b) != family or d not in _RESULTS[family]:
        return None
    integer = family in ("s8", "b1")
    legal = n % 8 == 0 and 8 <= n <= 256
    if integer:
        legal = n in (8, 16, 24, 32) or (n % 16 == 0 and 48 <= n <= 256)
    if not legal or (family == "b1") != (last == ".and.popc") or (last == ".satfinite" and family != "s8"):
        return None
    return Form(n, depth, d, a, b, last == ".satfinite")


@dataclass
class Product:
    """One wgmma of one or several warpgroups that execute it together (`len(b)` of them).

    Attributes:
      serial: number by which registers in flight name it; line: of the PTX.
      shared: uint8 shared memory of the CTA.
      a: one descriptor a warpgroup, or the four registers; b: one descriptor a warpgroup.
      accumulate: one a warpgroup; sign: -1 if exactly one operand is negated.
      before: the product whose results are the accumulator; old: its registers where that is no product.
      results: once done, uint32 (registers, 128 * warpgroups).
    """

    form: Form
    serial: int
    line: int
    shared: Array
    a: list[MatrixDescriptor] | list[Array]
    b: list[MatrixDescriptor]
    accumulate: list[bool]
    sign: int
    a_mn_major: bool
    b_mn_major: bool
    before: Product | None
    old: list[Array] | None
    done: bool = False
    results: Array | None = None
    matrices: list[Array] = field(default_factory=list)  # D of each warpgroup once done

    def tags(self) -> list[Array]:
        """What the registers hold meanwhile: a NaN that names the product and the register."""
        lanes = 128 * len(self.b)
        tags = first_tag(self.serial) + np.arange(self.form.registers, dtype=np.uint32)
        return list(np.repeat(tags[:, None], lanes, axis=1))

    def finish(self) -> None:
        """Reads the operands and multiplies; `results` are there afterwards. Raises: IllegalDescriptor."""
        if self.done:
            return
        if self.before is not None:
            self.before.finish()
        half = self.form.d == "f16"
        out = []
        for number, b in enumerate(self.b):
            lanes = slice(128 * number, 128 * number + 128)
            value = _multiply(self, number, b)
            if self.accumulate[number]:
                value = self._added(value, self._old_matrix(number, lanes, half))
            elif self.form.d == "s32":
                value = to_s32(value.astype(np.int64), self.form.saturate)
            if half:
                value = to_f16(value).view(np.float16).astype(np.float32)
            self.matrices.append(value)
            out.append(np.ascontiguousarray(warpgroup_registers(value, half)).view(np.uint32))
        self.results = out[0] if len(out) == 1 else np.concatenate(out, axis=1)
        self.done = True
        self.before = self.old = None  # what the chain held may go

    def _added(self, value: Array, old: Array) -> Array:
        if self.form.d == "s32":
            return to_s32(value.astype(np.int64) + old, self.form.saturate)
        with np.errstate(over="ignore", invalid="ignore"):
            return value + old

    def _old_matrix(self, number: int, lanes: slice, half: bool) -> Array:
        if self.before is not None:
            return self.before.matrices[number]
        dtype = {"f32": np.float32, "s32": np.int32, "f16": np.uint32}[self.form.d]
        assert self.old is not None
        return warpgroup_accumulator([r.view(dtype)[lanes] for r in self.old], self.form.n, half)


TAG, TAG_BITS, SERIALS = 0x7FC00000, 7, 1 << 15


def first_tag(serial: int) -> np.uint32:
    """The tag of a product's first register; the others follow."""
    return np.uint32(TAG | (serial % SERIALS) << TAG_BITS)


def read_tag(word: int) -> tuple[int, int] | None:
    """(serial, register) of a word, if it may be a tag."""
    if word & TAG != TAG or word >> 31:
        return None
    return (word & 0x3FFFFF) >> TAG_BITS, word & 0x7F


def _multiply(product: Product, number: int, b: MatrixDescriptor) -> Array:
    form = product.form
    left_format, right_format = FORMATS[form.a], FORMATS[form.b]
    a = product.a[number] if isinstance(product.a[0], MatrixDescriptor) else None
    if isinstance(a, MatrixDescriptor):
        left = _from_shared(product.shared, a, product.a_mn_major, 64, form.depth, form.a)
    else:
        lanes = slice(128 * number, 128 * number + 128)
        registers = [r.view(np.uint32)[lanes] for r in product.a]  # type: ignore[union-attr]
        left = left_format.decode(operand(registers, 16, form.depth, left_format.bits).reshape(64, form.depth))
    right = _from_shared(product.shared, b, product.b_mn_major, form.n, form.depth, form.b)
    assert left.dtype == right.dtype, (left_format, right_format)
    with np.errstate(over="ignore", invalid="ignore"):
        value = left @ right.T
    return -value if product.sign < 0 else value


def _from_shared(memory: Array, where: MatrixDescriptor, mn_major: bool, rows: int, depth: int, name: str) -> Array:
    form = FORMATS[name]
    if mn_major:
        raw = gather(memory, where, True, rows, depth, form.bits // 8)
        return form.decode(elements(np.ascontiguousarray(raw), form.bits)).T
    return form.decode(elements(gather(memory, where, False, rows, 32, 1), form.bits))


def check_operand(memory: Array, where: MatrixDescriptor, mn_major: bool, rows: int, form: Form) -> Array:
    """Byte addresses (multiples of 16) that an operand covers, for the checks at issue. Raises IllegalDescriptor."""
    item = max(1, FORMATS[form.a].bits // 8)
    if mn_major and item != 2:
        raise IllegalDescriptor(f"{where}: only 16-bit operands may be MN-major")
    index, base = tile_index(memory.size, where, mn_major, rows, form.depth if mn_major else 32, item)
    return (index.ravel() + base) * 16
