"""Each kind of finding: calls that have it, calls that do not, its level, and its words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion import tpu as pltpu
from palladion import triton as pltriton
from report.looking import copy_kernel, copying, found, levels, look

FLOAT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
TPU = pltpu.CompilerParams()
TRITON = pltriton.CompilerParams()


def accumulate(x_ref, o_ref):
    o_ref[...] += x_ref[...]


# --- nothing to find ------------------------------------------------------------------------------------------------
def test_a_clean_call_has_no_findings():
    assert copying((8, 128), (4, 2), lambda i, j: (i, j), shape=(32, 256)).findings == ()


def test_a_call_without_a_grid_has_no_findings():
    assert look(pl.pallas_call(copy_kernel, FLOAT((8, 128))), jnp.zeros((8, 128))).findings == ()


# --- out-of-bounds --------------------------------------------------------------------------------------------------
def test_element_offsets_are_out_of_bounds():
    report = copying((16, 128), (4,), lambda i: (i * 16, 0), lambda i: (i, 0), shape=(64, 128))
    assert levels(report) == {"out-of-bounds": "error"}
    (finding,) = report.findings
    assert finding.message == "x_ref (input 0) is asked for block 16 in dimension 0, outside the valid range 0..3."
    assert finding.when == "program (1,), the first of 3"
    assert "block numbers, not element offsets" in finding.hint
    assert "test_findings.py:" in finding.where and finding.where.endswith("(<lambda>)")


@pytest.mark.parametrize(("index_map", "index"), [(lambda i: (i - 1, 0), -1), (lambda i: (i + 1, 0), 4)])
def test_one_block_too_far_on_either_side(index_map, index):
    (finding,) = found(copying((16, 128), (4,), index_map, lambda i: (i, 0), shape=(64, 128)), "out-of-bounds")
    assert f"block {index} in dimension 0" in finding.message
    assert "first of" not in finding.when
    assert finding.hint.startswith("return a block number in 0..3 for every program (block n begins at element n * 16)")


def test_a_grid_that_is_too_large_is_said_to_be():
    report = copying((16, 128), (2, 6), lambda i, j: (j, i), shape=(60, 256))
    hints = {finding.hint for finding in found(report, "out-of-bounds")}
    assert hints == {
        "the grid has 6 programs along axis 1, but the array has 4 blocks in this dimension: pl.cdiv(60, 16) programs "
        "cover it"
    }


def test_an_offset_that_is_out_of_bounds():
    block = (pl.Element(16), 128)
    report = copying(block, (6,), lambda i: (i * 16, 0), lambda i: (0, 0), shape=(64, 128))
    assert found(report, "out-of-bounds")[0].hint.startswith("Element(16) takes element offsets, here 0..63")


def test_what_follows_from_clamping_an_output_is_not_reported_again():
    report = copying((16, 128), (4,), lambda i: (i, 0), lambda i: (i * 16, 0), shape=(64, 128))
    assert levels(report) == {"out-of-bounds": "error", "uninitialized-read": "error"}
    assert found(report, "uninitialized-read")[0].message.startswith("Output block never written: 2 of 4 blocks")


# --- unwritten outputs ----------------------------------------------------------------------------------------------
def test_blocks_that_no_program_visits():
    report = copying((8, 128), (2, 1), lambda i, j: (i, j), shape=(32, 256))
    assert levels(report) == {"uninitialized-read": "error"}
    assert report.findings[0].message == (
        "Output block never written: 6 of 8 blocks of o_ref (output 0), first (0, 1)."
    )


def test_a_grid_rounded_down_misses_the_last_block():
    (finding,) = copying((32, 128), (100 // 32,), lambda i: (i, 0), shape=(100, 128)).findings
    assert "1 of 4 blocks of o_ref (output 0), first (3, 0)" in finding.message
    assert copying((32, 128), (pl.cdiv(100, 32),), lambda i: (i, 0), shape=(100, 128)).findings == ()


def test_an_empty_grid_writes_nothing():
    report = copying((8, 128), (0,), lambda i: (i, 0), shape=(32, 128))
    assert levels(report) == {"uninitialized-read": "error"}
    assert "4 of 4 blocks" in report.findings[0].message


def test_an_empty_output_needs_no_program():
    def nothing(o_ref):
        o_ref[...] = o_ref[...]

    assert look(pl.pallas_call(nothing, FLOAT((0, 128)), grid=(0,))).findings == ()


def test_an_output_that_the_kernel_never_writes():
    def first_only(x_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...]

    report = look(pl.pallas_call(first_only, [FLOAT((8, 128))] * 2), jnp.zeros((8, 128)))
    assert levels(report) == {"uninitialized-read": "error"}
    assert report.findings[0].message.startswith("The kernel never writes p_ref (output 1)")
    assert report.findings[0].where.endswith("(first_only)")


def test_a_write_inside_a_branch_and_a_loop_counts():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            jax.lax.fori_loop(0, 8, lambda i, _: o_ref.__setitem__(i, x_ref[i]), None)

    report = copying((8, 128), (4,), lambda i: (i, 0), shape=(32, 128), kernel=kernel)
    assert report.findings == ()


def test_aliased_outputs_start_as_their_operand():
    def nothing(x_ref, o_ref):
        pass

    report = copying((8, 128), (2,), lambda i: (i, 0), shape=(32, 128), kernel=nothing, input_output_aliases={0: 0})
    assert report.findings == ()


# --- revisited-block ------------------------------------------------------------------------------------------------
def test_the_reduction_axis_first_revisits_blocks():
    report = copying(
        (8, 128), (4, 3), lambda k, i: (i, k), lambda k, i: (i, 0), shape=(24, 512), out_shape=(24, 128),
        kernel=accumulate,
    )  # fmt: skip
    assert levels(report) == {"revisited-block": "error", "race": "warning"}
    (finding,) = found(report, "revisited-block")
    assert finding.message == (
        "Revisited block (0, 0) of o_ref (output 0) in iteration (1, 0), previously visited in iterations (0, 0) "
        "through (0, 0)."
    )
    assert finding.when == "program (1, 0); 3 blocks in all" and "put grid axis 0" in finding.hint


def test_the_reduction_axis_last_does_not():
    report = copying(
        (8, 128), (3, 4), lambda i, k: (i, k), lambda i, k: (i, 0), shape=(24, 512), out_shape=(24, 128),
        kernel=accumulate,
    )  # fmt: skip
    assert levels(report) == {"race": "warning"}


def test_previous_visits_of_several_programs_are_named_as_a_range():
    report = copying((8, 128), (2, 2, 3), lambda i, j, k: (j, 0), shape=(16, 128), compiler_params=TPU)
    (finding,) = found(report, "revisited-block")
    assert "in iteration (1, 0, 0), previously visited in iterations (0, 0, 0) through (0, 0, 2)." in finding.message


def test_gpu_calls_have_no_order_to_revisit_in():
    report = copying((8, 128), (2, 2), lambda k, i: (i, 0), shape=(16, 128), compiler_params=TRITON)
    assert levels(report) == {"race": "error"}


# --- race -----------------------------------------------------------------------------------------------------------
def sum_over_last_axis(**options):
    return copying(
        (8, 128), (3, 4), lambda i, k: (i, k), lambda i, k: (i, 0), shape=(24, 512), out_shape=(24, 128),
        kernel=accumulate, **options,
    )  # fmt: skip


def semantics(*words):
    return pltpu.CompilerParams(dimension_semantics=words)


@pytest.mark.parametrize(
    ("params", "level"),
    [
        (None, "warning"),
        (TPU, "note"),
        (semantics("parallel", "arbitrary"), "note"),
        (semantics("arbitrary", "parallel"), "error"),
        (semantics(pltpu.PARALLEL, pltpu.PARALLEL), "error"),
        (TRITON, "error"),
        (plgpu.CompilerParams(), "error"),
        (plgpu.CompilerParams(dimension_semantics=["parallel", "sequential"]), None),
        (plgpu.CompilerParams(dimension_semantics=["parallel", "parallel"]), "error"),
    ],
    ids=str,
)
def test_the_level_of_a_race_follows_the_target_and_the_axes(params, level):
    races = found(sum_over_last_axis(compiler_params=params), "race")
    assert [race.level for race in races] == ([] if level is None else [level])
    if races:
        assert races[0].message.startswith("Programs (0, 0) and (0, 1) share block (0, 0) of o_ref (output 0): ")
        assert races[0].when == "along grid axis 1, for 3 of 3 blocks"


def test_a_parallel_axis_is_named():
    (race,) = found(sum_over_last_axis(compiler_params=semantics("arbitrary", "parallel")), "race")
    assert "grid axis 1 is declared parallel" in race.message


@pytest.mark.parametrize(("params", "level"), [(None, "note"), (TRITON, "note"), (TPU, None)])
def test_programs_that_write_parts_of_a_whole_array(params, level):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[pl.ds(i * 8, 8)] = x_ref[pl.ds(i * 8, 8)]

    report = look(pl.pallas_call(kernel, FLOAT((32, 128)), grid=(4,), compiler_params=params), jnp.zeros((32, 128)))
    assert levels(report) == ({} if level is None else {"race": level})


# --- illegal-shape: TPU ---------------------------------------------------------------------------------------------
SQ, EL = pl.squeezed, pl.Element
# Measured by lowering for TPU v5e with JAX 0.12.0.1.
TPU_BLOCKS = [
    ((8, 128), (256, 512), True),
    ((64, 128), (256, 512), True),
    ((256, 512), (256, 512), True),
    ((4, 128), (256, 512), False),
    ((64, 100), (256, 512), False),
    ((8, 64), (256, 512), False),
    ((4, 100), (4, 100), True),
    ((8, 256), (8, 200), True),
    ((8, 128), (8, 100), True),
    ((SQ, 64, 128), (4, 256, 512), True),
    ((64, SQ, 128), (256, 4, 512), False),
    ((64, SQ, 128), (256, 1, 512), True),
    ((SQ, 128), (256, 512), False),
    ((SQ, 128), (1, 512), True),
    ((8, SQ), (256, 1), True),
    ((1, 1, 8, 128), (2, 2, 256, 512), True),
    ((EL(4), EL(128)), (256, 512), False),
    ((100,), (100,), True),
    ((64,), (4096,), False),
    ((128,), (4096,), True),
    ((384,), (4096,), False),
    ((3072,), (6144,), True),
    ((SQ,), (4096,), False),
]


def shapes_of(block, shape, dtype=jnp.float32, **options):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

    spec = pl.BlockSpec(block, lambda i: (0,) * len(shape), memory_space=options.pop("memory_space", None))
    call = pl.pallas_call(kernel, FLOAT((8, 128)), grid=(1,), in_specs=[spec], **options)
    return found(look(call, jnp.zeros(shape, dtype)), "illegal-shape")


@pytest.mark.parametrize(("block", "shape", "legal"), TPU_BLOCKS, ids=str)
def test_blocks_that_a_tpu_takes(block, shape, legal):
    shapes = shapes_of(block, shape, compiler_params=TPU)
    assert [s.level for s in shapes] == ([] if legal else ["error"])


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 128), ("bfloat16", 256), ("int8", 512), ("int4", 1024), ("bool", 128)]
)
def test_one_dimension_depends_on_the_dtype(dtype, least):
    legal = [n for n in (64, 128, 256, 512, 1024) if not shapes_of((n,), (4096,), dtype, compiler_params=TPU)]
    assert legal == [n for n in (64, 128, 256, 512, 1024) if n >= least]


def test_without_a_target_a_tpus_refusal_is_a_warning():
    (shape,) = (s for s in shapes_of((4, 128), (256, 512)) if "TPU" in s.message)
    assert shape.level == "warning"
    assert shape.message == "A TPU would refuse the block (4, 128) of x_ref (input 0) f32[256,512]."
    assert "divisible by 8 and 128" in shape.hint


def test_memory_spaces_of_a_tpu_make_it_the_target():
    (shape,) = shapes_of((4, 128), (256, 512), memory_space=pltpu.VMEM)
    assert shape.level == "error"


def test_operands_that_stay_in_hbm_are_passed_whole():
    (shape,) = shapes_of((8, 128), (256, 512), memory_space=pl.ANY, compiler_params=TPU)
    assert "passed whole" in shape.hint
    assert not shapes_of((256, 512), (256, 512), memory_space=pl.ANY, compiler_params=TPU)


def test_gpu_calls_are_free_of_the_tpus_rule():
    assert not shapes_of((4, 64), (256, 512), compiler_params=TRITON)


# --- illegal-shape: Triton ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("block", "params", "level"),
    [
        ((8, 96), TRITON, "error"),
        ((6, 128), TRITON, "error"),
        ((8, 128), TRITON, None),
        ((24, 128), None, "note"),
        ((24, 128), TPU, None),
        ((24, 128), plgpu.CompilerParams(), None),
    ],
    ids=str,
)
def test_powers_of_two(block, params, level):
    shapes = [s for s in shapes_of(block, (192, 384), compiler_params=params) if "Triton" in s.message]
    assert [s.level for s in shapes] == ([] if level is None else [level])


def test_a_whole_array_read_in_parts_may_have_any_size():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(0, 8), pl.ds(0, 128)]

    def whole(x_ref, o_ref):
        o_ref[...] = jnp.full(o_ref.shape, x_ref[...].sum())

    operand = jnp.zeros((100, 300))
    for body, expected in ((kernel, []), (whole, ["illegal-shape"])):
        report = look(pl.pallas_call(body, FLOAT((8, 128)), compiler_params=TRITON), operand)
        assert [f.kind for f in report.findings] == expected


# --- overflow -------------------------------------------------------------------------------------------------------
def large_copy(rows, **options):
    return copying((rows, 1024), (4,), lambda i: (i, 0), shape=(4 * rows, 1024), **options)


def test_more_vmem_than_any_tpu_has():
    rows = (200 << 20) // (4 * 4 * 1024)  # two buffers each of an input and an output of 4 KiB a row: 200 MiB
    (overflow,) = found(large_copy(rows, compiler_params=TPU), "vmem-overflow")
    assert overflow.level == "error"
    assert overflow.message == "Blocks and scratch take 200.0 MiB of VMEM, more than any TPU has (192.0 MiB)."
    assert found(large_copy(rows), "vmem-overflow")[0].level == "warning"
    assert not found(large_copy(rows // 2, compiler_params=TPU), "vmem-overflow")


def test_one_buffer_is_advised_where_it_is_enough():
    def hint(index_map, limit):
        out_map, params = lambda i: (i, 0), pltpu.CompilerParams(vmem_limit_bytes=limit)
        report = copying((256, 1024), (4,), index_map, out_map, shape=(1024, 1024), compiler_params=params)
        return found(report, "vmem-overflow")[0].hint

    assert "pl.Buffered(1)" in hint(lambda i: (0, 0), 3 << 20)  # 3 MiB of 4 without the input's second buffer
    assert hint(lambda i: (0, 0), (3 << 20) - 1) == "make the blocks smaller"
    assert hint(lambda i: (i, 0), 3 << 20) == "make the blocks smaller"  # the block changes


def test_more_vmem_than_the_call_allows_itself():
    params = pltpu.CompilerParams(vmem_limit_bytes=1 << 20)
    (overflow,) = found(large_copy(256, compiler_params=params), "vmem-overflow")
    assert overflow.level == "error" and "vmem_limit_bytes allows (1.0 MiB)" in overflow.message
    assert not found(large_copy(64, compiler_params=params), "vmem-overflow")


@pytest.mark.parametrize(
    ("params", "level"), [(None, "note"), (TPU, None), (TRITON, "warning"), (plgpu.CompilerParams(), "error")], ids=str
)
def test_more_shared_memory_than_an_sm_has(params, level):
    report = large_copy(64, compiler_params=params)  # 256 KiB a block
    assert [f.level for f in found(report, "smem-overflow")] == ([] if level is None else [level])
    assert not found(large_copy(8, compiler_params=params), "smem-overflow")


def test_more_scalars_than_any_tpu_has():
    def kernel(x_ref, o_ref, table_ref):
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(kernel, FLOAT((8, 128)), scratch_shapes=[pltpu.SMEM((1 << 20,), jnp.int32)])
    (overflow,) = look(call, jnp.zeros((8, 128))).findings
    assert (overflow.kind, overflow.level) == ("smem-overflow", "error")
    assert "4.0 MiB of SMEM (scalar memory)" in overflow.message


# --- gathered and scattered blocks ------------------------------------------------------------------------------------
def scatter(rows):
    """Program i writes the rows of an (8, 128) output that row i of the table names."""

    def kernel(rows_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2,),
        in_specs=[pl.BlockSpec((4, 128), lambda i, rows_ref: (i, 0))],
        out_specs=pl.BlockSpec((pl.Indirect(4), 128), lambda i, rows_ref: (rows_ref[pl.ds(i * 4, 4)], 0)),
    )
    return look(pl.pallas_call(kernel, FLOAT((8, 128)), grid_spec=spec), np.array(rows, np.int32), jnp.zeros((8, 128)))


def test_rows_that_no_program_scatters_to():
    assert not found(scatter([7, 6, 5, 4, 3, 2, 1, 0]), "uninitialized-read")
    (finding,) = found(scatter([0, 1, 3, 4, 4, 5, 6, 7]), "uninitialized-read")
    assert finding.message == "Output block never written: 128 of 1024 elements of o_ref (output 0), first (2, 0)."


def test_a_row_out_of_range():
    assert "block 8 in dimension 0" in found(scatter([0, 1, 2, 3, 4, 5, 6, 8]), "out-of-bounds")[0].message


# --- what is known only at run time ---------------------------------------------------------------------------------
def gather(table, x):
    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, table_ref: (table_ref[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, table_ref: (i, 0)),
    )
    return pl.pallas_call(kernel, FLOAT((32, 128)), grid_spec=spec)(table, x)


def test_scalar_prefetch_values_are_followed():
    report = look(gather, np.array([0, 3, 3, 1], np.int32), jnp.zeros((32, 128)))
    assert report.findings == ()
    copies = {row.name: row.copies for row in report.footprint.buffers}
    assert copies == {"table_ref": 1, "x_ref": 3, "o_ref": 4}
    (finding,) = look(gather, np.array([0, 9, 3, 1], np.int32), jnp.zeros((32, 128))).findings
    assert finding.kind == "out-of-bounds" and "block 9" in finding.message and finding.when == "program (1,)"


def test_scalar_prefetch_under_jit_is_not_checked():
    report = look(jax.jit(gather), np.array([0, 9, 3, 1], np.int32), jnp.zeros((32, 128)))
    assert levels(report) == {"not-checked": "note"}
    assert "depend on run-time values" in report.findings[0].message
    assert report.footprint.moved_bytes is None and report.footprint.flops is not None


def dynamic(n):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(copy_kernel, FLOAT((32, 128)), grid=(n,), in_specs=[rows], out_specs=rows)(
        jnp.zeros((32, 128))
    )


def test_a_dynamic_grid_is_checked_at_its_size():
    assert look(dynamic, jnp.int32(4)).findings == ()
    report = look(dynamic, jnp.int32(3))
    assert report.grid == (3,) and "1 of 4 blocks" in report.findings[0].message


def test_a_dynamic_grid_under_jit_is_not_checked():
    report = look(jax.jit(dynamic), jnp.int32(3))
    assert report.grid == (None,) and levels(report) == {"not-checked": "note"}
    assert report.footprint.flops is None


def test_a_sampled_grid_says_so():
    report = copying((8, 128), (2048, 1024), lambda i, j: (i, j), shape=(2048 * 8, 1024 * 128), dtype=jnp.int8)
    assert "not-checked" in levels(report)
    assert "2,097,152 programs" in found(report, "not-checked")[0].message
    assert not found(report, "uninitialized-read") and not found(report, "revisited-block")


def test_a_revisit_in_a_sampled_grid_is_found():
    report = copying((8, 128), (2048, 1024), lambda k, i: (i, 0), shape=(1024 * 8, 128))
    assert "in iteration (1, 0), previously visited in iterations (0, 0)" in found(report, "revisited-block")[0].message


def test_an_out_of_range_corner_of_a_sampled_grid_is_found():
    report = copying((8, 128), (2048, 1024), lambda i, j: (i + j, 0), shape=(8 * 3070, 128))
    assert "block 3070" in found(report, "out-of-bounds")[0].message
