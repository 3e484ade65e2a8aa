"""The state of lowering one kernel to Triton IR: a walk over its jaxpr, equation by equation, through `RULES`.

Every operation carries the line of the user's that it came from, so that Triton's own messages and the PTX name it.
Blocks must have sizes that are powers of two: the dialect holds no others. The walk checks that for every result, so
that no rule needs to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from palladion import jaxlink, locations
from palladion.compiler.triton import emit
from palladion.errors import explain
from palladion.rules import RuleTable

RULES = RuleTable("the Triton compiler")
KEY_RULES: dict[Any, Any] = {}  # of operations on random keys (keys.py); those that run jaxprs take keys as they are


@dataclasses.dataclass
class Cell:
    """A Ref that lives in registers: scratch, and buffers of `run_scoped`.

    Attributes:
      shape, dtype, label: of the Ref.
      value: what it holds now, of shape `block`; None before the program has stored anything.
    """

    shape: tuple[int, ...]
    dtype: Any
    label: str
    value: Any = None

    @property
    def block(self) -> tuple[int, ...]:
        """The shape in which it is held: sizes are powers of two. Only parts of such a Ref can be read."""
        return rounded_up(self.shape)


class Lowering:
    """What the rules need.

    Attributes:
      ids: the program's index along each grid axis that the kernel sees; sizes: of those axes (int or value).
      sm: compute capability that the code is for (90), as some rules depend on it.
      wanted: whether each result of the running equation is used.
    """

    def __init__(self, ids: Sequence[Any], sizes: Sequence[Any], sm: int) -> None:
        self.ids, self.sizes, self.sm = list(ids), list(sizes), sm
        self.wanted: list[bool] = []
        self.eqn: Any = None
        self.pending: dict[Any, str] = {}  # memory -> "read" or "written" since the last barrier

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Emit a jaxpr; its results. Arguments are values and Refs."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args))
        for var, value in zip(jaxpr.constvars, getattr(jaxpr, "consts", ())):
            env[var] = self.constant(np.asarray(value), f"a captured array of shape {np.shape(value)}")
        used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jaxlink.Literal)}
        used.update(v for v in jaxpr.outvars if not isinstance(v, jaxlink.Literal))
        for eqn in jaxpr.eqns:
            outer, self.eqn = self.eqn, eqn
            with location(eqn):
                values = [self.read(env, v) for v in eqn.invars]
                for v in eqn.outvars:
                    check_size(eqn, v)
                rule = RULES.get(eqn.primitive)
                if any(is_key(v) for v in eqn.invars) and not any(jaxlink.jaxprs_in_params(eqn.params)):
                    rule = KEY_RULES.get(eqn.primitive)
                if rule is None:
                    raise RULES.unsupported(eqn)
                self.wanted = [v in used for v in eqn.outvars]
                outs = rule(self, eqn, *values)
            self.eqn = outer
            outs = outs if isinstance(outs, (list, tuple)) else [outs]
            env.update(zip(eqn.outvars, outs))
        return [self.read(env, v) for v in jaxpr.outvars]

    def read(self, env: dict[Any, Any], var: Any) -> Any:
        """The value of a variable, or of a literal."""
        if not isinstance(var, jaxlink.Literal):
            return env[var]
        return self.constant(np.asarray(var.val, dtype_of(var)), "a constant array")

    def constant(self, value: np.ndarray, what: str) -> Any:
        """A constant scalar, or a block that holds one number."""
        if value.shape and (value.size == 0 or (value != value.flat[0]).any()):
            raise refusal(
                NotImplementedError, f"{what} cannot stand in a Triton kernel.", self.eqn, "pass it as an operand"
            )
        return emit.const(value.flat[0], value.dtype, value.shape)


def is_key(var: Any) -> bool:
    """Whether a variable holds random keys."""
    return jaxlink.is_opaque(getattr(var.aval, "dtype", None)) and not isinstance(var.aval, jaxlink.AbstractRef)


def type_of(aval: Any) -> ir.Type:
    """The type of a value; of keys, that of their words."""
    if jaxlink.is_opaque(aval.dtype):
        return emit.typed((*aval.shape, *aval.dtype._impl.key_shape), emit.element_type("uint32"))
    return emit.typed(aval.shape, emit.element_type(aval.dtype))


def location(eqn: Any) -> ir.Location:
    """The user's line of an equation."""
    frame = jaxlink.source_info_util.user_frame(eqn.source_info.traceback)
    name = str(eqn.primitive)
    if frame is None:
        return ir.Location.name(name)
    return ir.Location.file(frame.file_name, frame.start_line, frame.start_column)


def refusal(kind: type[Exception], headline: str, eqn: Any, hint: str | None = None, **facts: Any) -> Exception:
    """An exception at the line of an equation."""
    where = None if eqn is None else locations.location_of(eqn)
    return kind(explain(headline, where=where, hint=hint, **facts))


def power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def fits(shape: Sequence[int]) -> bool:
    """Whether Triton holds blocks of that shape."""
    return all(power_of_two(n) for n in shape)


def check_size(eqn: Any, var: Any) -> None:
    """Refuse a result that Triton has no block for.

    Raises: ValueError: a size that is no power of two, or too many elements. TypeError: the dtype.
    """
    aval = var.aval
    if isinstance(aval, jaxlink.AbstractRef) or not hasattr(aval, "shape") or jaxlink.is_opaque(aval.dtype):
        return
    if str(aval.dtype) not in emit.HELD:
        headline = f"`{eqn.primitive}` gives {aval.dtype}, which Triton does not have."
        raise refusal(TypeError, headline, eqn, "convert the operand before the call, or run with interpret=True")
    if not fits(aval.shape) and eqn.primitive not in (jaxlink.get_p, jaxlink.swap_p):  # those name the operand
        raise refusal(
            ValueError,
            f"`{eqn.primitive}` gives a block of shape {tuple(aval.shape)}; in Triton every size is a power of two.",
            eqn,
            f"compute in {rounded_up(aval.shape)} and mask what is too much",
        )
    if math.prod(aval.shape) > emit.MAX_ELEMENTS:
        raise refusal(
            ValueError,
            f"`{eqn.primitive}` gives {math.prod(aval.shape):,} elements; a block of Triton's has at most "
            f"{emit.MAX_ELEMENTS:,}.",
            eqn,
            "make the blocks smaller; they are held in registers",
        )


def rounded_up(shape: Sequence[int]) -> tuple[int, ...]:
    """The next sizes that are powers of two."""
    return tuple(1 << max(n - 1, 0).bit_length() for n in shape)


def dtype_of(var: Any) -> Any:
    return jnp.dtype(var.aval.dtype)
