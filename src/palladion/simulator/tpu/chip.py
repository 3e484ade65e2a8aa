"""The figures of the chip that is simulated: how much VMEM a buffer takes, how long things take.

A buffer in VMEM lies in whole tiles: its last dimension is rounded up to the lanes, the one before to the sublanes of
its dtype (tutorial 6.1). Times are those of an ideal core: matrix products at the published peak rate of their dtype,
other array code at one vector register of 32-bit elements a cycle for each of four slots, copies at the bandwidth of
HBM after a fixed latency.

Sources: the published TPU system architecture pages (language/tpu/info.py). The number of vector slots and the latency
of a copy are not published; they are round figures.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from palladion import jaxlink
from palladion.errors import mistake
from palladion.language import cost
from palladion.language.dtypes import element_bits
from palladion.language.tpu.info import ChipVersion, TpuInfo, get_tpu_info_for_chip

LATENCY = 1e-6  # seconds that a copy takes besides moving its bytes
DEFAULT = "v5e"
CLOCK, SLOTS = 1.5e9, 4  # cycles a second; vector operations a cycle


@functools.cache
def chip(name: str | None) -> TpuInfo:
    """The figures of a chip by its short name ("v5e").

    Raises:
      ValueError: there is none of this name.
    """
    names = [c.value for c in ChipVersion]
    if (name or DEFAULT) not in names:
        raise mistake(ValueError, f"There is no TPU chip {name!r}.", hint=f"chip= one of {', '.join(names)}")
    return get_tpu_info_for_chip(ChipVersion(name or DEFAULT), 1)


def tile_bytes(shape: Any, dtype: Any, info: TpuInfo) -> int:
    """Bytes of VMEM that a buffer takes, in whole tiles."""
    bits = element_bits(dtype)
    dims = [int(n) for n in shape] or [1]
    dims[-1] = -(-dims[-1] // info.num_lanes) * info.num_lanes
    if len(dims) > 1:
        rows = info.num_sublanes * max(32 // bits, 1)
        dims[-2] = -(-dims[-2] // rows) * rows
    return math.prod(dims) * bits // 8


def step_seconds(eqn: Any, info: TpuInfo) -> float:
    """How long an equation of array code keeps an ideal core busy."""
    if eqn.primitive in (lax.dot_general_p, lax.conv_general_dilated_p):
        dtype = str(eqn.invars[0].aval.dtype)
        rate = info.int8_ops_per_second if dtype in ("int8", "uint8") else info.bf16_ops_per_second
        rate = rate or info.bf16_ops_per_second
        if dtype == "float32":
            rate /= 6  # passes of bf16 products at highest precision
        return cost.flops_of(eqn) / rate
    elements = max((_registers(v.aval, info) for v in (*eqn.invars, *eqn.outvars)), default=0)
    return elements / (SLOTS * CLOCK)


def _registers(aval: Any, info: TpuInfo) -> float:
    if isinstance(aval, jaxlink.AbstractRef) or not hasattr(aval, "shape") or jaxlink.is_opaque(aval.dtype):
        return 0
    return math.prod(aval.shape) * min(jnp.dtype(aval.dtype).itemsize, 4) / 4 / (info.num_lanes * info.num_sublanes)


def copy_seconds(size: int, info: TpuInfo) -> float:
    """How long the copy of so many bytes keeps the memory bus busy."""
    return size / info.mem_bw_bytes_per_second
