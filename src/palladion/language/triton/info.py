"""What is known of each GPU, by product: its compute capability; and which of them JAX runs on.

Source: NVIDIA's list of CUDA GPUs by compute capability; VR200 as JAX 0.12.0.1 has it.
"""

from __future__ import annotations

import dataclasses
import enum

from palladion.errors import explain
from palladion.language.hardware import current_device

__all__ = ["GpuInfo", "GpuVersion", "get_gpu_info", "get_gpu_info_from_version", "is_gpu_device"]


class GpuVersion(enum.Enum):
    """A GPU product; the value is how the driver's name for it begins ("NVIDIA H100 80GB HBM3")."""

    T4 = "Tesla T4"
    A10 = "NVIDIA A10"
    L4 = "NVIDIA L4"
    RTX_4090 = "NVIDIA GeForce RTX 4090"
    A30 = "NVIDIA A30"
    L40 = "NVIDIA L40"
    A100 = "NVIDIA A100"
    GB10 = "NVIDIA GB10"
    H100 = "NVIDIA H100"
    THOR = "NVIDIA Thor"
    GH200 = "NVIDIA GH200"
    RTX_PRO_4500 = "NVIDIA RTX PRO 4500"
    H200 = "NVIDIA H200"
    RTX_PRO_5000 = "NVIDIA RTX PRO 5000"
    B200 = "NVIDIA B200"
    RTX_PRO_6000 = "NVIDIA RTX PRO 6000"
    GB200 = "NVIDIA GB200"
    VR200 = "NVIDIA VR200"
    B300 = "NVIDIA B300"
    GB300 = "NVIDIA GB300"

    def __str__(self) -> str:
        return self.value


_COMPUTE_CAPABILITY = {
    GpuVersion.A10: "8.6",
    GpuVersion.A30: "8.0",
    GpuVersion.A100: "8.0",
    GpuVersion.H100: "9.0",
    GpuVersion.H200: "9.0",
    GpuVersion.GH200: "9.0",
    GpuVersion.B200: "10.0",
    GpuVersion.GB200: "10.0",
    GpuVersion.B300: "10.3",
    GpuVersion.GB300: "10.3",
    GpuVersion.GB10: "12.1",
    GpuVersion.L4: "8.9",
    GpuVersion.L40: "8.9",
    GpuVersion.T4: "7.5",
    GpuVersion.RTX_4090: "8.9",
    GpuVersion.RTX_PRO_4500: "12.0",
    GpuVersion.RTX_PRO_5000: "12.0",
    GpuVersion.RTX_PRO_6000: "12.0",
    GpuVersion.THOR: "11.0",
    GpuVersion.VR200: "10.7",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """A GPU as a compiler sees it.

    Attributes:
      gpu_version: the product, or None for one that is not in the list.
      arch_name: compute capability as NVIDIA writes it ("9.0").
      compute_capability: the same as one number (90).
    """

    gpu_version: GpuVersion | None
    arch_name: str
    compute_capability: int


def get_gpu_info_from_version(gpu_version: GpuVersion) -> GpuInfo:
    """What is known of a GPU product, whether it is there or not.

    Raises:
      TypeError: `gpu_version` is not a `pltriton.GpuVersion`.
    """
    if not isinstance(gpu_version, GpuVersion):
        raise TypeError(
            explain(
                f"The GPU must be a pltriton.GpuVersion, but it is {gpu_version!r}.",
                hint=f"use one of {', '.join(f'pltriton.GpuVersion.{v.name}' for v in GpuVersion)}",
            )
        )
    return _info(gpu_version, _COMPUTE_CAPABILITY[gpu_version])


def _info(gpu_version: GpuVersion | None, capability: str) -> GpuInfo:
    return GpuInfo(gpu_version=gpu_version, arch_name=capability, compute_capability=int(capability.replace(".", "")))


def is_gpu_device() -> bool:
    """Whether the current device (`palladion.language.hardware`) is a GPU."""
    return current_device().platform in ("gpu", "cuda", "rocm")


def get_gpu_info() -> GpuInfo:
    """What is known of the GPU that JAX runs on, or of the one an abstract mesh stands for.

    A GPU that is there but not in the list has `gpu_version` None, and the compute capability it reports.

    Raises:
      ValueError: the current device is not a GPU, or an abstract one that is not in the list.
    """
    device = current_device()
    version = _version_of(device.device_kind)
    if version is not None:
        return get_gpu_info_from_version(version)
    capability = getattr(device, "compute_capability", None)
    if is_gpu_device() and capability:
        return _info(None, str(capability))
    raise ValueError(
        explain(
            f"There is no known GPU here: the current device is {device.device_kind!r}.",
            hint="use pltriton.get_gpu_info_from_version(pltriton.GpuVersion.H100) for another one, or "
            "trace under jax.sharding.use_abstract_mesh with an AbstractDevice of that GPU",
        )
    )


def _version_of(device_kind: str) -> GpuVersion | None:
    """The product in a driver's name, which may go on: "NVIDIA A100-SXM4-40GB" is an A100, not an A10."""
    for version in GpuVersion:
        rest = device_kind.removeprefix(version.value)
        if rest != device_kind and not rest[:1].isalnum():
            return version
    return None
