"""The operations of pltriton that came with the compiler, on the other executors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from compiler.triton.kernels import draw, sds
from palladion import cpu as plcpu
from palladion import triton as pltriton
from palladion.errors import UnsupportedPrimitive

INTERPRETERS = [dict(interpret=True), dict(interpret=pl.EagerParams())]


@pytest.mark.parametrize("options", INTERPRETERS, ids=["reference", "eager"])
def test_a_barrier_changes_nothing_where_a_program_has_one_thread(options):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pltriton.debug_barrier()
        o_ref[...] = o_ref[...] + 1

    x = draw(8, 16)
    np.testing.assert_array_equal(pl.pallas_call(kernel, sds((8, 16)), **options)(x), x + 1)


@pytest.mark.parametrize(
    "options", [*INTERPRETERS, dict(compiler_params=plcpu.CompilerParams())], ids=["reference", "eager", "native"]
)
def test_approximate_tanh_is_tanh_elsewhere(options):
    def kernel(x_ref, o_ref):
        o_ref[...] = pltriton.approx_tanh(x_ref[...])

    x = draw(8, 16)
    np.testing.assert_allclose(pl.pallas_call(kernel, sds((8, 16)), **options)(x), np.tanh(x), rtol=1e-5)


def test_inline_assembly_names_the_machine_that_takes_it():
    def kernel(x_ref, o_ref):
        (o_ref[...],) = pltriton.elementwise_inline_asm(
            "mov.b32 $0, $1;", args=[x_ref[...]], constraints="=r,r", pack=1, result_shape_dtypes=[sds((16,))]
        )

    with pytest.raises(UnsupportedPrimitive) as error:
        pl.pallas_call(kernel, sds((16,)), interpret=True)(draw(16))
    assert "elementwise_inline_asm" in str(error.value) and "the Triton compiler" in str(error.value)


def test_inline_assembly_checks_its_arguments():
    x = jnp.zeros(16)
    good = dict(args=[x], constraints="=r,r", pack=1, result_shape_dtypes=[sds((16,))])
    with pytest.raises(TypeError, match="takes PTX and constraints as strings"):
        pltriton.elementwise_inline_asm(3, **good)
    with pytest.raises(ValueError, match="pack of elementwise_inline_asm is a positive integer"):
        pltriton.elementwise_inline_asm("", **good | dict(pack=0))
    with pytest.raises(ValueError, match=r"of one shape, but these are \(8,\), \(16,\)"):
        pltriton.elementwise_inline_asm("", **good | dict(result_shape_dtypes=[sds((8,))]))


def test_every_name_of_the_dialect_is_there():
    names = """CUSTOM_CALL_TARGET_NAME CompilerParams GpuInfo GpuVersion approx_tanh atomic_add atomic_and atomic_cas
        atomic_max atomic_min atomic_or atomic_xchg atomic_xor debug_barrier dot elementwise_inline_asm get_gpu_info
        get_gpu_info_from_version is_gpu_device load max_contiguous store"""
    assert set(names.split()) == set(pltriton.__all__)
    assert pltriton.CUSTOM_CALL_TARGET_NAME == "__gpu$xla.gpu.triton"


def test_approximate_tanh_has_a_derivative():
    slope = jax.grad(lambda x: pltriton.approx_tanh(x).sum())(jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(slope, 1 - np.tanh([0.0, 1.0]) ** 2, rtol=1e-5)
