"""`palladion.compile`: the kernel calls of a function, compiled for a machine that need not be here, and reported.

The function is traced, not run. Each target is a module with `compile_call(call) -> CompiledCall`, imported when it is
first asked for; `palladion check --target` goes through the same table.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from palladion import jaxlink, locations
from palladion.compiler.reports import CompiledCall, CompileReport, Refusal
from palladion.errors import kind_of, mistake
from palladion.language.primitive import EagerKernel, pallas_call_p

TARGETS = {"cpu": "palladion.compiler.cpu.report"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel call to compile: the parameters of its `pallas_call` equation, and where it was written."""

    params: dict[str, Any]
    kernel: str | None
    called_at: str | None


def known_target(name: str) -> str:
    """The name of a target, checked.

    Raises: ValueError: there is no such target; the message lists those that there are.
    """
    if name not in TARGETS:
        raise mistake(
            ValueError, f"There is no compile target {name!r}.", hint=f"the targets are: {', '.join(TARGETS)}"
        )
    return name


def compile_call(call: Call, target: str) -> CompiledCall:
    """Compile one call; what cannot be compiled comes back as a refusal, with the user's line."""
    try:
        if isinstance(call.params["jaxpr"], EagerKernel):
            raise TypeError("a call with interpret=pl.EagerParams() is not traced, so there is nothing to compile.")
        found = importlib.import_module(TARGETS[known_target(target)]).compile_call(call.params)
        return dataclasses.replace(found, kernel=call.kernel, called_at=call.called_at)
    except Exception as error:
        where = getattr(error, "where", None) or _line_in(str(error))
        refusal = Refusal(type(error).__name__, str(error), where)
        return CompiledCall(target, call.params["name"], call.kernel, call.called_at, refusal=refusal)


def _line_in(message: str) -> str | None:
    match = re.search(r"^  at: (.*)$", message, re.MULTILINE)
    return match and match[1]


def compile(f: Callable[..., Any], *args: Any, target: str = "cpu") -> CompileReport:
    """Compile the kernel calls of a function, without running it, and report what came of each.

        report = palladion.compile(softmax, jax.ShapeDtypeStruct((4096, 4096), "float32"), target="cpu")
        print(report)                    # code size, vectors, threads, what is slow and why
        print(report.text("asm"))        # or "jaxpr", "nests", "llvm"

    Arguments:
      f: a function of arrays that makes kernel calls, under `jit` and other transforms too; or what `pallas_call`
        returns. `interpret` and `compiler_params` of another target do not matter.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s for shapes alone, and pytrees of them.
      target: "cpu": native code for this machine.

    Returns:
      a `CompileReport`, with one entry for each kernel call; a call that the target cannot compile has a `refusal` in
      place of numbers.

    Raises:
      TypeError: f is not a function. ValueError: there is no such target. What tracing f raises.
    """
    if not callable(f):
        raise mistake(TypeError, f"palladion.compile takes a function first, not {kind_of(f)}.")
    known_target(target)
    traced = jax.make_jaxpr(f)(*args)
    calls = tuple(compile_call(call, target) for call in _calls_in(traced.jaxpr))
    return CompileReport(getattr(f, "__name__", type(f).__name__), target, calls)


def _calls_in(jaxpr: Any) -> Iterator[Call]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is pallas_call_p:
            yield Call(eqn.params, kernel_location(eqn.params["jaxpr"]), locations.location_of(eqn))
        else:
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                yield from _calls_in(inner)


def kernel_location(body: Any) -> str | None:
    """`file:line` of a kernel function; files below the working folder as relative paths."""
    if isinstance(body, EagerKernel):
        return (locations.defined_at(body.function) or "").partition(" (")[0] or None
    match = re.fullmatch(r".* at (.*):(\d+)", body.debug_info.func_src_info or "", re.DOTALL)
    if match is None:
        return None
    file, line = match.groups()
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}:{line}"
