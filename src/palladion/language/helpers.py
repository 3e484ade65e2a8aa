"""Small functions that kernels and their callers share: sizes, shapes, uninitialised arrays, text of a lowering."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import executors, jaxlink, locations
from palladion.errors import kind_of, mistake
from palladion.language import frames
from palladion.language.indexing import is_ref
from palladion.language.refs import KernelRef, MemoryRef, MemorySpace, checked_dtype


def cdiv(a: Any, b: Any) -> Any:
    """a / b rounded up, for integers and integer arrays: how many blocks of `b` cover `a` elements.

    Raises:
      ZeroDivisionError: Python integers with b == 0.
    """
    return _quotient_up("pl.cdiv", a, b)


def align_to(a: Any, alignment: Any) -> Any:
    """The smallest multiple of `alignment` that is not below `a`."""
    return _quotient_up("pl.align_to", a, alignment) * alignment


def _quotient_up(function: str, a: Any, b: Any) -> Any:
    try:
        return -(-a // b)
    except TypeError:
        headline = f"{function} takes integers or integer arrays, not {kind_of(a)} and {kind_of(b)}."
        raise mistake(TypeError, headline, hint=f"{function}(100, 8)") from None


def _static_shape(function: str, shape: Any) -> tuple[int, ...]:
    """A shape of Python integers.

    Raises:
      TypeError: it is not one.
    """
    try:
        return tuple(operator.index(n) for n in shape)
    except TypeError:
        headline = f"{function} takes a shape of Python integers, not {kind_of(shape)}."
        raise mistake(TypeError, headline, hint="a shape is a tuple, (8, 128); of one dimension, (8,)") from None


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is not below `x`; 1 for 0.

    Raises:
      ValueError: `x` is negative. TypeError: `x` is not an integer.
    """
    try:
        x = operator.index(x)
    except TypeError:
        headline = f"pl.next_power_of_2 takes an integer, not {kind_of(x)}."
        raise mistake(TypeError, headline, hint="sizes are Python integers: use a static one") from None
    if x < 0:
        hint = "the smallest power is 1, for 0 and 1"
        raise mistake(ValueError, f"pl.next_power_of_2 takes a number that is not negative, not {x}.", hint=hint)
    return 1 if x == 0 else 1 << (x - 1).bit_length()


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements: (12, 4, 1) for shape (2, 3, 4)."""
    shape = _static_shape("pl.strides_from_shape", shape)
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def broadcast_to(a: Any, shape: Sequence[int]) -> jax.Array:
    """`a` repeated to `shape` by NumPy's rules, as one operation that every target knows."""
    shape = _static_shape("pl.broadcast_to", shape)
    try:
        a = jnp.asarray(a)
    except (TypeError, ValueError):
        raise mistake(TypeError, f"pl.broadcast_to takes an array, not {kind_of(a)}.", hint="jnp.zeros(…)") from None
    lead = len(shape) - a.ndim
    if lead < 0 or any(have not in (1, want) for have, want in zip(a.shape, shape[lead:])):
        raise mistake(
            ValueError,
            f"An array of shape {a.shape} cannot be broadcast to {shape}.",
            hint="dimensions are matched from the last; each must be equal or 1",
        )
    return lax.broadcast_in_dim(lax.reshape(a, (1,) * lead + a.shape), shape, tuple(range(len(shape))))


def empty(shape: Any, dtype: Any, *, out_sharding: Any = None) -> jax.Array:
    """An array whose contents are not initialised: what an output or scratch holds before it is written.

    Arguments:
      shape: an int, or one for each dimension.
      dtype: anything that `jnp.dtype` takes.
      out_sharding: of the array, as in `jax.lax.empty`.

    Raises:
      ValueError: a 64-bit dtype while x64 is off.
    """
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    return lax.empty(shape, checked_dtype(dtype, "pl.empty"), out_sharding=out_sharding)


def empty_like(x: Any) -> Any:
    """Uninitialised arrays with given types.

    Arguments:
      x: a pytree of arrays, `jax.ShapeDtypeStruct`s or Refs.
    """

    def one(y):
        if not _is_array_type(y):
            hint = "an array, a Ref or jax.ShapeDtypeStruct(shape, dtype); or pl.empty(shape, dtype)"
            raise mistake(TypeError, f"pl.empty_like takes things with shape and dtype, not {kind_of(y)}.", hint=hint)
        return empty(y.shape, y.dtype)

    return jax.tree.map(one, x, is_leaf=_is_array_type)


def empty_ref_like(x: Any) -> Any:
    """Uninitialised `jax.ref` Refs with given types.

    Arguments:
      x: a pytree of `jax.ShapeDtypeStruct`s, or of memory types such as `pltpu.VMEM(shape, dtype)`.

    Raises:
      TypeError: a leaf has no shape and dtype. NotImplementedError: a memory type outside jit.
    """

    def one(y):
        if not _is_array_type(y):
            hint = "jax.ShapeDtypeStruct(shape, dtype), or pltpu.VMEM(shape, dtype)"
            raise mistake(TypeError, f"pl.empty_ref_like takes array types, not {kind_of(y)}.", hint=hint)
        space = y.memory_space if isinstance(y, MemoryRef) else None
        try:
            return jax.empty_ref(jax.ShapeDtypeStruct(y.shape, y.dtype), memory_space=space)
        except NotImplementedError:  # JAX has Refs without contents only under jit
            if space is None:
                return jax.new_ref(empty(y.shape, y.dtype))
            headline = f"A Ref in {space} exists only inside jit."
            raise mistake(NotImplementedError, headline, hint="call pl.empty_ref_like in a jitted function") from None

    return jax.tree.map(one, x, is_leaf=_is_array_type)


def _is_array_type(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def run_state(f: Callable[..., None]) -> Callable[[Any], Any]:
    """Make a function of values out of a function that changes Refs.

        doubled = pl.run_state(lambda refs: refs[0].__setitem__(..., refs[0][...] * 2))((x,))

    Arguments:
      f: a function of one pytree of Refs, which returns None.

    Returns:
      a function of one pytree of arrays, which gives what the Refs hold at the end. In a kernel for GPUs leaves may be
      `plgpu.ACC.init(array)`, too: their Refs are accumulators in registers.

    Raises:
      ValueError: `f` returns a value.
    """

    def call(values: Any) -> Any:
        def body(*refs):
            out = f(jax.tree.unflatten(tree, refs))
            if out is not None:
                raise mistake(
                    ValueError,
                    f"The function given to pl.run_state should return None; it returns {kind_of(out)}.",
                    where=locations.defined_at(f),
                    hint="it changes its Refs in place; what they hold at the end is the result",
                )

        flat, tree = jax.tree.flatten(values, is_leaf=_is_state)
        if any(map(_is_state, flat)):
            return jax.tree.unflatten(tree, _scoped_state(body, flat, on_gpu=True))
        flat = [jnp.asarray(x) for x in flat]
        refs = [
            KernelRef(jaxlink.ShapedArray(x.shape, x.dtype), MemorySpace.ANY, label=f"state {i}")
            for i, x in enumerate(flat)
        ]

        jaxpr, _ = jaxlink.trace_to_jaxpr(body, refs, jaxlink.debug_info("run_state", f, ()))
        jaxpr, consts = jaxlink.convert_consts_to_invars(jaxpr)
        outer = [jaxlink.typeof(c) for c in consts if is_ref(c)]
        if outer and frames.current() is not None:  # what it does to the kernel's Refs has its place in the kernel
            held = _scoped_state(body, flat, on_gpu=any(hasattr(ref, "storage") for ref in outer))
            return jax.tree.unflatten(tree, held)
        held = executors.discharge(jaxpr, [*consts, *flat])[1]
        return jax.tree.unflatten(tree, held[len(consts) :])

    return call


def _is_state(x: Any) -> bool:
    """Whether a value of `run_state` has a Ref type of its own (`plgpu.ACC.init`)."""
    return hasattr(x, "state_type")


def _scoped_state(f: Callable[..., None], values: Sequence[Any], *, on_gpu: bool) -> list[Any]:
    """`run_state` by Refs of a scope in the kernel: they get their values, `f` runs, and what they hold is read."""
    from palladion.language.gpu.memory import REGS
    from palladion.language.ops import run_scoped

    arrays: list[Any] = [x if _is_state(x) else jnp.asarray(x) for x in values]
    array_type = REGS.like if on_gpu else lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    types = [x.state_type() if _is_state(x) else array_type(x) for x in arrays]

    def body(*refs):
        for ref, x in zip(refs, arrays, strict=True):
            if _is_state(x):
                x.begin(ref)
            else:
                ref[...] = x
        f(*refs)
        return [ref[...] for ref in refs]

    return run_scoped(body, *types)


@contextlib.contextmanager
def pallas_export_experimental(dynamic_shapes: bool) -> Iterator[None]:
    """For programs that export kernels with symbolic shapes: `with pl.pallas_export_experimental(True): export(…)`.

    Palladion's reference interpreter takes symbolic array sizes and grids (block sizes stay static) with or without
    this context; it checks its argument and is otherwise there so that such programs run unchanged.

    Raises:
      TypeError: `dynamic_shapes` is not a bool.
    """
    if not isinstance(dynamic_shapes, bool):
        raise TypeError(f"pallas_export_experimental takes True or False, not {dynamic_shapes!r}.")
    yield


def lower_as_mlir(
    f: Callable[..., Any],
    *args: Any,
    dynamic_shapes: bool = False,
    device: Any = None,
    static_argnames: Any = (),
    platforms: Sequence[str] | None = None,
    **kwargs: Any,
) -> str:
    """The StableHLO text that `f` lowers to, without compiling or running it.

    Arguments:
      f: a JAX function, jitted or not.
      *args, **kwargs: its arguments; arrays or `jax.ShapeDtypeStruct`s.
      dynamic_shapes: lower through `jax.export`, which accepts symbolic shapes in the arguments.
      device: a `jax.Device` whose platform to lower for.
      static_argnames: names of static arguments.
      platforms: e.g. ("tpu",); default: the device's, else JAX's default platform.
    """
    jitted = jax.jit(f, static_argnames=static_argnames)
    if platforms is None and device is not None:
        platforms = (device.platform,)
    if dynamic_shapes:
        exported = jax.export.export(jitted, platforms=platforms)(*args, **kwargs)
        return str(exported.mlir_module())
    traced = jitted.trace(*args, **kwargs)
    lowered = traced.lower() if platforms is None else traced.lower(lowering_platforms=tuple(platforms))
    return lowered.as_text()
