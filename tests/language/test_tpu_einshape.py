"""pltpu.einshape against NumPy's reshape and transpose, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu


def filled(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "equation", "sizes", "expected"),
    [
        ((6, 4), "(ab)c->abc", {"a": 2}, lambda x: x.reshape(2, 3, 4)),
        ((6, 4), "(ab)c -> bac", {"b": 3}, lambda x: x.reshape(2, 3, 4).swapaxes(0, 1)),
        ((6, 4), "ab->(ba)", {}, lambda x: x.T.ravel()),
        ((12, 4), "(abc)d->c(db)a", {"a": 2, "b": 3},
         lambda x: x.reshape(2, 3, 2, 4).transpose(2, 3, 1, 0).reshape(2, 12, 2)),
        ((6, 4), "ab->a()b", {}, lambda x: x[:, None]),
        ((6, 4), "a(b)->ba", {"a": 6}, lambda x: x.T),
    ],
)  # fmt: skip
def test_values(shape, equation, sizes, expected):
    x = filled(*shape)
    np.testing.assert_array_equal(pltpu.einshape(equation, x, **sizes), expected(x))


X = filled(16, 128)


@pytest.mark.parametrize(
    ("equation", "sizes", "kind", "first_line"),
    [
        ("ab", {}, ValueError, "pltpu.einshape 'ab': there must be one '->'."),
        ("ab->abc", {}, ValueError, "pltpu.einshape 'ab->abc': 'c' stands on the right only."),
        ("ab->aab", {}, ValueError, "pltpu.einshape 'ab->aab': 'a' stands twice on the right."),
        ("aa->a", {}, ValueError, "pltpu.einshape 'aa->a': 'a' stands twice on the left."),
        ("ab->a", {}, NotImplementedError, "pltpu.einshape 'ab->a': 'b' is missing on the right."),
        ("abc->abc", {}, ValueError, "pltpu.einshape 'abc->abc': the left side has 3 dimensions, but the array has 2"),
        ("(ab)c->abc", {}, ValueError, "pltpu.einshape '(ab)c->abc': the sizes of a and b are not given"),
        ("(ab)c->abc", {"a": 3}, ValueError, "pltpu.einshape '(ab)c->abc': (ab) cannot be 3 long: the array has 16"),
        ("(ab)c->abc", {"a": 2, "b": 9}, ValueError, "pltpu.einshape '(ab)c->abc': (ab) cannot be 18 long"),
        ("ab->ab", {"a": 17}, ValueError, "pltpu.einshape 'ab->ab': (a) cannot be 17 long: the array has 16 there."),
        ("(ab->ab", {}, ValueError, "pltpu.einshape '(ab->ab': a parenthesis is not closed."),
        ("a1->a1", {}, ValueError, "pltpu.einshape 'a1->a1': '1' is not expected there."),
    ],
)
def test_mistakes(equation, sizes, kind, first_line):
    with pytest.raises(kind) as error:
        pltpu.einshape(equation, X, **sizes)
    assert str(error.value).startswith(first_line)


@pytest.mark.parametrize(
    ("shape", "equation", "sizes", "preserves"),
    [
        ((16, 128), "(ab)c->abc", {"b": 8}, True),
        ((16, 256), "(ab)(cd)->cabd", {"b": 8, "d": 128}, True),
        ((2, 8, 128), "abc->b(ac)", {}, True),
        ((1024,), "(ab)->ab", {"b": 128}, True),
        ((2, 3, 5, 100), "abcd->(ba)cd", {}, True),
        ((16, 128), "(ab)c->abc", {"b": 4}, False),
        ((16, 128), "(ab)c->bac", {"b": 8}, False),
        ((8, 256), "a(bc)->bac", {"c": 64}, False),
        ((8, 8), "ab->ba", {}, False),
    ],
)
def test_tile_preserving(shape, equation, sizes, preserves):
    def kernel(x_ref, o_ref):
        o_ref[...] = pltpu.einshape(equation, x_ref[...], True, **sizes)

    x = filled(*shape)
    expected = pltpu.einshape(equation, x, True, **sizes)  # outside a kernel nothing is checked
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(expected.shape, jnp.float32), interpret=True)
    if preserves:
        np.testing.assert_array_equal(call(x), expected)
    else:
        with pytest.raises(ValueError, match=r"takes \(8, 128\) tiles apart"):
            call(x)
