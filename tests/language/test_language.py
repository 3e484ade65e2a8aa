"""The language: what `pallas_call`, specs and the operations of a kernel do, on the reference interpreter."""

import functools
import inspect
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import tpu as pltpu

x = jnp.arange(8, dtype=jnp.float32)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def blocks(n):
    return pl.BlockSpec((n,), lambda i: (i,))


call = functools.partial(pl.pallas_call, interpret=True)


def run(kernel, *operands, out=None, **options):
    """The result of a kernel on operands; by default one output like `x`."""
    return jax.tree.map(np.asarray, call(kernel, f32(8) if out is None else out, **options)(*operands))


# --- the signature --------------------------------------------------------------------------------------------------
def test_the_signature_is_the_tutorials():
    parameters = inspect.signature(pl.pallas_call).parameters
    assert (
        list(parameters)
        == (
            "kernel out_shape grid_spec grid in_specs out_specs scratch_shapes input_output_aliases debug interpret "
            "name compiler_params cost_estimate metadata"
        ).split()
    )
    assert parameters["interpret"].default is False and parameters["in_specs"].default is pl.no_block_spec


def test_a_call_has_the_kernels_name():
    def my_kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    f = call(my_kernel, f32(8))
    assert f.__name__ == "my_kernel" and "my_kernel" in f.__doc__
    assert "name=my_kernel" in str(jax.make_jaxpr(f)(x))
    assert "name=other" in str(jax.make_jaxpr(call(my_kernel, f32(8), name="other"))(x))


def test_the_jaxpr_of_a_call_shows_refs():
    """Tutorial 1.3: one equation, `pallas_call`, whose parameter is the kernel's own jaxpr over Refs."""

    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    (equation,) = jax.make_jaxpr(call(add, f32(8)))(x, x).jaxpr.eqns
    assert str(equation.primitive) == "pallas_call"
    inner = equation.params["jaxpr"]
    assert [str(v.aval) for v in inner.invars] == ["Ref<default>{float32[8]}"] * 3
    assert "custom-call" not in jax.jit(call(add, f32(8))).lower(x, x).compile().as_text()


def test_debug_prints_the_kernel(capsys):
    def add_one(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    run(add_one, x, debug=True)
    printed = capsys.readouterr().out
    assert "pallas_call add_one" in printed and "add" in printed and "grid=()" in printed


# --- outputs, pytrees, prefixes -------------------------------------------------------------------------------------
def test_out_shape_may_be_any_tree():
    def kernel(x_ref, out):
        out["sum"][...] = jnp.sum(x_ref[...])
        out["parts"][0][...] = x_ref[:4]
        out["parts"][1][...] = x_ref[4:]

    shape = {"sum": f32(), "parts": [f32(4), f32(4)]}
    result = run(kernel, x, out=shape)
    assert jax.tree.structure(result) == jax.tree.structure(shape)
    assert result["sum"] == 28
    np.testing.assert_array_equal(np.concatenate(result["parts"]), x)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_list_of_outputs_becomes_a_tuple(kind):
    def kernel(x_ref, a_ref, b_ref):
        a_ref[...] = x_ref[...] + 1
        b_ref[...] = x_ref[...] * 2

    result = run(kernel, x, out=kind([f32(8), f32(8)]))
    assert type(result) is tuple
    np.testing.assert_array_equal(result, [np.arange(8) + 1, np.arange(8) * 2])


def test_out_shape_takes_anything_with_shape_and_dtype():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(o_ref.dtype)

    for like in (x, np.zeros(8, np.int32), pltpu.VMEM((8,), jnp.bfloat16), jax.eval_shape(lambda: x)):
        result = run(kernel, x, out=like)
        assert result.dtype == like.dtype and result.shape == (8,)


def test_no_outputs():
    assert run(lambda x_ref: None, x, out=()) == ()


def test_operands_may_be_trees():
    def kernel(tree, y_ref, o_ref):
        assert set(tree) == {"a", "b"} and type(tree["b"]) is tuple
        o_ref[...] = tree["a"][...] + tree["b"][0][...] * y_ref[...]

    np.testing.assert_array_equal(run(kernel, {"a": x, "b": (x + 1,)}, x), np.arange(8) * (np.arange(8) + 2))


def test_specs_are_prefixes_of_the_trees():
    """One spec serves a whole subtree, a list stands for a tuple, and a bare spec for all operands."""

    def kernel(pair, y_ref, out):
        out[0][...] = pair["a"][...] + pair["b"][...] * y_ref[...]
        out[1][...] = pair["a"][...]

    tree = {"a": x, "b": x + 1}
    expected = np.arange(8) * (np.arange(8) + 2), np.arange(8)
    for in_specs in (
        [blocks(4), blocks(4)],
        (blocks(4), blocks(4)),
        blocks(4),
        [{"a": blocks(4), "b": blocks(4)}, blocks(4)],
    ):
        for out_specs in (blocks(4), [[blocks(4), blocks(4)]], ((blocks(4), blocks(4)),)):
            result = call(kernel, ((f32(8), f32(8)),), grid=2, in_specs=in_specs, out_specs=out_specs)(tree, x)
            np.testing.assert_array_equal(result[0], expected)


def test_a_missing_spec_is_the_whole_array():
    def kernel(x_ref, y_ref, z_ref, o_ref):
        assert x_ref.shape == y_ref.shape == (8,) and z_ref.shape == (4,)
        o_ref[...] = z_ref[...] + x_ref[0] + y_ref[7]

    specs = [None, pl.no_block_spec, blocks(4)]
    np.testing.assert_array_equal(run(kernel, x, x, x, grid=2, in_specs=specs, out_specs=blocks(4)), np.arange(8) + 7)


def test_a_grid_spec_holds_grid_specs_and_scratch():
    def kernel(x_ref, o_ref, s_ref):
        s_ref[...] = x_ref[...] * 2
        o_ref[...] = s_ref[...]

    spec = pl.GridSpec(
        grid=(2,), in_specs=[blocks(4)], out_specs=blocks(4), scratch_shapes=[pltpu.VMEM((4,), jnp.float32)]
    )
    np.testing.assert_array_equal(run(kernel, x, grid_spec=spec), np.arange(8) * 2)


def test_scratch_by_name_comes_in_any_order():
    def kernel(x_ref, o_ref, *, b_ref, a_ref, c_ref):
        assert (b_ref.shape, a_ref.shape, c_ref.shape) == ((8,), (1,), (2, 3))
        assert [label(r) for r in (a_ref, b_ref)] == ["a_ref (scratch 0)", "b_ref (scratch 1)"]
        o_ref[...] = x_ref[...]

    shapes = {"b_ref": (8,), "c_ref": (2, 3), "a_ref": (1,)}
    run(kernel, x, scratch_shapes={name: pltpu.VMEM(shape, jnp.float32) for name, shape in shapes.items()})


def test_scratch_by_name_and_in_trees():
    def kernel(x_ref, o_ref, *, acc_ref, pair):
        acc_ref[...] = x_ref[...]
        pair[0][...] = acc_ref[...] * 2
        pair[1][0] = 5.0
        o_ref[...] = pair[0][...] + pair[1][0]

    buffer = pltpu.VMEM((8,), jnp.float32)
    scratch = {"acc_ref": buffer, "pair": (buffer, pltpu.SMEM((1,), jnp.float32))}
    np.testing.assert_array_equal(run(kernel, x, scratch_shapes=scratch), np.arange(8) * 2 + 5)


def test_scratch_lives_across_programs():
    def kernel(x_ref, o_ref, total_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            total_ref[0] = 0.0

        total_ref[0] += jnp.sum(x_ref[...])
        o_ref[...] = jnp.full_like(o_ref, total_ref[0])

    result = run(
        kernel,
        x,
        out=f32(4),
        grid=4,
        in_specs=[blocks(2)],
        out_specs=blocks(1),
        scratch_shapes=[pltpu.SMEM((1,), jnp.float32)],
    )
    np.testing.assert_array_equal(result, np.cumsum(np.arange(8))[1::2])


def test_metadata_cost_and_compiler_params_are_kept():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    cost, params = pl.CostEstimate(1, 2, 3), pltpu.CompilerParams(dimension_semantics=("parallel",))
    f = call(kernel, f32(8), metadata={"layer": "3"}, cost_estimate=cost, compiler_params=params)
    (equation,) = jax.make_jaxpr(f)(x).jaxpr.eqns
    assert dict(equation.params["metadata"]) == {"layer": "3"}
    assert equation.params["cost_estimate"] == cost and equation.params["compiler_params"] == params
    np.testing.assert_array_equal(f(x), x)


# --- labels ---------------------------------------------------------------------------------------------------------
def label(ref):
    return jax.typeof(ref).label


def test_labels_name_parameters_and_roles():
    seen = []

    def kernel(s_ref, x_ref, tree, o_ref, acc_ref):
        seen.extend(map(label, [s_ref, x_ref, tree["a"], tree["b"][1], o_ref, acc_ref]))

    grid_spec = pltpu.PrefetchScalarGridSpec(1, scratch_shapes=[pltpu.VMEM((8,), jnp.float32)])
    run(kernel, jnp.arange(2), x, {"a": x, "b": (x, x)}, grid_spec=grid_spec)
    assert seen == [
        "s_ref (scalar-prefetch operand 0)",
        "x_ref (input 0)",
        "tree['a'] (input 1)",
        "tree['b'][1] (input 3)",
        "o_ref (output 0)",
        "acc_ref (scratch 0)",
    ]


def test_labels_of_starred_and_keyword_parameters():
    seen = []

    def kernel(*refs, tmp_ref):
        seen.extend(map(label, [*refs, tmp_ref]))

    run(kernel, x, x, scratch_shapes={"tmp_ref": pltpu.VMEM((8,), jnp.float32)})
    assert seen == ["refs[0] (input 0)", "refs[1] (input 1)", "refs[2] (output 0)", "tmp_ref (scratch 0)"]


# --- where a program is ---------------------------------------------------------------------------------------------
def test_program_id_and_num_programs():
    def kernel(o_ref):
        i, j = pl.program_id(0), pl.program_id(axis=1)
        assert i.dtype == jnp.int32 and i.shape == ()
        assert (pl.num_programs(0), pl.num_programs(axis=1)) == (2, 3)
        assert type(pl.num_programs(1)) is int
        o_ref[...] = jnp.full(o_ref.shape, 10 * i + j, o_ref.dtype)

    out = jax.ShapeDtypeStruct((4, 6), jnp.int32)
    result = run(kernel, out=out, grid=(2, 3), out_specs=pl.BlockSpec((2, 2), lambda i, j: (i, j)))
    np.testing.assert_array_equal(result, np.kron([[0, 1, 2], [10, 11, 12]], np.ones((2, 2), int)))


def test_ids_are_right_at_any_depth():
    """In a branch, in a loop, in a jitted helper, in a custom derivative, in a scope."""

    @jax.jit
    def helper():
        return pl.program_id(0) * 100 + pl.num_programs(0)

    @jax.custom_jvp
    def custom(v):
        return v + pl.program_id(0)

    custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))

    def kernel(o_ref):
        o_ref[0] = helper()

        @pl.when(pl.program_id(0) >= 0)
        def _():
            o_ref[1] = pl.program_id(0)

        @pl.loop(0, 1)
        def _(i):
            o_ref[2] = pl.program_id(0) + helper()

        pl.run_scoped(lambda ref: o_ref.set(custom(jnp.int32(7)), (3,)), pltpu.VMEM((1,), jnp.float32))

    result = run(kernel, out=jax.ShapeDtypeStruct((8,), jnp.int32), grid=2, out_specs=blocks(4))
    np.testing.assert_array_equal(result, [2, 0, 2, 7, 102, 1, 103, 8])


def test_a_dynamic_axis_has_a_run_time_size():
    def kernel(o_ref):
        assert isinstance(pl.num_programs(0), jax.Array) and pl.num_programs(1) == 2

        @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
        def _():
            o_ref[pl.program_id(1)] = pl.program_id(0)

    f = jax.jit(lambda n: call(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), grid=(n, 2))())
    np.testing.assert_array_equal(f(3), [2, 2])
    np.testing.assert_array_equal(f(5), [4, 4])
    np.testing.assert_array_equal(f(jnp.int8(2)), [1, 1])


# --- conditions and loops -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("condition", [True, np.bool_(True), 1, jnp.bool_(True)])
def test_when_with_a_known_condition(condition):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.when(condition)(lambda: o_ref.set(50.0, (0,)))
        pl.when(not condition)(lambda: o_ref.set(60.0, (1,)))

    np.testing.assert_array_equal(run(kernel, x)[:2], [50, 1])


def test_when_with_a_run_time_condition():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.when((pl.program_id(0) == 1) & (x_ref[0] > 3))
        def _():
            o_ref[...] += 10

            @pl.when(x_ref[1] == 5)
            def _():
                o_ref[0] = 99.0

        assert pl.when(pl.program_id(0) == 5)(lambda: None) is None

    result = run(kernel, x, grid=2, in_specs=[blocks(4)], out_specs=blocks(4))
    np.testing.assert_array_equal(result, [0, 1, 2, 3, 99, 15, 16, 17])


@pytest.mark.parametrize("unroll", [None, 2, True])
@pytest.mark.parametrize(("lower", "upper", "step"), [(0, 8, 1), (1, 8, 3), (2, 7, 2), (5, 5, 1), (6, 2, 1)])
def test_loop_over_known_bounds(lower, upper, step, unroll):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.loop(lower, upper, step=step, unroll=unroll)
        def _(i):
            assert i.dtype == jnp.int32
            o_ref[i] += 10

    expected = np.arange(8.0)
    expected[lower:upper:step] += 10
    np.testing.assert_array_equal(run(kernel, x), expected)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8])
@pytest.mark.parametrize(("lower", "upper", "step"), [(0, 8, 1), (1, 8, 3), (2, 7, 2), (5, 5, 1), (6, 2, 1)])
def test_loop_over_run_time_bounds(lower, upper, step, dtype):
    def kernel(b_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.loop(b_ref[0], b_ref[1], step=b_ref[2])
        def _(i):
            assert i.dtype == dtype
            o_ref[i] += 10

    expected = np.arange(8.0)
    expected[lower:upper:step] += 10
    np.testing.assert_array_equal(run(kernel, jnp.array([lower, upper, step], dtype), x), expected)


def test_loop_over_a_range_whose_length_does_not_fit_its_type():
    def kernel(b_ref, o_ref):
        o_ref[0] = pl.loop(b_ref[0], b_ref[1], init_carry=0)(lambda i, count: count + 1).astype(jnp.float32)

    assert run(kernel, jnp.array([-100, 100], jnp.int8), out=f32(1))[0] == 200
    with jax.enable_x64(True):
        assert run(kernel, jnp.array([-100, 100], jnp.int8), out=f32(1))[0] == 200
        assert run(kernel, jnp.array([3, 10], jnp.int64), out=f32(1))[0] == 7


def test_loop_with_a_carry():
    def kernel(x_ref, o_ref):
        @pl.loop(0, 4, init_carry=(jnp.float32(0), 1))
        def result(i, carry):
            total, count = carry
            return total + x_ref[i], count + 1

        total, count = result
        o_ref[...] = jnp.full(8, total * count)

    assert run(kernel, x)[0] == 6 * 5


# --- scoped buffers -------------------------------------------------------------------------------------------------
def test_run_scoped_passes_trees_and_returns_trees():
    def kernel(x_ref, o_ref):
        def body(pair, *, tmp_ref):
            pair[0][...] = x_ref[...] * 2
            tmp_ref[...] = pair[0][...] + 1
            pair[1]["flag"][0] = 5
            return {"sum": jnp.sum(tmp_ref[...]), "rest": (pair[1]["flag"][0], None)}

        vmem, smem = pltpu.VMEM((8,), jnp.float32), pltpu.SMEM((1,), jnp.int32)
        result = pl.run_scoped(body, (vmem, {"flag": smem}), tmp_ref=vmem)
        assert result["rest"][1] is None
        o_ref[...] = jnp.full(8, result["sum"] + result["rest"][0])

    assert run(kernel, x)[0] == 56 + 8 + 5


def test_with_scoped_adds_the_refs_to_the_arguments():
    def kernel(x_ref, o_ref):
        @pl.with_scoped(pltpu.VMEM((8,), jnp.float32), flag_ref=pltpu.SMEM((1,), jnp.int32))
        def scaled(factor, tmp_ref, *, shift, flag_ref):
            """Scales."""
            flag_ref[0] = 1
            tmp_ref[...] = x_ref[...] * factor + shift
            return tmp_ref[...] + flag_ref[0]

        assert scaled.__name__ == "scaled" and scaled.__doc__ == "Scales."
        o_ref[...] = scaled(2.0, shift=3)

    np.testing.assert_array_equal(run(kernel, x), np.arange(8) * 2 + 4)


def test_run_state_turns_writes_into_a_function():
    def body(refs):
        @pl.loop(0, 3)
        def _(i):
            refs["a"][i] += refs["b"][i] * 2

    start = {"a": jnp.ones(4), "b": jnp.arange(4.0)}
    for f in (pl.run_state(body), jax.jit(pl.run_state(body))):
        result = f(start)
        np.testing.assert_array_equal(result["a"], [1, 3, 5, 1])
        np.testing.assert_array_equal(result["b"], np.arange(4))
    np.testing.assert_array_equal(pl.run_state(lambda ref: ref.set(ref[...] + x))(x), 2 * x)  # closes over an array

    def kernel(x_ref, o_ref):
        state = pl.run_state(lambda refs: refs[0].addupdate(refs[1][...]))((x_ref[...], x_ref[...] * 2))
        o_ref[...] = state[0]

    np.testing.assert_array_equal(run(kernel, x), 3 * np.arange(8))


# --- prints and checks ----------------------------------------------------------------------------------------------
def printed(kernel, capfd, *operands, **options):
    """The lines that a call prints."""
    jax.block_until_ready(call(kernel, f32(8), **options)(*operands))
    jax.effects_barrier()
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_prints_come_in_grid_order(capfd, wrap):
    def kernel(x_ref, o_ref):
        pl.debug_print("pid=({}, {}) of {}", pl.program_id(0), pl.program_id(1), pl.num_programs(1))
        o_ref[...] = x_ref[...]

    jax.block_until_ready(wrap(call(kernel, f32(8), grid=(20, 5)))(x))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == [f"pid=({i}, {j}) of 5" for i in range(20) for j in range(5)]


def test_prints_of_a_call_whose_result_is_unused(capfd):
    @jax.jit
    def f(x):
        call(lambda x_ref, o_ref: pl.debug_print("seen {}", x_ref[0]), f32(8))(x)
        return x + 1

    f(x).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out == "seen 0.0\n"


@pytest.mark.parametrize(
    ("fmt", "args", "line"),
    [
        ("{} {}", lambda r: (r[1], r[2].astype(int)), "1.0 2"),
        ("{1} {0}", lambda r: (r[1], 7), "7 1.0"),
        ("{:>8.3f}|{:+d}", lambda r: (r[1], r[3].astype(int)), "   1.000|+3"),
        ("{{}} {}", lambda r: (r[:3],), "{} [0. 1. 2.]"),
        ("{0[2]} {0.shape}", lambda r: (r[...],), None),
        ("{}", lambda r: (r,), "[0. 1. 2. 3. 4. 5. 6. 7.]"),
        ("{}", lambda r: (r[1].astype(jnp.bfloat16),), "1.0"),
        ("{} {} {}", lambda r: ("{name}", r[1], None), "{name} 1.0 None"),
        ("{2} {0} {1:5d}", lambda r: ("a", 3, r[1] > 0), "True a     3"),
        ("values", lambda r: (r[1], r[2]), "values 1.0 2.0"),
        ("values ", lambda r: (r[:2],), "values [0. 1.]"),
        ("nothing {{}}", lambda r: (), "nothing {}"),
        ("{} {}", lambda r: (np.float32(0.5), True), "0.5 True"),
    ],
)
def test_formats(fmt, args, line, capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print(fmt, *args(x_ref))

    if line is None:
        with pytest.raises(ValueError, match="does not fit the values"):
            call(kernel, f32(8))(x)
    else:
        assert printed(kernel, capfd, x) == [line]


def test_print_outside_a_kernel_is_jaxs(capfd):
    jax.jit(lambda v: pl.debug_print("outside {}", v))(3)
    jax.effects_barrier()
    assert capfd.readouterr().out == "outside 3\n"


def test_checks_cost_nothing_unless_they_are_on():
    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref[0] > 5, "first element is {not} large")
        o_ref[...] = x_ref[...]

    f = call(kernel, f32(8), grid=2)
    np.testing.assert_array_equal(f(x), x)
    assert "debug_check[" not in str(jax.make_jaxpr(f)(x))
    with pl.enable_debug_checks(True):
        assert "debug_check[" in str(jax.make_jaxpr(f)(x))
        with pytest.raises(pl.KernelCheckError) as caught:
            f(x)
        np.testing.assert_array_equal(f(x + 6), x + 6)
    first, place, point = str(caught.value).splitlines()
    assert first == "first element is {not} large"
    assert f"test_language.py:{kernel.__code__.co_firstlineno + 1} (" in place
    assert point == "  grid point: (0,)"
    assert isinstance(caught.value, AssertionError)
    np.testing.assert_array_equal(f(x), x)


def test_a_check_with_a_python_condition():
    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref.shape == (9,), "wrong shape")
        o_ref[...] = x_ref[...]

    with pl.enable_debug_checks(True), pytest.raises(pl.KernelCheckError, match="wrong shape"):
        run(kernel, x)


def test_checks_in_threads_raise_their_own_failures():
    def kernel(x_ref, o_ref):
        pl.debug_check(x_ref[0] < 0, "starts too high")
        o_ref[...] = x_ref[...]

    f, failures = call(kernel, f32(8), grid=3), {}

    def work(n):
        with pl.enable_debug_checks(True):
            for _ in range(5):
                try:
                    f(x + n)
                except BaseException as error:
                    failures.setdefault(n, []).append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(errors) for errors in failures.values()] == [5] * 4
    assert {type(e) for errors in failures.values() for e in errors} == {pl.KernelCheckError}


def test_delay_and_multiple_of_do_not_change_values():
    def kernel(i_ref, x_ref, o_ref):
        pl.delay(100)
        pl.delay(i_ref[0])
        start = pl.multiple_of(i_ref[0] * 4, 4)
        o_ref[...] = x_ref[pl.ds(start, 4)] + pl.multiple_of(8, [2, 4])

    np.testing.assert_array_equal(run(kernel, jnp.array([1]), x, out=f32(4)), np.arange(4, 8) + 8)
    assert pl.multiple_of(12, 4) == 12
    np.testing.assert_array_equal(pl.multiple_of(jnp.array([4, 8]), 4), [4, 8])


# --- small functions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b", "quotient"), [(7, 2, 4), (8, 2, 4), (0, 3, 0), (1, 128, 1), (-7, 2, -3), (10**12 + 1, 10**6, 10**6 + 1)]
)
def test_cdiv(a, b, quotient):
    assert pl.cdiv(a, b) == quotient and type(pl.cdiv(a, b)) is int
    if abs(a) < 2**31:
        assert pl.cdiv(jnp.int32(a), b) == quotient
        assert pl.cdiv(np.int64(a), np.int64(b)) == quotient


def test_cdiv_by_zero():
    with pytest.raises(ZeroDivisionError):
        pl.cdiv(1, 0)


@pytest.mark.parametrize(("a", "alignment", "aligned"), [(5, 8, 8), (8, 8, 8), (0, 8, 0), (9, 8, 16), (130, 128, 256)])
def test_align_to(a, alignment, aligned):
    assert pl.align_to(a, alignment) == aligned
    assert pl.align_to(jnp.int32(a), alignment) == aligned


def test_next_power_of_2():
    assert [pl.next_power_of_2(n) for n in (0, 1, 2, 3, 5, 64, 65, 2**40 - 1)] == [1, 1, 2, 4, 8, 64, 128, 2**40]
    assert pl.next_power_of_2(np.int32(5)) == 8


def test_strides_from_shape():
    assert pl.strides_from_shape((2, 3, 4)) == (12, 4, 1)
    assert pl.strides_from_shape((5,)) == (1,) and pl.strides_from_shape(()) == ()


def test_ds():
    assert pl.ds is pl.dslice
    for got, (start, size, stride) in [
        (pl.ds(1, 2), (1, 2, 1)),
        (pl.ds(3), (0, 3, 1)),
        (pl.ds(None, 3), (0, 3, 1)),
        (pl.ds(1, 2, 3), (1, 2, 3)),
    ]:
        assert isinstance(got, pl.Slice) and (got.start, got.size, got.stride) == (start, size, stride)

    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 4, 2)] = x_ref[pl.ds(4)]
        o_ref[pl.ds(1, 4, 2)] = x_ref[pl.ds(-4, 4)]

    np.testing.assert_array_equal(run(kernel, x), [0, 4, 1, 5, 2, 6, 3, 7])


def test_broadcast_to():
    for a, shape in [
        (np.arange(3), (2, 3)),
        (np.arange(2)[:, None], (4, 2, 3)),
        (np.float32(5), (2,)),
        (np.ones((1, 1)), (2, 3)),
    ]:
        np.testing.assert_array_equal(pl.broadcast_to(a, shape), np.broadcast_to(a, shape))

    def kernel(x_ref, o_ref):
        o_ref[...] = pl.broadcast_to(x_ref[0], o_ref.shape) + pl.broadcast_to(x_ref[1:2], (8,))

    np.testing.assert_array_equal(run(kernel, x), np.ones(8))


def test_empty():
    assert pl.empty((2, 3), jnp.int8).shape == (2, 3) and pl.empty(4, jnp.float32).dtype == jnp.float32
    tree = pl.empty_like({"a": x, "b": (jax.ShapeDtypeStruct((2,), jnp.int32),)})
    assert tree["a"].shape == (8,) and tree["b"][0].dtype == jnp.int32

    def kernel(x_ref, o_ref):
        buffer = pl.empty_like(x_ref)
        o_ref[...] = jnp.where(True, x_ref[...], buffer)

    np.testing.assert_array_equal(run(kernel, x), x)


def test_empty_ref_like():
    def fill():
        refs = pl.empty_ref_like({"a": f32(8), "b": pltpu.VMEM((2,), jnp.int32)})
        assert refs["b"].shape == (2,) and refs["b"].dtype == jnp.int32
        refs["a"][...] = x
        return refs["a"][...]

    np.testing.assert_array_equal(jax.jit(fill)(), x)
    ref = pl.empty_ref_like(f32(8))
    ref[...] = x
    np.testing.assert_array_equal(ref[...], x)
    with pytest.raises(NotImplementedError, match="A Ref in vmem exists only inside jit"):
        pl.empty_ref_like(pltpu.VMEM((8,), jnp.float32))


# --- costs ----------------------------------------------------------------------------------------------------------
def test_cost_estimates_are_plain_data():
    cost = pl.CostEstimate(flops=np.int64(10), transcendentals=2, bytes_accessed=3)
    assert cost == pl.CostEstimate(10, 2, 3, remote_bytes_transferred=0) and hash(cost) == hash(
        pl.CostEstimate(10, 2, 3)
    )
    assert type(cost.flops) is int
    assert json.loads(cost.to_json()) == {
        "flops": 10,
        "transcendentals": 2,
        "bytes_accessed": 3,
        "remote_bytes_transferred": 0,
    }


def test_estimate_cost_counts():
    m, k, n = 8, 16, 32
    a, b = f32(m, k), f32(k, n)
    dot = pl.estimate_cost(jnp.dot, a, b)
    assert dot == pl.CostEstimate(2 * m * k * n, 0, 4 * (m * k + k * n + m * n))
    elementwise = pl.estimate_cost(lambda v: jnp.exp(v) * 2 + 1, f32(100))
    assert elementwise == pl.CostEstimate(200, 100, 800)
    loop = pl.estimate_cost(lambda v: lax.fori_loop(0, 5, lambda i, c: c * 2.0, v), f32(100))
    assert loop.flops >= 500 and loop.bytes_accessed == 800
    static = pl.estimate_cost(lambda v, mode, *, flip: -v if flip and mode == "on" else v, f32(100), "on", flip=True)
    assert static.flops == 100


def test_estimate_cost_of_a_kernel_call():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    counted = pl.estimate_cost(call(kernel, f32(8), grid=2, in_specs=[blocks(4)], out_specs=blocks(4)), f32(8))
    assert (counted.transcendentals, counted.bytes_accessed) == (8, 64)
    stated = pl.CostEstimate(flops=1, transcendentals=2, bytes_accessed=3)
    declared = pl.estimate_cost(call(kernel, f32(8), cost_estimate=stated), f32(8))
    assert (declared.flops, declared.transcendentals, declared.bytes_accessed) == (1, 2, 3 + 64)


# --- the text of a lowering -----------------------------------------------------------------------------------------
def test_lower_as_mlir():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    f = call(kernel, f32(8))
    for argument in (x, f32(8)):
        text = pl.lower_as_mlir(f, argument)
        assert text.startswith("module @jit_kernel") and "stablehlo.multiply" in text and "custom_call" not in text
    assert "stablehlo" in pl.lower_as_mlir(f, x, platforms=("tpu", "cuda"))
    assert "stablehlo" in pl.lower_as_mlir(f, x, device=jax.devices("cpu")[0])
    assert "stablehlo.power" in pl.lower_as_mlir(lambda v, *, p: v**p, x, p=jnp.float32(2.5))
    text = pl.lower_as_mlir(lambda v, n: v * n, x, 3, static_argnames=("n",))
    assert "3.0" in text


def test_lower_as_mlir_with_symbolic_shapes():
    (n,) = jax.export.symbolic_shape("n")
    text = pl.lower_as_mlir(lambda v: v * 2, jax.ShapeDtypeStruct((n,), jnp.float32), dynamic_shapes=True)
    assert "tensor<?xf32>" in text


# --- options --------------------------------------------------------------------------------------------------------
def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


@pytest.fixture
def restored():
    """Puts the process's options back."""
    before = {name: pl.config.get(name) for name in ("cpu", "debug_checks", "poison_buffers", "interpret")}
    yield
    for name, value in before.items():
        setattr(pl.config, name, value)


def test_options_for_a_block_and_for_the_process(restored):
    assert (pl.config.cpu, pl.config.debug_checks, pl.config.interpret) == ("refuse", False, None)
    with pl.config.state("cpu")("interpret"):
        assert pl.config.cpu == "interpret"
        np.testing.assert_array_equal(pl.pallas_call(copy, f32(8))(x), x)
        with pl.config.state("cpu")("refuse"), pytest.raises(ValueError, match="Only interpret mode"):
            pl.pallas_call(copy, f32(8))(x)
    with pytest.raises(ValueError, match="Only interpret mode"):
        pl.pallas_call(copy, f32(8))(x)
    pl.config.cpu = "interpret"
    np.testing.assert_array_equal(jax.jit(pl.pallas_call(copy, f32(8)))(x), x)
    assert pl.config.get("cpu") == pl.config.state("cpu").value == "interpret"


def test_an_option_can_interpret_every_call(restored):
    pl.config.interpret = True
    np.testing.assert_array_equal(pl.pallas_call(copy, f32(8))(x), x)
    with pl.config.state("interpret")(pl.EagerParams()):
        np.testing.assert_array_equal(pl.pallas_call(copy, f32(8))(x), x)
        np.testing.assert_array_equal(pl.pallas_call(copy, f32(8), interpret=True)(x), x)


def test_options_are_per_thread_in_a_block():
    seen = []
    with pl.enable_debug_checks(True), pl.enable_poison_buffers(True):
        thread = threading.Thread(target=lambda: seen.append((pl.config.debug_checks, pl.config.poison_buffers)))
        thread.start()
        thread.join()
        assert (pl.config.debug_checks, pl.config.poison_buffers) == (True, True)
    assert seen == [(False, False)] and pl.config.debug_checks is False


NO_OPTION = (
    AttributeError,
    "palladion.config has no option 'gpu'.",
    ("the options are cpu, debug_checks, poison_buffers, interpret"),
)
NOT_FAST = ValueError, "palladion.config.cpu cannot be 'fast' (str).", "'refuse' or 'interpret'"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda: setattr(pl.config, "cpu", "fast"), NOT_FAST),
        (lambda: pl.config.state("cpu")("fast"), NOT_FAST),
        (
            lambda: pl.enable_debug_checks(1),
            (ValueError, "palladion.config.debug_checks cannot be 1 (int).", "False or True"),
        ),
        (lambda: pl.config.gpu, NO_OPTION),
        (lambda: setattr(pl.config, "gpu", 1), NO_OPTION),
        (lambda: pl.config.get("gpu"), NO_OPTION),
    ],
)
def test_options_that_are_not(change, expected):
    kind, first_line, fix = expected
    with pytest.raises(kind) as caught:
        change()
    first, place, last = str(caught.value).splitlines()
    assert first == first_line and last.startswith(f"  fix: {fix}")
    assert "test_language.py:" in place


# --- one Ref, twice -------------------------------------------------------------------------------------------------
def test_one_ref_may_be_passed_twice_to_a_helper():
    @jax.jit
    def add(a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] + b_ref[...]
        a_ref[0] = 5.0

    def kernel(x_ref, o_ref):
        @jax.jit
        def increment(ref):
            ref[1] = o_ref[0] + 1  # closes over the Ref that it is passed

        add(x_ref, x_ref, o_ref)
        increment(o_ref)

    result, updated = run(
        lambda x_ref, o_ref, p_ref: kernel(p_ref, o_ref),
        x,
        out=(f32(8), f32(8)),
        input_output_aliases={0: 1},
    )
    np.testing.assert_array_equal(result, [0, 1, 4, 6, 8, 10, 12, 14])
    np.testing.assert_array_equal(updated, [5, 1, 2, 3, 4, 5, 6, 7])
