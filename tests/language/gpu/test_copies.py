"""Copies between GMEM and SMEM, stores to other blocks, atomics and multimem: equations, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import palladion as pl
from language.mistakes import check, collector
from palladion import mosaic_gpu as plgpu
from palladion.language.check import equations
from palladion.language.gpu import atomics, copies, views

F32 = jnp.float32
X = np.zeros((16, 128), np.float32)
S = plgpu.SMEM((16, 128), F32)
CLUSTER = dict(cluster=(2,), cluster_names=("cl",), grid=(3,), grid_names=("x",))
copy_in, copy_out = copies.copy_gmem_to_smem, copies.copy_smem_to_gmem
cases, mistake = collector()


def traced(body, *scratch, x=X, out=X, **options):
    """The jaxpr of a kernel with an operand and an output in GMEM."""
    call = plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)
    return jax.make_jaxpr(call)(x).jaxpr.eqns[0].params["jaxpr"]


def over_devices(body, *scratch):
    """The same under a shard_map over two devices, as a JAX function that is only traced."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    call = plgpu.kernel(body, out_type=X, scratch_types=scratch)
    jaxpr = jax.make_jaxpr(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(X)
    return next(e.params["jaxpr"] for e in equations(jaxpr) if e.primitive is pl.pallas_call_p)


# --- equations --------------------------------------------------------------------------------------------------------
def test_a_copy_to_smem_holds_its_views_barrier_and_options():
    def body(x, o, s, bars):
        i = lax.axis_index("x")
        copy_in(x.at[i], s.at[0], barrier=bars.at[1], collective_axes="cl", predicate=i > 0)
        copy_in(x, s, bars.at[0], oob_mode=plgpu.OOBFillMode.ZEROS)
        copy_in(x, s)
        copies.wait_gmem_to_smem(2)

    jaxpr = traced(body, S, plgpu.Barrier(num_barriers=2), **CLUSTER)
    first, second, third = [e for e in jaxpr.eqns if e.primitive is copies.copy_gmem_to_smem_p]
    operands = jax.tree.unflatten(first.params["tree"], first.invars)
    assert isinstance(operands, copies.Copy)
    assert [v.ref for v in (operands.src, operands.dst, operands.barrier)] == [
        jaxpr.invars[0], jaxpr.invars[2], jaxpr.invars[3]
    ]  # fmt: skip
    assert operands.predicate is jaxpr.eqns[1].outvars[0]
    assert {k: v for k, v in first.params.items() if k != "tree"} == dict(
        collective_axes=("cl",), leader_tracked=None, oob_mode=None
    )
    assert second.params["oob_mode"] is plgpu.OOBFillMode.ZEROS
    assert jax.tree.unflatten(third.params["tree"], third.invars).barrier is None
    assert jaxpr.eqns[-1].params["n"] == 2


def test_copies_to_gmem_groups_and_waits():
    def body(x, o, s):
        copies.commit_smem()
        copy_out(s, o, commit_group=False, reduction_op="smax")
        copies.commit_group()
        copy_out(s.at[0], o.at[1], predicate=True)
        copies.wait_smem_to_gmem(1, wait_read_only=True)

    eqns = traced(body, plgpu.SMEM((16, 128), jnp.int32), out=X.astype(np.int32)).eqns
    assert [str(e.primitive) for e in eqns] == [
        "commit_smem", "copy_smem_to_gmem", "commit_group", "copy_smem_to_gmem", "wait_smem_to_gmem"
    ]  # fmt: skip
    assert (eqns[1].params["commit_group"], eqns[1].params["reduction_op"]) == (False, "max")
    assert (eqns[3].params["commit_group"], eqns[3].params["reduction_op"]) == (True, None)
    assert (eqns[4].params["n"], eqns[4].params["wait_read_only"]) == (1, True)


def test_leader_tracked_copies_deliver_halves_or_all():
    def body(x, o, half, whole, bar):
        copy_in(x, half, bar, collective_axes="cl", leader_tracked=plgpu.CopyPartition.PARTITIONED(-1))
        copy_in(x, whole, bar, collective_axes="cl", leader_tracked=plgpu.CopyPartition.REPLICATED)
        copies.async_prefetch(x, collective_axes="cl", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))

    first, second, third = traced(body, plgpu.SMEM((16, 64), F32), S, plgpu.Barrier(), **CLUSTER).eqns
    assert first.params["leader_tracked"] == plgpu.CopyPartition.PARTITIONED(-1)
    assert second.params["leader_tracked"] is plgpu.CopyPartition.REPLICATED
    assert third.params["collective_axes"] == ("cl",)
    assert repr(plgpu.CopyPartition.PARTITIONED(1)) == "PARTITIONED(1)"


def test_gathers_windows_and_pallas_call():
    def gather(x_gmem, i_ref, o_ref, bar):
        copy_in(x_gmem.at[i_ref[...]], o_ref, bar)
        copy_in(x_gmem.at[i_ref[...], pl.ds(0, 64)], o_ref.at[:, pl.ds(64, 64)], bar)

    call = pl.pallas_call(
        gather, jax.ShapeDtypeStruct((8, 128), F32), scratch_shapes=[plgpu.Barrier()],
        in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM), pl.BlockSpec(memory_space=plgpu.SMEM)],
        out_specs=plgpu.BlockSpec(memory_space=plgpu.SMEM),
    )  # fmt: skip
    assert "src d[h,:] dst f[...]" in str(jax.make_jaxpr(call)(X, np.zeros((8,), np.int32)))

    def windows(x, o, s, bar):
        view = views.im2col_ref(x, window_shape=(3, 3), padding=((1, 1), (0, 0)))
        assert view.shape == (2 * 8 * 6, 3, 3, 16)
        copy_in(view.at[pl.ds(4, 64), 1, 2, pl.ds(0, 16)], s, bar)

    assert traced(windows, plgpu.SMEM((64, 16), F32), plgpu.Barrier(), x=np.zeros((2, 8, 8, 16), np.float32)).eqns


def test_stores_to_another_block_and_atomics():
    def body(x, o, s, bar):
        i = lax.axis_index("cl")
        copies.async_store_smem(x[...], s, bar, cluster_idx=1 - i, cluster_dim=0, atomic="add")
        rows = lax.iota(jnp.int32, 3)
        atomics.atomic_add(o.at[rows], jnp.ones((3, 128), F32))
        atomics.atomic_max(s.at[0, 0], 1.0)

    eqns = traced(body, S, plgpu.Barrier(), **CLUSTER).eqns
    store = next(e for e in eqns if e.primitive is copies.async_store_smem_p)
    assert (store.params["cluster_dim"], store.params["atomic"]) == ("cl", "add")
    assert [e.params["op"] for e in eqns if e.primitive is atomics.atomic_p] == ["add", "max"]


def test_multimem_is_for_axes_of_devices():
    def body(x, o):
        atomics.multimem_store(x[0], o.at[1], "x")
        o[0] = atomics.multimem_load_reduce(x.at[0], collective_axes=("x",), reduction_op="add")

    jaxpr = over_devices(body)
    store = next(e for e in jaxpr.eqns if e.primitive is atomics.multimem_store_p)
    load = next(e for e in jaxpr.eqns if e.primitive is atomics.multimem_load_reduce_p)
    assert store.params["collective_axes"] == load.params["collective_axes"] == ("x",)
    assert load.outvars[0].aval.str_short() == "float32[128]"


# --- mistakes ---------------------------------------------------------------------------------------------------------
@mistake(ValueError, "The source of plgpu.copy_gmem_to_smem must be in GMEM; s (scratch 0) is in SMEM.")
def a_copy_the_wrong_way_round():
    def kernel(x, o, s, bar):
        copy_in(s, o, bar)  # here

    traced(kernel, S, plgpu.Barrier())


@mistake(ValueError, "The destination of plgpu.copy_smem_to_gmem must be in GMEM; s (scratch 0) is in SMEM.")
def a_copy_within_smem():
    def kernel(x, o, s):
        copy_out(s, s)  # here

    traced(kernel, S)


@mistake(TypeError, "The source of plgpu.copy_gmem_to_smem is float32[16, 128]; it must be a Ref.")
def a_copy_of_a_value():
    def kernel(x, o, s, bar):
        copy_in(x[...], s, bar)  # here

    traced(kernel, S, plgpu.Barrier())


@mistake(TypeError, "The destination of plgpu.copy_gmem_to_smem is bar (scratch 1), which holds barriers, not data.")
def arguments_in_another_order():
    def kernel(x, o, s, bar):
        copy_in(x, bar, s)  # here

    traced(kernel, S, plgpu.Barrier())


@mistake(
    ValueError,
    "A copy needs a source and a destination of the same shape: a view of x (input 0) has (8, 128), s (scratch 0) has "
    "(16, 128).",
)
def other_shapes():
    def kernel(x, o, s, bar):
        copy_in(x.at[pl.ds(0, 8)], s, bar)  # here

    traced(kernel, S, plgpu.Barrier())


@mistake(TypeError, "A copy does not convert: s (scratch 0) holds float16, o (output 0) holds float32.")
def other_dtypes():
    def kernel(x, o, s):
        copy_out(s, o)  # here

    traced(kernel, plgpu.SMEM((16, 128), jnp.float16))


@mistake(
    ValueError,
    "The collective_axes of plgpu.copy_gmem_to_smem must be cluster axes of the kernel; 'x' is none.",
    axes="'cl'",
)
def a_collective_copy_over_the_grid():
    def kernel(x, o, s, bar):
        copy_in(x, s, bar, collective_axes="x")  # here

    traced(kernel, S, plgpu.Barrier(), **CLUSTER)


@mistake(
    ValueError, "plgpu.copy_gmem_to_smem: leader_tracked copies are for clusters of two blocks; there are 4 along 'cl'."
)
def a_leader_of_four():
    def kernel(x, o, s, bar):
        copy_in(x, s, bar, collective_axes="cl", leader_tracked=plgpu.CopyPartition.REPLICATED)  # here

    traced(kernel, S, plgpu.Barrier(), cluster=(4,), cluster_names=("cl",))


@mistake(
    ValueError,
    "A copy needs a source and a destination of the same shape: x (input 0) has (16, 128), of which each block gets "
    "(8, 128), s (scratch 0) has (16, 128).",
)
def a_partition_without_halves():
    def kernel(x, o, s, bar):
        copy_in(x, s, bar, collective_axes="cl", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))  # here

    traced(kernel, S, plgpu.Barrier(), **CLUSTER)


@mistake(ValueError, "A collective copy needs a barrier: this one, of x (input 0), has none.")
def a_collective_copy_without_a_barrier():
    def kernel(x, o, s):
        copy_in(x, s, collective_axes="cl")  # here

    traced(kernel, S, **CLUSTER)


@mistake(
    ValueError,
    "plgpu.copy_gmem_to_smem gathers rows of a matrix; a view of x (input 0) is indexed by arrays in another way.",
)
def a_gather_of_columns():
    def kernel(x, o, s, bar):
        copy_in(x.at[:, lax.iota(jnp.int32, 8)], s.at[:, pl.ds(0, 8)], bar)  # here

    traced(kernel, S, plgpu.Barrier())


@mistake(ValueError, "The n of plgpu.wait_smem_to_gmem is -1; it cannot be negative.")
def a_negative_wait():
    def kernel(x, o):
        copies.wait_smem_to_gmem(-1)  # here

    traced(kernel)


@mistake(TypeError, "The n of plgpu.wait_smem_to_gmem is a scalar int32; it must be a Python integer.")
def a_wait_for_a_number_known_at_run_time():
    def kernel(x, o):
        copies.wait_smem_to_gmem(lax.axis_index("x"))  # here

    traced(kernel, grid=(2,), grid_names=("x",))


@mistake(ValueError, "The reduction_op of plgpu.copy_smem_to_gmem is 'mul' (str), which is not one.")
def an_unknown_reduction():
    def kernel(x, o, s):
        copy_out(s, o, reduction_op="mul")  # here

    traced(kernel, S)


@mistake(TypeError, "The reduction_op 'xor' of plgpu.copy_smem_to_gmem is for integers, not for float32.")
def a_bitwise_reduction_of_floats():
    def kernel(x, o, s):
        copy_out(s, o, reduction_op="xor")  # here

    traced(kernel, S)


@mistake(ValueError, "plgpu.copy_smem_to_gmem cannot copy a view of s (scratch 0), which is in another block.")
def a_copy_from_another_block():
    def kernel(x, o, s):
        copy_out(views.cluster_ref(s, {"cl": 0}), o)  # here

    traced(kernel, S, **CLUSTER)


@mistake(
    ValueError,
    "Cannot write a value of shape (128,) to o (output 0), which has shape (16, 128).",
)
def an_atomic_of_another_shape():
    def kernel(x, o):
        atomics.atomic_add(o, x[0])  # here

    traced(kernel)


@mistake(TypeError, "The reduction_op 'max' of plgpu.multimem_load_reduce is not for float32.")
def a_maximum_of_floats_by_the_switch():
    def kernel(x, o):
        atomics.multimem_load_reduce(x, collective_axes="x", reduction_op="max")  # here

    over_devices(kernel)


@mistake(
    ValueError,
    "The collective_axes of plgpu.multimem_store must be axes of the mesh of devices; 'y' is none.",
    axes="'x'",
)
def multimem_over_an_unknown_axis():
    def kernel(x, o):
        atomics.multimem_store(x[...], o, "y")  # here

    over_devices(kernel)


@pytest.mark.parametrize("case", cases)
def test_mistakes_are_explained(case):
    check(case)
