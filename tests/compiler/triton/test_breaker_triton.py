"""What users of the Triton compiler ran into: each fault found by writing kernels, or by trying to break it, once."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from compiler.triton.kernels import draw, sds
from compiler.triton.running import evaluate
from palladion import tpu as pltpu
from palladion import triton as pltriton
from palladion.compiler import child
from palladion.compiler.entry import _calls_in
from palladion.compiler.triton import compile as compiler
from palladion.compiler.triton import races, sequence
from palladion.compiler.triton.module import lower_call

needs_triton = pytest.mark.skipif(not compiler.available(), reason="the triton package is not installed")


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """Triton's cache on disk apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def call_in(f, *shapes):
    (found,) = _calls_in(jax.make_jaxpr(f)(*shapes).jaxpr)
    return found.params


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


# --- axes that run in order -------------------------------------------------------------------------------------------
def matmul_scratch(**options):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...] @ y_ref[...]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...]

    call = pl.pallas_call(
        kernel, sds((32, 32)), grid=(2, 2, 3),
        in_specs=[pl.BlockSpec((16, 16), lambda i, j, k: (i, k)), pl.BlockSpec((16, 16), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((16, 16), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((16, 16), jnp.float32)], **options,
    )  # fmt: skip
    return call, (draw(32, 48), draw(48, 32, seed=3))


def matmul_output(**options):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    call = pl.pallas_call(
        kernel, sds((32, 32)), grid=(3, 2, 2),
        in_specs=[pl.BlockSpec((16, 16), lambda k, i, j: (i, k)), pl.BlockSpec((16, 16), lambda k, i, j: (k, j))],
        out_specs=pl.BlockSpec((16, 16), lambda k, i, j: (i, j)), **options,
    )  # fmt: skip
    return call, (draw(32, 48), draw(48, 32, seed=3))


def scalar_total(**options):
    """A part of a block, whose place is a constant: once taken for each program's own."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[0, 0] = 0.0

        o_ref[0, 0] += x_ref[...].sum()

    one = pl.BlockSpec((1, 1), lambda i: (0, 0))
    row = pl.BlockSpec((16,), lambda i: (i,))
    return pl.pallas_call(kernel, sds((1, 1)), grid=(4,), in_specs=[row], out_specs=one, **options), (draw(64),)


def vmapped_total(**options):
    call, (x,) = scalar_total(**options)
    return jax.vmap(call), (np.stack([x, x + 1, -x]),)


def chosen_by_switch(**options):
    def kernel(x_ref, o_ref, acc_ref):
        which = jnp.minimum(pl.program_id(0), 1)
        acc_ref[...] = lax.switch(which, [lambda: x_ref[...], lambda: acc_ref[...] + x_ref[...]])
        o_ref[...] = acc_ref[...]

    row, scratch = pl.BlockSpec((8,), lambda i: (i,)), [pltpu.VMEM((8,), jnp.float32)]
    call = pl.pallas_call(
        kernel, sds((32,)), grid=(4,), in_specs=[row], out_specs=row, scratch_shapes=scratch, **options
    )
    return call, (draw(32),)


def carried_over_two_axes(**options):
    def kernel(x_ref, o_ref, n_ref):
        first = jnp.logical_and(pl.program_id(0) == 0, pl.program_id(1) == 0)
        before = lax.cond(first, lambda: jnp.zeros(8), lambda: n_ref[...])
        n_ref[...] = before * 0.5 + x_ref[...]
        o_ref[...] = n_ref[...]

    row = pl.BlockSpec((8,), lambda i, j: (i * 3 + j,))
    scratch = [pltpu.VMEM((8,), jnp.float32)]
    call = pl.pallas_call(
        kernel, sds((48,)), grid=(2, 3), in_specs=[row], out_specs=row, scratch_shapes=scratch, **options
    )
    return call, (draw(48),)


def rows_added_by_table(**options):
    """Programs come back to a block by a table: which of them, only run time knows."""

    def kernel(table_ref, x_ref, start_ref, o_ref):
        o_ref[...] += x_ref[...]

    spec = pl.BlockSpec((1, 8), lambda i, table: (table[i], 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(6,),
        in_specs=[pl.BlockSpec((1, 8), lambda i, table: (i, 0)), spec], out_specs=spec,
    )  # fmt: skip
    call = pl.pallas_call(kernel, sds((4, 8)), grid_spec=grid, input_output_aliases={2: 0}, **options)
    return call, (np.array([2, 0, 2, 3, 2, 0], "int32"), draw(6, 8), draw(4, 8, seed=8))


ORDERED = [
    matmul_scratch, matmul_output, scalar_total, vmapped_total, chosen_by_switch, carried_over_two_axes,
    rows_added_by_table,
]  # fmt: skip


@pytest.mark.parametrize("build", ORDERED, ids=lambda f: f.__name__)
def test_what_programs_hand_on_is_carried_in_a_loop(build):
    call, operands = build()
    want = np.asarray(build(interpret=True)[0](*operands))
    for seed in range(3):  # an order of programs each
        np.testing.assert_allclose(np.asarray(evaluate(call, *operands, seed=seed)), want, rtol=1e-5, atol=1e-5)


def test_only_the_axes_that_need_it_become_loops():
    for build, loops, grid in (
        (matmul_scratch, (2,), (2, 2, 1)),
        (matmul_output, (0,), (1, 2, 2)),
        (vmapped_total, (1,), (3, 1, 1)),
        (carried_over_two_axes, (0, 1), (1, 1, 1)),
    ):
        call, operands = build()
        params = call_in(call, *operands)
        assert sequence.plan(params).loops == loops and lower_call(params, 90).grid == grid


def test_an_accumulated_output_stays_in_registers():
    call, operands = matmul_output()
    params = call_in(call, *operands)
    assert sequence.plan(params).outputs == (0,)
    assert lower_call(params, 90).plain.count("tt.store") == 1, "after the loop"


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (lambda i, j: (i, j), {0, 1}),
        (lambda i, j: (i * 4 + j, 0), {0, 1}),
        (lambda i, j: (i * 2 + j, 0), {1}),
        (lambda i, j: (7 - i, 0), {0}),
        (lambda i, j: (i // 2, j), {1}),
        (lambda i, j: (i - i, 0), set()),
    ],
)
def test_which_indices_a_block_tells(index, told):
    spec = pl.BlockSpec((1, 8), index)
    params = call_in(pl.pallas_call(copy, sds((64, 64)), grid=(8, 4), in_specs=[spec], out_specs=spec), sds((64, 64)))
    assert races.axes_told(params["grid_mapping"].outputs[0].index_map, (8, 4)) == told


def test_a_program_that_reads_only_what_it_stored_needs_no_order():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[...] = o_ref[...] * 2

    spec = pl.BlockSpec((8,), lambda i: (i // 2 * 2 + i % 2,))
    params = call_in(pl.pallas_call(kernel, sds((64,)), grid=(8,), in_specs=[spec], out_specs=spec), sds((64,)))
    assert not sequence.plan(params).axes


@needs_triton
def test_the_report_says_which_axes_became_loops():
    call, operands = matmul_scratch()
    report = pl.compile(call, *operands, target="triton:sm_90")
    assert report.ok and "programs       2×2×1" in str(report)
    assert "axis 2 (3 programs) in order: acc_ref (scratch 0) is carried along it" in str(report)


# --- random numbers --------------------------------------------------------------------------------------------------
def random_kernel(**options):
    def kernel(o_ref, p_ref):
        first, second = jax.random.split(jax.random.fold_in(jax.random.key(7), pl.program_id(0)))
        keys = jax.random.split(second, 4)
        key = lax.fori_loop(0, 2, lambda i, k: jax.random.fold_in(k, i), keys[pl.program_id(0) % 4])
        key = lax.cond(pl.program_id(0) == 1, lambda k: k, lambda k: jax.random.fold_in(k, 3), key)
        o_ref[...] = jax.random.uniform(first, (16,)) + jax.random.normal(key, (16,))
        p_ref[...] = jax.random.bits(keys[3], (4, 4))

    specs = (pl.BlockSpec((16,), lambda i: (i,)), pl.BlockSpec((4, 4), lambda i: (i, 0)))
    return pl.pallas_call(kernel, (sds((48,)), sds((12, 4), "uint32")), grid=3, out_specs=specs, **options)


def test_jax_random_draws_the_same_bits():
    numbers, bits = evaluate(random_kernel())
    want, want_bits = random_kernel(interpret=True)()
    np.testing.assert_allclose(numbers, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(bits, want_bits)


def test_keys_of_a_tpu_core_are_refused():
    def kernel(o_ref):
        o_ref[...] = jax.random.uniform(jax.random.key(0, impl="palladion_tpu"), (16,))

    with pytest.raises(NotImplementedError, match="Pallas keys draw from the generator of a TPU core"):
        lower_call(call_in(pl.pallas_call(kernel, sds((16,)))), 90)


# --- limits -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_warps=64), "copy asks for num_warps=64; a GPU can do no more than 32"),
        (dict(num_stages=10**6), "copy asks for num_stages=1000000; a GPU can do no more than 64"),
        (dict(num_stages=2**40), "a GPU can do no more than 64"),
    ],
)
def test_what_no_gpu_can_launch(options, message):
    """Triton compiled 4,096 threads a program, and took minutes over a million stages."""
    call = pl.pallas_call(copy, sds((256,)), compiler_params=pltriton.CompilerParams(**options))
    with pytest.raises(ValueError, match=message):
        lower_call(call_in(call, sds((256,))), 90)
    with pytest.raises(ValueError, match=message):
        jax.jit(call).trace(sds((256,))).lower(lowering_platforms=("cuda",))


def test_blocks_without_elements():
    call = pl.pallas_call(copy, sds((8, 0)), compiler_params=pltriton.CompilerParams())
    with pytest.raises(ValueError, match=r"x_ref \(input 0\) is a block of shape \(8, 0\) without elements"):
        lower_call(call_in(call, sds((8, 0))), 90)
    text = jax.jit(call).trace(sds((8, 0))).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in text, "there is nothing to launch"


# --- the compiler's surroundings --------------------------------------------------------------------------------------
@needs_triton
def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    """Also that Triton's environment variables are those of the call: a worker that lives longer has older ones."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file))
    (call,) = pl.compile(pl.pallas_call(copy, sds((2,))), sds((2,)), target="triton:sm_90").calls
    assert call.refusal is not None and call.refusal.message.startswith("Triton cannot keep its files, which go to ")
    assert str(file) in call.refusal.message and "set TRITON_CACHE_DIR to a folder" in call.refusal.message


def test_a_file_where_triton_keeps_its_folder(monkeypatch, tmp_path):
    (tmp_path / ".triton").touch()
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "palladion-triton-" in compiler.environment()["TRITON_CACHE_DIR"]


@needs_triton
def test_two_threads_at_once():
    found = {}

    def work(n):
        call = pl.pallas_call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * (n + 3)), sds((64,)))
        found[n] = pl.compile(call, sds((64,)), target=f"triton:sm_{(80, 90)[n]}").ok

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {0: True, 1: True}


@needs_triton
def test_a_killed_worker_is_replaced():
    def compiled():
        call = pl.pallas_call(copy, sds((4,), "int8"))
        return pl.compile(call, sds((4,), "int8"), target="triton:sm_90").ok

    assert compiled()
    for process in [p for p in child._pool.idle if p.kind.name == "Triton"]:
        os.kill(process.process.pid, 9)
        process.process.wait()
    assert compiled()
