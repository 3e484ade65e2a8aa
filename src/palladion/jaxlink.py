"""Everything Palladion takes from the private parts of JAX, and nothing else.

This is the only module that imports `jax._src`. The rest of the package imports names from here, so that a new
JAX release is met in one place. What is used, and where JAX 0.11.2 and 0.12.0.1 differ, was measured in
`spikes/tracing.md` of the shared folder. `jax.extend` would offer some of these names, but importing it loads
JAX's own Pallas, which Palladion never does.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    ad_checkpoint,
    ad_util,
    api_util,
    core,
    custom_derivatives,
    debugging,
    dtypes,
    flattree,
    pjit,
    source_info_util,
    traceback_util,
    util,
)
from jax._src import config as jax_config
from jax._src import effects as jax_effects
from jax._src import pretty_printer as pretty_printer
from jax._src.callback import _callback_op_sharding, emit_python_callback
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import ShapedArray as ShapedArray
from jax._src.core import Tracer as Tracer
from jax._src.core import jaxprs_in_params as jaxprs_in_params
from jax._src.debugging import DebugEffect as DebugEffect
from jax._src.debugging import debug_effect as debug_effect
from jax._src.indexing import Slice as Slice
from jax._src.indexing import ds as ds
from jax._src.interpreters import ad as ad
from jax._src.interpreters import batching as batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as lax_internal
from jax._src.lax import special as lax_special
from jax._src.lax.control_flow import loops
from jax._src.lax.control_flow.conditionals import platform_index_p as platform_index_p
from jax._src.random import core as random_core
from jax._src.random import prng as _prng
from jax._src.random import threefry2x32 as _threefry
from jax._src.state import discharge as state_discharge
from jax._src.state import indexing as state_indexing
from jax._src.state import primitives as state_primitives
from jax._src.state import types as state_types
from jax._src.state import utils as state_utils
from jax._src.state.primitives import addupdate_p as addupdate_p
from jax._src.state.primitives import get_p as get_p
from jax._src.state.primitives import swap_p as swap_p
from jax._src.state.types import AbstractRef as AbstractRef
from jax._src.state.types import RefEffect as RefEffect
from jax._src.state.types import TransformedRef as TransformedRef
from jax._src.tree_util import _registry as _all_registry
from jax._src.tree_util import _RegistryEntry, tracing_registry
from jax.interpreters import mlir as mlir

# Views of Refs, as Any: their classes declare methods that they need not have.
NDIndexer: Any = state_indexing.NDIndexer
BitcastTransform: Any = state_types.BitcastTransform
ReshapeTransform: Any = state_types.ReshapeTransform
TransposeTransform: Any = state_types.TransposeTransform

bitcast_array = state_utils.bitcast
jit_p = pjit.jit_p
add_any_p = ad_util.add_any_p
ref_broadcast_to_p = state_primitives.broadcast_to_p
empty_p = lax_internal.empty_p
ExtendedDType = dtypes.ExtendedDType
random_seed_p, random_wrap_p, random_unwrap_p = _prng.random_seed_p, _prng.random_wrap_p, _prng.random_unwrap_p
random_bits_p, random_split_p, random_fold_in_p = _prng.random_bits_p, _prng.random_split_p, _prng.random_fold_in_p
iota_2x32_shape_p = _prng.iota_2x32_shape_p
random_gamma_p = random_core.random_gamma_p
threefry2x32_p, threefry2x32_lowering = _threefry.threefry2x32_p, _threefry._threefry2x32_lowering
jax_debug_print_p = debugging.debug_print_p
remat_p = ad_checkpoint.remat_p
custom_jvp_call_p = custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = custom_derivatives.custom_vjp_call_p
# Primitives that call a function, and the parameter that holds the jaxpr that runs (not its derivatives).
CALLED = {jit_p: "jaxpr", remat_p: "jaxpr", custom_jvp_call_p: "call_jaxpr", custom_vjp_call_p: "call_jaxpr"}
ref_p = core.ref_p
freeze_p = core.freeze_p
free_ref_p = core.free_ref_p
empty_ref_p = core.empty_ref_p
DropVar = core.DropVar
JaxprInputEffect = jax_effects.JaxprInputEffect
eval_jaxpr = core.eval_jaxpr
typeof = core.typeof
is_symbolic_dim = core.is_symbolic_dim
# Sizes of arrays under `jax.export` with symbolic shapes may be expressions; these take both.
dimension_as_value = core.dimension_as_value
min_dim = core.min_dim
max_dim = core.max_dim
clear_caches_with_jax = util.register_cache

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))
LIBRARY_DIRS = (PACKAGE_DIR, os.path.dirname(os.path.abspath(jax.__file__)))
# Frames of Palladion are not the user's: source locations name the kernel's own line.
source_info_util.register_exclusion(PACKAGE_DIR + os.sep)


# --- tracing ---------------------------------------------------------------------------------------------------
def debug_info(traced_for: str, fun: Callable, args: Sequence[Any]) -> core.DebugInfo:
    """JAX's record of which function was traced: its name, file, line and parameter names."""
    return api_util.debug_info(traced_for, fun, tuple(args), {})


def trace_to_jaxpr(fun: Callable, avals: Sequence[Any], info: core.DebugInfo) -> tuple[Jaxpr, Any]:
    """Trace `fun` on flat abstract arguments: the jaxpr, and the pytree structure of the result.

    Kernels may pass one Ref twice to a jitted helper, or pass one that it also closes over; JAX's check against that
    is off.
    """
    with jax_config.mutable_array_checks(False):
        jaxpr, out = partial_eval.trace_to_jaxpr(fun, flattree.flatten_args(*avals), info)
        if jaxpr.is_high:  # operations that JAX has in simpler ones too (jnp.searchsorted, jnp.frexp)
            jaxpr = partial_eval.lower_jaxpr2(jaxpr)
    return jaxpr, out.tree


def special_functions() -> dict[Primitive, Callable]:
    """Primitives whose meaning JAX gives as a function of arrays, with that function."""
    both = {
        lax_special.igamma_p: lax_special.igamma_impl,
        lax_special.igammac_p: lax_special.igammac_impl,
        lax_special.igamma_grad_a_p: lax_special.igamma_grad_a_impl,
        lax_special.regularized_incomplete_beta_p: lax_special.regularized_incomplete_beta_impl,
    }
    spread = {p: lax_special._up_and_broadcast(f) for p, f in both.items()}
    return {lax_special.bessel_i0e_p: lax_special.bessel_i0e_impl, **spread}


def random_gamma(keys: Any, a: Any, log_space: bool) -> Any:
    """What JAX's `random_gamma` does, in simpler operations."""
    return random_core._gamma_impl(keys, a, log_space=log_space, use_vmap=True)


def convert_consts_to_invars(jaxpr: Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr whose captured values are leading arguments, and those values."""
    consts = list(jaxpr.consts)
    return partial_eval.convert_constvars_jaxpr(jaxpr), consts


@contextlib.contextmanager
def axis_in_trace_key(name: Any, size: int = 1):
    """Bind a named axis, so that `lax.axis_index(name)` traces; it is part of the key of JAX's tracing caches.

    Without that a jitted helper that reads `num_programs` would be reused, stale, by a kernel with another grid.
    """
    with core.extend_axis_env_nd([(name, size)]):
        yield


@contextlib.contextmanager
def untracked_mesh_axes():
    """Trace without the types that say over which axes of a `shard_map` a value varies: a kernel's Refs have none."""
    with jax_config._check_vma(False):
        yield


def flatten_views(tree: Any) -> tuple[list[Any], Any]:
    """A pytree as leaves and structure, in which views of Refs are nodes: their Ref, then their dynamic indices."""
    return tracing_registry.flatten(tree)


def trace_cache(fun: Callable) -> Callable:
    """Memoise `fun` on its hashable arguments and on JAX's trace-time configuration (x64, precision, ours)."""
    return util.cache()(fun)


def trace_context() -> Any:
    """JAX's trace-time configuration (x64, precision, ours …) as a key."""
    return jax_config.trace_context()


def positional_ref_effects(jaxpr: Jaxpr) -> set:
    """The effects of a call of `jaxpr`: those on refs numbered by argument, the others as they are."""
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    result = set()
    for effect in jaxpr.effects:
        if isinstance(effect, JaxprInputEffect):
            if effect.input in position:
                result.add(effect.replace(position[effect.input]))
        elif not isinstance(effect, core.InternalMutableArrayEffect):
            result.add(effect)
    return result


Effect = jax_effects.Effect


class KernelEffect(Effect):
    """An effect that keeps equations of a kernel alive and in order, and ends with its call (random state …)."""


def effects_outside(jaxpr: Jaxpr) -> set:
    """The effects of a kernel that outlive its call: prints and checks, not reads and writes of its own refs."""
    local = (JaxprInputEffect, core.InternalMutableArrayEffect, KernelEffect)
    return {e for e in jaxpr.effects if not isinstance(e, local)}


def vmapped_axes() -> set:
    """The named axes that `vmap` has bound here, as opposed to those of a `shard_map`."""
    return set(core.unsafe_get_axis_names()) - set(jax.sharding.get_abstract_mesh().manual_axes)


@contextlib.contextmanager
def without_named_axes():
    """Run a block in which no named axis is bound, so that `lax.psum(x, "i")` is an error."""
    before = core.trace_ctx.axis_env
    core.trace_ctx.set_axis_env(core.top_axis_env)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(before)


def written_vars(eqn_or_jaxpr: Any) -> set:
    """The ref variables that an equation or a jaxpr may write or accumulate into."""
    kinds = (state_types.WriteEffect, state_types.AccumEffect)
    return {e.input for e in eqn_or_jaxpr.effects if isinstance(e, kinds)}


def read_vars(eqn_or_jaxpr: Any) -> set:
    """The ref variables that an equation or a jaxpr may read (an accumulation reads too)."""
    kinds = (state_types.ReadEffect, state_types.AccumEffect)
    return {e.input for e in eqn_or_jaxpr.effects if isinstance(e, kinds)}


def register_discharge(primitive: Primitive, run: Callable) -> None:
    """How JAX's own Refs (`jax.new_ref` under jit) go through `primitive`: `run` maps values of the operands to
    what the Refs among them hold afterwards, None for those that keep what they hold."""
    rule = state_discharge.register_discharge_rule(primitive)
    rule(lambda ctx, *args, **params: (run(*args, **params), []))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of a scan equation's operands are constants and how many are carries; the rest are xs."""
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def register_effect(kind: type, *, lowerable: bool = False) -> None:
    """Let an effect class of ours stand in control flow and custom derivatives inside kernels."""
    for allowed in (
        jax_effects.control_flow_allowed_effects,
        jax_effects.custom_derivatives_allowed_effects,
        jax_effects.remat_allowed_effects,
    ):
        allowed.add_type(kind)
    if lowerable:
        jax_effects.lowerable_effects.add_type(kind)


register_effect(KernelEffect)


@contextlib.contextmanager
def tracing_aside():
    """Run Python that builds something of its own while JAX lowers a program: no trace of JAX's is entered."""
    with core.eval_context():
        yield


# --- errors -------------------------------------------------------------------------------------------------------
def api_boundary(fun: Callable) -> Callable:
    """Errors that leave `fun` have JAX's and Palladion's own frames taken out of their tracebacks."""
    return traceback_util.api_boundary(fun)


traceback_util.register_exclusion(PACKAGE_DIR)


def find_collective_ids(find: Callable[[Jaxpr], set[int]]) -> None:
    """Let `find` say which collective ids the kernels of a program name: JAX's own function loads its Pallas."""
    _mlir._find_manual_pallas_collective_ids = find


# --- the pallas_call primitive ------------------------------------------------------------------------------------
def compile_and_run(primitive: Primitive, capacity: int = 512) -> Callable:
    """The implementation of a primitive by its lowering rule: compiled once per parameters and types.

    As `jax._src.dispatch.apply_primitive`, whose cache, however, keeps 4096 executables alive: more than a gigabyte
    in a program that makes its kernels afresh. This one keeps the `capacity` that were used last.
    """

    @functools.lru_cache(capacity)
    def compiled(**params: Any) -> Callable:
        def call(*args: Any) -> Any:
            with jax_config.eager_constant_folding(False):
                return primitive.bind(*args, **params)

        call.__name__ = call.__qualname__ = primitive.name
        setattr(call, "_apply_primitive", True)  # noqa: B010 - JAX's errors about NaNs then name the primitive alone
        return jax.jit(call)

    def run(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(**params)(*args)

    clear_caches_with_jax(compiled, f"executables of {primitive.name}")
    return run


def varying_as(out_avals: Iterable[ShapedArray], in_avals: Sequence[Any]) -> list[ShapedArray]:
    """Under a `shard_map` that checks it, results vary over the mesh axes over which any argument does."""
    axes = frozenset().union(*(a.manual_axis_type.varying for a in in_avals if isinstance(a, ShapedArray)))
    if not axes:
        return list(out_avals)
    varying = dict(sharding=core.get_cur_mesh_sharding(), manual_axis_type=core.ManualAxisType(varying=axes))
    return [a.update(**varying) for a in out_avals]


def lower_as(fun: Callable, ctx: Any, *args: Any) -> Any:
    """Lower a call of `fun`. A kernel was traced without mesh axes, so their check is off inside it."""

    def plain(avals):
        return [core.ShapedArray(a.shape, a.dtype) if isinstance(a, core.ShapedArray) else a for a in avals]

    with jax_config._check_vma(False):
        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)


def register_pytree_like_ref_view(cls: type) -> None:
    """Register a subclass of JAX's ref view as JAX registers the view itself: a node for tracing only."""
    tracing_registry.register_dataclass_node(cls, ["ref", "transforms"], [])
    _all_registry[cls] = _RegistryEntry(lambda x: ((x.ref, x.transforms), None), lambda _, d: cls(*d))


def register_ref_type(cls: type) -> None:
    """Teach `vmap` to add and remove a dimension of a ref type of ours."""

    def mapped(size, axis, ref):
        return ref.update(inner_aval=core.mapped_aval(size, axis, ref.inner_aval))

    def unmapped(size, axis, explicit_mesh_axis, ref):
        return ref.update(inner_aval=core.unmapped_aval(size, axis, explicit_mesh_axis, ref.inner_aval))

    core.aval_mapping_handlers[cls] = (mapped, unmapped)
    core.shard_aval_handlers[cls] = core.shard_aval_handlers[AbstractRef]
    core.unshard_aval_handlers[cls] = core.unshard_aval_handlers[AbstractRef]


def is_opaque(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's extended ones (PRNG keys)."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


# --- host callbacks ------------------------------------------------------------------------------------------------
def lower_host_call(ctx: Any, function: Callable, args: Sequence[Any]) -> Any:
    """Lower a call of a Python function of NumPy arrays that gives a tuple; what it raises stops the program.

    Unlike `jax.debug.callback` it does not log the traceback of what is raised.
    """
    avals = ctx.avals_in, ctx.avals_out
    where = _callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)  # on which device it runs
    options: dict[str, Any] = dict(has_side_effect=True, returns_token=False, sharding=where)
    return emit_python_callback(ctx, function, None, list(args), *avals, **options)[0]


def lower_as_value(ctx: Any, fun: Callable) -> Any:
    """Lower a function without arguments that gives one int32 scalar."""
    avals = dict(avals_in=[], avals_out=[core.ShapedArray((), np.dtype(np.int32))])
    with jax_config._check_vma(False):
        return mlir.lower_fun(fun, multiple_results=False)(ctx.replace(**avals))[0]


# --- running Python on Refs without tracing -----------------------------------------------------------------------
EvalTrace = core.EvalTrace
eval_trace = core.eval_trace
set_current_trace = core.set_current_trace


def register_tracer(cls: type) -> None:
    """Let a tracer class of ours stand under views of Refs, which look its class up."""
    core.pytype_aval_mappings[cls] = lambda x: x.aval


def wrap_keys(data: Any, dtype: Any) -> Any:
    """Typed PRNG keys of an extended dtype, from their uint32 words."""
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


def register_keys(name: str, **implementation: Any) -> str:
    """Add a kind of PRNG keys (`key_shape`, `seed`, `split`, `random_bits`, `fold_in`, `tag`), known by its name."""
    _prng.register_prng(_prng.PRNGImpl(name=name, **implementation))
    return name


def adapt_fori_bodies(adapt: Callable[[Callable], Callable]) -> None:
    """Let `adapt` wrap the body, `((i, x), None) -> ((i + 1, x), None)`, of each `fori_loop` of known trip count.

    Under `disable_jit` JAX hands such a body plain Python numbers where traced code gets arrays (`i.astype` fails),
    and nothing public stands between the two.
    """
    make = loops._fori_scan_body_fun
    loops._fori_scan_body_fun = lambda body, info: adapt(make(body, info))


# --- configuration ------------------------------------------------------------------------------------------------
def bool_state(name: str, default: bool, help: str) -> Any:
    """A boolean option, also a context manager, that is part of the key of every trace and compile cache."""
    return jax_config.bool_state(name, default, help, include_in_jit_key=True, include_in_trace_context=True)


def enum_state(name: str, values: Sequence[str], default: str, help: str) -> Any:
    """An option with a few values, also a context manager, in the key of every trace and compile cache."""
    return jax_config.enum_state(
        name, list(values), default, help, include_in_jit_key=True, include_in_trace_context=True
    )


def object_state(name: str, default: Any, help: str) -> Any:
    """An option that holds any hashable object (or None), in the key of every trace and compile cache."""
    return jax_config.string_or_object_state(
        name, default, help, include_in_jit_key=True, include_in_trace_context=True
    )


aval_property = core.aval_property
aval_method = core.aval_method


def canonicalize_dtype(dtype: Any) -> Any:
    """The dtype that JAX holds for `dtype` under the current x64 setting."""
    return jax.dtypes.canonicalize_dtype(dtype)


def is_weak(x: Any) -> bool:
    """Whether a value has a weak type, as Python scalars have."""
    return getattr(core.typeof(x), "weak_type", False)
