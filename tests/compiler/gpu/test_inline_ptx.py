"""`plgpu.inline_ptx` runs PTX on the elements of arrays, and refuses what no register holds."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import UnsupportedPrimitive

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)


def call(body, *args, out, interpret=None):
    def kernel(*refs):
        ins, outs = refs[: len(args)], refs[len(args) :]
        for ref, value in zip(outs, body(*(r[...] for r in ins))):
            ref[...] = value

    shapes = [jax.ShapeDtypeStruct(args[0].shape, d) for d in out]
    return pl.pallas_call(kernel, shapes, interpret=interpret or plgpu.EmulateParams())(*args)


@needs_nvrtc
@pytest.mark.parametrize("shape", [(256,), (7, 5), (1,)])
def test_it_computes(shape):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(0, 1 << 30, shape), jnp.uint32) for _ in range(2))
    code = "{ .reg .b32 t; xor.b32 t, $2, $3; popc.b32 $0, t; lop3.b32 $1, $2, $3, t, 0x96; }"
    bits, parity = call(
        lambda a, b: plgpu.inline_ptx(code, a, b, dtype=(jnp.uint32, jnp.uint32)), x, y, out=("uint32",) * 2
    )
    t = np.asarray(x) ^ np.asarray(y)
    np.testing.assert_array_equal(bits, np.bitwise_count(t))
    np.testing.assert_array_equal(parity, np.asarray(x) ^ np.asarray(y) ^ t)


@needs_nvrtc
def test_halves_floats_and_scalars():
    x = jnp.linspace(-2, 2, 128).astype(jnp.float16)
    y = jnp.linspace(0, 1, 128, dtype=jnp.float32)

    def body(a, b):
        double = plgpu.inline_ptx("add.f16 $0, $1, $1;", a, dtype=jnp.float16)
        scaled = plgpu.inline_ptx("fma.rn.f32 $0, $1, $2, $1;", b, jnp.float32(3.0), dtype=jnp.float32)
        return double, scaled

    double, scaled = call(body, x, y, out=("float16", "float32"))
    np.testing.assert_array_equal(double, np.asarray(x) * 2)
    np.testing.assert_allclose(scaled, np.asarray(y) * 4, rtol=1e-6)


def test_what_it_refuses():
    x = jnp.ones((8,), jnp.float32)

    def refused(kind, text, *given, **options):
        with pytest.raises(kind, match=text):
            call(lambda a: (plgpu.inline_ptx(*(a if g is ... else g for g in given), **options),), x, out=("float32",))

    refused(TypeError, "code of plgpu.inline_ptx", 3, ..., dtype=jnp.float32)
    refused(ValueError, r"names \$2", "add.f32 $0, $1, $2;", ..., dtype=jnp.float32)
    refused(TypeError, "no register for bool", "mov.b32 $0, $1;", ..., dtype=jnp.bool_)
    refused(ValueError, "needs an operand", "mov.b32 $0, 1;", dtype=jnp.float32)
    with pytest.raises(ValueError, match="inside a kernel"):
        plgpu.inline_ptx("mov.b32 $0, $1;", x, dtype=jnp.float32)


def test_other_targets_name_the_compiler():
    x = jnp.ones((8,), jnp.float32)
    with pytest.raises(UnsupportedPrimitive, match=r"inline_ptx(.|\n)*the Mosaic GPU compiler"):
        call(lambda a: (plgpu.inline_ptx("mov.b32 $0, $1;", a, dtype=jnp.float32),), x, out=("float32",),
             interpret=plgpu.InterpretGPUParams())  # fmt: skip
