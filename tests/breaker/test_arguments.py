"""Wrong arguments of every kind: the first line speaks of the function that got them, not of Python's inside."""

import re

import jax
import jax.numpy as jnp
import pytest

import palladion as pl
from palladion import tpu as pltpu

X = jnp.arange(8.0)
INSIDE = re.compile(r"object (is not|has no|cannot)|unsupported operand|bad operand|not understood|not iterable")
ODD = [None, "s", 1.5, {}, object(), (None,), b"x"]


def first_line(error) -> str:
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("odd", ODD, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pl.cdiv", lambda x: pl.cdiv(2, x)),
        ("pl.align_to", lambda x: pl.align_to(2, x)),
        ("pl.broadcast_to", lambda x: pl.broadcast_to(1, x)),
        ("pl.strides_from_shape", pl.strides_from_shape),
        ("pl.empty_like", lambda x: pl.empty_like([x])),
        ("pl.estimate_cost", pl.estimate_cost),
        ("pl.loop", lambda x: pl.loop(0, x)),
        ("pl.multiple_of", lambda x: pl.multiple_of(8, x)),
    ],
)
def test_outside_kernels(name, call, odd):
    if name in ("pl.cdiv", "pl.align_to") and isinstance(odd, float):
        pytest.skip("Python divides by floats")
    if name in ("pl.broadcast_to", "pl.strides_from_shape") and odd in ({}, b"x"):
        pytest.skip("to Python, integers")
    if name == "pl.empty_like" and odd in (None, {}, (None,)):
        pytest.skip("an empty pytree")
    with pytest.raises((TypeError, ValueError)) as error:
        call(odd)
    assert name in first_line(error)
    assert not INSIDE.search(first_line(error))


@pytest.mark.parametrize("interpret", [True, pl.EagerParams()], ids=["reference", "eager"])
@pytest.mark.parametrize("odd", ODD, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("A function is needed here", lambda ref, x: pl.when(ref[0] >= 0)(x)),
        ("A function is needed here", lambda ref, x: pl.loop(0, 2)(x)),
        ("A function is needed here", lambda ref, x: pl.run_scoped(x, pltpu.VMEM((1,), jnp.float32))),
        ("pl.loop", lambda ref, x: pl.loop(0, x)(lambda i: None)),
        ("pl.delay", lambda ref, x: pl.delay(x)),
        ("A Ref is reshaped to Python integers", lambda ref, x: ref.reshape(x)),
    ],
    ids=["when", "loop body", "run_scoped", "loop", "delay", "reshape"],
)
def test_in_kernels(words, use, odd, interpret):
    def kernel(x_ref, o_ref):
        use(x_ref, odd)
        o_ref[...] = x_ref[...]

    if words.startswith("A Ref") and odd in ({}, b"x"):
        pytest.skip("to Python, integers")
    with pytest.raises((TypeError, ValueError)) as error:
        pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=interpret)(X)
    assert words in first_line(error)


@pytest.mark.parametrize("space", [[], {}, jnp.arange(3)], ids=["list", "dict", "array"])
def test_a_memory_space_that_is_none(space):
    with pytest.raises(TypeError) as error:
        pl.BlockSpec((4,), lambda i: (i,), memory_space=space)
    assert first_line(error).startswith("The memory space of a BlockSpec cannot be ")


@pytest.mark.parametrize("dtype", ["U3", "datetime64[s]", "S4", object, "no such", 1.5])
def test_a_dtype_that_jax_does_not_hold(dtype):
    with pytest.raises(TypeError) as error:
        pltpu.VMEM((3,), dtype)
    assert re.match(r"The dtype of a vmem buffer is .*, which is not one\.", first_line(error))


def test_an_operand_that_no_array_can_hold():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    with pytest.raises(TypeError) as error:
        pl.pallas_call(kernel, jax.ShapeDtypeStruct((), jnp.int32), interpret=True)(2**70)
    assert first_line(error).startswith("Operand 0 of kernel is 1180591620717411303424 (int)")
