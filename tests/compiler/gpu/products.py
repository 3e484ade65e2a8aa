"""Small kernels with one matrix product, for tests of the compiler's tensor core code; how to look at its code."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import sass
from palladion.compiler.gpu.build import Built, build
from simulator.gpu.kernels.common import bf16, f16, f32, f64, i8, i32, struct, tiled_smem

e4m3, e5m2, e8m0, e2m1, u8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.float4_e2m1fn, jnp.uint8
Layout = plgpu.Layout

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)


def numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Small integers, of which every sum is exact; for unsigned types from zero on."""
    low = 0 if jnp.dtype(dtype) == jnp.uint8 else -2
    values = np.random.default_rng(seed).integers(low, 3, size=shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product to compute.

    Attributes:
      m, k, n: sizes. dtype: of A. out: of the accumulator. b_dtype: of B, if another.
      a_turned, b_turned: whether an operand lies in memory with its dimensions exchanged.
      a_in: "smem"; "regs" (Hopper), "tmem" (Blackwell).
      layout: of the result of `plgpu.async_load_tmem`. parts: in how many it is loaded.
      twice: whether the product is added once more.
    """

    m: int
    k: int
    n: int
    dtype: Any
    out: Any
    b_dtype: Any = None
    a_turned: bool = False
    b_turned: bool = True
    a_in: str = "smem"
    layout: Any = None
    parts: int = 1
    twice: bool = False

    @property
    def shapes(self) -> tuple[Any, Any]:
        """Of A and B in memory."""
        a, b = (self.m, self.k), (self.k, self.n)
        return a[::-1] if self.a_turned else a, b[::-1] if self.b_turned else b

    def operands(self) -> tuple[jax.Array, jax.Array]:
        a, b = self.shapes
        return numbers(0, a, self.dtype), numbers(1, b, self.b_dtype or self.dtype)

    def expected(self, a: Any, b: Any) -> np.ndarray:
        a, b = f64(a), f64(b)
        return (a.T if self.a_turned else a) @ (b.T if self.b_turned else b) * (2 if self.twice else 1)


def _turned(ref: Any, turned: bool) -> Any:
    return plgpu.transpose_ref(ref, (1, 0)) if turned else ref


def on_hopper(p: Product, interpret: Any = None) -> Callable[..., Any]:
    """A kernel of two matrices that computes a product by `wgmma`."""

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        def compute(acc):
            a = _turned(a_smem, p.a_turned)
            if p.a_in == "regs":
                bits = 8 * jnp.dtype(p.dtype).itemsize
                a = plgpu.load(a, layout={16: Layout.WGMMA, 8: Layout.WGMMA_8BIT}.get(bits))
            for _ in range(2 if p.twice else 1):
                plgpu.wgmma(acc, a, _turned(b_smem, p.b_turned))
            return acc[...]

        o_gmem[...] = pl.run_scoped(compute, plgpu.ACC((p.m, p.n), p.out))

    a, b = p.shapes
    scratch = [tiled_smem(a, p.dtype), tiled_smem(b, p.b_dtype or p.dtype), plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(kernel, out_type=struct((p.m, p.n), p.out), scratch_types=scratch, interpret=interpret)


def on_blackwell(p: Product, interpret: Any = None) -> Callable[..., Any]:
    """A kernel of two matrices that computes a product by `tcgen05`."""

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, acc, loaded, done, *a_tmem):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        a, b = _turned(a_smem, p.a_turned), _turned(b_smem, p.b_turned)
        if a_tmem:
            plgpu.async_store_tmem(a_tmem[0], plgpu.load(a, layout=Layout.TCGEN05_TMEM_NATIVE))
            plgpu.commit_tmem()
            (a,) = a_tmem
        plgpu.tcgen05_mma(acc, a, b, None if p.twice else done, accumulate=False)
        if p.twice:
            plgpu.tcgen05_mma(acc, a, b, done)
        plgpu.barrier_wait(done)
        wide = p.n // p.parts
        for i in range(p.parts):
            columns = pl.ds(i * wide, wide)
            part = acc if p.parts == 1 else acc.at[:, columns]
            o_gmem[:, columns] = plgpu.async_load_tmem(part, layout=p.layout)
        plgpu.wait_load_tmem()

    a, b = p.shapes
    packed: dict[str, Any] = {} if jnp.dtype(p.out).itemsize == 4 else {"packed": False}
    scratch = [tiled_smem(a, p.dtype), tiled_smem(b, p.b_dtype or p.dtype), plgpu.TMEM((p.m, p.n), p.out, **packed)]
    scratch += [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(orders_tensor_core=True)]
    scratch += [plgpu.TMEM((p.m, p.k), p.dtype, packed=True)] if p.a_in == "tmem" else []
    return plgpu.kernel(kernel, out_type=struct((p.m, p.n), p.out), scratch_types=scratch, interpret=interpret)


# --- looking at code --------------------------------------------------------------------------------------------------
def params_of(call: Callable[..., Any], *operands: Any) -> dict[str, Any]:
    """The parameters of the one kernel call that a function of arrays is."""
    (eqn,) = [e for e in jax.make_jaxpr(call)(*operands).eqns if e.primitive.name == "pallas_call"]
    return eqn.params


def built(call: Callable[..., Any], arch: str, *operands: Any) -> Built:
    """A call, compiled but not run."""
    return build(params_of(call, *operands), arch)


def machine_code(compiled: Built) -> tuple[sass.Instruction, ...]:
    """The instructions of a compiled kernel."""
    return sass.instructions(sass.disassemble(compiled.binary.cubin))[compiled.generated.name]


def innermost_loop(code: tuple[sass.Instruction, ...], opcode: str) -> tuple[sass.Instruction, ...]:
    """The loop around the instructions of a kind."""
    first = next(i for i, x in enumerate(code) if x.base == opcode)
    for end in range(first, len(code)):
        target = code[end].target
        if target is not None and target <= code[first].address:
            begin = next(i for i, x in enumerate(code) if x.address == target)
            return code[begin : end + 1]
    raise ValueError(f"no loop around {opcode}")


__all__ = [
    "Layout", "Product", "bf16", "built", "e2m1", "e4m3", "e5m2", "e8m0", "f16", "f32", "f64", "i32", "i8",
    "innermost_loop",
    "machine_code", "needs_nvrtc", "numbers", "on_blackwell", "on_hopper", "params_of", "u8",
]  # fmt: skip
