"""`pl.EagerParams`: run the kernel's own Python, program by program, with nothing traced.

    call = pl.pallas_call(kernel, out_shape, grid=(4, 4), interpret=pl.EagerParams(only=(2, 3)))
    call(x)   # print(x_ref), breakpoint(), assert jnp.all(…), a traceback into your line: all work

The interpreter itself is `palladion.reference.eager`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from palladion.language.fields import Check, check_fields, choice

__all__ = ["EagerParams"]


def _points() -> Check:
    def convert(value: Any) -> tuple[tuple[int, ...], ...] | None:
        if value is None:
            return None
        if isinstance(value, (tuple, list)) and value and isinstance(value[0], (tuple, list)):
            points = tuple(_point(entry) for entry in value)
        else:
            points = (_point(value),)
        if len({len(p) for p in points}) > 1:
            raise ValueError("the programs have unlike numbers of ids")
        return tuple(sorted(set(points)))

    return Check(
        "None, one program's ids, or a sequence of them",
        convert,
        "only=(2, 3) for one program of a 2-d grid, only=[(0, 0), (2, 3)] for two, only=() without a grid",
    )


def _point(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(i, bool) for i in ids):
        raise TypeError
    point = tuple(operator.index(i) for i in ids)
    if any(i < 0 for i in point):
        raise ValueError(f"{point} has a negative id")
    return point


@dataclasses.dataclass(frozen=True)
class EagerParams:
    """Ask for the eager interpreter: `pallas_call(…, interpret=pl.EagerParams())`.

    The kernel is called once for each program, in lexicographic order, with Refs that hold their values. What it
    reads are ordinary `jax.Array`s, so `print`, `breakpoint()`, `assert` and Python's `if` work on them, and an
    exception shows the kernel's own line and the program. Loops and branches of `jax.lax`, and nested `jax.jit`,
    run as plain Python (`jax.disable_jit`). `print(x_ref)` shows what a Ref holds, also in a post-mortem debugger.

    Arguments:
      only: run these programs alone: one program's ids, or a sequence of them, as `pl.program_id` counts (a vmapped
        call runs them for each element of the batch); `()` for a call without a grid. What the others would have
        written stays uninitialised. None runs all.
      out_of_range: what an index or slice known at run time that leaves its Ref does: "raise" an IndexError, or
        "clamp" it as compiled code does without a word (a slice is moved back inside, a gather takes the last
        element, a scatter drops the value).
      uninitialized: what outputs, scratch and the parts of blocks outside the array hold at first: "nan" (NaN, the
        lowest integer, False) or "zero".

    Raises:
      TypeError, ValueError: a field is not one of these.
    """

    only: int | Sequence[int] | Sequence[Sequence[int]] | None = None
    out_of_range: str = "raise"
    uninitialized: str = "nan"

    def __post_init__(self) -> None:
        check_fields(self, "pl.EagerParams", _CHECKS)


_CHECKS: dict[str, Check] = {
    "only": _points(),
    "out_of_range": choice("raise", "clamp"),
    "uninitialized": choice("nan", "zero"),
}
