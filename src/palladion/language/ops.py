"""What a kernel may call: program ids, conditions, loops, scoped buffers, prints and checks.

Each of these is a JAX primitive or a thin use of `jax.lax`; while the eager interpreter runs a kernel's Python, they
act at once on the running program instead (`frames.Frame.eager`).

Source: tutorial 2.2 (program_id), 4.1 (when), 3 (debug_print); public Pallas documentation of the other names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import config, jaxlink
from palladion.errors import TargetNotBuilt, explain
from palladion.language import formats, frames
from palladion.language.formats import format_values as format_values
from palladion.language.refs import KernelRef, MemorySpace

# --- where a program is ---------------------------------------------------------------------------------------------
program_id_p = jaxlink.Primitive("program_id")
program_id_p.def_abstract_eval(lambda *, axis: jaxlink.ShapedArray((), jnp.dtype("int32")))

num_programs_p = jaxlink.Primitive("num_programs")
num_programs_p.def_abstract_eval(lambda *, axis: jaxlink.ShapedArray((), jnp.dtype("int32")))


def _axis(operation: str, axis: int) -> tuple[frames.Frame, int]:
    frame = frames.required(operation)
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise mistake(
            TypeError,
            f"pl.{operation} takes the number of a grid axis, not {kind_of(axis)}.",
            hint=f"pl.{operation}(0) is for the first axis; axes are Python integers",
        )
    if not 0 <= axis < len(frame.grid):
        axes = count_of(len(frame.grid), "axis", "axes") if frame.grid else "no axes"
        raise mistake(
            ValueError,
            f"pl.{operation}({axis}): the grid of {frame.name} has {axes}.",
            grid=frame.grid,
            hint="axes are counted from 0" if frame.grid else "give the call a grid: pl.pallas_call(…, grid=(n,))",
        )
    return frame, int(axis)


def program_id(axis: int) -> jax.Array:
    """This program's index along a grid axis: an int32 scalar in 0..num_programs(axis) - 1.

    Raises:
      ValueError: outside a kernel, or no such axis. TypeError: the axis is not a Python integer.
    """
    frame, axis = _axis("program_id", axis)
    return frame.eager.program_id(axis) if frame.eager else program_id_p.bind(axis=axis)


def num_programs(axis: int) -> int | jax.Array:
    """How many programs run along a grid axis: a Python int, or an int32 scalar for a dynamic axis.

    Raises:
      ValueError: outside a kernel, or no such axis. TypeError: the axis is not a Python integer.
    """
    frame, axis = _axis("num_programs", axis)
    size = frame.grid[axis]
    return num_programs_p.bind(axis=axis) if size is None else size


# --- conditions and loops -------------------------------------------------------------------------------------------
def when(condition: Any, /) -> Callable[[Callable[[], None]], None]:
    """Decorator: run a function without parameters, for its effects on Refs, if the condition holds.

        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

    Arguments:
      condition: a bool, or a scalar known at run time. A Python bool decides while the kernel is traced.

    Raises:
      TypeError: the condition is not a scalar.
    """
    if np.ndim(condition) != 0:
        raise TypeError(f"pl.when takes a scalar condition, not one of shape {np.shape(condition)}.")

    def decorate(body: Callable[[], None]) -> None:
        if isinstance(condition, jaxlink.Tracer):
            lax.cond(condition, lambda: _without_result(body), lambda: None)
        elif condition:
            body()

    return decorate


def _without_result(body: Callable[[], Any]) -> None:
    body()


def loop(
    lower: Any, upper: Any, *, init_carry: Any = None, step: Any = 1, unroll: int | bool | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: run a function for each index of a range.

        @pl.loop(0, 4)                        total = pl.loop(0, 4, init_carry=0.0)(
        def _(i):                                 lambda i, carry: carry + x_ref[i])
            o_ref[i] = x_ref[i] * 2

    Arguments:
      lower, upper, step: the range; integers or int scalars known at run time.
      init_carry: a pytree carried from one round to the next; then the body is `body(i, carry) -> carry`.
      unroll: as in `jax.lax.fori_loop`; needs Python integers.

    Returns:
      a decorator that gives the last carry (None without one).

    Raises:
      ValueError: a Python step that is not positive.
    """
    if isinstance(step, (int, np.integer)) and step < 1:
        raise ValueError(f"pl.loop takes a positive step, not {step}.")

    def decorate(body: Callable[..., Any]) -> Any:
        static = all(isinstance(b, (int, np.integer)) for b in (lower, upper, step))
        rounds = max(-(-(int(upper) - int(lower)) // int(step)), 0) if static else _rounds(lower, upper, step)

        def one_round(n, carry):
            i = lower + n * step
            if init_carry is None:
                body(i)
                return None
            return body(i, carry)

        return lax.fori_loop(0, rounds, one_round, init_carry, unroll=unroll)

    return decorate


def _rounds(lower, upper, step):
    return jnp.maximum(lax.div(upper - lower + step - 1, jnp.asarray(step, jnp.result_type(lower, upper, step))), 0)


# --- scoped buffers -------------------------------------------------------------------------------------------------
run_scoped_p = jaxlink.Primitive("run_scoped")
run_scoped_p.multiple_results = True


@run_scoped_p.def_effectful_abstract_eval
def _run_scoped_abstract_eval(*avals, jaxpr, num_scoped):
    effects = jaxlink.positional_ref_effects(jaxpr)
    outer = {e for e in effects if not isinstance(e, jaxlink.JaxprInputEffect) or e.input < len(avals)}
    return [v.aval for v in jaxpr.outvars], outer


def _scoped_ref(x: Any, label: str) -> KernelRef:
    if hasattr(x, "get_ref_aval"):
        ref = x.get_ref_aval()
        return KernelRef(ref.inner_aval, ref.memory_space, label=label)
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return KernelRef(jaxlink.ShapedArray(tuple(x.shape), jnp.dtype(x.dtype)), MemorySpace.DEFAULT, label=label)
    raise TypeError(
        explain(f"{label} is {x!r}, which is not a buffer type.", hint="pltpu.VMEM(shape, dtype), pltpu.SMEM(…)")
    )


def run_scoped(
    f: Callable[..., Any],
    *types: Any,
    collective_axes: Hashable | tuple[Hashable, ...] = (),
    **kw_types: Any,
) -> Any:
    """Call `f` with Refs that live for the duration of the call.

    Arguments:
      f: a function of the Refs; it may use the kernel's other Refs and returns a pytree of values.
      *types, **kw_types: pytrees of buffer types, e.g. `pltpu.VMEM((8, 128), jnp.float32)`; what they hold at first
        is not initialised (NaN in interpreters).
      collective_axes: GPU thread axes that share the buffers; needs the Mosaic GPU dialect.

    Returns:
      what `f` returns.
    """
    if collective_axes not in ((), None):
        raise TargetNotBuilt("run_scoped(collective_axes=…) needs the Mosaic GPU machines, which are not built yet.")
    frame = frames.required("run_scoped")
    leaves, tree = jax.tree.flatten((types, kw_types), is_leaf=lambda x: hasattr(x, "shape"))
    refs = [_scoped_ref(x, f"scoped buffer {i}") for i, x in enumerate(leaves)]
    if frame.eager:
        args, kwargs = jax.tree.unflatten(tree, [frame.eager.scratch(r) for r in refs])
        return f(*args, **kwargs)

    out_tree = None

    def flat(*flat_refs):
        nonlocal out_tree
        args, kwargs = jax.tree.unflatten(tree, flat_refs)
        leaves, out_tree = jax.tree.flatten(f(*args, **kwargs))
        return leaves

    jaxpr, _ = jaxlink.trace_to_jaxpr(flat, refs, jaxlink.debug_info("run_scoped", f, ()))
    jaxpr, consts = jaxlink.convert_consts_to_invars(jaxpr)
    assert out_tree is not None  # set by the trace
    return jax.tree.unflatten(out_tree, run_scoped_p.bind(*consts, jaxpr=jaxpr, num_scoped=len(refs)))


def with_scoped(
    *types: Any, collective_axes: Hashable | tuple[Hashable, ...] = (), **kw_types: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator form of `run_scoped`: the function is called with its own arguments, then the scoped Refs.

    @pl.with_scoped(pltpu.VMEM((8, 128), jnp.float32))
    def body(tmp_ref): ...
    body()
    """

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def call(*args, **kwargs):
            def with_refs(*refs, **kw_refs):
                return f(*args, *refs, **kwargs, **kw_refs)

            return run_scoped(with_refs, *types, collective_axes=collective_axes, **kw_types)

        return call

    return decorate


# --- prints, checks, hints ------------------------------------------------------------------------------------------
debug_print_p = jaxlink.Primitive("debug_print")
debug_print_p.multiple_results = True
debug_print_p.def_effectful_abstract_eval(lambda *avals, fmt: ([], {jaxlink.debug_effect}))


def debug_print(fmt: str, *args: Any) -> None:
    """Print values from inside a kernel: one line for each program that comes here, in grid order.

    Arguments:
      fmt: a format string as in `jax.debug.print`, with values by position: "program {}: {:.3f}". Without a place
        for values they are printed after it.
      *args: arrays, scalars, Refs (their values are printed), strings.

    Raises:
      ValueError: the format does not fit the arguments. TypeError: an argument cannot be printed.

    Outside a kernel this is `jax.debug.print`.
    """
    fmt, args = formats.prepare(fmt, args)
    frame = frames.current()
    if frame is None:
        jax.debug.print(fmt, *args)
    elif frame.eager and not any(isinstance(a, jaxlink.Tracer) for a in args):
        print(format_values(fmt, args))
    else:
        debug_print_p.bind(*args, fmt=fmt)


class CheckEffect(jaxlink.DebugEffect):
    """The effect of `debug_check`: like a print, it must not be dropped."""

    def __str__(self) -> str:
        return "Check"


check_effect = CheckEffect()
jaxlink.register_effect(CheckEffect, lowerable=True)

debug_check_p = jaxlink.Primitive("debug_check")
debug_check_p.multiple_results = True
debug_check_p.def_effectful_abstract_eval(lambda *avals, message, where: ([], {check_effect}))


def debug_check(condition: Any, message: str) -> None:
    """Stop with `KernelCheckError` when a condition is false; costs nothing unless checks are on.

        with pl.enable_debug_checks(True):
            call(x)

    Arguments:
      condition: a bool, or a boolean scalar known at run time.
      message: what to say; the error adds the line and the grid point.
    """
    if not config.get("debug_checks"):
        return
    if np.ndim(condition) != 0:
        raise TypeError(f"pl.debug_check takes a scalar condition, not one of shape {np.shape(condition)}.")
    where = jaxlink.current_location()
    frame = frames.required("debug_check")
    if frame.eager and not isinstance(condition, jaxlink.Tracer):
        frame.eager.check(bool(condition), message, where)
    else:
        debug_check_p.bind(jnp.asarray(condition, bool), message=message, where=where)


delay_p = jaxlink.Primitive("delay")
delay_p.multiple_results = True
delay_p.def_effectful_abstract_eval(lambda nanos: ([], {jaxlink.debug_effect}))


def delay(nanos: int | jax.Array) -> None:
    """Wait at least so many nanoseconds on a machine; interpreters, which have no clock, go straight on.

    Raises:
      TypeError: `nanos` is not an integer scalar. ValueError: outside a kernel.
    """
    frame = frames.required("delay")
    if np.ndim(nanos) or not jnp.issubdtype(jnp.result_type(nanos), jnp.integer):
        raise TypeError(f"pl.delay takes an integer number of nanoseconds, not {nanos!r}.")
    if not frame.eager:
        delay_p.bind(jnp.asarray(nanos, jnp.int32))


multiple_of_p = jaxlink.Primitive("multiple_of")
multiple_of_p.def_abstract_eval(lambda x, *, values: jaxlink.ShapedArray(x.shape, x.dtype))


def multiple_of(x: jax.Array, values: Any) -> jax.Array:
    """Promise that `x` is a multiple of `values`; compilers use it for alignment, interpreters pass `x` on.

    Arguments:
      x: an integer array or scalar.
      values: an int, or one for each dimension of `x`.

    Raises:
      ValueError: a value is not positive, or `x` is a Python integer that is no such multiple.
    """
    wanted = (values,) if isinstance(values, (int, np.integer)) else tuple(values)
    if not wanted or any(not isinstance(v, (int, np.integer)) or v < 1 for v in wanted):
        raise ValueError(f"pl.multiple_of takes positive integers, not {values!r}.")
    frame = frames.current()
    if isinstance(x, jaxlink.Tracer) and frame is not None:
        return multiple_of_p.bind(x, values=tuple(int(v) for v in wanted))
    if np.ndim(x) == 0 and not isinstance(x, jaxlink.Tracer) and any(int(x) % v for v in wanted):
        raise ValueError(
            explain(
                f"pl.multiple_of({int(x)}, {values}): {int(x)} is not a multiple of that.",
                where=jaxlink.current_location(),
            )
        )
    return x
