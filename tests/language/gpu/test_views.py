"""Views of other devices, of other blocks and of windows, unions of buffers, and how buffers may be stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import palladion as pl
from language.mistakes import check, collector
from palladion import jaxlink
from palladion import mosaic_gpu as plgpu
from palladion.language.check import equations
from palladion.language.gpu import views
from palladion.language.gpu.copies import copy_smem_to_gmem
from palladion.language.gpu.memory import TransposeTransform, stored_shape
from palladion.language.gpu.union import RefUnion, unions_among

F16, F32 = jnp.float16, jnp.float32
X = np.zeros((16, 128), np.float32)
S = plgpu.SMEM((16, 128), F32)
CLUSTER = dict(cluster=(2, 2), cluster_names=("a", "b"))
Tile, Swizzle = plgpu.TilingTransform, plgpu.SwizzleTransform
cases, mistake = collector()


def traced(body, *scratch, x=X, **options):
    """The jaxpr of a kernel with an operand and an output in GMEM."""
    call = plgpu.kernel(body, out_type=X, scratch_types=scratch, **options)
    return jax.make_jaxpr(call)(x).jaxpr.eqns[0].params["jaxpr"]


def over_devices(body, *scratch, axes=("x",), **options):
    """The same under a shard_map over devices, which are only traced."""
    mesh = jax.sharding.AbstractMesh((2,) * len(axes), axes)
    call = plgpu.kernel(body, out_type=X, scratch_types=scratch, **options)
    jaxpr = jax.make_jaxpr(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(X)
    return next(e.params["jaxpr"] for e in equations(jaxpr) if e.primitive is pl.pallas_call_p)


# --- places -----------------------------------------------------------------------------------------------------------
def test_views_of_other_devices_read_write_and_print():
    def body(x, o, s):
        other = 1 - lax.axis_index("x")
        peer = views.remote_ref(o, other)
        peer[...] = x[...]
        o[0] = views.peer_ref(x, {"x": other}).at[1][...]
        copy_smem_to_gmem(s, views.remote_ref(o.at[pl.ds(0, 16)], 1, pl.DeviceIdType.LOGICAL))
        views.multicast_ref(o, "x")[...] = x[...]

    text = str(over_devices(body, S, grid=(3,), grid_names=("g",)))
    assert "b{device e}" in text and "a{device x=e}[1,:]" in text
    assert "b{device 1:i32[]}" in text
    assert "b{devices along x}" in text


def test_views_of_other_blocks_go_through_control_flow():
    def body(x, o, s):
        far = views.cluster_ref(s.at[pl.ds(0, 8)], {"b": 1 - lax.axis_index("b")})
        lax.cond(lax.axis_index("a") == 0, lambda: far.set(x[pl.ds(0, 8)]), lambda: None)

        def row(i, total):
            return total + far[i]

        o[0] = lax.fori_loop(0, 8, row, jnp.zeros((128,), F32))
        pl.run_scoped(lambda t: t.set(far[...]), plgpu.SMEM((8, 128), F32))

    jaxpr = traced(body, S, **CLUSTER)
    first = {jaxlink.get_p: 1, jaxlink.swap_p: 2}  # operand of the view's dynamic indices
    accesses = [e for e in equations(jaxpr) if e.primitive in first]
    views_of = [jax.tree.unflatten(e.params["tree"], e.invars[first[e.primitive] :]) for e in accesses]
    far = [v for v in views_of if any(isinstance(t, views.ClusterRef) for t in v)]
    assert len(far) == 3  # in the branch, in the loop, in the scope
    assert all(isinstance(t[0], jaxlink.NDIndexer) and list(t[1].block_id) == ["b"] for t in far)
    assert str(jaxpr).count("{block b=") >= 3


def test_split_view_tells_places_from_indices():
    seen = []

    def body(x, o):
        view = views.transpose_ref(views.remote_ref(x.at[0:8], 1).at[1:3], (1, 0))
        seen.append((view.shape, *views.split_view(view)))
        seen.append((x.shape, *views.split_view(x)))

    over_devices(body)
    shape, where, others = seen[0]
    assert shape == (128, 2) and [type(t) for t in where] == [views.PeerMemRef]
    assert int(where[0].device_id) == 1 and where[0].device_id_type is pl.DeviceIdType.MESH
    assert [type(t) for t in others] == [jaxlink.NDIndexer, jaxlink.NDIndexer, jaxlink.TransposeTransform]
    assert seen[1] == ((16, 128), [], [])


@pytest.mark.parametrize(
    ("shape", "window", "padding", "expected"),
    [
        ((2, 8, 4), (3,), None, (12, 3, 4)),
        ((2, 5, 6, 16), (3, 2), ((1, 1), (0, 1)), (2 * 5 * 6, 3, 2, 16)),
        ((1, 4, 4, 4, 8), (2, 2, 2), None, (27, 2, 2, 2, 8)),
    ],
)
def test_windows_have_the_shape_that_counts_them(shape, window, padding, expected):
    seen = []
    traced(
        lambda x, o: seen.append(views.im2col_ref(x, window_shape=window, padding=padding).shape),
        x=np.zeros(shape, np.float32),
    )
    assert seen == [expected]


# --- unions -----------------------------------------------------------------------------------------------------------
def test_a_union_gives_a_ref_for_each_alternative():
    def body(x, o, s, u, v):
        first, [second, third] = u
        assert (first.shape, second.dtype, third.shape) == ((16,), F16, (4, 4))
        ((only,),) = v
        only[...] = first[...]
        pl.run_scoped(lambda w: w[1].set(first[...]), RefUnion(plgpu.SMEM((8,), F32), plgpu.SMEM((16,), F32)))

    one = RefUnion(plgpu.SMEM((16,), F32), [plgpu.SMEM((8,), F16), plgpu.SMEM((4, 4), F16, transforms=(Tile((2, 4)),))])
    jaxpr = traced(body, S, one, RefUnion((plgpu.SMEM((16,), F32),)))
    refs = [v.aval for v in jaxpr.invars]
    assert unions_among(refs) == [[3, 4, 5], [6]]
    assert [r.storage.union[1] for r in refs[3:]] == [0, 1, 1, 0]
    assert refs[5].storage.transforms == (Tile((2, 4)),)
    assert [r.label for r in refs[3:6]] == ["u[0] (scratch 1)", "u[1][0] (scratch 2)", "u[1][1] (scratch 3)"]
    scope = next(e.params for e in jaxpr.eqns if str(e.primitive) == "run_scoped")
    assert unions_among([v.aval for v in scope["jaxpr"].invars[-scope["num_scoped"] :]]) == [[0, 1]]


def test_unions_made_at_one_line_are_kept_apart():
    def body(x, o, u, v):
        pass

    both = [RefUnion(plgpu.SMEM((16,), F32), plgpu.SMEM((16,), F16)) for _ in range(2)]
    assert unions_among([v.aval for v in traced(body, *both).invars]) == [[2, 3], [4, 5]]


# --- how buffers are stored -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "transforms", "expected"),
    [
        ((128, 128), (Tile((8, 64)), Swizzle(128)), (16, 2, 8, 64)),
        ((2, 128, 64), (Tile((8, 64)), Swizzle(128)), (2, 16, 1, 8, 64)),
        ((128, 64), (Swizzle(128),), (128, 64)),
        ((128, 128), (Swizzle(16),), (128, 128)),
        ((128, 64), (Tile((8, 64)), Tile((2, 2))), (16, 1, 4, 32, 2, 2)),
        ((64, 64), (Tile((8, 64)), TransposeTransform((1, 0, 2, 3)), Swizzle(128)), (1, 8, 8, 64)),
    ],
)
def test_transforms_give_the_shape_in_memory(shape, transforms, expected):
    assert stored_shape(shape, F16, transforms, "a buffer") == expected
    assert plgpu.SMEM(shape, F16, transforms=transforms).get_ref_aval().storage.transforms == transforms


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(ValueError, "Tiles of (7, 64) do not divide a smem buffer of shape (128, 128).")
def tiles_that_do_not_divide():
    plgpu.SMEM((128, 128), F16, transforms=(Tile((7, 64)),))  # here


@mistake(ValueError, "Tiles of (8, 64) do not divide a smem buffer of shape (128,).")
def tiles_of_more_dimensions():
    plgpu.SMEM((128,), F16, transforms=(Tile((8, 64)),))  # here


@mistake(
    ValueError,
    "A swizzle of 128 bytes is for rows as wide; a smem buffer of shape (128, 128) and dtype float16 is stored in rows "
    "that are 64 bytes wide.",
)
def tiles_narrower_than_the_swizzle():
    plgpu.SMEM((128, 128), F16, transforms=(Tile((8, 32)), Swizzle(128)))  # here


@mistake(
    ValueError, "plgpu.TransposeTransform((1, 0, 2)) is for 3 dimensions, but a smem buffer is stored with 2 here."
)
def a_transposition_of_other_dimensions():
    plgpu.SMEM((128, 128), F16, transforms=(TransposeTransform((1, 0, 2)),))  # here


@mistake(TypeError, "A plgpu.RefUnion is of buffer types in SMEM or TMEM, not of float32[8].")
def a_union_of_arrays():
    RefUnion(jax.ShapeDtypeStruct((8,), F32))  # here


@mistake(ValueError, "A plgpu.RefUnion is of buffers in one memory.")
def a_union_over_memories():
    RefUnion(S, plgpu.TMEM((128, 64), F32))  # here


@mistake(ValueError, "The ref of plgpu.remote_ref must be in GMEM; s (scratch 0) is in SMEM.")
def shared_memory_of_another_device():
    def kernel(x, o, s):
        views.remote_ref(s, 1)  # here

    over_devices(kernel, S)


@mistake(TypeError, "plgpu.remote_ref is for data; sem (scratch 0) holds semaphores.")
def a_semaphore_of_another_device():
    def kernel(x, o, sem):
        views.remote_ref(sem, 1)  # here

    over_devices(kernel, plgpu.SemaphoreType.REGULAR)


@mistake(
    ValueError,
    "The device_id 1 of plgpu.remote_ref has 1 coordinate, but the mesh has 2 axes.",
    axes="'x', 'y'",
)
def a_number_in_a_mesh_of_two_axes():
    def kernel(x, o):
        views.remote_ref(o, 1)  # here

    over_devices(kernel, axes=("x", "y"))


@mistake(ValueError, "plgpu.multicast_ref: a view of o (output 0) is on another device already.")
def two_places():
    def kernel(x, o):
        views.multicast_ref(views.remote_ref(o, 1), "x")  # here

    over_devices(kernel)


@mistake(
    ValueError, "The block_id of plgpu.cluster_ref must be cluster axes of the kernel; 'c' is none.", axes="'a', 'b'"
)
def a_block_along_an_unknown_axis():
    def kernel(x, o, s):
        views.cluster_ref(s, {"c": 0})  # here

    traced(kernel, S, **CLUSTER)


@mistake(TypeError, "The block_id of plgpu.cluster_ref is 1 (int).")
def a_block_by_number():
    def kernel(x, o, s):
        views.cluster_ref(s, 1)  # here

    traced(kernel, S, **CLUSTER)


@mistake(ValueError, "plgpu.im2col_ref: windows of (9,) with padding ((0, 0),) do not fit images of (8,).")
def windows_larger_than_the_image():
    def kernel(x, o):
        views.im2col_ref(x, window_shape=(9,))  # here

    traced(kernel, x=np.zeros((2, 8, 16), np.float32))


@mistake(ValueError, "x (input 0) has 2 dimensions; ((0, 0),) is not an order of them.")
def no_order_of_dimensions():
    def kernel(x, o):
        views.transpose_ref(x, (0, 0))  # here

    traced(kernel)


@pytest.mark.parametrize("case", cases)
def test_mistakes_are_explained(case):
    check(case)
