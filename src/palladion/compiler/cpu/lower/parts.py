"""Complex numbers and PRNG keys: a kernel over them becomes one over the real arrays that they are made of.

A complex array is two arrays of floats, an array of keys one array of uint32 for each of a key's words. This pass runs
before all others. It traces the kernel again with each such Ref and value in parts: what only moves elements is done
to every part, arithmetic on complex numbers is spelled out in real numbers (parts_math.py), and what is done with keys
is what JAX's own generators do with their words. The rest of the compiler knows neither type.

Operands are taken apart before the native call and results put together after it (boundary.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.compiler.cpu.boundary import has_parts, key_words, part_dtypes, take_apart
from palladion.compiler.cpu.lower.values import RULES as NATIVE
from palladion.language import ops
from palladion.language.grid import GridMapping


@dataclasses.dataclass(frozen=True)
class Parts:
    """A value, or a Ref, in parts of one shape.

    Attributes:
      dtype: of the whole: a complex dtype or that of a kind of keys.
      parts: real and imaginary part, or the words of the keys.
    """

    dtype: Any
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape


RULES: dict[Any, Callable] = {}


def rule(*primitives: Any) -> Callable[[Callable], Callable]:
    """Decorator: the function does what these primitives do, as `f(eqn, *inputs)`."""

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


# --- values in parts ------------------------------------------------------------------------------------------------
def _keys_from(words: Any, dtype: Any) -> Parts:
    key_shape = dtype._impl.key_shape
    flat = words.reshape(*words.shape[: words.ndim - len(key_shape)], -1)
    return Parts(dtype, tuple(flat[..., k] for k in range(flat.shape[-1])))


def flatten(values: Iterable[Any]) -> list[Any]:
    """Values with those in parts replaced by their parts."""
    return [p for v in values for p in (v.parts if isinstance(v, Parts) else (v,))]


def rebuild(dtypes: Iterable[Any], flat: Iterable[Any]) -> list[Any]:
    """The inverse of `flatten`, for values of these dtypes."""
    rest = iter(flat)
    return [Parts(d, tuple(next(rest) for _ in part_dtypes(d))) if part_dtypes(d) else next(rest) for d in dtypes]


def _part_avals(aval: Any) -> list[Any]:
    dtypes = part_dtypes(getattr(aval, "dtype", np.int32))
    if not dtypes:
        return [aval]
    if isinstance(aval, jaxlink.AbstractRef):
        return [aval.update(inner_aval=jaxlink.ShapedArray(aval.shape, d)) for d in dtypes]
    return [jaxlink.ShapedArray(aval.shape, d) for d in dtypes]


# --- kernel calls ---------------------------------------------------------------------------------------------------
@functools.lru_cache(1024)
def split_kernel(jaxpr: Any) -> Any:
    """A jaxpr over parts that does what `jaxpr` does."""
    dtypes = [v.aval.dtype for v in jaxpr.invars]
    avals = [a for v in jaxpr.invars for a in _part_avals(v.aval)]

    def kernel(*flat):
        return flatten(run(jaxpr, rebuild(dtypes, flat)))

    info = jaxlink.debug_info("pallas_call kernel in parts", kernel, avals)
    return jaxlink.trace_to_jaxpr(kernel, avals, info)[0]


def split_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the call whose operands and results are the parts of this call's."""
    gm: GridMapping = params["grid_mapping"]
    arrays = [*(m.array for m in gm.prefetch_mappings), *(m.array for m in gm.inputs)]
    first = _first_parts(a.dtype for a in arrays)
    first_out = _first_parts(m.array.dtype for m in gm.outputs)
    aliases = []
    for i, o in params["input_output_aliases"]:
        n = max(1, len(part_dtypes(arrays[i].dtype)))
        aliases += [(first[i] + k, first_out[o] + k) for k in range(n)]
    inputs = [p for m in gm.inputs for p in _split_mapping(m)]
    outputs = [p for m in gm.outputs for p in _split_mapping(m)]
    prefetch = tuple(p for m in gm.prefetch_mappings for p in _split_mapping(m))
    mapping = dataclasses.replace(
        gm, block_mappings=(*inputs, *outputs), num_inputs=len(inputs), prefetch_mappings=prefetch
    )
    return dict(
        params,
        jaxpr=split_kernel(params["jaxpr"]),
        grid_mapping=mapping,
        input_output_aliases=tuple(aliases),
        out_avals=tuple(jaxlink.ShapedArray(m.array.shape, m.array.dtype) for m in outputs),
    )


def _first_parts(dtypes: Iterable[Any]) -> list[int]:
    at, result = 0, []
    for d in dtypes:
        result.append(at)
        at += max(1, len(part_dtypes(d)))
    return result


def _split_mapping(m: Any) -> list[Any]:
    index_map = split_kernel(m.index_map) if has_parts(m.index_map) else m.index_map
    dtypes = part_dtypes(m.array.dtype) or (m.array.dtype,)
    return [dataclasses.replace(m, array=jax.ShapeDtypeStruct(m.array.shape, d), index_map=index_map) for d in dtypes]


# --- running a jaxpr on parts ---------------------------------------------------------------------------------------
def run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on values and Refs, some of them in parts, under the trace that is active."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    env.update((v, _known(c, v.aval)) for v, c in zip(jaxpr.constvars, jaxpr.consts))
    for eqn in jaxpr.eqns:
        inputs = [_known(a.val, a.aval) if isinstance(a, jaxlink.Literal) else env[a] for a in eqn.invars]
        with locations.as_traced(eqn):
            outputs = _apply(eqn, inputs)
        env.update(zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs]))
    return [_known(a.val, a.aval) if isinstance(a, jaxlink.Literal) else env[a] for a in jaxpr.outvars]


def _known(value: Any, aval: Any) -> Any:
    if not part_dtypes(getattr(aval, "dtype", np.int32)):
        return value
    if jaxlink.is_opaque(aval.dtype):
        return Parts(aval.dtype, tuple(take_apart(value)))
    value = np.asarray(value, aval.dtype)
    return Parts(aval.dtype, (value.real, value.imag))


def _apply(eqn: Any, inputs: Sequence[Any]) -> Any:
    if (known := RULES.get(eqn.primitive)) is not None:
        return known(eqn, *inputs)
    split_outs = [part_dtypes(getattr(v.aval, "dtype", np.int32)) for v in eqn.outvars]
    if not any(split_outs) and not any(isinstance(x, Parts) for x in inputs):
        return bind(eqn, inputs)
    if eqn.primitive not in MOVES:
        raise NATIVE.unsupported(eqn)
    return each_part(eqn, inputs)


def bind(eqn: Any, inputs: Sequence[Any], **changed: Any) -> Any:
    """Do what an equation does on other inputs, with some of its parameters changed."""
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*inputs, **(params | changed))


def each_part(eqn: Any, inputs: Sequence[Any], **changed: Any) -> Any:
    """Do the same to the first parts, to the second parts, …"""
    whole = next(x for x in inputs if isinstance(x, Parts))
    outs = [
        bind(eqn, [x.parts[k] if isinstance(x, Parts) else x for x in inputs], **changed)
        for k in range(len(whole.parts))
    ]
    if not eqn.primitive.multiple_results:
        return Parts(whole.dtype, tuple(outs))
    return [Parts(whole.dtype, tuple(column)) for column in zip(*outs)]


MOVES = {  # what moves elements, or adds up, is done to each part alone
    lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p, lax.transpose_p, lax.slice_p, lax.dynamic_slice_p,
    lax.dynamic_update_slice_p, lax.rev_p, lax.concatenate_p, lax.stack_p, lax.unstack_p, lax.tile_p, lax.split_p,
    lax.pad_p, lax.select_n_p, lax.gather_p, lax.scatter_p, lax.copy_p, lax.optimization_barrier_p,
    jaxlink.ref_broadcast_to_p, jaxlink.get_p, jaxlink.ref_p, jaxlink.freeze_p, jaxlink.free_ref_p,
}  # fmt: skip


@rule(lax.gather_p)
def _gather(eqn: Any, x: Any, indices: Any) -> Any:
    if not isinstance(x, Parts):
        return bind(eqn, [x, indices])
    fill = eqn.params["fill_value"]
    if fill is None:
        return each_part(eqn, [x, indices])
    fills = _known(fill, eqn.outvars[0].aval).parts
    return Parts(x.dtype, tuple(bind(eqn, [p, indices], fill_value=f.item()) for p, f in zip(x.parts, fills)))


@rule(jaxlink.swap_p, jaxlink.addupdate_p)
def _write(eqn: Any, ref: Any, value: Any, *index: Any) -> Any:
    return each_part(eqn, [ref, value, *index]) if isinstance(ref, Parts) else bind(eqn, [ref, value, *index])


@rule(jaxlink.empty_ref_p)
def _empty_ref(eqn: Any) -> Any:
    aval = eqn.outvars[0].aval
    if not part_dtypes(aval.dtype):
        return bind(eqn, [])
    return Parts(aval.dtype, tuple(bind(eqn, [], ty=a.inner_aval) for a in _part_avals(aval)))


# --- control flow ---------------------------------------------------------------------------------------------------
def _dtypes(atoms: Iterable[Any]) -> list[Any]:
    return [v.aval.dtype for v in atoms]


def _inline(param: str) -> Callable:
    return lambda eqn, *args: run(eqn.params[param], args)


rule(jaxlink.jit_p, jaxlink.remat_p)(_inline("jaxpr"))
rule(jaxlink.custom_jvp_call_p, jaxlink.custom_vjp_call_p)(_inline("call_jaxpr"))


@rule(lax.cond_p)
def _cond(eqn: Any, which: Any, *operands: Any) -> list[Any]:
    branches = [lambda b=b: flatten(run(b, operands)) for b in eqn.params["branches"]]
    outs = lax.switch(which, branches)
    return rebuild(_dtypes(eqn.outvars), outs)


@rule(lax.while_p)
def _while(eqn: Any, *operands: Any) -> list[Any]:
    n = eqn.params["cond_nconsts"]
    m = n + eqn.params["body_nconsts"]
    cond_jaxpr, body_jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    dtypes = _dtypes(eqn.outvars)
    batch = len(cond_jaxpr.outvars[0].aval.shape)

    def going(flat):
        return run(cond_jaxpr, [*operands[:n], *rebuild(dtypes, flat)])[0]

    def body(flat):
        outs = flatten(run(body_jaxpr, [*operands[n:m], *rebuild(dtypes, flat)]))
        if batch:  # vmap of a loop: elements that are done keep what they have
            go_on = going(flat)
            outs = [jnp.where(lax.expand_dims(go_on, range(batch, o.ndim)), o, c) for o, c in zip(outs, flat)]
        return outs

    outs = lax.while_loop(lambda flat: jnp.any(going(flat)), body, flatten(operands[m:]))
    return rebuild(dtypes, outs)


@rule(lax.scan_p)
def _scan(eqn: Any, *operands: Any) -> list[Any]:
    params, (n_consts, n_carry) = eqn.params, jaxlink.scan_counts(eqn)
    m = n_consts + n_carry
    inner = params["jaxpr"]
    dtypes, x_dtypes = _dtypes(eqn.outvars), _dtypes(inner.invars[m:])

    def body(carry, xs):
        values = [*rebuild(dtypes[:n_carry], carry), *rebuild(x_dtypes, xs)]
        outs = run(inner, [*operands[:n_consts], *values])
        return flatten(outs[:n_carry]), flatten(outs[n_carry:])

    init, xs = flatten(operands[n_consts:m]), flatten(operands[m:])
    carry, ys = lax.scan(body, init, xs, params["length"], params["reverse"], params["unroll"])
    return rebuild(dtypes, [*carry, *ys])


@rule(ops.run_scoped_p)
def _run_scoped(eqn: Any, *operands: Any) -> list[Any]:
    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    scoped = sum(len(_part_avals(v.aval)) for v in jaxpr.invars[len(jaxpr.invars) - n :])
    kernel, axes = split_kernel(jaxpr), eqn.params["collective_axes"]
    outs = ops.run_scoped_p.bind(*flatten(operands), jaxpr=kernel, num_scoped=scoped, collective_axes=axes)
    return rebuild(_dtypes(eqn.outvars), outs)


# --- keys -----------------------------------------------------------------------------------------------------------
def _over_keys(function: Callable, n_batch: int) -> Callable:
    for _ in range(n_batch):
        function = jax.vmap(function)
    return function


@rule(jaxlink.random_seed_p)
def _seed(eqn: Any, seeds: Any) -> Parts:
    return _keys_from(_over_keys(eqn.params["impl"].seed, seeds.ndim)(seeds), eqn.outvars[0].aval.dtype)


@rule(jaxlink.random_wrap_p)
def _wrap(eqn: Any, words: Any) -> Parts:
    return _keys_from(words, eqn.outvars[0].aval.dtype)


@rule(jaxlink.random_unwrap_p)
def _unwrap(eqn: Any, keys: Parts) -> Any:
    return key_words(keys.parts, keys.dtype)


@rule(jaxlink.random_bits_p)
def _bits(eqn: Any, keys: Parts) -> Any:
    impl, width, shape = keys.dtype._impl, eqn.params["bit_width"], eqn.params["shape"]
    bits = _over_keys(lambda key: impl.random_bits(key, width, shape), len(keys.shape))
    return bits(key_words(keys.parts, keys.dtype))


@rule(jaxlink.random_fold_in_p)
def _fold_in(eqn: Any, keys: Parts, messages: Any) -> Parts:
    impl, shape = keys.dtype._impl, jnp.broadcast_shapes(keys.shape, jnp.shape(messages))
    words = key_words([jnp.broadcast_to(p, shape) for p in keys.parts], keys.dtype)
    fold = _over_keys(lambda key, message: impl.fold_in(key, message), len(shape))
    return _keys_from(fold(words, jnp.broadcast_to(messages, shape)), keys.dtype)


@rule(jaxlink.random_gamma_p)
def _gamma(eqn: Any, keys: Parts, a: Any) -> Any:
    def gamma(keys: Any, a: Any) -> Any:
        return jaxlink.random_gamma(keys, a, eqn.params["log_space"])

    jaxpr = jax.make_jaxpr(gamma)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (keys, a)))
    return run(getattr(jaxpr, "jaxpr", jaxpr), [keys, a])[0]


@rule(jaxlink.random_split_p)
def _split(eqn: Any, keys: Parts) -> Parts:
    impl, shape = keys.dtype._impl, eqn.params["shape"]
    split = _over_keys(lambda key: impl.split(key, shape), len(keys.shape))
    return _keys_from(split(key_words(keys.parts, keys.dtype)), keys.dtype)


from palladion.compiler.cpu.lower import parts_math  # noqa: E402, F401 - it registers its rules here
