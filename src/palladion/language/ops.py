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

from palladion import config, jaxlink, locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import formats, frames
from palladion.language.buffers import buffer_ref, is_buffer_type, settle_types, shared_along
from palladion.language.formats import format_values as format_values
from palladion.language.indexing import is_ref, label_of

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
            hint=_axis_hint(frame),
        )
    return frame, int(axis)


def _axis_hint(frame: frames.Frame) -> str:
    if frame.grid:
        return "axes are counted from 0"
    if frame.cores:
        return f"the axes of its mesh have names: lax.axis_index({next(iter(frame.cores))!r})"
    return "give the call a grid: pl.pallas_call(…, grid=(n,))"


def program_id(axis: int) -> jax.Array:
    """This program's index along a grid axis: an int32 scalar in 0..num_programs(axis) - 1.

    Raises:
      ValueError: outside a kernel, or no such axis. TypeError: the axis is not a Python integer.
    """
    frame, axis = _axis("program_id", axis)
    if frame.program is not None:
        return frame.program[0][axis]
    return frame.eager.program_id(axis) if frame.eager else program_id_p.bind(axis=axis)


def num_programs(axis: int) -> int | jax.Array:
    """How many programs run along a grid axis: a Python int, or an int32 scalar for a dynamic axis.

    Raises:
      ValueError: outside a kernel, or no such axis. TypeError: the axis is not a Python integer.
    """
    frame, axis = _axis("num_programs", axis)
    if frame.program is not None:
        return frame.program[1][axis]
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
      TypeError: the condition is not a scalar. ValueError: the function returns a value.
    """
    _check_condition("pl.when", condition, "reduce it, jnp.any(mask), or store with jnp.where(mask, new, o_ref[...])")

    def decorate(body: Callable[[], None]) -> None:
        def run():
            frames.check_arity(
                body,
                0,
                lambda takes: explain(
                    f"The function under pl.when takes {takes}, but it is called without arguments.",
                    where=locations.defined_at(body),
                    hint="it reads and writes the kernel's Refs: `def _(): o_ref[...] = …`",
                ),
            )
            result = body()
            if result is not None and not isinstance(condition, bool):  # under a Python bool it is a plain `if`
                raise mistake(
                    ValueError,
                    f"The function under pl.when returns {kind_of(result)}; it must return nothing.",
                    where=locations.defined_at(body),
                    hint="store the value in a Ref, or choose between values with jnp.where",
                )

        if isinstance(condition, jaxlink.Tracer):
            lax.cond(condition, run, lambda: None)
        elif condition:
            run()

    return decorate


def _check_condition(operation: str, condition: Any, hint: str) -> None:
    """Raise TypeError unless a condition is one bool or number."""
    if is_ref(condition):
        headline, hint = f"{operation} got the Ref {label_of(condition)}, not a condition.", "read it: x_ref[0] > 0"
    elif isinstance(condition, (bool, int, float, np.generic, np.ndarray, jax.Array, jaxlink.Tracer)):
        if np.ndim(condition) == 0:
            return
        headline = f"{operation} takes one condition, not an array of shape {np.shape(condition)}."
    else:
        headline = f"{operation} takes a condition, not {kind_of(condition)}."
    raise mistake(TypeError, headline, hint=hint)


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
      TypeError: a bound is not an integer. ValueError: a Python step that is not positive, or a body that returns a
        value although nothing is carried.
    """
    for name, bound in (("lower bound", lower), ("upper bound", upper), ("step", step)):
        if is_ref(bound):
            raise mistake(TypeError, f"The {name} of pl.loop is a Ref, {label_of(bound)}.", hint="read it: n_ref[0]")
        if not is_integer(bound):
            hint = "use an integer: n // 2 instead of n / 2, .astype(jnp.int32) of a value known at run time"
            raise mistake(TypeError, f"The {name} of pl.loop is {kind_of(bound)}, not an integer.", hint=hint)
    if isinstance(step, (int, np.integer)) and step < 1:
        hint = "count upwards and index with upper - 1 - i"
        raise mistake(ValueError, f"The step of pl.loop is {step}; it must be positive.", hint=hint)

    def decorate(body: Callable[..., Any]) -> Any:
        n_args = 1 if init_carry is None else 2
        frames.check_arity(
            body,
            n_args,
            lambda takes: explain(
                f"The body of pl.loop takes {takes}, but it is called with the index"
                + (" and the carry." if n_args == 2 else " only."),
                where=locations.defined_at(body),
                hint="`def _(i)`, or `def _(i, carry)` with init_carry=…",
            ),
        )
        static = all(isinstance(b, (int, np.integer)) for b in (lower, upper, step))
        if static:
            first, rounds = 0, max(-(-(int(upper) - int(lower)) // int(step)), 0)
        else:
            first, rounds = _rounds(lower, upper, step)

        def one_round(n, carry):
            i = lower + n * step
            i = i if static else lax.convert_element_type(i, jnp.result_type(lower, upper, step))
            if init_carry is not None:
                return body(i, carry)
            if (result := body(i)) is not None:
                raise mistake(
                    ValueError,
                    f"The body of pl.loop returns {kind_of(result)}, but nothing is carried.",
                    where=locations.defined_at(body),
                    hint="give pl.loop init_carry=…, or store the value in a Ref",
                )
            return None

        return lax.fori_loop(first, rounds, one_round, init_carry, unroll=unroll)

    return decorate


def is_integer(x: Any) -> bool:
    """Whether `x` is one integer, known now or at run time."""
    if not isinstance(x, (int, np.generic, np.ndarray, jax.Array, jaxlink.Tracer)):
        return False
    return np.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer)


def _rounds(lower: Any, upper: Any, step: Any) -> tuple[jax.Array, jax.Array]:
    """0 and the number of rounds, in a signed type of at least 32 bits: a difference of int8 may not fit int8."""
    wide = jaxlink.canonicalize_dtype(jnp.promote_types(jnp.result_type(lower, upper, step), jnp.int32))
    lower, upper, step = (lax.convert_element_type(b, wide) for b in (lower, upper, step))
    return jnp.zeros((), wide), jnp.maximum(lax.div(upper - lower + step - 1, step), 0)


# --- scoped buffers -------------------------------------------------------------------------------------------------
run_scoped_p = jaxlink.Primitive("run_scoped")
run_scoped_p.multiple_results = True


@run_scoped_p.def_effectful_abstract_eval
def _run_scoped_abstract_eval(*avals, jaxpr, num_scoped, collective_axes):
    effects = jaxlink.positional_ref_effects(jaxpr)
    outer = {e for e in effects if not isinstance(e, jaxlink.JaxprInputEffect) or e.input < len(avals)}
    return [v.aval for v in jaxpr.outvars], outer


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
      collective_axes: axes of the kernel's mesh (one name or several) along which all make this call and share the
        buffers: the thread axis of a GPU kernel.

    Returns:
      what `f` returns.

    Raises:
      TypeError: something is no buffer type, or `f` takes other parameters. ValueError: no such axis; outside a kernel.
    """
    frame = frames.required("run_scoped")
    axes = shared_along(frame, collective_axes)
    types, kw_types = settle_types((types, kw_types), frame.mesh)
    leaves, tree = jax.tree.flatten((types, kw_types), is_leaf=is_buffer_type)
    refs = [buffer_ref(x, f"scoped buffer {i}", "pl.run_scoped", scoped=True) for i, x in enumerate(leaves)]
    frames.check_arity(
        f,
        len(types),
        lambda takes: explain(
            f"The function given to pl.run_scoped takes {takes}, but it gets {count_of(len(types), 'argument')}"
            + (f" and, by keyword, {', '.join(kw_types)}." if kw_types else "."),
            where=locations.defined_at(f),
            hint="it has one parameter for each buffer type",
        ),
        tuple(kw_types),
    )
    if frame.eager:
        args, kwargs = jax.tree.unflatten(tree, [frame.eager.scratch(r) for r in refs])
        out = f(*args, **kwargs)
        _refuse_refs(f, jax.tree.leaves(out))
        return out

    out_tree = None

    def flat(*flat_refs):
        nonlocal out_tree
        args, kwargs = jax.tree.unflatten(tree, flat_refs)
        leaves, out_tree = jax.tree.flatten(f(*args, **kwargs))
        _refuse_refs(f, leaves)
        return leaves

    jaxpr, _ = jaxlink.trace_to_jaxpr(flat, refs, jaxlink.debug_info("run_scoped", f, ()))
    jaxpr, consts = jaxlink.convert_consts_to_invars(jaxpr)
    assert out_tree is not None  # set by the trace
    params = dict(jaxpr=jaxpr, num_scoped=len(refs), collective_axes=axes)
    return jax.tree.unflatten(out_tree, run_scoped_p.bind(*consts, **params))


def _refuse_refs(f: Callable[..., Any], results: Any) -> None:
    for leaf in filter(is_ref, results):
        raise mistake(
            ValueError,
            f"The function given to pl.run_scoped returns the Ref of {label_of(leaf)}.",
            where=locations.defined_at(f),
            hint="its memory ends with the call: return its value, ref[...], or work with it inside",
        )


def with_scoped(
    *types: Any, collective_axes: Hashable | tuple[Hashable, ...] = (), **kw_types: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator form of `run_scoped`: the function is called with its own arguments, then the scoped Refs.

        @pl.with_scoped(pltpu.VMEM((8, 128), jnp.float32))
        def body(tmp_ref): ...
        body()

    Arguments:
      *types, collective_axes, **kw_types: as in `run_scoped`.
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
    fmt, values = formats.prepare(fmt, args)
    frame = frames.current()
    if frame is None:
        jax.debug.print(fmt, *values)
    elif frame.eager and not any(isinstance(v, jaxlink.Tracer) for v in values):
        print(format_values(fmt, values))
    else:
        debug_print_p.bind(*values, fmt=fmt)


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
    _check_condition("pl.debug_check", condition, "reduce it: jnp.all(x_ref[...] > 0)")
    where = locations.current_location()
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
    if not is_integer(nanos):
        headline = f"pl.delay takes an integer number of nanoseconds, not {kind_of(nanos)}."
        raise mistake(TypeError, headline, hint="pl.delay(100)")
    if not frame.eager:
        delay_p.bind(jnp.asarray(nanos, jnp.int32))


multiple_of_p = jaxlink.Primitive("multiple_of")
multiple_of_p.def_abstract_eval(lambda x, *, values: jaxlink.ShapedArray(x.shape, x.dtype))


def multiple_of(x: int | jax.Array, values: Any) -> int | jax.Array:
    """Promise that `x` is a multiple of `values`; compilers use it for alignment, interpreters pass `x` on.

    Arguments:
      x: an integer array or scalar.
      values: an int, or one for each dimension of `x`.

    Raises:
      ValueError: a value is not positive, or `x` is a Python integer that is no such multiple.
    """
    wanted = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if not isinstance(x, (int, np.generic, np.ndarray, jax.Array, jaxlink.Tracer)):
        hint = "pl.multiple_of(i * 128, 128)"
        raise mistake(TypeError, f"pl.multiple_of takes an integer or an array, not {kind_of(x)}.", hint=hint)
    if not wanted or any(not isinstance(v, (int, np.integer)) or v < 1 for v in wanted):
        hint = "pl.multiple_of(i * 128, 128)"
        raise mistake(ValueError, f"pl.multiple_of takes positive integers, not {kind_of(values)}.", hint=hint)
    frame = frames.current()
    if isinstance(x, jaxlink.Tracer) and frame is not None:
        return multiple_of_p.bind(x, values=tuple(int(v) for v in wanted))
    if np.ndim(x) == 0 and not isinstance(x, jaxlink.Tracer) and any(int(x) % v for v in wanted):
        headline = f"pl.multiple_of({int(x)}, {values}): {int(x)} is not a multiple of {values}."
        raise mistake(ValueError, headline, hint="promise only what holds; compilers rely on it")
    return x
