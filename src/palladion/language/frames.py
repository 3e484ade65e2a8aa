"""Where a thread is while a kernel's Python runs: which grid it belongs to, and whether it is traced or eager.

`program_id`, `num_programs` and the other operations ask the innermost frame. A frame is pushed while a kernel is
traced, while the eager interpreter runs one program, and (as None) while an index map is traced, where none of these
operations mean anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from palladion.errors import count_of, kind_of, mistake, noting_jax_errors
from palladion.language.foreign import noting_foreign_operations

MAX_DEPTH = 8  # kernels in kernels; Python's own limit comes soon after, with a worse message


@dataclasses.dataclass
class Frame:
    """One kernel that this thread is tracing or running.

    Attributes:
      grid: the kernel's grid; None for an axis whose size is known only at run time.
      name: the kernel, for messages.
      eager: the running program of the eager interpreter (an object with the methods that `ops` calls), or None
        while tracing.
      cores: {axis name: size} of the mesh of cores that run the kernel, where it has one.
      program: (ids, sizes) of a grid inside the kernel, whose body this is (`pltpu.emit_pipeline`), or None.
      mesh: that mesh, or None.
      warps: the axis of the warps of a GPU's thread, where the function of a single one is traced; else None.
    """

    grid: tuple[int | None, ...]
    name: str
    eager: Any = None
    cores: Mapping[str, int] = dataclasses.field(default_factory=dict)
    program: tuple[Sequence[Any], Sequence[Any]] | None = None
    mesh: Any = None
    warps: Hashable | None = None


_local = threading.local()


def _stack() -> list[Frame | str]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


@contextlib.contextmanager
def kernel(frame: Frame):
    """Run a block inside a kernel's frame.

    Raises:
      RecursionError: kernels call kernels without end.
    """
    if len(_stack()) >= MAX_DEPTH:
        raise mistake(
            RecursionError,
            f"The kernel {frame.name} is called inside {MAX_DEPTH} other kernel calls: it calls itself without end.",
            hint="a kernel cannot call itself; loop with pl.loop or lax.fori_loop",
        )
    reason = "program ids and what Refs hold are known only when it runs."
    _stack().append(frame)
    try:
        notes = contextlib.nullcontext() if frame.eager else noting_jax_errors(f"the kernel {frame.name}", reason)
        with notes, noting_foreign_operations(frame.name):
            yield frame
    finally:
        _stack().pop()


@contextlib.contextmanager
def no_kernel(what: str):
    """Run a block where kernel operations mean nothing; `what` names it in messages."""
    _stack().append(what)
    try:
        reason = "grid indices are known only when the kernel runs."
        advice = "compute with the grid indices: jnp.where for a choice, // and % for arithmetic"
        with noting_jax_errors(what, reason, advice=advice):
            yield
    finally:
        _stack().pop()


@contextlib.contextmanager
def single_warp(axis_name: Hashable):
    """Trace, in the kernel at hand, the function that a single warp of a GPU's thread runs."""
    frame = required("a function of a single warp")
    _stack().append(dataclasses.replace(frame, warps=axis_name))
    try:
        yield
    finally:
        _stack().pop()


def current() -> Frame | None:
    """The innermost kernel frame, or None outside a kernel and in index maps."""
    stack = _stack()
    return stack[-1] if stack and isinstance(stack[-1], Frame) else None


def required(operation: str) -> Frame:
    """The innermost kernel frame, for an operation of `pl`, or of a dialect ("pltpu.make_async_copy").

    Raises:
      ValueError: there is none.
    """
    frame = current()
    if frame is None:
        stack = _stack()
        if stack:
            hint = "an index map gets the grid indices as its parameters; bind sizes when the spec is made"
        else:
            hint = "call it in the function given to pl.pallas_call, or in what that calls"
        where = f"in {stack[-1]}" if stack else "outside a kernel"
        name = operation if "." in operation else f"pl.{operation}"
        raise mistake(ValueError, f"{name} can only be used inside a kernel; it was called {where}.", hint=hint)
    return frame


def check_arity(function: Callable, count: int, message: Callable[[str], str], names: tuple[str, ...] = ()) -> None:
    """Raise TypeError(message(what it takes)) when `function` cannot take `count` positional arguments.

    Functions without a signature (builtins) are let through; what is no function is refused.
    """
    if not callable(function):
        hint = "decorate a `def`, or pass a function"
        raise mistake(TypeError, f"A function is needed here, not {kind_of(function)}.", hint=hint)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p for p in signature.parameters.values() if p.kind in kinds]
        raise TypeError(message(f"{count_of(len(positional), 'parameter')} {signature}")) from None
