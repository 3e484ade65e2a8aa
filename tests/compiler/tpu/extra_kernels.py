"""Kernels with operations that the corpus has not, for libtpu to compile: name -> (function, operands)."""

import jax
import jax.numpy as jnp
from jax import lax

import palladion as pl
from compiler.tpu.calls import sds
from compiler.tpu.test_kernels import HBM, SMEM, matmul_by_a_pipeline
from palladion import tpu as pltpu

KERNELS = {}
i32 = jnp.int32


def kernel(out, *operands, **options):
    def register(body):
        KERNELS[body.__name__] = pl.pallas_call(body, out, **options), operands
        return body

    return register


def _unaligned(dtype):
    def body(at_ref, x_ref, new_ref, part_ref, o_ref):
        place = pl.ds(at_ref[0], 16), pl.ds(at_ref[1], 40)
        part_ref[...] = x_ref[place]
        o_ref[...] = x_ref[...]
        o_ref[place] = new_ref[...]

    part, whole = sds(16, 40, dtype=dtype), sds(64, 512, dtype=dtype)
    call = pl.pallas_call(body, (part, whole), in_specs=[SMEM, pl.BlockSpec(), pl.BlockSpec()])
    KERNELS[f"unaligned_{jnp.dtype(dtype).name}"] = call, (sds(2, dtype=i32), whole, part)


for _dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32):
    _unaligned(_dtype)
KERNELS["pipeline"] = matmul_by_a_pipeline(256, 256, 384, 128), (sds(256, 384), sds(384, 256))


@kernel(sds(8, 128), sds(8, 128), sds(8, 128, dtype=i32))
def gathers(x_ref, i_ref, o_ref):
    x, i = x_ref[...], i_ref[...]
    o_ref[...] = jnp.take_along_axis(x, i, 1) + jnp.take_along_axis(x, i, 0) + jnp.take(x, i[:, 0], axis=0)


@kernel(sds(8, 128), sds(1, dtype=i32), sds(8, 128), in_specs=[SMEM, pl.BlockSpec()], grid=(2,))
def prints_and_checks(n_ref, x_ref, o_ref):
    pl.debug_print("n = {}, x = {}", n_ref[0], x_ref[0, 0])
    pl.debug_print("here")
    pltpu.trace_value("n", n_ref[0])
    pl.delay(100)
    o_ref[...] = x_ref[...]


@kernel((sds(8, 128, dtype=i32), sds(8, 128)), sds(1, dtype=i32), in_specs=[SMEM])
def generator(seed_ref, bits_ref, uniform_ref):
    pltpu.prng_seed(seed_ref[0], 3)
    bits_ref[...] = pltpu.prng_random_bits((8, 128))
    uniform_ref[...] = pltpu.stateful_uniform((8, 128))


@kernel(sds(8, 128), jax.eval_shape(lambda: pltpu.to_pallas_key(jax.random.key(0))), in_specs=[SMEM])
def pallas_keys(key_ref, o_ref):
    o_ref[...] = jax.random.uniform(key_ref[...], (8, 128))


@kernel(sds(8, 128), sds(8, 128))
def rolls(x_ref, o_ref):
    o_ref[...] = pltpu.roll(x_ref[...], 3, 1) + pltpu.roll(x_ref[...], jnp.argmax(x_ref[0, :]), 0)


@kernel(sds(16, 128, dtype=jnp.bfloat16), sds(8, 128))
def bitcasts(x_ref, o_ref):
    o_ref[...] = x_ref.bitcast(jnp.bfloat16)[...]


@kernel(sds(8, 128), sds(8, 128), sds(8, 128), input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=1 << 24, has_side_effects=True),
        cost_estimate=pl.CostEstimate(flops=1024, transcendentals=0, bytes_accessed=8192))  # fmt: skip
def options(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


@kernel(sds(64, 128), sds(64, 128), grid=(4,), in_specs=[pl.BlockSpec((16, 128), lambda i: (3 - i, 0))],
        out_specs=pl.BlockSpec((16, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(1)))  # fmt: skip
def backwards(x_ref, o_ref):
    o_ref[...] = x_ref[...]


@kernel(sds(8, 128), sds(8, 128), scratch_shapes=[pltpu.SemaphoreType.REGULAR, pltpu.SMEM((4,), i32)])
def semaphores_and_scalars(x_ref, o_ref, sem, counts):
    pl.semaphore_signal(sem, 2)
    counts[0] = pl.semaphore_read(sem)
    pl.semaphore_wait(sem, 2)
    o_ref[...] = x_ref[...] * counts[0].astype(jnp.float32)


def _cores():
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    @pl.kernel(out_type=sds(16, 128), mesh=mesh, scratch_types=[pltpu.SemaphoreType.DMA])
    def copy(x_ref, o_ref, sem):
        rows = pl.ds(lax.axis_index("core") * 8, 16)
        pltpu.async_copy(x_ref.at[rows], o_ref.at[rows], sem).wait()

    KERNELS["cores"] = copy, (sds(16, 128),)


_cores()


@kernel(sds(8, 128), sds(64, 128), in_specs=[HBM])
def scoped(x_ref, o_ref):
    def body(tmp, sem):
        pltpu.async_copy(x_ref.at[pl.ds(8, 8)], tmp, sem).wait()
        return tmp[...]

    o_ref[...] = pl.run_scoped(body, pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA)


@kernel(sds(8, 128), sds(8, 128))
def functions(x_ref, o_ref):
    x = x_ref[...]
    for f in (jnp.expm1, jnp.sinh, jnp.arcsinh, jnp.cbrt, lax.erfc, lax.erf_inv, lax.lgamma, lax.digamma, jnp.arctan):
        x = f(x)
    o_ref[...] = x + lax.reduce(x, 1.0, lambda a, b: a * b, (0,))


@kernel(sds(8, 128), sds(8, 128))
def refs_of_its_own(x_ref, o_ref):
    total, count = jax.new_ref(x_ref[...]), jax.new_ref(jnp.int32(0))

    @pl.loop(0, 4)
    def _(i):
        total[...] += x_ref[...]
        count[...] += i

    o_ref[...] = total[...] * count[...].astype(jnp.float32)
