"""Layouts on the simulated GPU: casts change no values, layouts are printed once, clashes are found before the run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding

SHAPE = (128, 64)


def run(body, *args):
    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        grid=(3,),
        grid_names=("g",),
        interpret=plgpu.InterpretGPUParams(detect_races=True, num_sms=1),
    )
    return np.asarray(made(*args))


def once(body):
    """Only the first block does it."""
    return lambda *refs: pl.when(jax.lax.axis_index("g") == 0)(lambda: body(*refs))


def test_a_cast_changes_no_value():
    x = jnp.arange(128 * 64, dtype=jnp.float32).reshape(SHAPE)

    def body(x, o):
        o[...] = plgpu.layout_cast(x[...], plgpu.Layout.WGMMA) + 1

    np.testing.assert_array_equal(run(once(body), x), np.asarray(x) + 1)


def test_a_layout_is_printed_once_for_a_kernel(capfd):
    def body(x, o):
        value = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.print_layout("rows: {}", value.sum(1))
        plgpu.print_layout("all: {}", value)
        o[...] = value

    run(once(body), jnp.zeros(SHAPE))
    lines = [line for line in capfd.readouterr().out.splitlines() if ": " in line]
    assert lines == ["rows: Layout.WGMMA.reduce(1)", "all: Layout.WGMMA"]


@pytest.mark.parametrize("same", [True, False])
def test_arrays_of_two_layouts_do_not_meet(same):
    def body(x, o):
        a = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        other = plgpu.Layout.WGMMA if same else plgpu.Layout.WG_STRIDED(SHAPE, vec_size=2)
        o[...] = a + plgpu.load(x, layout=other)

    if same:
        assert (run(once(body), jnp.ones(SHAPE)) == 2).all()
        return
    with pytest.raises(KernelFinding) as caught:
        run(once(body), jnp.ones(SHAPE))
    assert caught.value.finding.kind == "illegal-layout" and "WG_STRIDED" in caught.value.finding.message
