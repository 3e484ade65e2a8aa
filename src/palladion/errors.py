"""Every exception, warning and finding that a user of Palladion can meet.

Errors are for people at work: the first line says what is wrong in the user's terms, then where (file and line,
operand, grid point), then how to fix it. `explain` puts a message in that order, and `mistake` makes an exception
of one, at the user's line. Mistakes of use are raised as the built-in exceptions that Pallas users catch
(`ValueError`, `TypeError`, `IndexError`); the classes here are for what has no built-in name.

JAX raises some mistakes itself, such as `if` on a traced value. Programs match on its exceptions, so they stay as
they are; `noting_jax_errors` adds the line and the fix to them as a note, which Python prints below the message.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from palladion import jaxlink, locations


def explain(headline: str, *, where: str | None = None, hint: str | None = None, **facts: Any) -> str:
    """A message in Palladion's order: what is wrong, where, the facts, how to fix it.

    Arguments:
      headline: one sentence in the user's terms.
      where: `file:line (function)` of the user's line.
      hint: the usual fix.
      **facts: further lines, `name: value` (underscores in a name become spaces); None values are left out.
    """
    lines = [headline]
    if where is not None:
        lines.append(f"  at: {where}")
    facts = {name.replace("_", " "): str(value) for name, value in facts.items() if value is not None}
    lines += [f"  {name}:{value if value.startswith('\n') else f' {value}'}" for name, value in facts.items()]
    if hint is not None:
        lines.append(f"  fix: {hint}")
    return "\n".join(lines)


def mistake[E: Exception](
    kind: type[E], headline: str, *, where: str | None = None, hint: str | None = None, **facts: Any
) -> E:
    """An exception with a message in Palladion's order, at the user's line.

    Arguments:
      kind: the exception's class.
      headline, hint, facts: as in `explain`.
      where: `file:line (function)`; default: the line of the user's code that is running.
    """
    return kind(explain(headline, where=where or locations.current_location(), hint=hint, **facts))


def count_of(n: int, thing: str, plural: str | None = None) -> str:
    """`1 operand`, `2 operands`."""
    return f"{n} {thing if n == 1 else plural or thing + 's'}"


def kind_of(x: Any) -> str:
    """What a value is, for messages: `float32[8]` for an array or a traced value, `'a' (str)` for other things."""
    if isinstance(x, (jax.Array, jaxlink.Tracer)) or (hasattr(x, "dtype") and hasattr(x, "shape")):
        return f"{x.dtype}{list(x.shape)}" if len(x.shape) else f"a scalar {x.dtype}"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    text = repr(x)
    text = text if len(text) <= 60 and "\n" not in text else f"{text.splitlines()[0][:57]}..."
    return text if x is None else f"{text} ({type(x).__name__})"


# --- mistakes that JAX finds --------------------------------------------------------------------------------------
_ADVICE = (  # by the exception's class; the first that fits
    (
        jax.errors.TracerBoolConversionError,
        "use @pl.when(condition) for an `if`, jnp.where for a choice of values, & and | for `and` and `or`",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "sizes, shapes, `range` and list indices need Python integers; loop with pl.loop or lax.fori_loop, index "
        "Refs with run-time integers as they are",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "NumPy functions need concrete arrays: use the jax.numpy function of the same name",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "use the value as it is: Refs take run-time integers and pl.ds(start, size) run-time starts; .astype converts",
    ),
)


@contextlib.contextmanager
def noting_jax_errors(what: str, reason: str, *, advice: str | None = None) -> Iterator[None]:
    """Add a note with the user's line to an exception that JAX raises in the block.

    Arguments:
      what: whose code runs in the block ("the kernel add"), for the note.
      reason: why its values are not known yet, for errors about Python needing one.
      advice: the fix for those; default: by the kind of error.
    """
    try:
        yield
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        fix = next((text for kind, text in _ADVICE if isinstance(error, kind)), None)
        if not getattr(error, "_noted", False) and locations.raised_in_library(error):
            error._noted = True  # pyright: ignore[reportAttributeAccessIssue]  # the innermost kernel's note is enough
            headline = f"In {what}, {reason}" if fix else f"Raised in {what}."
            error.add_note(explain(headline, where=locations.location_of_error(error), hint=fix and (advice or fix)))
        raise


# --- keyword arguments --------------------------------------------------------------------------------------------
def suggesting_keywords[F: Callable](function: F) -> F:
    """Decorator: an unknown keyword argument is refused with the nearest name (Python itself does so from 3.13 on)."""
    names = [p.name for p in inspect.signature(function).parameters.values()]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                hint = f"the keywords are {', '.join(names)}"
                raise mistake(TypeError, unknown_keyword(function.__name__, name, names), hint=hint)
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def unknown_keyword(function: str, name: str, names: Sequence[str]) -> str:
    """`pallas_call() got an unexpected keyword argument 'in_spec'. Did you mean 'in_specs'?`"""
    near = difflib.get_close_matches(name, names, n=1)
    question = f" Did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}.{question}"


class PalladionWarning(UserWarning):
    """A call that works as specified, but probably not as meant (a block index past the end, for one)."""


class UnsupportedPrimitive(NotImplementedError):
    """An operation that a target has no rule for.

    Attributes:
      primitive: the name of the JAX primitive.
      target: the executor that met it ("the reference interpreter", "native CPU" …).
      where: the user's file and line, or None.
      supported_by: the targets that do have a rule for it.
    """

    def __init__(self, primitive: str, target: str, where: str | None = None, supported_by: Iterable[str] = ()) -> None:
        self.primitive, self.target, self.where = primitive, target, where
        self.supported_by = tuple(supported_by)
        others = ", ".join(self.supported_by) or "none yet"
        super().__init__(
            explain(
                f"The operation `{primitive}` is not supported in a kernel on {target}.",
                where=where,
                supported_by=others,
            )
        )


class TargetNotBuilt(NotImplementedError):
    """A machine or compiler that this version of Palladion does not have yet."""


class KernelCheckError(AssertionError):
    """A `pl.debug_check` in a kernel was false, or a checked run-time index left its Ref."""


_failures: collections.deque[KernelCheckError] = collections.deque(maxlen=256)  # other threads' among them


def failed_check(message: str, where: str | None, point: Sequence[int]) -> KernelCheckError:
    """The exception of a check that failed in a compiled kernel, for the host to raise.

    XLA makes an error of its own of what the host raises; the exception is kept for `raising_failed_checks`.

    Arguments: message; where: the user's `file:line (function)`; point: of the grid.
    """
    failure = KernelCheckError(explain(message, where=where, grid_point=tuple(point) or None))
    _failures.append(failure)
    return failure


def raising_failed_checks(run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Run a compiled call to its end; raise its first failed check as it was raised on the host."""
    try:
        outs = jax.block_until_ready(run())
        jax.effects_barrier()
        return outs
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError: from the second call on
        text = str(error)
        failure = next((f for f in reversed(tuple(_failures)) if str(f) in text), None)
        if failure is None:
            raise
        raise failure from error


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that a check found in a kernel call.

    Attributes:
      kind: one of the kinds of `docs/design.md`, such as "out-of-bounds" or "revisited-block".
      level: "error" (wrong results on a target named in the message), "warning" or "note".
      message: one line.
      where: the user's source line, `file:line (function)`.
      when: the grid point(s) concerned, or None.
      hint: the rule that was broken and the usual fix.
      operand: the operand concerned ("input 0 (x_ref)"), or None.
    """

    kind: str
    level: str
    message: str
    where: str | None = None
    when: str | None = None
    hint: str | None = None
    operand: str | None = None


class KernelFinding(RuntimeError):
    """What a simulated machine found: the kernel would go wrong on the hardware.

    Attributes:
      finding: the `Finding`: kind, where, when, hint.
    """

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        facts: dict[str, Any] = {"kind": finding.kind, "when": finding.when, "operand": finding.operand}
        super().__init__(explain(finding.message, where=finding.where, hint=finding.hint, **facts))

    def __reduce__(self) -> tuple[Any, ...]:
        return KernelFinding, (self.finding,)
