"""The native CPU compiler: a kernel call becomes machine code that XLA calls through its FFI.

    jaxpr -> loop nests (program.py, lower/) -> LLVM (unit.py, emit.py) -> object code (cache.py) -> runtime.py

`lower` is the executor's lowering rule. A call that is known from the disk goes through source.py, cache.py and
runtime.py only; the rest of the compiler is not even imported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from palladion import jaxlink
from palladion.compiler.cpu import boundary, dumps, runtime, source
from palladion.errors import explain
from palladion.language.intern import CallKey

if TYPE_CHECKING:
    from palladion.compiler.cpu.unit import Unit


def lower(ctx: Any, *args: Any, **params: Any) -> list[Any]:
    """The lowering rule of `pallas_call` for native CPU code."""
    dtypes_now = [a.dtype for a in (*ctx.avals_in, *ctx.avals_out)]
    if all(map(boundary.passes_as_it_is, dtypes_now)) and not boundary.has_parts(params["jaxpr"]):
        return runtime.lower_call(ctx, compile_call(_Key(params)), args)
    return jaxlink.lower_as(functools.partial(_call_across, params, [a.dtype for a in ctx.avals_out]), ctx, *args)


def _call_across(params: dict[str, Any], out_dtypes: Sequence[Any], *operands: Any) -> list[Any]:
    """A call of a kernel whose memory is not that of its arrays."""
    if boundary.has_parts(params["jaxpr"]):
        from palladion.compiler.cpu.lower.parts import split_params  # seldom needed

        params = split_params(params)
    outs = iter(runtime.call(compile_call(_Key(params)), *(p for x in operands for p in boundary.enter(x))))
    counts = [max(1, len(boundary.part_dtypes(d))) for d in out_dtypes]
    return [boundary.leave([next(outs) for _ in range(n)], d) for n, d in zip(counts, out_dtypes)]


_FIELDS = ("jaxpr", "grid_mapping", "input_output_aliases", "debug_checks", "compiler_params")
_Key = functools.partial(CallKey, fields=_FIELDS)


@functools.lru_cache(1024)
def compile_call(call: CallKey) -> int:
    """Compile a kernel call, or find its code in memory or on disk; its content key (runtime.py).

    A call that the cache knows by its text (source.py) is not lowered again. Calls that print or check are, as what
    they do in Python cannot be on disk; and so is every call while PALLADION_DUMP asks for its stages.
    """
    p = call.params
    folder = dumps.folder()
    text = None if folder else source.describe(p, jaxlink.trace_context())
    if text is not None and not p["debug_checks"] and not jaxlink.effects_outside(p["jaxpr"]):
        with contextlib.suppress(_CallsPython):
            return runtime.load_cached(text, lambda: _without_python(make_unit(p)))[0]
    unit = make_unit(p)
    module, description = unit.build()
    if folder:
        dumps.write(folder, unit, module)
    return runtime.load(module, description, unit.sites())


class _CallsPython(Exception):
    """A kernel that calls Python on its way: its code alone is not the kernel."""


def _without_python(unit: Unit) -> tuple[Any, runtime.KernelDescription]:
    if unit.program.sites:
        raise _CallsPython
    return unit.build()


def make_unit(params: dict[str, Any]) -> Unit:
    """A call's loop nests, on their way to LLVM.

    Arguments: params: of the `pallas_call` equation.
    Raises: UnsupportedPrimitive, TypeError: native code cannot express it.
    """
    from palladion.compiler.cpu.coalesce import coalesce  # here: not needed where the disk has the code
    from palladion.compiler.cpu.unit import Unit

    refuse_semaphores(params["jaxpr"])
    check_dtypes(params["jaxpr"], params["name"])
    return Unit.of(coalesce(params))


def refuse_semaphores(jaxpr: Any) -> None:
    """Refuse the operations of machines.

    Raises:
      UnsupportedPrimitive: the first operation on a semaphore, with its line.
    """
    from palladion.compiler.cpu.lower.values import RULES

    for eqn in jaxpr.eqns:
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            refuse_semaphores(inner)
        if any(boundary.is_semaphore(getattr(v.aval, "dtype", None)) for v in (*eqn.invars, *eqn.outvars)):
            raise RULES.unsupported(eqn)


def check_dtypes(jaxpr: Any, name: str) -> None:
    """Refuse Refs of dtypes that are not held natively.

    Raises:
      TypeError: naming the Ref, its dtype and the way out.
    """
    from palladion.compiler.cpu import dtypes

    for v in jaxpr.invars:
        if (dtype := str(v.aval.dtype)) not in dtypes.HELD:
            raise TypeError(
                explain(
                    f"{v.aval.label} of the kernel {name} holds {dtype}, which native CPU code does not have.",
                    hint="run this kernel with interpret=True, or convert the operand before the call",
                )
            )
