"""Which primitives have NumPy rules: all array primitives of the corpus, each compared with JAX by some test."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import corpus
from palladion import errors, jaxlink
from palladion.simulator.values import ARRAYS, array_function
from simulator import test_values_computing, test_values_elementwise, test_values_movement
from simulator.values_check import CASES, case, check, run

assert test_values_computing and test_values_elementwise and test_values_movement  # they fill CASES

# Control flow, calls, Refs and what else is not a function of arrays: the simulators' own.
NOT_ARRAYS = set(
    """addupdate broadcast_to cond custom_jvp_call custom_vjp_call debug_print debug_check delay get jit multiple_of
    num_programs program_id remat2 run_scoped scan swap while checkify_check max_contiguous""".split()
)


def primitives(jaxpr, inside, found):
    for eqn in jaxpr.eqns:
        if inside:
            found.setdefault(eqn.primitive, eqn)
        for sub in jaxlink.jaxprs_in_params(eqn.params):
            primitives(getattr(sub, "jaxpr", sub), inside or eqn.primitive.name == "pallas_call", found)
    return found


def test_every_array_primitive_of_the_corpus_has_a_rule():
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of index maps out of range, which are the point of some cases
        for c in corpus.CASES.values():
            with corpus.scope(c):
                primitives(jax.make_jaxpr(c.make())(*corpus.arguments(c)), False, found)
    arrays = {p for p in found if p.name not in NOT_ARRAYS}
    assert len(arrays) > 90, "the corpus is no longer found"
    assert not {p.name for p in arrays if ARRAYS.get(p) is None}


def test_every_rule_is_compared_with_jax():
    found = {}
    for c in CASES:
        primitives(jax.make_jaxpr(c.function)(*c.args), True, found)
    assert not {p.name for p in ARRAYS if p not in found}


def test_a_primitive_without_a_rule_is_named():
    eqn = jax.make_jaxpr(lambda x: jax.lax.rng_uniform(x, x + 1, (3,)))(jnp.float32(0)).eqns[-1]
    with pytest.raises(errors.UnsupportedPrimitive, match="rng_uniform"):
        array_function(eqn)
    with pytest.raises(errors.UnsupportedPrimitive, match="random_wrap"):
        run(lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl="rbg"), (3,)), np.zeros(4, np.uint32))


FUNCTIONS = {
    "softmax": (lambda x: jax.nn.softmax(x, -1), jax.nn.log_softmax, jax.nn.logsumexp),
    "activations": (
        jax.nn.relu,
        jax.nn.gelu,
        lambda x: jax.nn.gelu(x, approximate=False),
        jax.nn.silu,
        jax.nn.softplus,
        jax.nn.elu,
        jax.nn.leaky_relu,
        jax.nn.hard_swish,
        jax.nn.mish,
    ),
    "normalisation": (
        lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
        lambda x: jax.nn.standardize(x),
        lambda x: x / jnp.linalg.norm(x),
    ),
    "numpy": (
        jnp.diff,
        lambda x: jnp.percentile(x, 30.0),
        jnp.median,
        jnp.tril,
        lambda x: jnp.einsum("ij,kj->ik", x, x),
        jnp.outer,
        jnp.trace,
        jnp.nansum,
        lambda x: jnp.round(x, 2),
        jnp.rint,
        lambda x: jnp.clip(x, -1, 1),
        lambda x: x // 0.7,
        lambda x: x % 0.7,
        jnp.floor,
        jnp.ptp,
        jnp.cumsum,
        lambda x: jnp.tensordot(x, x, 2),
        jnp.isnan,
        jnp.signbit,
        lambda x: jnp.kron(x[:2, :2], x[:2, :2]),
        jnp.sinc,
        jnp.hypot,
        jnp.logaddexp,
        jnp.cross,
    ),
    "gradients": (
        jax.grad(lambda x: jax.nn.softmax(x).max()),
        jax.grad(lambda x: jnp.tanh(x @ x.T).sum()),
        jax.grad(lambda x: jnp.sort(x, 0)[2].sum()),
        jax.grad(lambda x: jax.nn.gelu(x).sum()),
        jax.grad(lambda x: (jnp.sin(x) * x).sum()),
    ),
}


X = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
OF_TWO = {jnp.outer, jnp.hypot, jnp.logaddexp, jnp.cross}
WHOLE = {
    group: [
        case(f"{group} {i}", f, *[X, X[::-1].copy()][: 1 + (f in OF_TWO)], ulp=32, atol=1e-5) for i, f in enumerate(fs)
    ]
    for group, fs in FUNCTIONS.items()
}


@pytest.mark.parametrize("group", FUNCTIONS)
def test_functions_of_jax(group):
    """Whole functions, as kernels call them."""
    check(WHOLE[group])
