"""What the tests of the eager interpreter share: small calls on a 4x4 array, and what an exception says."""

import jax
import numpy as np
import pytest

import palladion as pl

EAGER = pl.EagerParams()
X = np.arange(16, dtype=np.float32).reshape(4, 4)
ROW = pl.BlockSpec((1, 4), lambda i: (i, 0))


def sds(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(kernel, interpret=EAGER, **more):
    """A call on the four rows of a 4x4 array, one row a program."""
    return pl.pallas_call(kernel, sds((4, 4)), grid=(4,), in_specs=[ROW], out_specs=ROW, interpret=interpret, **more)


def whole(kernel, out=(4, 4), interpret=EAGER, **more):
    """A call without a grid."""
    return pl.pallas_call(kernel, sds(out), interpret=interpret, **more)


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def raised(call, *args) -> BaseException:
    with pytest.raises(BaseException) as info:
        call(*args)
    return info.value


def notes(error) -> str:
    return "\n".join(getattr(error, "__notes__", ()))
