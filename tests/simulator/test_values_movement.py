"""Shapes, indexing, gather and scatter in NumPy against JAX: bitwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from simulator.values_check import case, check, run

MODES = ("clip", "fill", "promise_in_bounds")


def array(*shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).integers(-100, 100, shape)
    return (x % 2 == 0) if dtype == "bool" else x.astype(dtype)


def shape_cases():
    for dtype in ("float32", "bfloat16", "int8", "bool", "float8_e5m2"):
        x = array(2, 3, 4, dtype=dtype)
        yield case(f"reshape {dtype}", lambda v: (v.reshape(6, 4), v.reshape(24), lax.reshape(v, (4, 6), (2, 0, 1))), x)
        yield case(f"transpose {dtype}", lambda v: (v.transpose(2, 0, 1), v.T, v.swapaxes(0, 1)), x)
        yield case(f"expand, squeeze {dtype}", lambda v: (v[:, None], jnp.squeeze(v[:1, :, :1]), v[None, ..., None]), x)
        yield case(
            f"broadcast {dtype}",
            lambda v: (
                jnp.broadcast_to(v, (5, 2, 3, 4)),
                jnp.broadcast_to(v[:, :1], (2, 3, 4)),
                lax.broadcast_in_dim(v[0], (3, 2, 4), (0, 2)),
                jnp.broadcast_to(v[0, 0, 0], (3, 4)),
            ),
            x,
        )
        yield case(
            f"concatenate {dtype}",
            lambda v: (jnp.concatenate([v, v[:1], v], 0), jnp.concatenate([v, v[..., :0]], 2)),
            x,
        )
        yield case(f"stack {dtype}", lambda v: (jnp.stack([v, v[::-1]], 1), jnp.stack([v, v], 3)), x)
        yield case(f"unstack, split {dtype}", lambda v: (*jnp.unstack(v, axis=1), *jnp.split(v, [1, 3], axis=2)), x)
        yield case(f"tile {dtype}", lambda v: (lax.tile(v, (2, 1, 3)), jnp.repeat(v, 2, axis=1)), x)
        yield case(f"rev {dtype}", lambda v: (lax.rev(v, (0, 2)), v[:, ::-1]), x)
        yield case(
            f"slice {dtype}",
            lambda v: (v[1:, :2, ::2], v[0], v[..., 3:3], lax.slice(v, (0, 1, 0), (2, 3, 4), (1, 2, 3))),
            x,
        )
        yield case(f"roll {dtype}", lambda v: jnp.roll(v, 3, 2), x)
    for shape in ((0,), (0, 3), (2, 0, 3), (1,), (1, 1)):
        x = array(*shape)
        yield case(
            f"movement of {list(shape)}", lambda v: (v.T, v.reshape(1, *v.shape), v[::-1], jnp.concatenate([v, v])), x
        )
    big = array(200, 1)
    yield case("large broadcast", lambda v: jnp.broadcast_to(v, (200, 300)) + 1, big)
    yield case(
        "iota",
        lambda: (
            lax.iota("int32", 5),
            lax.broadcasted_iota("float32", (3, 4), 1),
            lax.broadcasted_iota("bfloat16", (3, 4), 0),
            lax.broadcasted_iota("uint8", (2, 300), 1),
        ),
    )
    yield case(
        "literals", lambda v: (jnp.zeros((3, 2)) + v, jnp.full((2,), 7, "bfloat16"), jnp.ones((), "int8")), array(2)
    )
    yield case(
        "barriers and copies",
        lambda v: (lax.optimization_barrier((v, v + 1)), jnp.copy(v), lax.copy_p.bind(v)),
        array(3),
    )
    yield case("device_put", lambda v: jax.device_put(v), array(3))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    yield case("sharding", lambda v: lax.with_sharding_constraint(v, here), array(3))


def pad_cases():
    configs = [
        (0, 0, 0),
        (1, 2, 0),
        (0, 0, 2),
        (-1, 0, 0),
        (0, -2, 0),
        (-2, 3, 1),
        (3, -4, 2),
        (-9, 1, 3),
        (1, -9, 1),
        (-1, -1, 1),
    ]
    for low, high, interior in configs:
        for size in (0, 1, 7):
            if low + high + size + max(size - 1, 0) * interior >= 0:
                pad = lambda v, c=(low, high, interior): lax.pad(v, v.dtype.type(7), [c, (0, 1, 0)])
                yield case(f"pad {low} {high} {interior} of {size}", pad, array(size, 2))
    yield case("pad bf16", lambda v: jnp.pad(v, 1, constant_values=np.nan), array(2, 3, dtype="bfloat16"))


def dynamic_cases():
    x = array(5, 6)
    cut = lambda v, i, j: lax.dynamic_slice(v, (i, j), (2, 6))
    put = lambda v, w, i, j: lax.dynamic_update_slice(v, w, (i, j))
    for i, j in ((0, 0), (3, 0), (4, 3), (-1, -7), (100, 1), (2**31 - 1, -(2**31))):
        yield case(f"dynamic_slice {i} {j}", cut, x, np.int32(i), np.int32(j))
        yield case(f"dynamic_update_slice {i} {j}", put, x, array(2, 3, seed=1), np.int32(i), np.int32(j))
    yield case("unsigned start", cut, x, np.uint32(2**32 - 1), np.uint32(0))
    yield case("update of everything", put, x, array(5, 6, seed=1), np.int32(3), np.int32(3))
    yield case("dynamic_slice of nothing", lambda v, i: lax.dynamic_slice(v, (i,), (0,)), array(4), np.int32(9))


def gather_cases():
    x, wild = array(5, 6, 3), np.array([[0, 4, -1], [5, 99, -6]], np.int32)
    grid = np.array([[1, 2], [4, 0], [7, -9]], np.int32)
    for dtype in ("float32", "bfloat16", "int8", "uint8", "bool", "int32"):
        v = array(5, 6, 3, dtype=dtype)
        for mode in MODES[:2]:
            take = lambda v, i, mode=mode: [jnp.take(v, i, axis=a, mode=mode) for a in range(3)]
            yield case(f"take {mode} {dtype}", take, v, wild)
    for mode in MODES:
        safe = wild % 3 if mode == "promise_in_bounds" else wild
        at = lambda v, i, mode=mode: (
            v.at[i].get(mode=mode),
            v.at[:, i].get(mode=mode),
            v.at[i, :, i].get(mode=mode),
            v.at[1, i].get(mode=mode),
            v.at[i, i[0], i].get(mode=mode),
        )
        yield case(f"at[].get {mode}", at, x, safe)
        at = lambda v, i, mode=mode: v.at[i, 1:3].get(mode=mode)
        yield case(f"at[].get with slices {mode}", at, x, safe)
        numbers = lax.GatherDimensionNumbers((1, 2, 3), (), (0, 1))
        windows = lambda v, i, mode=mode, numbers=numbers: lax.gather(v, i, numbers, (2, 3, 3), mode=mode)
        yield case(f"windows {mode}", windows, x, grid % 3 if mode == "promise_in_bounds" else grid)
        numbers = lax.GatherDimensionNumbers((0, 2), (1,), (2, 1))
        windows = lambda v, i, mode=mode, numbers=numbers: lax.gather(v, i, numbers, (5, 1, 2), mode=mode)
        yield case(f"windows between {mode}", windows, x, grid % 2 if mode == "promise_in_bounds" else grid)
    yield case("fill_value", lambda v, i: v.at[i].get(mode="fill", fill_value=7), x, wild)
    yield case("take_along_axis", lambda v, i: jnp.take_along_axis(v, i, 1), array(2, 6), wild % 6)
    along = lambda v, i: jnp.take_along_axis(v, i[:, :1, None], axis=0, mode="fill")
    yield case("batched gather", along, x, wild)
    yield case("vmapped", jax.vmap(lambda v, i: v[i]), x, np.arange(5, dtype=np.int32) % 4)
    yield case(
        "vmapped windows",
        jax.vmap(lambda v, i: lax.dynamic_slice(v, (i, 0), (2, 3))),
        x,
        np.array([0, 9, 2, -3, 4], np.int32),
    )
    yield case("nothing gathered", lambda v, i: v[i[:, :0]], x, wild)
    yield case("gather of nothing", lambda v, i: jnp.take(v, i, axis=0, mode="fill"), array(4, 0), wild)
    yield case(
        "whole operand",
        lambda v, i: lax.gather(v, i, lax.GatherDimensionNumbers((1, 2), (), (0,)), (4, 2), mode="fill"),
        array(4, 2),
        np.array([[0], [1], [0]], np.int32),
    )
    keys = jax.random.split(jax.random.key(3), 6)
    words = jax.random.key_data
    yield case(
        "keys moved",
        lambda k: [
            words(y)
            for y in (
                k[2],
                k[::2],
                k.reshape(2, 3).T,
                k[None],
                jnp.concatenate([k, k[:1]]),
                jnp.stack([k, k]),
                *jnp.unstack(k.reshape(3, 2)),
                jnp.broadcast_to(k, (2, 6)),
            )
        ],
        keys,
    )
    yield case(
        "keys chosen",
        lambda k, i: [
            words(y)
            for y in (
                k[i],
                jnp.where(i.reshape(-1) > 2, k, k[::-1]),
                k.at[i[0, 0]].set(k[1]),
                lax.dynamic_slice(k, (i[0, 1],), (2,)),
                jnp.take(k.reshape(2, 3), i % 3, axis=1, mode="clip"),
            )
        ],
        keys,
        wild,
    )


def scatter_cases():
    x, wild = array(5, 6, 3), np.array([0, 4, -1, 5, 99, 0, -6], np.int32)
    for dtype in ("float32", "bfloat16", "float16", "int8", "int32", "uint32"):
        v, new = array(5, 6, 3, dtype=dtype), array(7, 6, 3, dtype=dtype, seed=1)
        for mode in ("clip", "drop"):
            for op in ("set", "add", "multiply", "min", "max"):
                put = lambda v, i, w, op=op, mode=mode: getattr(v.at[i], op)(w, mode=mode)
                yield case(f"{op} {mode} {dtype}", put, v, wild, new % 3 if op == "multiply" else new)
    for mode in (*MODES, "drop"):
        i = wild % 3 if mode == "promise_in_bounds" else wild
        many = lambda v, i, mode=mode: (
            v.at[:, i].add(2.0, mode=mode),
            v.at[i, :, i % 3].add(3.0, mode=mode),
            v.at[1, i].set(5.0, mode=mode),
            v.at[i, 1:3].max(0.0, mode=mode),
        )
        yield case(f"at[] {mode}", many, x, i)
        numbers = lax.ScatterDimensionNumbers((1, 2, 3), (), (0, 1))
        grid = np.array([[1, 2], [3, 0], [4, -9]], np.int32) % (3 if mode == "promise_in_bounds" else 100)
        windows = lambda v, i, w, mode=mode, numbers=numbers: (
            lax.scatter_add(v, i, w, numbers, mode=mode),
            lax.scatter(v, i, w, numbers, mode=mode),
        )
        yield case(f"windows {mode}", windows, x, grid, array(3, 2, 3, 3, seed=2))
        numbers = lax.ScatterDimensionNumbers((0, 2), (1,), (2, 1))
        windows = lambda v, i, w, mode=mode, numbers=numbers: lax.scatter_sub(v, i, w, numbers, mode=mode)
        yield case(f"windows between {mode}", windows, x, grid % 2, array(5, 3, 2, seed=2))
    yield case("apply", lambda v, i: v.at[i].apply(lambda y: y * 2 + 1), x, np.array([0, 2, 4, 9], np.int32))
    yield case(
        "apply in one dimension", lambda v, i: v.at[i].apply(jnp.abs), array(6), np.array([0, 2, 4, 9], np.int32)
    )
    yield case("mask", lambda v: v.at[np.arange(5) > 2].set(0), x)
    yield case(
        "batched scatter", jax.vmap(lambda v, i, w: v.at[i].add(w)), x, np.arange(5, dtype=np.int32) % 4, array(5, 3)
    )
    yield case("nothing scattered", lambda v, i: v.at[i[:0]].add(1), x, wild)
    yield case("into nothing", lambda v, i: v.at[i].add(1), array(0, 3), wild)
    yield case("one element", lambda v, i: v.at[i].set(9), array(4), np.int32(2))
    yield case("a whole array", lambda v, w: v.at[:].add(w), array(4), array(4))
    yield case("static", lambda v: v.at[1, ::2].set(0), x)
    yield case("negative step", lambda v: v.at[::-2].add(1), x)


FAMILIES = {f.__name__: list(f()) for f in (shape_cases, pad_cases, dynamic_cases, gather_cases, scatter_cases)}


@pytest.mark.parametrize("family", FAMILIES)
def test_against_jax(family):
    check(FAMILIES[family])


def test_apply_twice_at_one_place():
    """As NumPy's ufunc.at; JAX on a CPU does the same, but promises it not."""
    got = run(lambda v, i: v.at[i].apply(lambda y: y * 2), np.ones(3, np.float32), np.array([1, 1, 2], np.int32))
    assert got[0].tolist() == [1, 4, 2]


def test_what_depends_on_no_operand_is_made_once():
    from palladion.simulator.values import array_function

    iota = array_function(jax.make_jaxpr(lambda: lax.iota("int32", 8))().eqns[0])
    assert iota() is iota() and not iota().flags.writeable
    zeros = array_function(jax.make_jaxpr(lambda: jnp.zeros((8, 2)))().eqns[0])
    assert zeros(np.float32(0)) is zeros(np.float32(0))
