"""What is known of each TPU chip: cores, memories, rates; and which of them JAX runs on.

Capacities and rates are for one TensorCore. Source: Google Cloud's published TPU system architecture pages
(v2 to 7x), halved for chips with two TensorCores, in the rounding of JAX 0.12.0.1's own table; for `8i` and
`8t` that table is the source. Zero stands for "does not have it" and, with rates, for "no native support, or
not published".
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from palladion.errors import explain
from palladion.language.dtypes import element_bits
from palladion.language.hardware import current_device

__all__ = [
    "ChipVersion",
    "SparseCoreInfo",
    "TpuInfo",
    "get_tpu_info",
    "get_tpu_info_for_chip",
    "is_tpu_device",
]


class _Cores(NamedTuple):
    per_chip: int  # physical TensorCores
    lite: bool  # a chip made for inference and cost, with one TensorCore
    megacore: bool  # its TensorCores can act as one logical device


class ChipVersion(enum.Enum):
    """A generation and variant of TPU chip; the value is the short name ("v5e")."""

    TPU_V2 = "v2"
    TPU_V3 = "v3"
    TPU_V4I = "v4i"
    TPU_V4 = "v4"
    TPU_V5E = "v5e"
    TPU_V5P = "v5p"
    TPU_V6E = "v6e"
    TPU_7 = "7"
    TPU_7X = "7x"
    TPU_8I = "8i"
    TPU_8T = "8t"

    def __str__(self) -> str:
        return self.value

    @property
    def num_physical_tensor_cores_per_chip(self) -> int:
        return _CORES[self].per_chip

    @property
    def is_lite(self) -> bool:
        return _CORES[self].lite

    @property
    def supports_megacore(self) -> bool:
        """Whether two TensorCores of a chip can act as one device (`num_cores` of 2)."""
        return _CORES[self].megacore


_CORES = {
    ChipVersion.TPU_V2: _Cores(2, lite=False, megacore=False),
    ChipVersion.TPU_V3: _Cores(2, lite=False, megacore=False),
    ChipVersion.TPU_V4I: _Cores(1, lite=True, megacore=False),
    ChipVersion.TPU_V4: _Cores(2, lite=False, megacore=True),
    ChipVersion.TPU_V5E: _Cores(1, lite=True, megacore=False),
    ChipVersion.TPU_V5P: _Cores(2, lite=False, megacore=True),
    ChipVersion.TPU_V6E: _Cores(1, lite=True, megacore=False),
    ChipVersion.TPU_7: _Cores(2, lite=False, megacore=False),
    ChipVersion.TPU_7X: _Cores(2, lite=False, megacore=False),
    ChipVersion.TPU_8I: _Cores(2, lite=False, megacore=False),
    ChipVersion.TPU_8T: _Cores(1, lite=False, megacore=False),
}

# The names that the TPU runtime gives its devices (`jax.Device.device_kind`).
_DEVICE_KINDS = {
    "TPU v2": ChipVersion.TPU_V2,
    "TPU v3": ChipVersion.TPU_V3,
    "TPU v4 lite": ChipVersion.TPU_V4I,
    "TPU v4": ChipVersion.TPU_V4,
    "TPU v5 lite": ChipVersion.TPU_V5E,
    "TPU v5e": ChipVersion.TPU_V5E,
    "TPU v5": ChipVersion.TPU_V5P,
    "TPU v5p": ChipVersion.TPU_V5P,
    "TPU v6 lite": ChipVersion.TPU_V6E,
    "TPU v6e": ChipVersion.TPU_V6E,
    "TPU7": ChipVersion.TPU_7,
    "TPU7x": ChipVersion.TPU_7X,
    "TPU8i": ChipVersion.TPU_8I,
    "TPU8t": ChipVersion.TPU_8T,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCoreInfo:
    """The SparseCores of a chip.

    Attributes:
      num_cores: SparseCores for each logical device.
      num_subcores: vector subcores of one SparseCore.
      num_lanes: 32-bit lanes of a vector register.
      vmem_capacity_bytes: memory of one vector subcore.
      dma_granule_size_bytes: the smallest piece that a DMA moves.
    """

    num_cores: int
    num_subcores: int
    num_lanes: int
    vmem_capacity_bytes: int
    dma_granule_size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuInfo:
    """A TPU as a kernel's author sees it; capacities and rates are for one TensorCore.

    Attributes:
      chip_version: the chip.
      generation: its generation, 2 to 8.
      num_cores: TensorCores of one logical device (2: megacore).
      num_lanes, num_sublanes: shape of a vector register, in 32-bit elements.
      mxu_column_size: side of a matrix unit's array.
      num_mxus: matrix units.
      num_accumulators: result registers of a matrix unit (0: results leave through a queue).
      vmem_capacity_bytes, cmem_capacity_bytes, smem_capacity_bytes, hbm_capacity_bytes: memories, in bytes.
      mem_bw_bytes_per_second: bandwidth of HBM.
      bf16_ops_per_second, int8_ops_per_second, fp8_ops_per_second, int4_ops_per_second: peak rates of matrix
        products, multiplication and addition counted as two.
      sparse_core: the SparseCores, or None.
    """

    chip_version: ChipVersion
    generation: int
    num_cores: int
    num_lanes: int
    num_sublanes: int
    mxu_column_size: int
    num_mxus: int
    num_accumulators: int
    vmem_capacity_bytes: int
    cmem_capacity_bytes: int
    smem_capacity_bytes: int
    hbm_capacity_bytes: int
    mem_bw_bytes_per_second: int
    bf16_ops_per_second: int
    int8_ops_per_second: int
    fp8_ops_per_second: int
    int4_ops_per_second: int
    sparse_core: SparseCoreInfo | None = None

    @property
    def is_lite(self) -> bool:
        return self.chip_version.is_lite

    @property
    def is_split_chip(self) -> bool:
        """Whether a logical device is just one of the chip's TensorCores."""
        return self.num_cores == 1 and self.chip_version.num_physical_tensor_cores_per_chip > 1

    @property
    def is_megacore(self) -> bool:
        """Whether a logical device is several TensorCores of a chip."""
        return self.num_cores > 1 and self.chip_version.supports_megacore

    def get_sublane_tiling(self, dtype: Any) -> int:
        """Rows of the tile in which arrays of `dtype` lie in memory; its columns are `num_lanes`.

        Elements narrower than 32 bits are packed along the rows, so that tiles get taller. Before generation
        7 the compiler also uses tiles of `num_sublanes` rows for 16-bit elements, the usual choice.

        Raises:
          ValueError: the dtype has more than 32 bits, which no tile of a TPU holds.
        """
        bits = element_bits(dtype)
        if bits > 32:
            raise ValueError(
                explain(
                    f"A TPU has no tiles for {jnp.dtype(dtype).name}: an element has at most 32 bits.",
                    hint="use a 32-bit dtype",
                )
            )
        if bits == 16 and self.generation < 7:
            return self.num_sublanes
        return self.num_sublanes * (32 // bits)

    def is_matmul_supported(self, lhs_dtype: Any, rhs_dtype: Any) -> bool:
        """Whether the matrix units multiply these dtypes as they are, with no conversion before."""
        lhs, rhs = jnp.dtype(lhs_dtype).name, jnp.dtype(rhs_dtype).name
        return any(lhs in left and rhs in right for left, right in _MATMUL_DTYPES[self.chip_version])


class _Row(NamedTuple):
    """A chip in the units of its data sheet: MiB VMEM, MB CMEM, KiB SMEM, GB HBM, GB/s, Tops/s."""

    generation: int
    sublanes: int
    mxu: int
    num_mxus: int
    accumulators: int
    vmem: int
    cmem: int
    smem: int
    hbm: float
    bandwidth: float
    bf16: float
    int8: float
    fp8: float
    int4: float


# fmt: off
_ROWS = {
    #      gen sub  mxu mxus acc vmem cmem  smem    hbm    GB/s    bf16    int8     fp8     int4
    "v2":  _Row(2,  8, 128, 1,   0,  16,   0,   16,   8.0,  358.0,   23.0,    0.0,    0.0,     0.0),
    "v3":  _Row(3,  8, 128, 2,   0,  16,   0,   16,  17.2,  412.5,   70.0,    0.0,    0.0,     0.0),
    "v4i": _Row(4,  8, 128, 4,   0,  16, 134, 1024,  8.59,  614.0,  137.0,    0.0,    0.0,     0.0),
    "v4":  _Row(4,  8, 128, 4,   0,  16,  67, 1024,  17.2,  615.0,  137.5,    0.0,    0.0,     0.0),
    "v5e": _Row(5,  8, 128, 4,   0, 128,   0, 1024,  17.2,  820.0,  197.0,  394.0,    0.0,   788.0),
    "v5p": _Row(5,  8, 128, 4,   0,  64,   0, 1024,  51.5, 1230.0,  229.5,  459.0,    0.0,   920.0),
    "v6e": _Row(6,  8, 256, 2,   0, 128,   0, 1024,  34.4, 1640.0,  920.0, 1840.0,  920.0,  3680.0),
    "7":   _Row(7,  8, 256, 2, 128,  64,   0, 1024, 103.0, 3700.0, 1155.0,    0.0, 2300.0,     0.0),
    "7x":  _Row(7,  8, 256, 2, 128,  64,   0, 1024, 103.0, 3700.0, 1155.0,    0.0, 2300.0,     0.0),
    "8i":  _Row(8,  8, 256, 2, 256, 192,   0, 1024, 154.5, 4300.0,  550.5,    0.0, 4404.0,     0.0),
    "8t":  _Row(8, 16, 256, 2, 256, 128,   0, 1024, 231.0, 6400.0,  996.1,  996.1, 5976.9, 11953.8),
}

_SPARSE_CORES = {
    #     cores, subcores, lanes, KiB, granule
    "v5p": (4, 16,  8, 512, 32),
    "v6e": (2, 16,  8, 256, 32),
    "7":   (2, 16, 16, 512, 32),
    "7x":  (2, 16, 16, 512, 32),
    "8i":  (1,  4, 16, 512, 64),
    "8t":  (2, 16, 16, 256, 64),
}
# fmt: on

# Pairs of (left dtypes, right dtypes) that the matrix units take.
_F32 = frozenset({"float32"})
_FLOATS = frozenset({"float32", "bfloat16"})
_FP8_OCP = frozenset({"float8_e4m3fn", "float8_e5m2"})  # the Open Compute formats, from generation 7
_FLOATS_V5 = _FLOATS | {"float8_e5m2", "float8_e4m3b11fnuz"}
_INT8 = frozenset({"int8", "uint8"})
_INT4 = frozenset({"int4", "uint4"})
_V2 = ((_F32, _F32),)
_V4 = ((_FLOATS, _FLOATS | {"int8"}),)
_V5 = ((_FLOATS_V5, _FLOATS_V5), (_INT8, _INT8), (_INT4, _INT4))
_V7 = ((_FLOATS, _FLOATS | _FP8_OCP), (_FP8_OCP, _FP8_OCP))
_MATMUL_DTYPES = {
    ChipVersion.TPU_V2: _V2,
    ChipVersion.TPU_V3: _V2,
    ChipVersion.TPU_V4I: _V4,
    ChipVersion.TPU_V4: _V4,
    ChipVersion.TPU_V5E: _V5,
    ChipVersion.TPU_V5P: _V5,
    ChipVersion.TPU_V6E: _V5,
    ChipVersion.TPU_7: _V7,
    ChipVersion.TPU_7X: _V7,
    ChipVersion.TPU_8I: _V7 + ((_FLOATS | _FP8_OCP, _INT4),),
    ChipVersion.TPU_8T: _V7 + ((_FLOATS | _FP8_OCP, frozenset({"int4"})),),
}


def get_tpu_info_for_chip(chip_version: ChipVersion, num_tensor_cores_per_logical_device: int) -> TpuInfo:
    """The hardware figures of a chip, whether it is there or not.

    Arguments:
      chip_version: a `pltpu.ChipVersion`.
      num_tensor_cores_per_logical_device: 1, or 2 on the chips that join their TensorCores (v4, v5p).

    Returns:
      a `TpuInfo`; its capacities and rates are for one TensorCore.

    Raises:
      TypeError: an argument is of another type. ValueError: the chip has no logical devices with so many
        cores.
    """
    if not isinstance(chip_version, ChipVersion):
        raise TypeError(
            explain(
                f"The chip must be a pltpu.ChipVersion, but it is {chip_version!r}.",
                hint=f"use one of {', '.join(f'pltpu.ChipVersion.{c.name}' for c in ChipVersion)}",
            )
        )
    cores = num_tensor_cores_per_logical_device
    if isinstance(cores, bool) or not isinstance(cores, (int, np.integer)):
        raise TypeError(f"num_tensor_cores_per_logical_device must be an integer, but it is {cores!r}.")
    allowed = (1, chip_version.num_physical_tensor_cores_per_chip) if chip_version.supports_megacore else (1,)
    if cores not in allowed:
        raise ValueError(
            explain(
                f"A logical device of a TPU {chip_version} has {' or '.join(map(str, allowed))} TensorCore"
                f"{'s' if len(allowed) > 1 else ''}, but num_tensor_cores_per_logical_device={cores}.",
                hint="pass 1; only v4 and v5p can join their two TensorCores into one device (2)",
            )
        )
    row = _ROWS[chip_version.value]
    return TpuInfo(
        chip_version=chip_version,
        generation=row.generation,
        num_cores=int(cores),
        num_lanes=128,
        num_sublanes=row.sublanes,
        mxu_column_size=row.mxu,
        num_mxus=row.num_mxus,
        num_accumulators=row.accumulators,
        vmem_capacity_bytes=row.vmem << 20,
        cmem_capacity_bytes=row.cmem * 10**6,
        smem_capacity_bytes=row.smem << 10,
        hbm_capacity_bytes=_giga(row.hbm),
        mem_bw_bytes_per_second=_giga(row.bandwidth),
        bf16_ops_per_second=_giga(row.bf16) * 1000,
        int8_ops_per_second=_giga(row.int8) * 1000,
        fp8_ops_per_second=_giga(row.fp8) * 1000,
        int4_ops_per_second=_giga(row.int4) * 1000,
        sparse_core=_sparse_core(chip_version),
    )


def _giga(figure: float) -> int:
    return round(figure * 100) * 10**7  # exact: the table has at most two decimals


def _sparse_core(chip_version: ChipVersion) -> SparseCoreInfo | None:
    if chip_version.value not in _SPARSE_CORES:
        return None
    cores, subcores, lanes, kib, granule = _SPARSE_CORES[chip_version.value]
    return SparseCoreInfo(
        num_cores=cores,
        num_subcores=subcores,
        num_lanes=lanes,
        vmem_capacity_bytes=kib << 10,
        dma_granule_size_bytes=granule,
    )


def is_tpu_device() -> bool:
    """Whether the current device (`palladion.language.hardware`) is a TPU known to `get_tpu_info`."""
    return current_device().device_kind in _DEVICE_KINDS


def get_tpu_info() -> TpuInfo:
    """The hardware figures of the TPU that JAX runs on, or of the one an abstract mesh stands for.

    Raises:
      ValueError: the current device is not a TPU, or one that is not in the table.
    """
    device = current_device()
    kind = device.device_kind
    if kind not in _DEVICE_KINDS:
        raise ValueError(
            explain(
                f"There is no known TPU here: the current device is {kind!r}.",
                hint="use pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1) for another one, or "
                "trace under jax.sharding.use_abstract_mesh with an AbstractDevice of that chip",
            )
        )
    return get_tpu_info_for_chip(_DEVICE_KINDS[kind], getattr(device, "num_cores", None) or 1)
