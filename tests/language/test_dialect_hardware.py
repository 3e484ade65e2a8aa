"""What the dialects know of TPUs and GPUs, and of the hardware that JAX runs on.

The figures are what JAX 0.12.0.1's Pallas reports, in full units: apart from Palladion's own table.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from palladion import tpu as pltpu
from palladion import triton as pltriton
from palladion.language.tpu.info import SparseCoreInfo
from palladion.language.triton import info as triton_info

# chip; TensorCores, lite, megacore; generation, sublanes, MXU side, MXUs, accumulators;
# VMEM, CMEM, SMEM, HBM in bytes; SparseCores: cores, subcores, lanes, bytes of VMEM, bytes of a DMA granule.
CHIPS = """
TPU_V2  2 0 0 2  8 128 1   0  16777216         0   16384   8000000000 -  -  -      -  -
TPU_V3  2 0 0 3  8 128 2   0  16777216         0   16384  17200000000 -  -  -      -  -
TPU_V4I 1 1 0 4  8 128 4   0  16777216 134000000 1048576   8590000000 -  -  -      -  -
TPU_V4  2 0 1 4  8 128 4   0  16777216  67000000 1048576  17200000000 -  -  -      -  -
TPU_V5E 1 1 0 5  8 128 4   0 134217728         0 1048576  17200000000 -  -  -      -  -
TPU_V5P 2 0 1 5  8 128 4   0  67108864         0 1048576  51500000000 4 16  8 524288 32
TPU_V6E 1 1 0 6  8 256 2   0 134217728         0 1048576  34400000000 2 16  8 262144 32
TPU_7   2 0 0 7  8 256 2 128  67108864         0 1048576 103000000000 2 16 16 524288 32
TPU_7X  2 0 0 7  8 256 2 128  67108864         0 1048576 103000000000 2 16 16 524288 32
TPU_8I  2 0 0 8  8 256 2 256 201326592         0 1048576 154500000000 1  4 16 524288 64
TPU_8T  1 0 0 8 16 256 2 256 134217728         0 1048576 231000000000 2 16 16 262144 64
"""
# chip; HBM bytes/s; bf16, int8, fp8, int4 operations/s.
RATES = """
TPU_V2   358000000000   23000000000000                0                0                 0
TPU_V3   412500000000   70000000000000                0                0                 0
TPU_V4I  614000000000  137000000000000                0                0                 0
TPU_V4   615000000000  137500000000000                0                0                 0
TPU_V5E  820000000000  197000000000000  394000000000000                0   788000000000000
TPU_V5P 1230000000000  229500000000000  459000000000000                0   920000000000000
TPU_V6E 1640000000000  920000000000000 1840000000000000  920000000000000  3680000000000000
TPU_7   3700000000000 1155000000000000                0 2300000000000000                 0
TPU_7X  3700000000000 1155000000000000                0 2300000000000000                 0
TPU_8I  4300000000000  550500000000000                0 4404000000000000                 0
TPU_8T  6400000000000  996100000000000  996100000000000 5976900000000000 11953800000000000
"""
GPUS = """
A10 86; A30 80; A100 80; H100 90; H200 90; GH200 90; B200 100; GB200 100; B300 103; GB300 103; GB10 121;
L4 89; L40 89; T4 75; RTX_4090 89; RTX_PRO_4500 120; RTX_PRO_5000 120; RTX_PRO_6000 120; THOR 110; VR200 107
"""


def _rows(table):
    return {name: cells for name, *cells in (line.split() for line in table.strip().splitlines())}


def first_line(error):
    return str(error.value).splitlines()[0]


# Hardware


@pytest.mark.parametrize("chip", pltpu.ChipVersion, ids=lambda chip: chip.name)
def test_figures_of_every_tpu(chip):
    cells = _rows(CHIPS)[chip.name]
    physical, lite, megacore, generation, sublanes, mxu, mxus, accumulators = map(int, cells[:8])
    vmem, cmem, smem, hbm = map(int, cells[8:12])
    bandwidth, bf16, int8, fp8, int4 = map(int, _rows(RATES)[chip.name])
    sparse = None
    if cells[12] != "-":
        names = [field.name for field in dataclasses.fields(SparseCoreInfo)]
        sparse = SparseCoreInfo(**dict(zip(names, map(int, cells[12:]), strict=True)))
    info = pltpu.get_tpu_info_for_chip(chip, 1)
    assert info == pltpu.TpuInfo(
        chip_version=chip,
        generation=generation,
        num_cores=1,
        num_lanes=128,
        num_sublanes=sublanes,
        mxu_column_size=mxu,
        num_mxus=mxus,
        num_accumulators=accumulators,
        vmem_capacity_bytes=vmem,
        cmem_capacity_bytes=cmem,
        smem_capacity_bytes=smem,
        hbm_capacity_bytes=hbm,
        mem_bw_bytes_per_second=bandwidth,
        bf16_ops_per_second=bf16,
        int8_ops_per_second=int8,
        fp8_ops_per_second=fp8,
        int4_ops_per_second=int4,
        sparse_core=sparse,
    )
    assert hash(info) == hash(pltpu.get_tpu_info_for_chip(chip, np.int64(1)))
    assert str(chip) == chip.value == chip.name.removeprefix("TPU_").lower()
    assert chip.num_physical_tensor_cores_per_chip == physical
    assert (chip.is_lite, chip.supports_megacore) == (bool(lite), bool(megacore)) == (info.is_lite, bool(megacore))
    assert (info.is_megacore, info.is_split_chip) == (False, physical == 2)
    if megacore:
        both = pltpu.get_tpu_info_for_chip(chip, 2)
        assert both == dataclasses.replace(info, num_cores=2) and both.is_megacore and not both.is_split_chip
    for cores in (0, 3, -1) if megacore else (0, 2, -1):
        with pytest.raises(ValueError) as error:
            pltpu.get_tpu_info_for_chip(chip, cores)
        has = "1 or 2 TensorCores" if megacore else "1 TensorCore"
        assert first_line(error) == (
            f"A logical device of a TPU {chip.value} has {has}, but num_tensor_cores_per_logical_device={cores}."
        )


def test_arguments_of_another_type_are_refused():
    with pytest.raises(TypeError) as error:
        pltpu.get_tpu_info_for_chip("v5e", 1)
    assert first_line(error) == "The chip must be a pltpu.ChipVersion, but it is 'v5e'."
    with pytest.raises(TypeError) as error:
        pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V4, 1.0)
    assert first_line(error) == "num_tensor_cores_per_logical_device must be an integer, but it is 1.0."
    with pytest.raises(TypeError) as error:
        pltriton.get_gpu_info_from_version("H100")
    assert first_line(error) == "The GPU must be a pltriton.GpuVersion, but it is 'H100'."


@pytest.mark.parametrize(
    ("chip", "rows"),
    [
        ("TPU_V4", (8, 8, 32, 64)),
        ("TPU_V6E", (8, 8, 32, 64)),
        ("TPU_7X", (8, 16, 32, 64)),
        ("TPU_8T", (16, 32, 64, 128)),
    ],
)
def test_sublane_tiling(chip, rows):
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[chip], 1)
    assert tuple(map(info.get_sublane_tiling, (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4))) == rows
    assert info.get_sublane_tiling(jnp.bool_) == rows[2] == info.get_sublane_tiling("float8_e5m2")
    with pytest.raises(ValueError) as error:
        info.get_sublane_tiling(np.float64)
    assert first_line(error) == "A TPU has no tiles for float64: an element has at most 32 bits."


@pytest.mark.parametrize(
    ("chip", "supported", "refused"),
    [
        ("TPU_V2", ["float32 float32"], ["bfloat16 bfloat16", "int8 int8"]),
        ("TPU_V4", ["bfloat16 int8", "float32 bfloat16"], ["int8 bfloat16", "int8 int8"]),
        (
            "TPU_V5E",
            ["int8 uint8", "int4 int4", "float8_e5m2 float32"],
            ["int8 int4", "float8_e4m3fn bfloat16"],
        ),
        (
            "TPU_7X",
            ["float8_e4m3fn float8_e5m2", "bfloat16 float8_e5m2"],
            ["float8_e5m2 bfloat16", "int8 int8"],
        ),
        ("TPU_8I", ["float32 uint4", "float8_e5m2 int4"], ["int4 int4", "int4 float32"]),
        ("TPU_8T", ["bfloat16 int4"], ["bfloat16 uint4", "float16 float16"]),
    ],
)
def test_dtypes_of_matrix_units(chip, supported, refused):
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[chip], 1)
    assert [info.is_matmul_supported(*pair.split()) for pair in supported] == [True] * len(supported)
    assert [info.is_matmul_supported(*pair.split()) for pair in refused] == [False] * len(refused)


def test_compute_capability_of_every_gpu():
    expected = {name: int(number) for name, number in (entry.split() for entry in GPUS.split(";"))}
    assert {version.name: 0 for version in pltriton.GpuVersion} == dict.fromkeys(expected, 0)
    for version in pltriton.GpuVersion:
        number = expected[version.name]
        info = pltriton.get_gpu_info_from_version(version)
        assert info == pltriton.GpuInfo(
            gpu_version=version, arch_name=f"{number // 10}.{number % 10}", compute_capability=number
        )
        assert hash(info) == hash(pltriton.get_gpu_info_from_version(version)) and str(version) == version.value
    assert pltriton.GpuVersion.T4.value == "Tesla T4"
    assert pltriton.GpuVersion.RTX_4090.value == "NVIDIA GeForce RTX 4090"
    assert pltriton.CUSTOM_CALL_TARGET_NAME == "__gpu$xla.gpu.triton"


def _abstract(kind, platform, cores=1):
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "cores", "chip"),
    [
        ("TPU v4 lite", 1, "TPU_V4I"),
        ("TPU v4", 2, "TPU_V4"),
        ("TPU v5 lite", 1, "TPU_V5E"),
        ("TPU v5", 2, "TPU_V5P"),
        ("TPU v6e", 1, "TPU_V6E"),
        ("TPU7x", 1, "TPU_7X"),
        ("TPU8t", 1, "TPU_8T"),
    ],
)
def test_the_tpu_of_an_abstract_mesh(kind, cores, chip):
    with _abstract(kind, "tpu", cores):
        assert pltpu.is_tpu_device() and not pltriton.is_gpu_device()
        assert pltpu.get_tpu_info() == pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[chip], cores)


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_the_gpu_of_an_abstract_mesh(kind, version):
    with _abstract(kind, "cuda"):
        assert pltriton.is_gpu_device() and not pltpu.is_tpu_device()
        assert pltriton.get_gpu_info() == pltriton.get_gpu_info_from_version(pltriton.GpuVersion[version])


def test_without_the_hardware_a_question_about_it_is_an_error():
    with jax.default_device(jax.devices("cpu")[0]):
        assert not pltpu.is_tpu_device() and not pltriton.is_gpu_device()
        with pytest.raises(ValueError) as error:
            pltpu.get_tpu_info()
        assert first_line(error) == "There is no known TPU here: the current device is 'cpu'."
        with pytest.raises(ValueError) as error:
            pltriton.get_gpu_info()
        assert first_line(error) == "There is no known GPU here: the current device is 'cpu'."
    with _abstract("NVIDIA L40S", "cuda"), pytest.raises(ValueError) as error:
        pltriton.get_gpu_info()
    assert first_line(error) == "There is no known GPU here: the current device is 'NVIDIA L40S'."


def test_a_gpu_that_is_not_in_the_list_says_its_capability(monkeypatch):
    device = types.SimpleNamespace(device_kind="NVIDIA L40S", platform="gpu", compute_capability="8.9")
    monkeypatch.setattr(triton_info, "current_device", lambda: device)
    assert pltriton.get_gpu_info() == pltriton.GpuInfo(gpu_version=None, arch_name="8.9", compute_capability=89)
