"""What kernels take of a chip: VMEM on TPUs against the tutorial's formula, registers and spills on NVIDIA GPUs.

    ./dev exec python benchmarks/compilers_memory.py                # both, as Markdown tables
    ./dev exec python benchmarks/compilers_memory.py --tpus v5e     # one TPU, and no GPU
    ./dev exec python benchmarks/compilers_memory.py --sms sm_90    # the other way round

The formula (tutorial 6.3): two buffers of each block, in and out, and the accumulators; compared with what the program
that libtpu compiled says of itself. Nothing is run, and no time is measured.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import tpu as pltpu

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
from flash_attention import flash_attention

from compiler.triton.large import LARGE

BLOCKS = ((128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 512, 1024))  # of the tutorial: rows, inner, columns


def sds(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(n: int, rows: int, inner: int, columns: int) -> Callable:
    return pl.pallas_call(
        matmul_kernel,
        sds((n, n)),
        grid=(n // rows, n // columns, n // inner),
        in_specs=[
            pl.BlockSpec((rows, inner), lambda i, j, k: (i, k)),
            pl.BlockSpec((inner, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def layer_norm_kernel(x_ref, w_ref, b_ref, o_ref):
    x = x_ref[...]
    mean = jnp.mean(x, axis=1, keepdims=True)
    centred = x - mean
    variance = jnp.mean(centred * centred, axis=1, keepdims=True)
    o_ref[...] = centred * jax.lax.rsqrt(variance + 1e-5) * w_ref[...] + b_ref[...]


def layer_norm(n: int, width: int, rows: int) -> Callable:
    row, block = pl.BlockSpec((1, width), lambda i: (0, 0)), pl.BlockSpec((rows, width), lambda i: (i, 0))
    return pl.pallas_call(
        layer_norm_kernel, sds((n, width), jnp.float32), grid=(n // rows,), in_specs=[block, row, row], out_specs=block
    )


def kernels() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """Name, call and operands of each."""
    for block in BLOCKS:
        yield f"matmul bf16 4096³, blocks {'×'.join(map(str, block))}", matmul(4096, *block), (sds((4096, 4096)),) * 2
    x, w = sds((8192, 1024), jnp.float32), sds((1, 1024), jnp.float32)
    yield "LayerNorm f32 8192×1024, 256 rows", layer_norm(8192, 1024, 256), (x, w, w)
    for causal in (False, True):
        name = f"flash attention bf16 8×4096×128{', causal' * causal}, blocks of 256 and 512"
        f = functools.partial(flash_attention, causal=causal, block_q=256, block_k=512)
        yield name, f, (sds((1, 8, 4096, 128)),) * 3


def formula(f: Callable, operands: tuple[Any, ...]) -> int:
    """Bytes of VMEM by the tutorial: blocks twice, scratch once; rows and columns of tiles full."""
    (call,) = _calls(f, operands)
    gm, body = call["grid_mapping"], call["jaxpr"]
    blocks = [(m.ref_shape, m.array.dtype) for m in gm.block_mappings]
    scratch = [(v.aval.shape, v.aval.dtype) for v in body.invars[gm.num_prefetch + len(blocks) :]]
    return 2 * sum(_tiled(*b) for b in blocks) + sum(_tiled(*s) for s in scratch)


def _calls(f: Callable, operands: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [eqn.params for eqn in jax.make_jaxpr(f)(*operands).eqns if eqn.primitive.name == "pallas_call"]


def _tiled(shape: tuple[int, ...], dtype: Any) -> int:
    *outer, rows, columns = shape
    return math.prod(outer) * -(-rows // 8) * 8 * -(-columns // 128) * 128 * jnp.dtype(dtype).itemsize


def _mib(n: float) -> str:
    return f"{n / 2**20:.2f} MiB"


def on_tpus(chips: list[str]) -> None:
    print(f"\n| kernel | formula | {' | '.join(chips)} |\n|---{'|---' * (len(chips) + 1)}|")
    for name, f, operands in kernels():
        cells = []
        for chip in chips:
            (call,) = pl.compile(f, *operands, target=f"tpu:{chip}").calls
            cells.append(call.refusal.message.splitlines()[0] if call.refusal else _mib(call.fact("vmem_bytes")))
        print(f"| {name} | {_mib(formula(f, operands))} | {' | '.join(cells)} |", flush=True)


def on_gpus(sms: list[str]) -> None:
    print(f"\n| kernel | {' | '.join(sms)} |\n|---{'|---' * len(sms)}|")
    for name, build in LARGE.items():
        f, operands = build()
        cells = []
        for sm in sms:
            (call,) = pl.compile(f, *operands, target=f"triton:{sm}").calls
            if call.refusal:
                cells.append(call.refusal.message.splitlines()[0])
                continue
            spilled = call.fact("spill_bytes")
            spills = f"**{spilled} B spilled**" if spilled else "no spills"
            cells.append(f"{call.fact('registers')} registers, {spills}, {call.fact('shared_bytes') >> 10} KiB shared")
        print(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="VMEM on TPUs, registers and spills on GPUs.")
    parser.add_argument("--tpus", nargs="*", metavar="CHIP")
    parser.add_argument("--sms", nargs="*", metavar="SM")
    given = parser.parse_args()
    both = given.tpus is None and given.sms is None
    if chips := ["v5e", "v6e"] if both else given.tpus:
        on_tpus(chips)
    if sms := ["sm_80", "sm_90", "sm_100"] if both else given.sms:
        on_gpus(sms)


if __name__ == "__main__":
    main()
