"""What a compiled kernel does on the host, in program order: prints, and checks that stop it.

Each is a Python callback that takes a token and gives it back; the evaluator carries the token through the kernel's
control flow and from program to program, so that XLA cannot reorder them. A check is a callback that raises. XLA
turns what a callback raises into an internal error with the text of the traceback, so the failure is also kept
(`errors.failed_check`), and a call made outside jit raises it as it was. Inside jit the user gets XLA's error, whose
last lines are ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import failed_check
from palladion.language import ops


@dataclasses.dataclass(frozen=True)
class Print:
    """Print a line: the format, filled in with the operands."""

    fmt: str

    def __call__(self, *values: Any) -> None:
        print(ops.format_values(self.fmt, values), flush=True)


@dataclasses.dataclass(frozen=True)
class Check:
    """Stop when the first operand is false.

    Attributes:
      message: filled in with the next `n_values` operands; the rest are the program's grid point.
      where: the user's `file:line (function)`.
    """

    message: str
    n_values: int
    where: str | None

    def __call__(self, condition: Any, *rest: Any) -> None:
        if np.all(condition):
            return
        values, point = rest[: self.n_values], tuple(int(i) for i in rest[self.n_values :])
        text = self.message.format(*(np.asarray(v) for v in values))
        raise failed_check(text, self.where, point)


host_p = jaxlink.Primitive("host")
host_p.def_effectful_abstract_eval(
    lambda token, *avals, action: (jaxlink.ShapedArray((), jnp.dtype("int32")), {ops.check_effect})
)


def first_token() -> jax.Array:
    """The token before anything has happened."""
    return jnp.int32(0)


def act(token: Any, action: Print | Check, *values: Any) -> jax.Array:
    """Do something on the host after what gave `token`; the result is the next token."""
    return host_p.bind(token, *(jnp.asarray(v) for v in values), action=action)


@host_p.def_impl
def _now(token, *values, action):
    action(*(np.asarray(v) for v in values))
    return token


def _lower(ctx, token, *values, action):
    def call(token, *values):
        action(*values)
        return (token,)

    return jaxlink.lower_host_call(ctx, call, (token, *values))


jaxlink.mlir.register_lowering(host_p, _lower, cacheable=False)
