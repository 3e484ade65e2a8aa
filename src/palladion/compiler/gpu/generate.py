"""From the parameters of a kernel call to the CUDA C++ of one `__global__` function.

A kernel on a mesh (`plgpu.kernel`) is compiled as it is written. A call with a grid (`pl.pallas_call`) goes through
`blocks.py`, which writes the pipeline of copies around the kernel's body.

CUDA's grid has one dimension: the clusters in row-major order of the kernel's axes, the blocks of a cluster next to
each other (so that rank = blockIdx.x modulo the cluster's size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from palladion.compiler.gpu import memory, rules
from palladion.compiler.gpu.generated import Generated, Pointer
from palladion.compiler.gpu.header import PRELUDE
from palladion.compiler.gpu.unit import Unit
from palladion.compiler.gpu.values import Scalar
from palladion.compiler.gpu.writer import kernel_name
from palladion.errors import explain
from palladion.language.gpu.layout_inference import inferred_layouts

ARCHS = ("sm_90a", "sm_100a")
MAX_BLOCKS = 2**31 - 1


def generate(params: dict[str, Any], arch: str, mesh: Mapping[str, int] | None = None) -> Generated:
    """Compile a call to CUDA C++.

    Arguments:
      params: of the call's `pallas_call` equation.
      arch: "sm_90a" or "sm_100a".
      mesh: axes of the devices around the call (`shard_map`), and their sizes.

    Raises: UnsupportedPrimitive, NotImplementedError, KernelFinding, TypeError, ValueError: with the user's line.
    """
    if arch not in ARCHS:
        raise ValueError(explain(f"There is no architecture {arch!r}.", hint=f"it is one of {', '.join(ARCHS)}"))
    jaxpr = params["jaxpr"]
    unit = Unit(arch, params["mesh"], inferred_layouts(jaxpr))
    unit.tables.more["devices"] = dict(mesh or {})
    memory.prepare(unit, params)
    if params["mesh"] is None:
        from palladion.compiler.gpu import blocks

        grid, cluster = blocks.write(unit, params)
    else:
        grid, cluster = _mesh_kernel(unit, params)
    return _assembled(unit, params, grid, cluster)


def _mesh_kernel(unit: Unit, params: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    mesh, gm, jaxpr = params["mesh"], params["grid_mapping"], params["jaxpr"]
    size = math.prod(mesh.cluster)
    place(unit, mesh.grid_names, mesh.grid, "blockIdx.x" if size == 1 else f"(blockIdx.x / {size})")
    place(unit, mesh.cluster_names, mesh.cluster, f"(blockIdx.x % {size})")
    if mesh.thread_name is not None:
        unit.axes[mesh.thread_name] = Scalar("wg", np.dtype(np.int32))
    count = gm.num_prefetch + gm.num_inputs + gm.num_outputs
    aliases = dict(params["input_output_aliases"])
    refs = []
    for k, var in enumerate(jaxpr.invars):
        if k < count:
            operand = gm.num_prefetch + gm.num_inputs + aliases[k] if k in aliases else k
            refs.append(memory.operand(unit, var.aval, Pointer(operand), k))
    scratch = range(count, len(jaxpr.invars))
    refs += memory.scratch_all(unit, [jaxpr.invars[k].aval for k in scratch], list(scratch))
    unit.run(jaxpr, refs)
    return math.prod(mesh.grid), tuple(mesh.cluster)


def place(unit: Unit, names: Any, sizes: Any, flat: str) -> None:
    """Name the coordinates of `flat`, a row-major number, along axes."""
    for k, (name, size) in enumerate(zip(names, sizes)):
        below = math.prod(sizes[k + 1 :])
        text = flat if below == 1 else f"{flat} / {below}"
        text = text if k == 0 else f"{text} % {size}"
        if size == 1:
            unit.axes[name] = Scalar("0", np.dtype(np.int32), 0)
        else:
            unit.axes[name] = unit.scalar(np.int32, f"(int)({text})", str(name))


def _assembled(unit: Unit, params: dict[str, Any], grid: int, cluster: tuple[int, ...]) -> Generated:
    memory.finish(unit)
    tables = unit.tables
    blocks_in_cluster = math.prod(cluster)
    if grid * blocks_in_cluster > MAX_BLOCKS:
        raise ValueError(explain(f"A grid of {grid * blocks_in_cluster:,} blocks is more than CUDA's {MAX_BLOCKS:,}."))
    name = kernel_name(params["name"], {*memory.functions(), *tables.functions})
    name = unit.writer.name(name)  # C++'s own words, and functions of the header, are names already
    threads = 128 * unit.num_threads
    exchange = tables.more.get("exchange", 0)
    smem = tables.smem
    lines = []
    if exchange:
        at = -(-smem // 128) * 128
        smem = at + exchange * unit.num_threads
        where = f"smem + {at}" if unit.num_threads == 1 else f"smem + {at} + wg * {exchange}"
        lines.append(f"char* const exchange = {where};  // for arrays that change their layout")
    declared = ", ".join(
        f"{memory.pointer_type(unit, of)} {n}" if isinstance(of, Pointer) else f"const __grid_constant__ TensorMap {n}"
        for n, of in tables.params
    )
    body = "\n".join(["  " + line for line in [*lines, *tables.prologue]] + unit.writer.lines
                     + ["  " + line for line in tables.epilogue])  # fmt: skip
    bounds = f"__launch_bounds__({threads}, 1)"
    dims = f" __cluster_dims__({blocks_in_cluster}, 1, 1)" if blocks_in_cluster > 1 else ""
    source = (
        f"// {' '.join(params['name'].split())}, generated by Palladion for {unit.arch}.\n{PRELUDE}{memory.HEADER}\n"
        + "".join(f"{text}\n" for text in tables.functions.values())
        + f'\nextern "C" __global__ void {bounds}{dims} {name}({declared}) {{\n'
        + "  extern __shared__ __align__(1024) char smem[];\n"
        + "  const int t = threadIdx.x % 128, lane = threadIdx.x % 32;\n"
        # The assembler is told that these are the same in all lanes: what follows from them, it keeps once a warp.
        + "  const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);\n"
        + "  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);\n"
        + f"{body}\n}}\n"
    )
    return Generated(
        name,
        source,
        unit.arch,
        threads,
        (blocks_in_cluster, 1, 1),
        (grid * blocks_in_cluster, 1, 1),
        smem,
        0,
        tables.tmem,
        sum(n for _, n, _ in tables.barriers),
        tuple(of for _, of in tables.params),
        tuple(tables.workspaces),
        tables.max_registers,
        tuple(tables.notes),
    )


__all__ = ["ARCHS", "generate", "place", "rules"]  # importing `rules` fills the table of the walk
