"""What a Mosaic module says of a call: grid, windows, memory, options; and that it is always the same."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import palladion as pl
from compiler.tpu.calls import lowered, module_of, params_of, sds
from palladion import tpu as pltpu
from palladion.compiler.tpu.lower import build_module, options


def add(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def blocked(shape=(256, 512), block=(64, 128), **more):
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    grid = tuple(pl.cdiv(n, b) for n, b in zip(shape, block))
    return pl.pallas_call(add, sds(*shape), grid=grid, in_specs=[spec, spec], out_specs=spec, **more)


def test_grid_and_windows():
    x = sds(256, 512)
    text = module_of(blocked(), x, x)
    assert "iteration_bounds = array<i64: 4, 4>" in text
    assert text.count("window_bounds = array<i64: 64, 128>") == 3
    assert "dimension_semantics = [#tpu.dimension_semantics<arbitrary>, #tpu.dimension_semantics<arbitrary>]" in text
    assert "memref<64x128xf32, #tpu.memory_space<vmem>>" in text
    params = pltpu.CompilerParams(dimension_semantics=("parallel", pltpu.ARBITRARY))
    assert "<parallel>, #tpu.dimension_semantics<arbitrary>]" in module_of(blocked(compiler_params=params), x, x)


def test_no_grid_no_windows():
    text = module_of(pl.pallas_call(add, sds(8, 128)), sds(8, 128), sds(8, 128))
    assert "iteration_bounds" not in text and "window_params" not in text


def test_an_axis_of_vmap_is_parallel_beside_the_users():
    params = pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"))
    x = sds(3, 256, 512)
    text = module_of(jax.vmap(blocked(compiler_params=params)), x, x)
    assert "iteration_bounds = array<i64: 3, 4, 4>" in text
    assert "[#tpu.dimension_semantics<parallel>, #tpu.dimension_semantics<arbitrary>" in text
    assert "window_bounds = array<i64: 1, 64, 128>" in text


def test_scalar_prefetch_and_scratch():
    def kernel(table_ref, x_ref, o_ref, acc):
        acc[...] = x_ref[...]
        o_ref[...] = acc[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
    )
    text = module_of(pl.pallas_call(kernel, sds(32, 128), grid_spec=spec), sds(4, dtype=jnp.int32), sds(32, 128))
    assert "scalar_prefetch = 1 : i64" in text and "scratch_operands = 1 : i64" in text
    transform = text.split("@transform_0")[2]
    assert "memref.load" in transform  # the index map reads the table …
    assert "arith.minsi" in transform and "arith.maxsi" in transform  # … which may say anything: it is clamped
    assert "arith.minsi" not in text.split("@transform_1")[2]  # i is in the array for all i


def test_a_dynamic_grid_is_an_operand():
    def scaled(x_ref, o_ref):
        o_ref[...] = x_ref[...] * lax.convert_element_type(pl.num_programs(0), jnp.float32)

    def call(n, x):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(scaled, sds(32, 128), grid=(n,), in_specs=[spec], out_specs=spec)(x)

    args = sds(dtype=jnp.int32), sds(32, 128)
    text = module_of(call, *args)
    assert "iteration_bounds = array<i64: -9223372036854775808>" in text and "tpu.iteration_bound 0" in text
    assert "(tensor<i32>, tensor<32x128xf32>)" in lowered(call, *args)


def test_memory_spaces():
    def kernel(s_ref, x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    call = pl.pallas_call(
        kernel,
        sds(64, 128),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    text = module_of(call, sds(4), sds(64, 128))
    for element, memory in (("4xf32", "smem"), ("64x128xf32", "any"), ("64x128xf32", "hbm")):
        assert f"memref<{element}, #tpu.memory_space<{memory}>>" in text
    assert "memref<!tpu.dma_semaphore, #tpu.memory_space<semaphore_mem>>" in text


def test_one_buffer_and_element_windows():
    one = pl.BlockSpec((8, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(1))
    rows = pl.BlockSpec((pl.Element(24, (8, 8)), pl.Element(128)), lambda i: (i * 8, 0))

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[8:16]

    call = pl.pallas_call(kernel, sds(64, 128), grid=(8,), in_specs=[one, rows], out_specs=one)
    text = module_of(call, sds(64, 128), sds(64, 128))
    assert text.count("pipeline_mode = #tpu.pipeline_mode<synchronous>") == 2
    assert "window_kind = #tpu.element_window<[8, 0], [8, 0]>" in text


def test_masks_and_unsigned_numbers_cross_the_border_as_int32():
    def kernel(x_ref, m_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...] >> 1
        p_ref[...] = m_ref[...] & (x_ref[...] > 3)

    call = pl.pallas_call(kernel, (sds(8, 128, dtype=jnp.uint32), sds(8, 128, dtype=jnp.bool_)))
    args = sds(8, 128, dtype=jnp.uint32), sds(8, 128, dtype=jnp.bool_)
    assert "arith.shrui" in module_of(call, *args) and "cmpi ugt" in module_of(call, *args)
    text = lowered(call, *args)
    assert "(tensor<8x128xui32>, tensor<8x128xi32>) -> (tensor<8x128xui32>, tensor<8x128xi32>)" in text


def test_options_of_the_call():
    given = pltpu.CompilerParams(
        vmem_limit_bytes=1 << 25, has_side_effects=True, flags={"xla_tpu_x": 1}, allow_input_fusion=[True, False],
        internal_scratch_in_bytes=4096, disable_bounds_checks=True, disable_semaphore_checks=True,
        skip_device_barrier=True, shape_invariant_numerics=False,
    )  # fmt: skip
    call = blocked(
        compiler_params=given,
        cost_estimate=pl.CostEstimate(flops=7, transcendentals=8, bytes_accessed=9),
        input_output_aliases={1: 0},
        metadata={"layer": "3"},
        name="plus",
    )
    x = sds(256, 512)
    passed = options(params_of(call, x, x))
    for field in ("vmem_limit_bytes", "internal_scratch_in_bytes", "disable_bounds_checks", "disable_semaphore_checks",
                  "skip_device_barrier", "shape_invariant_numerics", "has_side_effects"):  # fmt: skip
        assert passed[field] == getattr(given, field)
    assert passed["flags"] == {"xla_tpu_x": 1} and passed["allow_input_fusion"] == (True, False)
    text = lowered(call, x, x).replace("\\22", '"')
    for part in ('"flops":7', '"bytes_accessed":9', "33554432", "has_side_effect = true", 'kernel_name = "plus"',
                 "output_operand_alias<output_tuple_indices = [], operand_index = 1", "layer"):  # fmt: skip
        assert part in text, part


def test_operations_carry_the_users_line():
    x = sds(256, 512)
    text = build_module(params_of(blocked(), x, x)).operation.get_asm(enable_debug_info=True)
    line = add.__code__.co_firstlineno + 1
    assert f'{__file__}":{line}:' in text


PROGRAM = """
import sys, hashlib, jax, jax.numpy as jnp, palladion as pl
from palladion import tpu as pltpu
def kernel(a, b, o, acc):
    k = pl.program_id(2)
    @pl.when(k == 0)
    def _(): acc[...] = jnp.zeros_like(acc)
    acc[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
    @pl.when(k == pl.num_programs(2) - 1)
    def _(): o[...] = jax.nn.gelu(acc[...]).astype(o.dtype)
x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
call = pl.pallas_call(kernel, x, grid=(2, 2, 2), in_specs=[pl.BlockSpec((256, 256), lambda i, j, k: (i, k)),
    pl.BlockSpec((256, 256), lambda i, j, k: (k, j))], out_specs=pl.BlockSpec((256, 256), lambda i, j, k: (i, j)),
    scratch_shapes=[pltpu.VMEM((256, 256), jnp.float32)])
text = jax.jit(call).trace(x, x).lower(lowering_platforms=("tpu",)).as_text()
assert "tpu_custom_call" in text
assert not [m for m in sys.modules if m.startswith(("jax._src.pallas", "jax.experimental.pallas", "jax.extend"))]
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_two_processes_give_the_same_bytes_and_load_no_other_pallas():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=_env(seed))
        for seed in "12"
    ]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout != ""


def _env(seed):
    return {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}


def test_collective_ids_of_a_program_are_found_without_jaxs_pallas():
    def kernel(x_ref, o_ref):
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1)
        pl.semaphore_wait(barrier, 1)
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(kernel, sds(8, 128), compiler_params=pltpu.CompilerParams(collective_id=5))
    assert '"collective_id": 5' in lowered(call, sds(8, 128)).replace("\\22", '"')


@pytest.mark.parametrize("cores", [1, 2])
def test_a_mesh_of_cores(cores):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=cores)

    @pl.kernel(out_type=sds(16, 128), mesh=mesh, scratch_types=[pltpu.SemaphoreType.DMA])
    def copy(x_ref, o_ref, sem):
        rows = pl.ds(lax.axis_index("core") * 8, 8)
        pltpu.async_copy(x_ref.at[rows], o_ref.at[rows], sem).wait()

    text = module_of(copy, sds(16, 128))
    assert f"iteration_bounds = array<i64: {cores}>" in text
    assert f"#tpu.dimension_semantics<{'core_parallel' if cores > 1 else 'arbitrary'}>" in text
