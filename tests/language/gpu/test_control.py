"""Operations that steer a kernel's threads (registers, dependent launches, taking over blocks), and the namespace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu

f32 = jax.ShapeDtypeStruct((128,), jnp.float32)
GRID = dict(grid=(3, 2), grid_names=("a", "b"))


def trace(body, **options):
    """The equations of a kernel."""
    call = plgpu.kernel(lambda y_ref, **scratch: body(**scratch), out_type=f32, **options)
    (eqn,) = jax.make_jaxpr(call)().eqns
    return eqn.params["jaxpr"].eqns


def named(equations, name):
    return [e for e in equations if e.primitive.name == name]


def test_registers():
    def body():
        plgpu.set_max_registers(40, action="decrease")
        plgpu.set_max_registers(np.int64(256), action="increase")

    found = [(e.params["n"], e.params["action"]) for e in named(trace(body), "set_max_registers")]
    assert found == [(40, "decrease"), (256, "increase")]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((25, "increase"), "n must be a multiple of 8 from 24 to 256, but it is 25"),
        ((16, "decrease"), "n must be a multiple of 8 from 24 to 256, but it is 16"),
        ((264, "increase"), "n must be a multiple of 8 from 24 to 256, but it is 264"),
        ((40.0, "increase"), "takes a Python integer, not"),
        ((True, "increase"), "takes a Python integer, not"),
        ((40, "less"), "action must be 'increase' or 'decrease', not 'less'"),
    ],
)
def test_what_set_max_registers_refuses(args, line):
    with pytest.raises((TypeError, ValueError), match=line):
        trace(lambda: plgpu.set_max_registers(args[0], action=args[1]))


def test_dependent_launches():
    def body():
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()

    found = [e.params["which"] for e in named(trace(body), "griddepcontrol")]
    assert found == ["wait", "launch_dependents"]


@pytest.mark.parametrize("spelling", ["TryClusterCancelResult", "TryCancelResultRef"])
def test_taking_over_a_cluster(spelling):
    def body(result, barrier):
        plgpu.try_cluster_cancel(result.at[1], barrier, collective_axes="c")
        (b,), taken = plgpu.query_cluster_cancel(result.at[1], ("b",))
        assert (b.shape, b.dtype, taken.shape, taken.dtype) == ((), jnp.int32, (), jnp.bool_)

    scratch = dict(result=getattr(plgpu, spelling)(2), barrier=plgpu.Barrier())
    equations = trace(body, scratch_types=scratch, cluster=(2,), cluster_names=("c",), **GRID)
    assert named(equations, "try_cluster_cancel")[0].params["collective_axes"] == ("c",)
    assert named(equations, "query_cluster_cancel")[0].params["grid_names"] == ("b",)
    assert plgpu.TryClusterCancelResult().shape == (4,) and plgpu.TryClusterCancelResult().memory_space is plgpu.SMEM


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (lambda r, many, x, b: plgpu.try_cluster_cancel(many, b), "takes one result, but .* holds 2"),
        (lambda r, many, x, b: plgpu.try_cluster_cancel(x, b), "is no result of a cancellation, but float32"),
        (lambda r, many, x, b: plgpu.try_cluster_cancel(r, x), "plgpu.try_cluster_cancel takes a barrier, not"),
        (lambda r, many, x, b: plgpu.try_cluster_cancel(r, b, collective_axes="a"), "must be cluster axes"),
        (lambda r, many, x, b: plgpu.query_cluster_cancel(r, ("c",)), "'c' is not an axis of the kernel's grid"),
        (lambda r, many, x, b: plgpu.query_cluster_cancel(3, ("a",)), "The result of plgpu.query_cluster_cancel is"),
        (lambda r, many, x, b: plgpu.TryClusterCancelResult(0), "num_buffers is 0; it must be positive"),
        (lambda r, many, x, b: plgpu.TryClusterCancelResult("2"), "num_buffers is an integer or None, not"),
    ],
)
def test_what_taking_over_refuses(body, line):
    scratch = dict(
        r=plgpu.TryClusterCancelResult(), many=plgpu.TryClusterCancelResult(2), x=plgpu.SMEM((4,), jnp.float32),
        b=plgpu.Barrier(),
    )  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=line):
        trace(lambda **refs: body(**refs), scratch_types=scratch, cluster=(2,), cluster_names=("c",), **GRID)


def test_inline_code_of_jaxs_compiler_is_refused():
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType((plgpu.SwizzleTransform(128),)),))
    def code(ctx, ref):
        raise AssertionError("never runs")

    with pytest.raises(pl.UnsupportedPrimitive, match=r"plgpu\.inline_ptx runs PTX") as error:
        trace(lambda: code(1))
    assert error.value.primitive == "inline_mgpu" and error.value.target == "the simulated GPU"
    assert "test_control.py" in error.value.where
    with pytest.raises(TypeError, match=r"A transform of a plgpu\.RefType cannot be 3"):
        plgpu.RefType((3,))


@pytest.mark.parametrize(
    "operation",
    [
        lambda: plgpu.set_max_registers(40, action="decrease"),
        plgpu.griddepcontrol_wait,
        plgpu.griddepcontrol_launch_dependents,
        lambda: plgpu.query_cluster_cancel(3, ("a",)),
        lambda: plgpu.inline_mgpu()(lambda: None)(),
    ],
)
def test_only_in_a_kernel(operation):
    with pytest.raises(ValueError, match=r"plgpu\.\w+ can only be used inside a kernel"):
        operation()


def test_other_machines_name_the_one_that_runs_it():
    body = lambda y_ref: plgpu.set_max_registers(40, action="decrease")
    with pytest.raises(pl.UnsupportedPrimitive) as error:
        plgpu.kernel(body, out_type=f32, interpret=True)()
    assert set(error.value.supported_by) == {"the simulated GPU", "the Mosaic GPU compiler"}


def test_older_names_are_the_same_objects():
    pairs = dict(TileTransform="TilingTransform", TryCancelResultRef="TryClusterCancelResult", peer_ref="remote_ref",
                 commit_group="commit_smem_to_gmem_group", tcgen05_commit="tcgen05_commit_arrive",
                 WGMMAAccumulatorRef="ACC")  # fmt: skip
    for older, name in pairs.items():
        assert getattr(plgpu, older) is getattr(plgpu, name), older
    assert plgpu.Semaphore.REGULAR is plgpu.SemaphoreType.REGULAR
    assert all(hasattr(plgpu, name) for name in plgpu.__all__)


def test_a_transposed_buffer():
    assert plgpu.TransposeTransform([1, 0, 2]).permutation == (1, 0, 2)
    assert isinstance(plgpu.TransposeTransform((1, 0, 2)), plgpu.Transform)
    assert isinstance(plgpu.TilingTransform((8, 64)), plgpu.Transform)
    plgpu.SMEM((2, 3, 4), jnp.float32, transforms=(plgpu.TransposeTransform((1, 0, 2)),))
    for wrong, line in (((1, 1), "must name each dimension once"), ((1, 0), "the last dimension must stay the last")):
        with pytest.raises(ValueError, match=line):
            plgpu.TransposeTransform(wrong)
