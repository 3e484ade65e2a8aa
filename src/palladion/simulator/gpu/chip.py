"""The figures of the GPUs that are simulated: limits that a kernel must keep, and rates for simulated time.

Times are those of an ideal SM: matrix products at the published dense peak of their dtype, other array code at 128
lanes a cycle, copies at the SM's share of the memory bandwidth after a fixed latency. They show what overlaps and what
waits, and predict nothing.

Sources: the CUDA C++ programming guide's table of compute capabilities; NVIDIA's H100 and B200 data sheets (the facts
file of this project, sections 6.7 and 10). Latencies are round figures.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from palladion import jaxlink
from palladion.language import cost

LANES = 128  # threads of a warpgroup
TMA_LATENCY, MMA_LATENCY, BARRIER_SECONDS = 7e-7, 3e-8, 2e-8


@dataclasses.dataclass(frozen=True)
class Chip:
    """One GPU.

    Attributes:
      arch: "sm_90a" or "sm_100a". name: of the board whose figures these are.
      num_sms: streaming multiprocessors.
      smem_bytes: shared memory that a block may have; smem_bytes_per_sm: of an SM, smem_reserved: of that, a block.
      tmem_columns: of 32 bits and 128 lanes; 0: no tensor memory.
      max_cluster: blocks of a cluster (not portable beyond 8). max_threads: CUDA threads of a block.
      registers: of an SM; registers_per_thread: at most.
      clock: cycles a second. memory_rate: bytes a second. tensor_rate: flops a second of 16-bit products, dense.
    """

    arch: str
    name: str
    num_sms: int
    clock: float
    memory_rate: float
    tensor_rate: float
    tmem_columns: int
    smem_bytes: int = 232448
    smem_bytes_per_sm: int = 233472
    smem_reserved: int = 1024
    max_cluster: int = 16
    max_threads: int = 1024
    max_blocks_per_sm: int = 32
    registers: int = 65536
    registers_per_thread: int = 255


CHIPS = {
    "sm_90a": Chip("sm_90a", "H100 SXM", 132, 1.83e9, 3.35e12, 989.4e12, 0),
    "sm_100a": Chip("sm_100a", "B200", 148, 1.85e9, 8e12, 2250e12, 512),
}


def step_seconds(eqn: Any, chip: Chip) -> float:
    """How long an equation of array code keeps a warpgroup busy."""
    if eqn.primitive is lax.dot_general_p:
        return cost.flops_of(eqn) / (chip.num_sms * LANES * 2 * chip.clock) * chip.num_sms
    elements = max((_elements(v.aval) for v in (*eqn.invars, *eqn.outvars)), default=0)
    return elements / LANES / chip.clock


def _elements(aval: Any) -> float:
    if isinstance(aval, jaxlink.AbstractRef) or not hasattr(aval, "shape") or jaxlink.is_opaque(aval.dtype):
        return 0
    return math.prod(aval.shape) * min(jnp.dtype(aval.dtype).itemsize, 4) / 4


def copy_seconds(size: int, chip: Chip) -> float:
    """How long a copy of so many bytes takes at an SM's share of the memory bandwidth."""
    return size / (chip.memory_rate / chip.num_sms)


def product_seconds(m: int, n: int, k: int, bits: int, chip: Chip) -> float:
    """How long a tensor core takes for an (m, k) x (k, n) product of operands of so many bits."""
    rate = chip.tensor_rate / chip.num_sms * {32: 0.5, 8: 2.0, 4: 4.0}.get(bits, 1.0)
    return 2 * m * n * k / rate
