"""What the tests of tcgen05 share: operands, buffers, and running a kernel."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding, PalladionWarning

M, N, K = 128, 64, 64
SCHEDULES = [None, "eager", 1, 2]
TC = plgpu.Barrier(orders_tensor_core=True)


def operands(dtype=jnp.float16, m=M, n=N, k=K, seed=0):
    """Small integers, exact in every dtype here."""
    draw = np.random.default_rng(seed).integers
    a, b = draw(-2, 3, (m, k)), draw(-2, 3, (k, n))
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), a @ b


def run(body, *args, shape=(M, N), out=jnp.float32, schedule=None, scratch=None, mesh=None, warns=False, **params):
    """A kernel on arrays in GMEM; `scratch`: types of its further arguments, by name. Without `warns`, no warning."""
    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, out),
        scratch_types=scratch or {},
        interpret=plgpu.InterpretGPUParams(detect_races=True, schedule=schedule, **params),
        **(mesh or {}),
    )
    with warnings.catch_warnings():
        if not warns:
            warnings.simplefilter("error", PalladionWarning)
        return np.asarray(made(*args))


def found(body, *args, **params):
    with pytest.raises(KernelFinding) as caught:
        run(body, *args, **params)
    return caught.value.finding


def fill(a, b, a_s, b_s):
    a_s[...], b_s[...] = a[...], b[...]
    plgpu.commit_smem()


def buffers(a, b, acc=jnp.float32, n=N):
    packed = None if jnp.dtype(acc).itemsize == 4 else False
    return dict(
        a_s=plgpu.SMEM(a.shape, a.dtype),
        b_s=plgpu.SMEM(b.shape, b.dtype),
        acc=plgpu.TMEM((M, n), acc, packed=packed),
        bar=TC,
    )


def load(acc):
    value = plgpu.async_load_tmem(acc)
    plgpu.wait_load_tmem()
    return value
