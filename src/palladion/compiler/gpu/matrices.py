"""Loads and stores of 16-bit arrays by tiles of 8 x 8 (ldmatrix, stmatrix), where the registers lie as a tensor core's.

In a fragment of wgmma the four threads of a row have two of its elements each, so that ordinary stores are of 4 bytes.
The instructions exchange within a warp: each lane gives the address of a row of a tile, 16 bytes that lie together, and
the tiles' elements go to or come from two registers of every lane. Whether an array lies so is seen from the table of
places, as is whether rows or columns of the tiles lie together in memory (`.trans`).

Source: PTX ISA, "ldmatrix", "stmatrix"; facts file, section 9.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from palladion.compiler.gpu import plans
from palladion.compiler.gpu.fragments import Fragments
from palladion.compiler.gpu.values import Fragment
from palladion.compiler.gpu.views import View

ROW = 16  # bytes
LANES = 32


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An array as tiles.

    Attributes:
      at_once: tiles of an instruction, 4 or 2. turned: whether the columns of a tile lie together in memory.
      rows: (128, instructions): the place of the row whose address each thread gives.
    """

    at_once: int
    turned: bool
    rows: np.ndarray

    @property
    def suffix(self) -> str:
        return f"{self.at_once}, {'true' if self.turned else 'false'}"


def tiles_of(view: View, layout: Fragments) -> Tiles | None:
    """How a (folded) view in shared memory is accessed by tiles; None: not at all."""
    plain = view.ref.in_smem and view.itemsize == 2 and not view.gathers and not view.where
    if not plain or layout.padded or layout.count % 4 or any(a.terms for a in view.axes):
        return None
    if any(t.divisor % ROW for t in view.terms):
        return None
    at_once = 4 if layout.count % 8 == 0 else 2
    places = view.table().reshape(-1)[layout.table].reshape(4, 8, 4, -1, at_once, 2)  # warp, l / 4, l % 4, …, tile, e
    q, e = np.arange(4)[:, None, None, None], np.arange(2)
    straight = places[:, :, :1, :, :, :1] + 4 * q + 2 * e
    if (places == straight).all():
        rows, turned = places[:, :, 0, :, :, 0], False  # (warp, row, instruction, tile)
    else:
        down = places[:, 0].transpose(0, 1, 4, 2, 3)  # (warp, l % 4, e, instruction, tile): row 2 * (l % 4) + e
        rows, turned = down.reshape(4, 8, *down.shape[3:]), True
        seven = np.arange(8)[:, None, None, None, None]
        expected = places[:, :1] + 2 * seven
        if (places != expected).any():
            return None
    if (rows % ROW).any():
        return None
    lane = np.arange(LANES)
    given = rows[:, lane % 8, :, lane // 8 % at_once]  # (lane, warp, instruction)
    return Tiles(at_once, turned, given.transpose(1, 0, 2).reshape(128, -1))


def _address(unit: Any, view: View, tiles: Tiles) -> Any:
    """C++ of the address that a thread gives to instruction i; None: no sum gives it."""
    by_thread, starts = tiles.rows[:, 0], tiles.rows[0] - tiles.rows[0, 0]
    if (tiles.rows != by_thread[:, None] + starts).any():
        return None
    return plans.addresses(unit, view, by_thread, starts, view.ref.base)


def load(unit: Any, view: View, target: Fragment) -> bool:
    """Read a view into registers by tiles, if it lies so."""
    return _access(unit, view, target, "load_tiles", "{address}, {registers}")


def store(unit: Any, view: View, value: Fragment) -> bool:
    """Write registers to a view by tiles, if they lie so."""
    return _access(unit, view, value, "store_tiles", "{address}, {registers}")


def _access(unit: Any, view: View, array: Fragment, function: str, form: str) -> bool:
    if unit.warps != 4 or array.pick is not None:
        return False
    tiles = tiles_of(view, array.layout)
    address = None if tiles is None else _address(unit, view, tiles)
    if tiles is None or address is None:
        return False
    unit.function("tiles", HEADER)
    n, each = tiles.rows.shape[1], 2 * tiles.at_once
    i = "0" if n == 1 else "i"
    registers = f"&{array.name}[{plans.times(i, each)}]"
    call = f"{function}<{tiles.suffix}>({form.format(address=address(i), registers=registers)});"
    if n > 1:
        unit.line("#pragma unroll")
        call = f"for (int i = 0; i < {n}; ++i) {call}"
    unit.line(call)
    return True


HEADER = r"""// Tiles of 8 x 8 elements of 16 bits between shared memory and the registers of a warp.
template <class T> __device__ __forceinline__ u32 pack(const T* x) {
  Vector<T, 2> two;
  two.at[0] = x[0], two.at[1] = x[1];
  return *(const u32*)&two;
}
template <class T> __device__ __forceinline__ void unpack(T* x, u32 bits) {
  const Vector<T, 2> two = *(const Vector<T, 2>*)&bits;
  x[0] = two.at[0], x[1] = two.at[1];
}
template <int n, bool turned, class T> __device__ __forceinline__ void store_tiles(const char* row, const T* x) {
  const u32 at = shared_address(row);
  if constexpr (n == 4 && !turned)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(pack(x)), "r"(pack(x + 2)), "r"(pack(x + 4)), "r"(pack(x + 6)) : "memory");
  else if constexpr (n == 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(pack(x)), "r"(pack(x + 2)), "r"(pack(x + 4)), "r"(pack(x + 6)) : "memory");
  else if constexpr (!turned)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                 ::"r"(at), "r"(pack(x)), "r"(pack(x + 2)) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(at), "r"(pack(x)), "r"(pack(x + 2)) : "memory");
}
template <int n, bool turned, class T> __device__ __forceinline__ void load_tiles(const char* row, T* x) {
  const u32 at = shared_address(row);
  u32 r[4];
  if constexpr (n == 4 && !turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else if constexpr (n == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else if constexpr (!turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
  for (int k = 0; k < n; ++k) unpack(x + 2 * k, r[k]);
}
"""
