"""Random numbers of the TPU dialect: the generator, its state across programs, keys, and block-invariant sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu
from palladion.errors import UnsupportedPrimitive
from palladion.language.tpu import random

SHAPE = (8, 128)


@pytest.fixture(params=["reference", "simulator"])
def interpret(request):
    return True if request.param == "reference" else pltpu.InterpretParams()


def draw(function, shape=SHAPE, dtype=jnp.float32, **call):
    """What `function()` gives in a kernel, once for each program."""

    def kernel(o_ref):
        o_ref[...] = function()

    n = call.get("grid", (1,))[0]
    spec = pl.BlockSpec((None, *shape), lambda i: (i, *[0] * len(shape)))
    out = jax.ShapeDtypeStruct((n, *shape), dtype)
    call = {"grid": (1,), "out_specs": spec, "out_shape": out, "interpret": True} | call
    return np.asarray(pl.pallas_call(kernel, **call)())


# --- the generator ----------------------------------------------------------------------------------------------------
def test_threefry_is_jaxs():
    key, counter = np.array([3, 2**32 - 5], np.uint32), np.arange(10, dtype=np.uint32)
    expected = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), (5,), jnp.uint32)
    a, b = random.threefry((key[:1], key[1:]), (np.zeros(5, np.uint32), counter[:5]))
    np.testing.assert_array_equal(a ^ b, expected)  # as JAX folds the two words since threefry is partitionable


def test_numpy_and_jax_give_the_same_bits():
    seeds = np.int32(-7), np.uint32(2**31)
    with np.errstate(all="raise"):
        state = random.mix(seeds, np)
        first, state = random.random_bits(state, (3, 5), np)
        second, state = random.random_bits(state, (3, 5), np)
    assert state[2] == 2
    jax_state = random.mix(seeds)
    for expected in (first, second):
        bits, jax_state = random.random_bits(jax_state, (3, 5))
        np.testing.assert_array_equal(bits, expected)


def test_a_seed_decides_the_numbers():
    def bits(*seeds):
        def sample():
            pltpu.prng_seed(*seeds)
            return pltpu.prng_random_bits(SHAPE)

        return draw(sample, dtype=jnp.int32)[0]

    expected = random.random_bits(random.mix([np.int32(3), np.int32(4)], np), SHAPE, np)[0]
    np.testing.assert_array_equal(bits(3, 4), expected.view(np.int32))
    assert not np.array_equal(bits(3, 4), bits(4, 3))
    assert not np.array_equal(bits(3), bits(3, 0))
    np.testing.assert_array_equal(bits(), bits(0))
    np.testing.assert_array_equal(bits(-1), bits(2**32 - 1))


def test_programs_go_on_where_the_last_one_stopped(interpret):
    def seeded_once():
        @pl.when(pl.program_id(0) == 0)
        def _():
            pltpu.prng_seed(5)

        return pltpu.stateful_bits(SHAPE)

    def seeded_each():
        pltpu.prng_seed(5)
        return pltpu.stateful_bits(SHAPE)

    once = draw(seeded_once, dtype=jnp.uint32, grid=(3,), interpret=interpret)
    state, expected = random.mix([5], np), []
    for _ in range(3):
        bits, state = random.random_bits(state, SHAPE, np)
        expected.append(bits)
    np.testing.assert_array_equal(once, expected)
    each = draw(seeded_each, dtype=jnp.uint32, grid=(3,), interpret=interpret)
    np.testing.assert_array_equal(each, [expected[0]] * 3)


def test_draws_in_loops_and_branches_move_the_state(interpret):
    def sample():
        pltpu.prng_seed(1)
        total = jax.lax.fori_loop(0, 3, lambda i, x: x + pltpu.prng_random_bits((4,)), jnp.zeros(4, jnp.int32))
        more = jax.lax.cond(total[0] == 0, lambda: jnp.zeros(4, jnp.int32), lambda: pltpu.prng_random_bits((4,)))
        rounds = jax.lax.while_loop(
            lambda n: (n < 100) & (pltpu.prng_random_bits((1,))[0] % 4 != 0), lambda n: n + 1, 0
        )
        return jnp.concatenate([total, more, pltpu.prng_random_bits((4,)), rounds[None]])

    got = draw(sample, (13,), jnp.int32, interpret=interpret)[0]
    state, draws = random.mix([1], np), []

    def bits(n):
        nonlocal state
        drawn, state = random.random_bits(state, (n,), np)
        return drawn.view(np.int32)

    draws = [bits(4) for _ in range(4)]
    rounds = 0
    while np.fmod(bits(1)[0], 4) != 0:
        rounds += 1
    np.testing.assert_array_equal(got, [*sum(draws[:3]), *draws[3], *bits(4), rounds])


# --- distributions ----------------------------------------------------------------------------------------------------
def seeded(function):
    def sample():
        pltpu.prng_seed(11)
        return function()

    return sample


def test_uniform():
    x = draw(seeded(lambda: pltpu.stateful_uniform((64, 128))), (64, 128))[0]
    assert 0 <= x.min() < 0.001 < 0.999 < x.max() < 1
    assert abs(x.mean() - 0.5) < 0.02
    assert abs(x.std() - 12**-0.5) < 0.01
    y = draw(seeded(lambda: pltpu.stateful_uniform((64, 128), minval=-3.0, maxval=5.0)), (64, 128))[0]
    np.testing.assert_allclose(y, x * 8 - 3, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_uniform_of_16_bits_stays_below_one(dtype):
    x = draw(seeded(lambda: pltpu.stateful_uniform((64, 128), dtype)), (64, 128), dtype)[0].astype(np.float32)
    assert 0 <= x.min()
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 0.02


def test_normal():
    x = draw(seeded(lambda: pltpu.stateful_normal((64, 128))), (64, 128))[0]
    assert np.isfinite(x).all()
    assert abs(x.mean()) < 0.03
    assert abs(x.std() - 1) < 0.03
    assert abs((x < -1).mean() - 0.1587) < 0.02


def test_bernoulli():
    x = draw(seeded(lambda: pltpu.stateful_bernoulli(0.3, (64, 128))), (64, 128), jnp.bool_)[0]
    assert abs(x.mean() - 0.3) < 0.02
    y = draw(seeded(lambda: pltpu.stateful_bernoulli(jax.lax.iota(jnp.float32, 2))), (2,), jnp.bool_)[0]
    np.testing.assert_array_equal(y, [False, True])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16])
def test_narrow_bits(dtype):
    x = draw(seeded(lambda: pltpu.stateful_bits((64, 128), dtype)), (64, 128), dtype)[0]
    assert x.dtype == dtype
    assert len(np.unique(x)) > 200


# --- keys -------------------------------------------------------------------------------------------------------------
def test_pallas_keys_work_in_kernels_and_outside(interpret):
    key = pltpu.to_pallas_key(jax.random.key(0))
    assert jax.random.key_data(key).shape == (1, 2)
    assert pltpu.to_pallas_key(key) is key

    def kernel(key_ref, o_ref):
        o_ref[...] = jax.random.uniform(jax.random.fold_in(key_ref[...], pl.program_id(0)), SHAPE)

    spec = pl.BlockSpec((None, *SHAPE), lambda i: (i, 0, 0))
    out = jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32)
    key_spec = pl.BlockSpec(memory_space=pltpu.SMEM)
    got = pl.pallas_call(kernel, out, grid=(2,), in_specs=[key_spec], out_specs=spec, interpret=interpret)(key)
    for i in range(2):
        np.testing.assert_array_equal(got[i], jax.random.uniform(jax.random.fold_in(key, i), SHAPE))
    assert abs(np.asarray(got).mean() - 0.5) < 0.03
    assert not np.array_equal(got[0], got[1])


def test_a_key_draws_what_its_words_seed():
    key = pltpu.to_pallas_key(jax.random.key(3))
    words = jax.random.key_data(key)

    def kernel(words_ref, o_ref):
        pltpu.prng_seed(words_ref[0, 0], words_ref[0, 1])
        o_ref[...] = pltpu.stateful_bits(SHAPE)

    out = jax.ShapeDtypeStruct(SHAPE, jnp.uint32)
    got = pl.pallas_call(kernel, out, interpret=True)(words)
    np.testing.assert_array_equal(got, jax.random.bits(key, SHAPE, jnp.uint32))


@pytest.mark.parametrize("width", [8, 16, 32])
def test_keys_in_numpy(width):
    key = pltpu.to_pallas_key(jax.random.key(3))
    words = np.asarray(jax.random.key_data(key))
    folded = random.key_fold_in(words, np.int32(9), np)
    np.testing.assert_array_equal(folded, jax.random.key_data(jax.random.fold_in(key, 9)))
    expected = jax.random.bits(jax.random.fold_in(key, 9), (3, 5), f"uint{width}")
    np.testing.assert_array_equal(random.key_bits(folded, width, (3, 5), np), expected)


def test_keys_of_other_kinds_and_shapes():
    batch = pltpu.to_pallas_key(jax.random.split(jax.random.key(0), 3))
    assert batch.shape == (3,)
    np.testing.assert_array_equal(
        jax.random.key_data(batch[1]),
        jax.random.key_data(pltpu.to_pallas_key(jax.random.split(jax.random.key(0), 3)[1])),
    )
    old = pltpu.to_pallas_key(jax.random.PRNGKey(7))
    np.testing.assert_array_equal(jax.random.key_data(old), jax.random.key_data(pltpu.to_pallas_key(jax.random.key(7))))
    with pytest.raises(NotImplementedError, match="A Pallas key cannot be split"):
        jax.random.split(old)


# --- block-invariant sampling -----------------------------------------------------------------------------------------
def sampled(key, block, grid, order, total, tile=(8, 128)):
    def kernel(key_ref, o_ref):
        index = None if order is None else order(pl.program_id(0), pl.program_id(1))
        o_ref[...] = pltpu.sample_block(
            jax.random.uniform, key_ref[...], block, tile, total, index, minval=1.0, maxval=2.0
        )

    spec = pl.BlockSpec(block, order or (lambda i, j: (i, j)))
    keys = pl.BlockSpec(memory_space=pltpu.SMEM)
    out = jax.ShapeDtypeStruct(total, jnp.float32)
    return np.asarray(pl.pallas_call(kernel, out, grid=grid, in_specs=[keys], out_specs=spec, interpret=True)(key))


@pytest.mark.parametrize("make", [lambda k: k, pltpu.to_pallas_key], ids=["threefry", "pallas"])
def test_blocks_of_any_size_and_order_draw_the_same(make):
    key, total = make(jax.random.key(0)), (36, 520)
    small = sampled(key, (8, 128), (5, 5), None, total)
    large = sampled(key, (16, 256), (3, 3), lambda i, j: (j, i), total)
    np.testing.assert_array_equal(small, large)
    fifth = jax.random.uniform(jax.random.fold_in(key, 5), (8, 128), minval=1.0, maxval=2.0)  # 5 tiles in a row
    np.testing.assert_array_equal(small[8:16, :128], fifth)


# --- mistakes ---------------------------------------------------------------------------------------------------------
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("function", "kind", "first_line"),
    [
        (lambda: pltpu.prng_seed(2**32), OverflowError, "Seed 0 of pltpu.prng_seed is 4294967296, which does not fit"),
        (
            lambda: pltpu.prng_seed(1, 1.5),
            TypeError,
            "Seed 1 of pltpu.prng_seed is 1.5 (float), not one 32-bit integer.",
        ),
        (lambda: pltpu.prng_seed(jnp.arange(2)), TypeError, "Seed 0 of pltpu.prng_seed is int32[2], not one 32-bit"),
        (
            lambda: pltpu.prng_random_bits((8, 1.5)),
            TypeError,
            "The shape of pltpu.prng_random_bits is (8, 1.5) (tuple).",
        ),
        (
            lambda: pltpu.stateful_bits((8,), jnp.int32),
            TypeError,
            "pltpu.stateful_bits gives unsigned integers, not int32",
        ),
        (lambda: pltpu.stateful_uniform((8,), jnp.int32), TypeError, "pltpu.stateful_uniform gives float32, bfloat16"),
        (lambda: pltpu.to_pallas_key(1.5), TypeError, "pltpu.to_pallas_key takes a key, not 1.5 (float)."),
        (
            lambda: pltpu.sample_block(jax.random.uniform, KEY, (8, 128), (16, 128), (16, 128), (0, 0)),
            ValueError,
            "pltpu.sample_block: a tile of (16, 128) does not divide a block of (8, 128).",
        ),
        (
            lambda: pltpu.sample_block(jax.random.uniform, KEY, (8, 128), (128,), (16, 128), (0, 0)),
            ValueError,
            "pltpu.sample_block: tile_size has 1 dimension, but block_size has 2.",
        ),
    ],
)
def test_mistakes(function, kind, first_line):
    def kernel(o_ref):
        function()

    with pytest.raises(kind) as error:
        pl.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)()
    assert str(error.value).startswith(first_line)


def test_outside_a_kernel():
    for function in (lambda: pltpu.prng_seed(1), lambda: pltpu.prng_random_bits((8,)), lambda: pltpu.stateful_normal()):
        with pytest.raises(ValueError, match=r"pltpu\.\w+ can only be used inside a kernel"):
            function()


def test_the_eager_interpreter_has_no_generator():
    with pytest.raises(UnsupportedPrimitive, match="`prng_seed` is not supported in a kernel on the eager interpreter"):
        pl.pallas_call(
            lambda o_ref: pltpu.prng_seed(1), jax.ShapeDtypeStruct((8,), jnp.float32), interpret=pl.EagerParams()
        )()
