"""PTX that Triton's compiler makes of kernels, run on the emulator, against NumPy and the reference interpreter.

Nothing of this PTX is ours: the emulator has to know what other compilers emit.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import corpus
import palladion as pl
from compiler.triton.kernels import KERNELS
from compiler.triton.large import flash_attention, matmul
from compiler.triton.running import evaluate_with, grid_of
from compiler.triton.table import NOT_THE_VALUES, REFUSED
from palladion import triton as pltriton
from palladion.compiler.triton import compile as compiler
from palladion.compiler.triton.module import lower_call
from palladion.emulator.driver import EmulatedDriver

pytestmark = [
    pytest.mark.skipif(not compiler.available(), reason="the triton package is not installed"),
    pytest.mark.filterwarnings("ignore::palladion.errors.PalladionWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """Triton's cache on disk apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


SECONDS: list[float] = []
"""What each launch took."""
PTX: list[str] = []
"""The text of each kernel."""
TF32: list[bool] = []
"""Whether each kernel multiplied in tf32, as Triton does by default: 11 bits of the operands."""


def on_the_emulator(params: dict[str, Any], operands: list[Any], sm: int = 90) -> list[np.ndarray]:
    """A kernel call: lowered, compiled to PTX by Triton, and run."""
    kernel, gm = lower_call(params, sm), params["grid_mapping"]
    compiled = compiler.compile_ttir(kernel.text, sm, kernel.num_warps, kernel.num_stages)
    PTX.append(compiled.code["ptx"])
    TF32.append("tf32" in compiled.code["ptx"])
    sizes, arrays = operands[: gm.num_dynamic], [np.array(x, order="C") for x in operands[gm.num_dynamic :]]
    aliases = {out: k for k, out in dict(params["input_output_aliases"]).items()}
    driver = EmulatedDriver(arch=f"sm_{sm}a")
    addresses = []
    for x in arrays:
        addresses.append(driver.alloc(x.nbytes))
        driver.copy_in(addresses[-1], x)
    outs = []
    for k, mapping in enumerate(gm.outputs):
        dtype, shape = np.dtype(mapping.array.dtype), mapping.array.shape
        if k in aliases:
            outs.append((addresses[aliases[k]], shape, dtype))
        else:
            outs.append((driver.alloc(int(np.prod(shape)) * dtype.itemsize), shape, dtype))
        addresses.append(outs[-1][0])
    function = driver.function(driver.load_module(compiled.code["ptx"]), kernel.name)
    entry = function.loaded.module.functions[kernel.name]
    args = [np.uint64(a).tobytes() for a in addresses]
    args += [bytes(p.size) for p in entry.params[len(args) :]]  # scratch memory that these kernels do not use
    threads = entry.directives["reqntid"][0]
    grid = grid_of(kernel, [int(n) for n in sizes])
    begin = time.perf_counter()
    driver.launch(function, grid, (threads, 1, 1), args, smem=compiled.shared_bytes)
    SECONDS.append(time.perf_counter() - begin)
    return [driver.copy_out(a, int(np.prod(s)) * d.itemsize).view(d).reshape(s) for a, s, d in outs]


def test_softmax_and_its_time():
    def softmax(x_ref, o_ref):
        x = x_ref[...]
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        o_ref[...] = e / jnp.sum(e, axis=-1, keepdims=True)

    x = np.random.default_rng(0).standard_normal((50, 256)).astype("f4")
    spec = pl.BlockSpec((1, 256), lambda i: (i, 0))
    call = pl.pallas_call(
        softmax,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(50,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltriton.CompilerParams(num_warps=4),
    )
    got = evaluate_with(on_the_emulator, call, x)
    e = np.exp(x.astype("f8") - x.max(1, keepdims=True))
    np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), rtol=3e-6)
    assert SECONDS[-1] < 1.0, "the emulator's own goal; it needs a tenth of that on an idle machine"


def close_as_tf32(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        w = np.asarray(w, "f8")
        np.testing.assert_allclose(np.asarray(g, "f8"), w, rtol=0, atol=2e-3 * np.abs(w).max())


# The whole corpus, and of the kernels some: most of the time is that of Triton, which compiles them.
SOME_KERNELS = [*list(KERNELS)[::9], "products", "conversions"]
CASES = [name for name in corpus.CASES if name not in REFUSED and name not in NOT_THE_VALUES]


@pytest.mark.parametrize("name", dict.fromkeys(SOME_KERNELS))
def test_kernels(name):
    call, operands = KERNELS[name]()
    reference, _ = KERNELS[name](interpret=True)
    want = jax.tree.leaves(reference(*operands))
    got = jax.tree.leaves(evaluate_with(on_the_emulator, call, *operands))
    assert len(got) == len(want)
    if TF32[-1]:
        return close_as_tf32(got, want)
    for g, w in zip(got, map(np.asarray, want)):
        assert g.dtype == w.dtype and g.shape == w.shape
        narrow = w.dtype.itemsize < 4 and w.dtype.kind not in "iub"
        np.testing.assert_allclose(g.astype("f8"), w.astype("f8"), rtol=2e-2 if narrow else 1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_corpus(name):
    case = corpus.CASES[name]
    with corpus.scope(case):
        args = corpus.arguments(case)
        got = jax.tree.map(np.asarray, evaluate_with(on_the_emulator, case.make(), *args))
    want = corpus.expected(case, args)
    if TF32[-1]:
        return close_as_tf32(got, want)
    corpus.compare(case, got, want)


INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.mark.parametrize(
    "sm, size, block, deep, stages",
    [(80, 200, 64, 32, 2), (90, 200, 64, 32, 2), (90, 256, 128, 64, 3), (100, 200, 64, 32, 2)],
)
def test_products_on_the_tensor_cores_of_each_generation(sm, size, block, deep, stages):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((size, size)).astype(jnp.bfloat16) for _ in range(2))
    call = matmul(size, block, deep, 4, stages)
    got = evaluate_with(lambda params, operands: on_the_emulator(params, operands, sm), call, x, y)
    assert INSTRUCTION[sm] in PTX[-1] and "cp.async" in PTX[-1]
    want = x.astype("f8") @ y.astype("f8")
    np.testing.assert_allclose(np.asarray(got, "f8"), want, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("sm", INSTRUCTION)
def test_attention(sm):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 128, 64)).astype(jnp.bfloat16) for _ in range(3))
    call = flash_attention(1, 128, 64, 64, 64, True)
    got = evaluate_with(lambda params, operands: on_the_emulator(params, operands, sm), call, q, k, v)
    assert INSTRUCTION[sm] in PTX[-1]
    a, b, c = (x[0].astype("f8") for x in (q, k, v))
    scores = np.where(np.tril(np.ones((128, 128), bool)), a @ b.T / 8, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(np.asarray(got, "f8")[0], p / p.sum(1, keepdims=True) @ c, atol=2e-2)
