"""Walking a kernel's jaxpr: each equation becomes MLIR operations, by the rule of its primitive, at the user's line.

The walk carries the MLIR values of scalars and arrays, and `Ref`s. Rules are small functions
`rule(ev, eqn, *inputs)` that emit at MLIR's current insertion point and return one value (a list for primitives with
several results). A rule that cannot raises `Refusal`; the walk adds the primitive and the user's line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from palladion import jaxlink, locations
from palladion.compiler.tpu import build
from palladion.compiler.tpu.context import element
from palladion.compiler.tpu.kinds import Refusal, element_type, typed
from palladion.errors import UnsupportedPrimitive, explain
from palladion.language.tpu.params import LoweringException
from palladion.rules import RuleTable

RULES = RuleTable("the TPU compiler")


@dataclasses.dataclass(eq=False)
class Ref:
    """A Ref in a kernel: memory, and what the language knows of it.

    Attributes:
      value: the memref.
      aval: its abstract Ref.
      label: how messages call it.
      squeezed: dimensions of the memref, of one element, that the Ref has not.
    """

    value: ir.Value
    aval: Any
    label: str
    squeezed: tuple[int, ...] = ()

    @functools.cached_property
    def space(self) -> str:
        """Mosaic's name of the memory: "vmem", "smem" …"""
        return element(self.value.type.memory_space, _space_named)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether all of it can be read and written as one vector."""
        return bool(self.aval.shape) and not self.squeezed and self.space == "vmem"


def _space_named(attribute: ir.Attribute) -> str:
    return str(attribute).partition("<")[2].rstrip(">")


@dataclasses.dataclass(frozen=True)
class Empty:
    """A value without elements, which Mosaic has not; nothing is emitted for it."""

    shape: tuple[int, ...]


def _without_elements(eqn: Any) -> bool:
    """Whether an equation gives nothing but values without elements (a store of such a value does nothing)."""
    for var in eqn.outvars:
        if 0 not in getattr(var.aval, "shape", ()):
            return False
    return bool(eqn.outvars)


@dataclasses.dataclass
class Kernel:
    """What rules know of the kernel around them.

    Attributes:
      ids, sizes: of each grid axis that the kernel sees: this program's index, and the number of programs (an int, or
        an `i32` on a dynamic axis).
      cores: {axis name: (size, this core's index)} of the kernel's core mesh.
      devices: {axis name: size} of the mesh of devices around the call, in order; None where there is none.
      checks: whether `pl.debug_check` checks.
      globals: Refs for equations that allocate for the whole call, by the equation's first result.
      started, waited: copies: semaphores' root Refs, with the line that first started, or waited for, one of them.
      params: the call's compiler parameters.
    """

    ids: Sequence[ir.Value] = ()
    sizes: Sequence[Any] = ()
    cores: Mapping[Any, tuple[int, ir.Value]] = dataclasses.field(default_factory=dict)
    devices: Mapping[Any, int] | None = None
    checks: bool = False
    globals: dict[int, Ref] = dataclasses.field(default_factory=dict)
    started: dict[Ref, str | None] = dataclasses.field(default_factory=dict)
    waited: dict[Ref, str | None] = dataclasses.field(default_factory=dict)
    params: Any = None


class Emitter:
    """Emits the operations of jaxprs in one MLIR context."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._places: dict[Any, ir.Location] = {}
        self._under_way: list[Any] = []  # the equation that is emitted, after those that it is part of
        self._used: set[Any] = set()  # variables of the jaxprs under way that something uses

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """The results of `jaxpr` on values and Refs.

        Raises:
          UnsupportedPrimitive, LoweringException: with the user's line.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, jaxpr.consts):
            env[var] = const
        self._used.update(uses_of(jaxpr))
        for eqn in jaxpr.eqns:
            rule = RULES.get(eqn.primitive)
            self._under_way.append(eqn)
            if rule is None:
                raise self.refuse(eqn, str(eqn.primitive))
            if _without_elements(eqn):
                outputs: Any = [Empty(tuple(v.aval.shape)) for v in eqn.outvars]
                outputs = outputs if eqn.primitive.multiple_results else outputs[0]
            else:
                outputs = self._emit(rule, eqn, env)
            env.update(zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs]))
            self._under_way.pop()
        return [self.read(a, env) for a in jaxpr.outvars]

    def _emit(self, rule: Callable[..., Any], eqn: Any, env: Mapping[Any, Any]) -> Any:
        try:
            with self.place(eqn):
                return rule(self, eqn, *[self.read(a, env) for a in eqn.invars])
        except Refusal as refusal:
            headline = f"`{eqn.primitive}` cannot be compiled for TPU: {refusal.headline}"
            raise LoweringException(explain(headline, where=self.where(), hint=refusal.hint)) from None
        except (ir.MLIRError, ValueError) as error:
            if "\n  at: " in str(error):  # told already, by an equation inside this one
                raise
            raise _refused(eqn, error, self.where()) from error
        except (UnsupportedPrimitive, LoweringException):
            raise
        except Exception as error:
            raise _failed(eqn, error, self.where(), [self.read(a, env) for a in eqn.invars]) from error

    def where(self) -> str | None:
        """The user's line of the equation under way; JAX's own functions have none, so it is their caller's."""
        return next((line for e in reversed(self._under_way) if (line := locations.location_of(e))), None)

    def read(self, atom: Any, env: Mapping[Any, Any]) -> Any:
        """The value of an operand of an equation."""
        x = atom.val if isinstance(atom, jaxlink.Literal) else env[atom]
        return x if isinstance(x, (ir.Value, Ref, Empty)) else literal(x, atom.aval)

    def is_used(self, var: Any) -> bool:
        """Whether an equation or a result of the jaxpr under way needs a variable."""
        return var in self._used

    def place(self, eqn: Any) -> ir.Location:
        """The user's file and line of an equation."""
        trace = eqn.source_info.traceback
        found = self._places.get(trace)
        if found is None:
            frame = jaxlink.source_info_util.user_frame(trace)
            if frame is None:  # inside a function of JAX's own
                return ir.Location.current or ir.Location.unknown()
            at = ir.Location.file(frame.file_name, frame.start_line, frame.start_column)
            found = ir.Location.name(frame.function_name, at)
            self._places[trace] = found
        return found

    def inline(self, function: Callable[..., Any], *args: Any, avals: Sequence[Any]) -> list[Any]:
        """Emit a JAX function of arrays: what a primitive is in simpler ones.

        Arguments:
          function: of arrays; it must be the same object on every call, for its trace is kept.
          *args: MLIR values.
          avals: their JAX types.
        """
        return self.run(_traced(function, tuple((tuple(a.shape), np.dtype(a.dtype)) for a in avals)), args)

    def refuse(self, eqn: Any, what: str) -> UnsupportedPrimitive:
        """The exception for a form of a primitive that Mosaic has not."""
        others = RULES.others(eqn.primitive)
        return UnsupportedPrimitive(what, RULES.target, self.where(), others)


def uses_of(jaxpr: Any) -> set[Any]:
    """The variables of a jaxpr that its equations or results need (of equations that are never dropped, too)."""
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jaxlink.Literal)}
    used.update(v for v in jaxpr.outvars if not isinstance(v, jaxlink.Literal))
    return used


@functools.lru_cache(1024)
def _traced(function: Callable[..., Any], types: tuple[Any, ...]) -> Any:
    def flat(*args):
        return jax.tree.leaves(function(*args))

    avals = [jaxlink.ShapedArray(shape, dtype) for shape, dtype in types]
    return jaxlink.trace_to_jaxpr(flat, avals, jaxlink.debug_info("TPU compiler", function, avals))[0]


_SPELLED_OUT = 256  # at most so many elements of a constant array


def literal(x: Any, aval: Any) -> ir.Value | Empty:
    """A constant of a jaxpr.

    Raises: Refusal: a large array of different numbers, which Mosaic has no constants for.
    """
    if not aval.shape:
        return build.full(element_type(aval.dtype), x)
    array = np.asarray(x)
    if not array.size:
        return Empty(array.shape)
    element, flat = element_type(aval.dtype), array.ravel()
    if (flat == flat[0]).all() or array.size == 1:
        return build.full(typed(array.shape, element), flat[0])
    if array.size > _SPELLED_OUT:
        raise Refusal(
            f"an array of constants ({aval.str_short()}) stands in the kernel.",
            "pass it as an operand, or compute it from lax.broadcasted_iota",
        )
    return _spelled(array, element)


def _spelled(array: np.ndarray, element: ir.Type) -> ir.Value:
    """An array of constants, chosen by the number of the element."""
    if array.dtype == np.bool_:
        return build.as_mask(_spelled(array.astype(np.int32), ir.IntegerType.get_signless(32)))
    place, flat = build.numbers(array.shape), array.ravel()
    result = build.full(typed(array.shape, element), flat[0])
    for n in range(1, array.size):
        if flat[n] != flat[0]:
            here = arith.cmpi(arith.CmpIPredicate.eq, place, build.full(place.type, n))
            result = arith.select(here, build.full(result.type, flat[n]), result)
    return result


def _refused(eqn: Any, error: Exception, where: str | None) -> LoweringException:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "error:" in line), lines[0] if lines else type(error).__name__)
    headline = f"`{eqn.primitive}` cannot be compiled for TPU: Mosaic refuses the operation."
    return LoweringException(explain(headline, where=where, Mosaic=said))


def _failed(eqn: Any, error: Exception, where: str | None, inputs: Sequence[Any]) -> LoweringException:
    """An exception that no rule means to raise: told at the user's line all the same."""
    called = f"`{eqn.primitive}` cannot be compiled for TPU: "
    if any(isinstance(x, Empty) for x in inputs):
        shapes = ", ".join(str(x.shape) for x in inputs if isinstance(x, Empty))
        headline = f"{called}Mosaic has no arrays without elements, such as shape {shapes}."
        return LoweringException(explain(headline, where=where, hint="leave the operation out where there is nothing"))
    hint = "a mistake of Palladion's own; the same written with other operations or shapes may pass"
    return LoweringException(explain(f"{called}{type(error).__name__}: {error}", where=where, hint=hint))


def inline(param: str) -> Callable:
    """The rule of a primitive that calls a jaxpr."""
    return lambda ev, eqn, *args: ev.run(eqn.params[param], args)


for _primitive, _param in jaxlink.CALLED.items():
    RULES.rule(_primitive)(inline(_param))
