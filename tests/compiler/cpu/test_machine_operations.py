"""Operations of a TPU in native CPU code: marks do nothing, what needs a machine is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import cpu as plcpu
from palladion import tpu as pltpu

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
HBM = pl.BlockSpec(memory_space=pl.ANY)


def run(kernel, *scratch, **more):
    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), scratch_shapes=scratch,
        compiler_params=plcpu.CompilerParams(), **more,
    )(X)  # fmt: skip


def test_marks():
    def kernel(x_ref, o_ref):
        pltpu.touch(x_ref)
        pltpu.trace_value("first", x_ref[0, 0])
        o_ref[...] = pltpu.with_memory_space_constraint(x_ref[...] * 2, pltpu.VMEM)

    np.testing.assert_array_equal(run(kernel), X * 2)


def copy(x_ref, o_ref, sem):
    pltpu.make_async_copy(x_ref, o_ref, sem).start()


def scoped(x_ref, o_ref):
    pl.run_scoped(lambda sem: copy(x_ref, o_ref, sem), pltpu.SemaphoreType.DMA)


def signal(x_ref, o_ref, sem):
    pl.semaphore_signal(sem, 1)


def draw(x_ref, o_ref):
    o_ref[...] = pltpu.prng_random_bits(x_ref.shape).astype(jnp.float32)


@pytest.mark.parametrize(
    ("kernel", "operation", "scratch"),
    [
        (copy, "dma_start", [pltpu.SemaphoreType.DMA]),
        (scoped, "dma_start", []),
        (signal, "semaphore_signal", [pltpu.SemaphoreType.REGULAR]),
        (draw, "prng_random_bits", []),
    ],
)
def test_what_needs_a_machine(kernel, operation, scratch):
    spaces = {} if kernel is draw else dict(in_specs=[HBM], out_specs=HBM)
    with pytest.raises(pl.UnsupportedPrimitive, match=f"`{operation}` is not supported") as caught:
        run(kernel, *scratch, **spaces)
    assert "the simulated TPU" in caught.value.supported_by
    assert "test_machine_operations.py" in caught.value.where
