"""The TPUs that libtpu compiles for on a machine that has none: `palladion.compile(…, target="tpu:v5e")`.

Measured with libtpu 0.0.50 and 0.0.52: which names of topologies load, how many devices each has, and how much VMEM a
kernel may use unless `vmem_limit_bytes` says otherwise (the compiler's messages say it). libtpu knows no topology of 8i
and 8t.
"""

from __future__ import annotations

import dataclasses

from palladion.language.tpu.info import ChipVersion, TpuInfo, get_tpu_info_for_chip


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU as libtpu names it.

    Attributes:
      version: the chip.
      topologies: (number of devices, name), small ones first.
      vmem_limit_bytes: what a kernel may use when it does not say.
    """

    version: ChipVersion
    topologies: tuple[tuple[int, str], ...]
    vmem_limit_bytes: int

    @property
    def info(self) -> TpuInfo:
        """Figures of one TensorCore."""
        return get_tpu_info_for_chip(self.version, 1)

    def topology(self, devices: int) -> str | None:
        """The smallest topology with so many devices; None where libtpu's largest here has fewer."""
        return next((name for n, name in self.topologies if n >= devices), None)


_MIB = 1 << 20

# A v4 or 7x chip is two devices, one for each TensorCore; a v5p chip is one.
CHIPS = {
    "v4i": Chip(ChipVersion.TPU_V4I, ((1, "v4 lite:1x1"), (4, "v4 lite:2x2")), 16 * _MIB),
    "v4": Chip(ChipVersion.TPU_V4, ((8, "v4:2x2x1"), (16, "v4:2x2x2"), (32, "v4:2x2x4")), 16 * _MIB),
    "v5e": Chip(ChipVersion.TPU_V5E, ((4, "v5e:2x2"), (8, "v5e:2x4"), (16, "v5e:4x4"), (32, "v5e:4x8")), 16 * _MIB),
    "v5p": Chip(
        ChipVersion.TPU_V5P,
        ((4, "v5p:2x2x1"), (8, "v5p:2x2x2"), (16, "v5p:2x2x4"), (32, "v5p:2x4x4")),
        16 * _MIB,
    ),
    "v6e": Chip(ChipVersion.TPU_V6E, ((4, "v6e:2x2"), (8, "v6e:2x4"), (16, "v6e:4x4")), 32 * _MIB),
    "v7x": Chip(ChipVersion.TPU_7X, ((8, "tpu7x:2x2x1"), (16, "tpu7x:2x2x2"), (32, "tpu7x:2x2x4")), 32 * _MIB),
}
