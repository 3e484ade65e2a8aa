"""Row-wise kernels as machine code: wide loads and stores, two meetings of the threads, nothing in local memory."""

import re

import jax
import jax.numpy as jnp
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.compiler.entry import _calls_in
from palladion.compiler.gpu import cache, nvrtc, sass
from palladion.compiler.gpu.generate import generate

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'"
)
ROWS, COLUMNS = 4, 1024


def softmax(x_ref, w_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    o_ref[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(o_ref.dtype)


def layer_norm(x_ref, w_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    x = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(x * x, -1, keepdims=True)
    o_ref[...] = (x * jax.lax.rsqrt(variance + 1e-5) * w_ref[...]).astype(o_ref.dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernel", [softmax, layer_norm])
def test_memory_and_meetings(kernel, dtype):
    rows = pl.BlockSpec((ROWS, COLUMNS), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((4 * ROWS, COLUMNS), dtype),
        grid=(4,),
        in_specs=[rows, pl.BlockSpec((COLUMNS,), lambda i: (0,))],
        out_specs=rows,
        interpret=True,
    )
    traced = jax.make_jaxpr(call)(jnp.ones((4 * ROWS, COLUMNS), dtype), jnp.ones((COLUMNS,), dtype))
    (equation,) = _calls_in(traced.jaxpr)
    made = generate(equation.params, "sm_90a")
    code = sass.disassemble(cache.compile_source(made.source, made.arch, made.name).cubin)
    found = re.findall(r"\b(LDG|STG|LDL|STL|BAR)\b([.\w]*)", code)
    vectors = ROWS * COLUMNS * jnp.dtype(dtype).itemsize // 16 // 128  # of 16 bytes a thread
    stores = [tail for name, tail in found if name == "STG"]
    loads = [tail for name, tail in found if name == "LDG"]
    assert len(stores) == vectors and all(".128" in tail for tail in stores)
    assert len(loads) >= vectors and all(".128" in tail for tail in loads)
    assert sum(name == "BAR" for name, _ in found) == 2  # one for each sum or maximum over the warps
    assert not any(name in ("LDL", "STL") for name, _ in found)


def test_prints_with_formats(capfd):
    def kernel(x_ref, i_ref, o_ref):
        x = x_ref[...]
        pl.debug_print('x = {} sum {:.3f} |{:>6d} {}% "', x, jnp.sum(x), i_ref[0], i_ref[0] > 1)
        jax.debug.print("{b} before {a}", a=i_ref[1], b=x_ref[0, 1])
        o_ref[...] = x

    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 4
    pl.pallas_call(kernel, jax.ShapeDtypeStruct((2, 3), x.dtype), interpret=plgpu.EmulateParams())(
        x, jnp.array([3, -5])
    )
    out = capfd.readouterr().out
    assert 'x = [[0 0.25 0.5]\n [0.75 1 1.25]] sum 3.750 |     3 True% "\n' in out
    assert "0.25 before -5\n" in out
