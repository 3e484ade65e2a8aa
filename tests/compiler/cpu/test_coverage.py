"""Everything in survey.py that JAX takes runs natively, as XLA computes it; what is refused is listed here."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from compiler.cpu import survey
from palladion import cpu as plcpu

# By what they need: no rule, or arrays that a kernel may not capture (the kernel's author has to pass those).
NO_RULE = {"special.i1e", "special.i1", "lax.bessel_i1e", "special.zeta", "lax.zeta", "special.polygamma"}
CAPTURES = {"histogram", "jnp.vander", "special.bernoulli", "special.expi", "special.exp1", "special.sici"}
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-9, "complex64": 1e-4}
CHUNK = 40


def native(names, outs, operands):
    """The functions of these names in one native kernel: name -> results."""

    def kernel(x_ref, y_ref, n_ref, m_ref, *o_refs):
        table, refs = survey.functions(x_ref[...], y_ref[...], n_ref[...], m_ref[...]), iter(o_refs)
        for name in names:
            for leaf in jax.tree.leaves(table[name]()):
                next(refs)[...] = leaf

    flat = [jax.ShapeDtypeStruct(o.shape, o.dtype) for n in names for o in outs[n]]
    results = iter(pl.pallas_call(kernel, flat, compiler_params=plcpu.CompilerParams())(*operands))
    return {n: [next(results) for _ in outs[n]] for n in names}


def check(dtype, shape, names=None):
    outs, operands = survey.cases(dtype, shape), tuple(map(jnp.asarray, survey.operands(dtype, shape)))
    chosen = [n for n in outs if n not in NO_RULE | CAPTURES and (names is None or names(n))]
    wrong = []
    for group in itertools.batched(chosen, CHUNK):
        want = jax.jit(lambda *a, group=group: {n: jax.tree.leaves(survey.functions(*a)[n]()) for n in group})(
            *operands
        )
        try:
            got = native(group, outs, operands)
        except NotImplementedError as error:
            wrong.append(str(error).splitlines()[0])
            continue
        wrong += [n for n in group if not all(map(_close, got[n], want[n]))]
    assert not wrong, f"{dtype}{list(shape)}: {wrong}"
    assert len(chosen) > 50


def _close(got, want):
    got, want = np.asarray(got), np.asarray(want)
    if (tolerance := TOLERANCE.get(got.dtype.name)) is None:
        return np.array_equal(got, want)
    wide = np.complex128 if np.iscomplexobj(got) else np.float64
    return np.allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True)


def test_floats():
    check(jnp.float32, (5, 7))


def test_integers():
    skip = ("random", "special", "nn", "lax.cumlogsumexp")  # of integers: what is done with floats, or nothing
    floats = {f"jnp.{name}" for name in survey.FLOAT_UNARY}
    check(jnp.int32, (5,), names=lambda n: not n.startswith(skip) and n not in floats)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (1, 1), (13,), (3, 17)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float16", "int8", "uint32", "bool"])
def test_other_types_and_shapes(dtype, shape):
    # XLA keeps f32 between operations on 16-bit floats, which erfinv magnifies; log of integers means nothing.
    skip = {"special.erfinv"} if "float16" in dtype else set() if dtype == "float32" else {"lax.cumlogsumexp"}
    check(jnp.dtype(dtype), shape, names=lambda n: n not in skip)


@pytest.mark.parametrize("name", sorted(NO_RULE & {"special.i1e", "lax.zeta"}))
def test_what_has_no_rule_is_refused_by_name(name):
    outs, operands = survey.cases(jnp.float32, (5,)), tuple(map(jnp.asarray, survey.operands(jnp.float32, (5,))))
    with pytest.raises(pl.UnsupportedPrimitive, match="is not supported in a kernel on native CPU"):
        native([name], outs, operands)
