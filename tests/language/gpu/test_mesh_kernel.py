"""`plgpu.Mesh`, `plgpu.kernel` in all its spellings, `pl.core_map` and `pl.run_scoped` on a GPU: what is traced."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.language import ops
from palladion.language.gpu.refs import storage_of

f32 = jax.ShapeDtypeStruct((256,), jnp.float32)
x = np.arange(256, dtype=np.float32)
GRID = dict(grid=(2,), grid_names=("x",))


def add_one(x_ref, y_ref):
    here = pl.ds(lax.axis_index("x") * 128, 128)
    y_ref[here] = x_ref[here] + 1


def call_of(f, *args):
    """The equation of the kernel call in a program."""
    (eqn,) = [e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == "pallas_call"]
    return eqn


def traced(body, *, out_type=f32, args=(x,), **options):
    """The jaxpr of a kernel."""
    return call_of(plgpu.kernel(body, out_type=out_type, **options), *args).params["jaxpr"]


# --- meshes -----------------------------------------------------------------------------------------------------------
def test_the_shape_of_a_mesh_is_grid_cluster_threads():
    mesh = plgpu.Mesh(
        grid=[4, 2], grid_names=["m", "n"], cluster=(2,), cluster_names="c", num_threads=3, thread_name="t"
    )
    assert mesh.shape == collections.OrderedDict(m=4, n=2, c=2, t=3)
    assert mesh.default_memory_space is plgpu.GMEM and mesh == mesh and hash(mesh) == hash(mesh)
    assert plgpu.Mesh().shape == {}
    assert plgpu.WarpMesh(axis_name="w").shape == {"w": 4}
    assert repr(plgpu.Mesh()) == (
        "Mesh(grid=(), grid_names=(), cluster=(), cluster_names=(), num_threads=None, thread_name=None, "
        "kernel_name=None)"
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(grid=(2,)), "grid_names must have the same length as grid: there is a name for each axis"),
        (dict(cluster=(2,), cluster_names=("a", "b")), "cluster_names must have the same length as cluster"),
        (dict(grid=(0,), grid_names=("x",)), "grid must be a sequence with, for each axis, a number of blocks of at"),
        (dict(grid=(2.0,), grid_names=("x",)), "entry 0 is 2.0"),
        (dict(grid=(2,), grid_names=(3,)), "grid_names must be a sequence with, for each axis, a name"),
        (dict(num_threads=2), "num_threads and thread_name must be either both set or both None, but num_threads is"),
        (dict(thread_name="t"), "but thread_name is given without num_threads"),
        (dict(num_threads=0, thread_name="t"), "num_threads must be None or a number of threads of at least 1"),
        (dict(num_threads=9, thread_name="t"), "num_threads is 9, but a block has at most 8 Pallas threads"),
        (dict(cluster=(2, 2, 2, 2), cluster_names=tuple("abcd")), "cluster must be at most 3D"),
        (dict(cluster=(17,), cluster_names=("c",)), "the cluster (17,) has 17 blocks, but at most 16"),
        (dict(**GRID, cluster=(2,), cluster_names=("x",)), "two axes are called 'x'"),
        (dict(**GRID, num_threads=2, thread_name="x"), "two axes are called 'x'"),
    ],
)
def test_what_a_mesh_cannot_be(fields, line):
    with pytest.raises((TypeError, ValueError)) as error:
        plgpu.Mesh(**fields)
    first = str(error.value).splitlines()[0]
    assert first.startswith("plgpu.Mesh: ") and line in first


# --- plgpu.kernel -----------------------------------------------------------------------------------------------------
FORMS = {
    "call": lambda: plgpu.kernel(add_one, out_type=f32, **GRID),
    "older spelling": lambda: plgpu.kernel(add_one, out_shape=f32, **GRID),
    "an array as type": lambda: plgpu.kernel(add_one, out_shape=x, **GRID),
    "by position": lambda: plgpu.kernel(add_one, f32, **GRID),
    "partial": lambda: functools.partial(plgpu.kernel, out_shape=f32, **GRID)(add_one),
    "decorator": lambda: plgpu.kernel(out_type=f32, **GRID)(add_one),
    "pl.kernel": lambda: pl.kernel(add_one, f32, mesh=plgpu.Mesh(**GRID)),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_make_the_same_call(form):
    eqn = call_of(FORMS[form](), x)
    assert [(str(v.aval), v.aval.memory_space) for v in eqn.params["jaxpr"].invars] == [
        ("Ref<gmem>{float32[256]}", plgpu.GMEM)
    ] * 2
    assert eqn.params["mesh"] == plgpu.Mesh(**GRID) and eqn.params["grid_mapping"].grid == (2,)
    assert eqn.params["name"] == "add_one" and eqn.outvars[0].aval.shape == (256,)


def test_the_plain_meaning_of_a_grid_with_names():
    """`interpret=True`: blocks one after the other, each with its own index along every axis."""

    def body(x_ref, y_ref):
        m, n = lax.axis_index("m"), lax.axis_index("n")
        assert (lax.axis_size("m"), lax.axis_size("n"), lax.axis_size(("m", "n"))) == (3, 2, 6)
        y_ref[m, n] = x_ref[m * 2 + n] + 10 * m + 100 * n + 1000 * lax.axis_index(("m", "n"))

    out = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    y = plgpu.kernel(body, out_type=out, grid=(3, 2), grid_names=("m", "n"), interpret=True)(x[:6])
    m, n = np.mgrid[:3, :2]
    np.testing.assert_array_equal(y, 2 * m + n + 10 * m + 100 * n + 1000 * (2 * m + n))


def test_outputs_keep_their_structure():
    def body(x_ref, y_ref, nothing, rest):
        assert nothing is None and rest["b"] is None
        y_ref[...] = x_ref[...] + 1
        rest["a"][...] = x_ref[...] + 2

    y, nothing, rest = plgpu.kernel(body, out_type=[f32, None, {"a": f32, "b": None}], interpret=True)(x)
    assert nothing is None and rest["b"] is None
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(rest["a"], x + 2)
    assert isinstance(plgpu.kernel(lambda a, b: b.set(a[...]), out_type=[f32], interpret=True)(x), list)
    assert isinstance(plgpu.kernel(lambda a, b: b.set(a[...]), out_type=(f32,), interpret=True)(x), tuple)


def test_a_kernel_without_operands():
    y = plgpu.kernel(lambda y_ref: y_ref.set(jnp.ones(256)), out_shape=f32, interpret=True)()
    np.testing.assert_array_equal(y, np.ones(256))


def test_scratch_is_nested_and_may_be_plain():
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    seen = {}

    def body(x_ref, y_ref, plain, tiled, nested):
        seen.update(plain=plain, tiled=tiled, nested=nested)

    scratch = dict(
        plain=f32,
        tiled=plgpu.SMEM((64, 64), jnp.float16, transforms=transforms),
        nested=[
            plgpu.SMEM((4,), jnp.int32),
            None,
            (plgpu.Barrier(), plgpu.RefUnion(plgpu.SMEM((2,), jnp.int8), f_smem())),
        ],
    )
    for spelling in ("scratch_types", "scratch_shapes"):
        seen.clear()
        traced(body, **{spelling: scratch})
        smem, none, (barrier, union) = seen["nested"]
        assert none is None and len(union) == 2 and smem.shape == (4,) and barrier.shape == ()
        assert {jax.typeof(r).memory_space for r in (seen["plain"], seen["tiled"], smem, *union)} == {plgpu.SMEM}
        assert storage_of(seen["tiled"]).transforms == transforms
        assert storage_of(union[0]).union[1] == 0 and storage_of(union[1]).union[1] == 1
    traced(lambda x_ref, y_ref, a, b: None, scratch_types=[f32, plgpu.Barrier()])


def f_smem():
    return plgpu.SMEM((8,), jnp.float32)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: plgpu.kernel(add_one, out_type=f32, out_shape=f32), "plgpu.kernel got out_type and out_shape"),
        (lambda: plgpu.kernel(add_one, scratch_types=(), scratch_shapes=()), "got scratch_types and scratch_shapes"),
        (lambda: plgpu.kernel(3, out_type=f32), "The body of plgpu.kernel must be a function of Refs"),
        (lambda: plgpu.kernel(add_one, out_type=f32, grid=(2,)), "grid_names must have the same length"),
        (lambda: plgpu.kernel(add_one, out_typ=f32), "out_typ"),
        (lambda: plgpu.kernel(add_one, out_type=f32, interpret=pl.EagerParams()), "plgpu.kernel does not run under"),
        (
            lambda: plgpu.kernel(lambda a, b, c: None, f32, scratch_types=[3])(x),
            "c (scratch 0) of <lambda> is 3 (int), which is no",
        ),
    ],
)
def test_what_kernel_refuses(make, line):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        make()
    assert line in str(error.value).splitlines()[0]


def test_program_ids_have_names_instead():
    with pytest.raises(ValueError, match=r"fix: the axes of its mesh have names: lax.axis_index\('x'\)"):
        traced(lambda x_ref, y_ref: y_ref.set(x_ref[...] + pl.program_id(0)), **GRID)


def test_stores_to_inputs_are_the_machines_to_find():
    """Collectives that ship with JAX have one that never happens; where nothing finds it at run time, it is refused."""

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...]
        pl.when(lax.axis_index("x") == -1)(lambda: x_ref.set(jnp.zeros(256)))

    with pytest.raises(ValueError, match=r"writes to x_ref \(input 0\), which is not aliased to an output"):
        traced(body, interpret=True, **GRID)
    assert len(traced(body, interpret=plgpu.InterpretGPUParams(), **GRID).invars) == 2


# --- core_map ---------------------------------------------------------------------------------------------------------
def test_core_map_under_run_state():
    """The reference's first example; in the call, what `run_state` made Refs of are whole Refs in GMEM."""

    @pl.run_state
    def run_kernel(refs):
        x_ref, y_ref = refs

        @pl.core_map(plgpu.Mesh(**GRID), scratch_shapes=[f32], interpret=True)
        def kernel_body(scratch):
            assert jax.typeof(scratch).memory_space is plgpu.SMEM
            here = pl.ds(lax.axis_index("x") * 128, 128)
            y_ref[here] = x_ref[here] + 1

    eqn = call_of(run_kernel, (x, np.zeros_like(x)))
    assert {v.aval.memory_space for v in eqn.params["jaxpr"].invars[:3]} == {plgpu.GMEM}
    before, after = run_kernel((x, np.zeros_like(x)))
    np.testing.assert_array_equal(before, x)
    np.testing.assert_array_equal(after, x + 1)


def test_the_warps_of_a_thread():
    def with_core_map(x_ref, y_ref):
        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            y_ref[lax.axis_index("warp")] = x_ref[0]

    def with_warp_map(x_ref, y_ref):
        @plgpu.warp_map
        def _(warp):
            y_ref[warp] = x_ref[0]

    for body in (with_core_map, with_warp_map):
        (eqn,) = traced(body).eqns
        assert eqn.primitive.name == "warp_map" and str(eqn.params["axis_name"]) == "warp"
        assert [e.primitive.name for e in eqn.params["jaxpr"].eqns if e.primitive.name == "axis_index"] == [
            "axis_index"
        ]
        assert not eqn.outvars and len(eqn.invars) == 2


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (lambda w: plgpu.warp_map(lambda v: None), "plgpu.warp_map inside the function of one warp"),
        (lambda w: w, "should return None"),
        (lambda: None, "The function under plgpu.warp_map takes 0 parameters"),
    ],
)
def test_what_a_warp_refuses(body, line):
    with pytest.raises((TypeError, ValueError), match=line):
        traced(lambda x_ref, y_ref: plgpu.warp_map(body))


def test_warps_outside_a_kernel_and_names_that_clash():
    with pytest.raises(ValueError, match=r"plgpu\.warp_map can only be used inside a kernel"):
        plgpu.warp_map(lambda w: None)
    with pytest.raises(ValueError, match="'x' is an axis of the kernel's mesh already"):
        traced(lambda x_ref, y_ref: pl.core_map(plgpu.WarpMesh(axis_name="x"))(lambda: None), **GRID)


# --- run_scoped -------------------------------------------------------------------------------------------------------
def scope_of(collective_axes, **options):
    def body(x_ref, y_ref):
        def scope(buffer, barriers, nothing):
            assert nothing is None and len(barriers) == 2
            y_ref[...] = x_ref[...] + buffer[0]

        types = (plgpu.SMEM((4,), jnp.float32), (plgpu.Barrier(), plgpu.Barrier(num_barriers=2)), None)
        pl.run_scoped(scope, *types, collective_axes=collective_axes)

    (eqn,) = [e for e in traced(body, **options).eqns if e.primitive is ops.run_scoped_p]
    return eqn


@pytest.mark.parametrize(("given", "kept"), [("wg", ("wg",)), (("x", "wg"), ("x", "wg")), ((), ()), (None, ())])
def test_collective_axes_are_a_tuple(given, kept):
    eqn = scope_of(given, **GRID, num_threads=2, thread_name="wg")
    assert eqn.params["collective_axes"] == kept and eqn.params["num_scoped"] == 3


def test_collective_axes_must_be_axes_of_the_mesh():
    with pytest.raises(ValueError, match=r"pl.run_scoped\(collective_axes='wg'\): 'wg' is not an axis") as error:
        scope_of("wg", **GRID)
    assert "axes: 'x'" in str(error.value)

    def on_a_grid(x_ref, o_ref):
        pl.run_scoped(lambda ref: None, f32, collective_axes="wg")

    with pytest.raises(ValueError, match="'wg' is not an axis") as error:
        pl.pallas_call(on_a_grid, f32, interpret=True)(x)
    assert "the kernel runs on a grid" in str(error.value)


def test_the_reference_interpreter_does_not_share_buffers_among_threads():
    def body(x_ref, y_ref):
        def scope(buffer):
            buffer[...] = x_ref[...] + 1
            y_ref[...] = buffer[...]

        pl.run_scoped(scope, plgpu.SMEM((256,), jnp.float32), collective_axes="wg")

    one = plgpu.kernel(body, out_type=f32, num_threads=1, thread_name="wg", interpret=True)
    np.testing.assert_array_equal(one(x), x + 1)
    two = plgpu.kernel(body, out_type=f32, num_threads=2, thread_name="wg", interpret=True)
    with pytest.raises(pl.UnsupportedPrimitive, match="buffers that several threads share") as error:
        two(x)
    assert error.value.supported_by == ("the simulated GPU",)
