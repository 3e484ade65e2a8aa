"""The eager interpreter: run-time indices that leave their Ref, and the refusals of a traced kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import tpu as pltpu

EAGER = pl.EagerParams()
CLAMP = pl.EagerParams(out_of_range="clamp")
X = np.arange(16, dtype=np.float32).reshape(4, 4)


def call(kernel, *args, interpret=EAGER, **more):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((4, 4), "float32"), interpret=interpret, **more)(*args)


# --- run-time indices that leave their Ref --------------------------------------------------------------------------
def _read(x_ref, o_ref, i):
    o_ref[0] = x_ref[i + 3]


def _write(x_ref, o_ref, i):
    o_ref[i + 3, 1] = 50.0


def _below(x_ref, o_ref, i):
    o_ref[-4 - i] = x_ref[3] + 1


def _read_slice(x_ref, o_ref, i):
    o_ref[:, 0:2] = x_ref[:, pl.ds(i + 2, 2)]


def _write_strided(x_ref, o_ref, i):
    o_ref[pl.ds(i + 1, 2, 2)] = x_ref[2:4]


def _view(x_ref, o_ref, i):
    o_ref.at[1:4].at[pl.ds(i + 1, 2)][...] = x_ref[0:2]


def _gather(x_ref, o_ref, i):
    o_ref[...] = x_ref[jnp.arange(4) - 4 + 5 * i]


def _scatter(x_ref, o_ref, i):
    o_ref[jnp.arange(2) * 2 + 2 * i] = x_ref[0:2] - 9


def _vmapped(x_ref, o_ref, i):
    o_ref[...] = jax.vmap(lambda j: x_ref[j])(jnp.arange(4) + i)


OUTSIDE = [
    (_read, "Index 4 is out of range for dimension 0 of x_ref (input 0), which has 4 elements."),
    (_write, "Index 4 is out of range for dimension 0 of o_ref (output 0), which has 4 elements."),
    (_below, "Index -5 is out of range for dimension 0 of o_ref (output 0), which has 4 elements."),
    (_read_slice, "pl.ds(start=3, size=2) runs past dimension 1 of x_ref (input 0), which has 4 elements."),
    (
        _write_strided,
        "pl.ds(start=2, size=2, stride=2) runs past dimension 0 of o_ref (output 0), which has 4 elements.",
    ),
    (_view, "pl.ds(start=2, size=2) runs past dimension 0 of a view of o_ref (output 0), which has 3 elements."),
    (_gather, "Index 4 is out of range for dimension 0 of x_ref (input 0), which has 4 elements."),
    (_scatter, "Index 4 is out of range for dimension 0 of o_ref (output 0), which has 4 elements."),
    (_vmapped, "Index 4 is out of range for dimension 0 of x_ref (input 0), which has 4 elements."),
]


def _indexing(body):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        body(x_ref, o_ref, pl.program_id(0))

    return kernel


@pytest.mark.parametrize(("body", "words"), OUTSIDE, ids=[b.__name__ for b, _ in OUTSIDE])
def test_an_index_outside_raises_at_the_users_line(body, words):
    call(_indexing(body), X, grid=(1,))  # program 0 stays inside
    with pytest.raises(IndexError) as info:
        call(_indexing(body), X, grid=(2,))
    lines = str(info.value).splitlines()
    assert lines[0] == words
    assert "test_eager_refusals.py" in lines[1] and body.__name__ in lines[1] and lines[2].startswith("  fix: ")
    assert "In the kernel kernel, program (1,) of the grid (2,)." in "\n".join(info.value.__notes__)


@pytest.mark.parametrize("body", [b for b, _ in OUTSIDE], ids=lambda b: b.__name__)
def test_clamp_gives_what_compiled_code_gives(body):
    kernel = _indexing(body)
    clamped = call(kernel, X, grid=(2,), interpret=CLAMP)
    np.testing.assert_array_equal(clamped, call(kernel, X, grid=(2,), interpret=True))


def test_a_slice_longer_than_its_ref_is_refused_in_every_mode():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0), 5), :4]

    for interpret in (EAGER, CLAMP, True):
        with pytest.raises(IndexError, match=r"size=5\) runs past dimension 0 of x_ref"):
            call(kernel, X, grid=(1,), interpret=interpret)


# --- refusals, in the words of the traced kernel --------------------------------------------------------------------
def _vmapped_write(x_ref, o_ref):
    def put(i):
        o_ref[i] = x_ref[i]

    jax.vmap(put)(jnp.arange(4))


def drop(_):
    """Evaluate and forget, so that a kernel returns None."""


REFUSED = {
    "store to an input": lambda x, o: x.__setitem__(0, x[1]),
    "store to a view of an input": lambda x, o: x.at[0].reshape(2, 2).set(x[1, :2], 0),
    "addupdate of an input": lambda x, o: jax.ref.addupdate(x, (0,), x[1]),
    "value returned": lambda x, o: x[...],
    "Ref returned": lambda x, o: o,
    "wrong shape": lambda x, o: o.__setitem__(..., x[0]),
    "wrong dtype": lambda x, o: o.__setitem__(..., x[...].astype(jnp.int32)),
    "not an array": lambda x, o: o.__setitem__(..., "a"),
    "Ref stored": lambda x, o: o.__setitem__(..., x),
    "jax.ref.set of a wrong shape": lambda x, o: jax.ref.set(o, (0,), jnp.ones((3,))),
    "jax.ref.set of a wrong dtype": lambda x, o: jax.ref.set(o, (0,), jnp.ones((4,), jnp.int32)),
    "jax.ref.get outside": lambda x, o: drop(jax.ref.get(x, (7,))),
    "index outside": lambda x, o: o.__setitem__(9, x[0]),
    "negative index outside": lambda x, o: o.__setitem__(-9, x[0]),
    "array index outside": lambda x, o: drop(x[np.array([0, 5])]),
    "static slice outside": lambda x, o: drop(x[pl.ds(3, 2)]),
    "too many indices": lambda x, o: o.__setitem__((0, 0, 0), 1.0),
    "two ellipses": lambda x, o: o.__setitem__((..., ...), 1.0),
    "negative step": lambda x, o: drop(x[::-1]),
    "slice with run-time bounds": lambda x, o: drop(x[pl.program_id(0) : pl.program_id(0) + 1]),
    "slice of run-time size": lambda x, o: drop(x[pl.ds(0, pl.program_id(0))]),
    "float index": lambda x, o: drop(x[1.5]),
    "float array index": lambda x, o: drop(x[x[0]]),
    "Ref as an index": lambda x, o: drop(x[o]),
    "bool index": lambda x, o: drop(x[True]),
    "mask of a wrong shape": lambda x, o: drop(x[np.array([True, False])]),
    "masked store of a wrong shape": lambda x, o: o.__setitem__(x[...] > 0, jnp.ones((3,))),
    "new axis in a write": lambda x, o: o.__setitem__(None, x[...]),
    "Ref in arithmetic": lambda x, o: drop(x + 1),
    "Ref in a function": lambda x, o: drop(jnp.sin(x)),
    "Ref as a number": lambda x, o: drop(float(x.at[0, 0])),
    "not a permutation": lambda x, o: drop(x.transpose(0, 0)),
    "wrong reshape": lambda x, o: drop(x.reshape(3, 3)),
    "wrong bitcast": lambda x, o: drop(x.at[0].bitcast(jnp.int16)),
    "no such axis": lambda x, o: drop(pl.program_id(5)),
    "when of an array": lambda x, o: pl.when(x[0] > 0)(lambda: None),
    "format without its values": lambda x, o: pl.debug_print("{} {}", x[0]),
    "scoped buffer of no type": lambda x, o: pl.run_scoped(lambda r: None, 3),
    "scoped Ref returned": lambda x, o: drop(pl.run_scoped(lambda r: r, pltpu.VMEM((4,), jnp.float32))),
    "vmapped write": _vmapped_write,
}


# Where JAX itself refuses: JAX 0.11 has other words for concrete values than for traced ones.
_WORDS_OF_JAX = {"jax.ref.get outside", "Ref in a function"} if jax.__version_info__ < (0, 12) else set()


@pytest.mark.parametrize("what", [what for what in REFUSED if what not in _WORDS_OF_JAX])
def test_refusals_are_those_of_the_traced_kernel(what):
    errors = []
    for interpret in (True, EAGER):
        with pytest.raises(Exception) as info:
            call(lambda x_ref, o_ref: REFUSED[what](x_ref, o_ref), X, grid=(1,), interpret=interpret)
        errors.append((type(info.value), str(info.value)))
    assert errors[1] == errors[0]
    assert errors[0][0] is not AssertionError


def test_store_to_prefetched_scalars_that_index_maps_read():
    def kernel(t_ref, x_ref, o_ref):
        t_ref[0] = 1

    def run(index_map, interpret):
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(2,), in_specs=[pl.BlockSpec((1, 4), index_map)], out_specs=pl.BlockSpec()
        )
        table = np.array([3, 2], np.int32)
        return call(kernel, table, X, grid_spec=grid_spec, interpret=interpret)

    words = []
    for interpret in (True, EAGER):
        with pytest.raises(ValueError) as info:
            run(lambda i, t: (t[i], 0), interpret)
        words.append(str(info.value))
        run(lambda i, t: (i, 0), interpret)  # nothing is in flight: allowed
    assert words[0] == words[1]
    assert words[0].startswith(
        "The kernel kernel writes to t_ref (scalar-prefetch operand 0), which the index map of x_ref"
    )
