"""What a kernel call becomes in Triton IR: structure, read off the module's text. Needs no triton package."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from compiler.triton.kernels import KERNELS, draw, sds
from compiler.triton.large import LARGE, matmul
from palladion import triton as pltriton
from palladion.compiler.entry import _calls_in
from palladion.compiler.triton.module import lower_call


def lowered(call, *shapes, sm=90):
    (found,) = _calls_in(jax.make_jaxpr(call)(*shapes).jaxpr)
    return lower_call(found.params, sm)


def add(shape, block, grid, dtype="float32", index=lambda *i: i, **options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec(block, index)
    call = pl.pallas_call(kernel, sds(shape, dtype), grid=grid, in_specs=[spec, spec], out_specs=spec, **options)
    return lowered(call, sds(shape, dtype), sds(shape, dtype))


def count(text, op):
    return len(re.findall(rf"\b{re.escape(op)}\b", text))


def test_pointers_are_aligned_and_carry_the_kernels_names():
    k = add((64, 128), (16, 32), (4, 4))
    assert k.plain.count("tt.divisibility = 16 : i32") == 3
    assert [a.label for a in k.arguments] == ["x_ref (input 0)", "y_ref (input 1)", "o_ref (output 0)"]
    assert [a.output for a in k.arguments] == [False, False, True]
    assert 'loc("x_ref")' in k.text


def test_no_masks_where_blocks_divide_the_array():
    text = add((64, 128), (16, 32), (4, 4)).plain
    assert "cmpi" not in text and count(text, "tt.load") == 2 and count(text, "tt.store") == 1


def test_masks_only_along_the_dimension_that_hangs_over():
    text = add((64, 100), (16, 32), (4, 4)).plain
    assert "andi" not in text and count(text, "arith.cmpi") == 3  # two loads and a store, columns alone
    assert all("tensor<1x32xi32>" in line for line in text.splitlines() if "arith.cmpi" in line)
    loads = [line for line in text.splitlines() if "tt.load" in line]
    assert all(line.count("%") == 4 for line in loads), (
        "a masked load needs pointers, a mask and what it reads elsewhere"
    )


@pytest.mark.filterwarnings("ignore::palladion.errors.PalladionWarning")
def test_indices_that_stay_inside_are_not_clamped_and_others_are():
    inside = add((64, 128), (16, 32), (4, 4), index=lambda i, j: (3 - i, jnp.minimum(i + j, 3))).plain
    assert "maxsi" not in inside and count(inside, "arith.minsi") == 3, "the user's own minimum alone"
    outside = add((64, 128), (16, 32), (8, 4), index=lambda i, j: (i, j)).plain
    assert count(outside, "arith.minsi") == 3, "of three operands, the first index"


def test_offsets_have_64_bits_only_where_the_array_needs_them():
    assert "i64" not in add((1 << 15, 1 << 15), (16, 32), (4, 4)).plain
    assert re.search(r"arith.muli .* : i64", add((1 << 16, 1 << 16), (16, 32), (4, 4)).plain)


def test_the_grid_is_cudas_and_a_longer_one_is_unrolled():
    assert add((64, 128), (16, 32), (4, 4)).grid == (4, 4, 1)
    shape = (2, 3, 2, 16)
    k = add(shape, (None, None, None, 8), (2, 3, 2, 2))
    assert k.grid == (24, 1, 1) and "get_program_id y" not in k.plain
    many = add((2, 1 << 17), (1, 1), (2, 1 << 17))
    assert many.grid == (1 << 18, 1, 1), "y has 65,535 programs at most"


def test_options_reach_the_kernel():
    k = add((64, 128), (16, 32), (4, 4), compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=5))
    assert (k.num_warps, k.num_stages) == (8, 5)
    k = add((64, 128), (16, 32), (4, 4))
    assert (k.num_warps, k.num_stages) == (4, 3)


def test_operations_carry_the_users_lines():
    k = add((64, 128), (16, 32), (4, 4))
    line = next(n for n, text in enumerate(open(__file__), 1) if "x_ref[...] + y_ref[...]" in text)
    assert f'test_lowering.py":{line}:' in k.text
    assert f'test_lowering.py":{line - 1}:1' in k.text, "the function's own line"


def test_a_fori_loop_with_run_time_bounds_is_a_for():
    call, shapes = LARGE["attention_causal"]()
    text = lowered(call, *shapes).plain
    assert count(text, "scf.for") == 1 and "scf.while" not in text and count(text, "tt.dot") == 2


def test_float8_of_ada_is_refused_before():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(jnp.float32)

    call = pl.pallas_call(kernel, sds((16, 16)))
    assert "tt.fp_to_fp" in lowered(call, sds((16, 16), "float8_e4m3fn"), sm=90).plain
    with pytest.raises(NotImplementedError, match="sm_80 does not compute with float8_e4m3fn"):
        lowered(call, sds((16, 16), "float8_e4m3fn"), sm=80)


@pytest.mark.parametrize(
    ("precision", "word"),
    [(None, "tf32"), ("high", "tf32x3"), ("highest", ""), (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, "bf16x3")],
)
def test_precision_of_float32_products(precision, word):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], precision=precision)

    text = lowered(pl.pallas_call(kernel, sds((16, 16))), sds((16, 32)), sds((32, 16))).plain
    (dot,) = [line for line in text.splitlines() if "tt.dot" in line]
    assert (f"inputPrecision = {word} " in dot) if word else "inputPrecision" not in dot, dot


def test_threads_meet_where_one_may_need_what_another_stored():
    call, operands = KERNELS["written_and_read"]()
    text = lowered(call, *operands).plain
    order = re.findall(r"gpu\.barrier|tt\.load|tt\.store", text)
    assert order[:6] == ["tt.load", "tt.store", "gpu.barrier", "tt.load", "gpu.barrier", "tt.store"]
    plain = add((64, 128), (16, 32), (4, 4)).plain
    assert "barrier" not in plain, "different arrays need none"
    aliased = add((64, 128), (16, 32), (4, 4), input_output_aliases={0: 0}).plain
    assert count(aliased, "gpu.barrier") == 1


def test_rounds_of_a_loop_wait_for_each_other():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.loop(0, 8)
        def _(i):
            o_ref[...] = o_ref[...].T

    text = lowered(pl.pallas_call(kernel, sds((16, 16))), sds((16, 16))).plain
    inside = text[text.index("scf.for") :]
    assert re.findall(r"gpu\.barrier|tt\.load|tt\.store", inside) == [
        "gpu.barrier",
        "tt.load",
        "gpu.barrier",
        "tt.store",
    ]


def test_hints_reach_loads_and_stores():
    text = lowered(*_built("masked")).plain
    assert "evict_first" in text and "evict_last" in text
    text = lowered(*_built("hints")).plain
    assert "cache_modifier = ca" in text and "isVolatile = true" in text
    assert "tt.contiguity = dense<16>" in text and "tt.divisibility = dense<16>" in text


def _built(name):
    call, operands = KERNELS[name]()
    return call, *operands


def test_inline_assembly_goes_through_as_it_is():
    def kernel(x_ref, o_ref):
        (y,) = pltriton.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;",
            args=[x_ref[...]],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[sds((32,))],
        )
        o_ref[...] = y

    text = lowered(pl.pallas_call(kernel, sds((32,))), sds((32,))).plain
    assert 'tt.elementwise_inline_asm "ex2.approx.ftz.f32 $0, $1;"' in text and 'constraints = "=f,f"' in text


def test_approximate_tanh_is_one_instruction_of_float32():
    text = lowered(*_built("approximate_tanh")).plain
    assert "tanh.approx.f32" in text and "__nv_tanhf" not in text


def test_lowering_is_the_same_in_every_process():
    program = """
import hashlib, sys
import jax
from compiler.triton.kernels import KERNELS
from palladion.compiler.entry import _calls_in
from palladion.compiler.triton.module import lower_call
for name, build in list(KERNELS.items())[::4]:
    call, operands = build()
    for found in _calls_in(jax.make_jaxpr(call)(*operands).jaxpr):
        kernel = lower_call(found.params, 90)
        print(name, hashlib.sha256(kernel.text.encode() + kernel.bytecode).hexdigest())
"""
    runs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "tests:src"}
        runs.append(
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        )
    first, second = (run.communicate()[0] for run in runs)
    assert first == second and len(first.splitlines()) == len(list(KERNELS)[::4])


def test_a_gpu_call_is_xlas_custom_call(monkeypatch):
    from palladion import executors
    from palladion.compiler.triton import lower

    found = executors.for_lowering
    monkeypatch.setattr(executors, "for_lowering", lambda p, *rest: lower if p == "cuda" else found(p, *rest))
    call = matmul(256, 64, 32, 4, 2)
    shapes = [sds((256, 256), "bfloat16")] * 2
    text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.custom_call @__gpu$xla.gpu.triton" in text
    for attribute in ("grid_x = 4", "grid_y = 4", "grid_z = 1", "num_warps = 4", "num_stages = 2", 'name = "matmul"'):
        assert attribute in text, attribute
    assert r'ir = "ML\EFR' in text, "bytecode"


def test_no_programs_no_kernel(monkeypatch):
    from palladion import executors
    from palladion.compiler.triton import lower

    found = executors.for_lowering
    monkeypatch.setattr(executors, "for_lowering", lambda p, *rest: lower if p == "cuda" else found(p, *rest))
    call = pl.pallas_call(lambda x_ref, o_ref: None, sds((8,)), grid=(0,))
    text = jax.jit(call).trace(draw(8)).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text


def test_views_keep_what_is_known_of_their_indices():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.at[pl.ds(pl.program_id(0) * 16, 16)].at[:, 8:16][...]

    call = pl.pallas_call(kernel, sds((16, 8)), grid=(4,))
    text = lowered(call, sds((64, 32))).plain
    assert "divui" not in text and "remui" not in text
    np.testing.assert_equal(count(text, "tt.load"), 1)
