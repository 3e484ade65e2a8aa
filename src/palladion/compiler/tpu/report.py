"""What libtpu made of a kernel call: VMEM, code, cost, compile time; or why it refuses it.

VMEM is what the compiled program says that it uses: the blocks, twice each while they are double-buffered, scratch, and
what registers spill. Flops and bytes are those of the call's cost estimate: libtpu does not look into kernels for them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from palladion.compiler import child
from palladion.compiler.reports import CompiledCall, Fact
from palladion.compiler.tpu import aot, refusals
from palladion.compiler.tpu.topologies import CHIPS
from palladion.errors import explain
from palladion.language.dtypes import element_bits
from palladion.language.refs import MemorySpace
from palladion.language.tpu.memory import VMEM


def compile_call(params: dict[str, Any], target: str, mesh: Mapping[str, int] | None = None) -> CompiledCall:
    """Compile a call, from the parameters of its `pallas_call` equation.

    Arguments:
      params: of the equation.
      target: "tpu:v5e".
      mesh: axes of the `shard_map` around the call, and their sizes.

    Raises: UnsupportedPrimitive, LoweringException, ValueError: it does not lower. `refusals.TpuRefusal`: libtpu
      does not compile it. ModuleNotFoundError: there is no libtpu.
    """
    chip = CHIPS[target.partition(":")[2]]
    start = time.perf_counter()
    lowered = aot.lower(params, mesh)
    seconds = time.perf_counter() - start
    topology = chip.topology(lowered.devices)
    if topology is None:
        most = chip.topologies[-1][0]
        raise ValueError(
            explain(
                f"The call is made on {lowered.devices} devices, but {target} is compiled for {most} at most.",
                hint="compile it in a smaller mesh: kernels are the same for every number of devices",
            )
        )
    asked = getattr(params["compiler_params"], "vmem_limit_bytes", None)
    capacity = chip.info.vmem_capacity_bytes
    limit = min(asked or chip.vmem_limit_bytes, capacity)
    of = refusals.Compiled(chip, target, limit, params["grid_mapping"])
    if (least := least_vmem(params)) > capacity:  # libtpu finds that out too, but only after it has unrolled it all
        raise refusals.overflow(least, of, at_least=True)
    try:
        program = aot.compile(lowered, topology)
    except child.CompilerFailure as failure:
        raise refusals.explained(failure, of) from failure
    stages = {
        "jaxpr": lambda: str(params["jaxpr"]),
        "mosaic": lambda: aot.mosaic(params, mesh),
        "stablehlo": lambda: lowered.text,
        "hlo": lambda: program.hlo,
    }
    facts = _facts(program, limit, capacity, seconds)
    return CompiledCall(target, params["name"], facts=tuple(facts), _stages=stages)


def _facts(program: aot.Program, limit: int, capacity: int, lowering: float) -> list[Fact]:
    # A call of which XLA leaves nothing, for it has no elements, has less code than the empty program.
    code = max(0, program.memory["generated_code_size_in_bytes"] - program.empty_code_bytes)
    vmem = vmem_used(program.hlo)
    facts = [
        Fact("code_bytes", "code", code, _bytes(code)),
        Fact("vmem_bytes", "VMEM", vmem, _bytes(vmem)),
        Fact("vmem_limit_bytes", "VMEM limit", limit, f"{_mib(limit)} of {capacity >> 20} MiB"),
    ]
    if "flops" in program.cost:  # the call has a cost estimate
        flops, moved = int(program.cost["flops"]), int(program.cost.get("bytes accessed", 0))
        facts += [Fact("flops", "flops", flops, f"{flops:,}"), Fact("moved_bytes", "moved", moved, _bytes(moved))]
    return [
        *facts,
        Fact("lower_seconds", "lowering", lowering, f"{1e3 * lowering:.0f} ms"),
        Fact("libtpu_seconds", "libtpu", program.seconds, f"{1e3 * program.seconds:.0f} ms"),
    ]


def least_vmem(params: Mapping[str, Any]) -> int:
    """Bytes of VMEM that a call needs at the least: one block of each operand there, and the scratch."""
    gm, body = params["grid_mapping"], params["jaxpr"]
    scratch = [v.aval for v in body.invars[gm.num_prefetch + len(gm.block_mappings) :]]
    blocks = [(m.ref_shape, m.array.dtype, m.memory_space) for m in gm.block_mappings]
    buffers = [*blocks, *((s.shape, s.dtype, s.memory_space) for s in scratch)]
    bits = [
        math.prod(shape) * element_bits(dtype)
        for shape, dtype, space in buffers
        if space in (None, MemorySpace.DEFAULT, VMEM) and jnp.issubdtype(dtype, jnp.number)
    ]
    return sum(bits) // 8


def vmem_used(hlo: str) -> int:
    """Bytes of VMEM that the kernels in a compiled program take; of several, the one that takes most."""
    used = re.findall(r'custom_call_target="tpu_custom_call".*?"used_scoped_memory_configs":\[(.*?)\]', hlo)
    spaces = [re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', kernel) for kernel in used]
    return max((sum(map(int, sizes)) for sizes in spaces), default=0)


def _mib(n: int) -> str:
    """MiB without digits that say nothing: 16, 0.5."""
    return f"{n / 2**20:.3g}"


def _bytes(n: int) -> str:
    return f"{n:,} B" if n < 10 << 10 else f"{n / 1024:,.1f} KiB" if n < 1 << 20 else f"{n / 2**20:,.1f} MiB"
