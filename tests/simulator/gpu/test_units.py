"""Units of an SM in simulated time: requests come in any order, and none of them overlap."""

import random

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion
import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.simulator.gpu.units import Unit
from simulator.gpu.calls import numbers, params, quiet


@pytest.mark.parametrize("seed", range(20))
def test_spans_do_not_overlap_and_gaps_are_used(seed):
    rng, unit, taken = random.Random(seed), Unit(), []
    for _ in range(60):
        now, seconds = rng.randrange(200), rng.choice([0, 1, 2, 5])
        begin = unit.gap(now, seconds)
        assert begin >= now
        free = [t for t in range(now, begin) if all(t + seconds <= b or t >= e for b, e in taken)]
        assert not free or seconds == 0, (now, seconds, begin, taken)
        unit.take(begin, seconds)
        if seconds:
            assert all(begin + seconds <= b or begin >= e for b, e in taken)
            taken.append((begin, begin + seconds))
            assert unit.idle_from == max(e for _, e in taken)


def test_a_thread_that_is_simulated_later_may_be_earlier():
    """Thread 0 computes at 50 us, thread 1 at 0 us: the tensor core is idle then, whoever is simulated first."""

    def kernel(a_ref, b_ref, y_ref, a, b, done):
        t = lax.axis_index("t")

        @pl.when(t == 0)
        def _():
            a[...] = a_ref[...]
            b[...] = b_ref[...]
            plgpu.commit_smem()
            plgpu.barrier_arrive(done)

        plgpu.barrier_wait(done)

        @pl.when(t == 0)
        def _():
            pl.delay(50_000)

        def product(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        y_ref[t] = pl.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = numbers(64, 64, dtype=jnp.float16), numbers(64, 64, dtype=jnp.float16)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    call = plgpu.kernel(
        kernel, out_shape=numbers(2, 64, 64), num_threads=2, thread_name="t", interpret=params(trace=True),
        scratch_shapes=[plgpu.SMEM((64, 64), jnp.float16, transforms=tiled)] * 2 + [plgpu.Barrier()],
    )  # fmt: skip
    got = quiet(lambda: call(a, b))
    np.testing.assert_array_equal(got, np.stack([np.float32(a) @ np.float32(b)] * 2))
    begins = sorted(s.start for s in palladion.last_report().timeline.spans if s.kind == "product")
    assert begins[0] < 20e-6 < 50e-6 <= begins[1]
