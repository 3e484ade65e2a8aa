"""Array primitives in NumPy compared with JAX under jit: what a case is, and how many are checked at once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion.simulator.values import straight_line

CASES: list["Case"] = []  # of all test files that have been imported


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays, its arguments, and how far its float results may be from JAX's.

    Attributes:
      ulp: in units in the last place of the result's dtype; 0 is bitwise (zeros with their sign, any NaN equal).
      atol: an absolute error that is allowed instead.
      loose_zero: zeros of either sign are equal.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    ulp: float = 0
    atol: float = 0
    loose_zero: bool = False


def case(name: str, function: Callable[..., Any], *args: Any, enter: bool = True, **options: Any) -> Case:
    """A case that, unless it needs a configuration of its own, is also entered into `CASES`."""
    made = Case(name, function, args, **options)
    if enter:
        CASES.append(made)
    return made


def held(x: Any) -> np.ndarray:
    """An argument as the simulator holds it: keys as their words."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def run(function: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """The flat results of a function, traced by JAX and computed in NumPy; operands must stay as they were."""
    jaxpr = jax.make_jaxpr(function)(*args)
    values = [held(x) for x in jax.tree.leaves(args)]
    for v in values:
        v.setflags(write=False)
    with np.errstate(all="ignore"):
        return [np.asarray(x) for x in straight_line(jaxpr)(*values)]


def check(cases: list[Case]) -> None:
    """Every case agrees with JAX: one compilation of them all, then one comparison each."""

    def everything(args):
        return [jax.tree.leaves(c.function(*a)) for c, a in zip(cases, args)]

    # the compiler's time is most of the tests'
    everything = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})

    wanted = everything([c.args for c in cases])
    problems = []
    for c, want in zip(cases, wanted):
        try:
            got = run(c.function, *c.args)
            assert len(got) == len(want)
            for g, w in zip(got, want):
                compare(g, held(w), c.ulp, c.atol, c.loose_zero)
        except Exception as error:
            problems.append(f"{c.name}: {type(error).__name__}: {error}")
    assert not problems, f"{len(problems)} of {len(cases)} cases:\n" + "\n".join(problems)


def compare(got: np.ndarray, want: np.ndarray, ulp: float = 0, atol: float = 0, loose_zero: bool = False) -> None:
    """Raises AssertionError naming the worst element."""
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"dtype {got.dtype}, expected {want.dtype}"
    if got.dtype.kind == "c":
        compare(got.real, want.real, ulp, atol, loose_zero)
        compare(got.imag, want.imag, ulp, atol, loose_zero)
        return
    if not jnp.issubdtype(got.dtype, np.floating):
        wrong = np.atleast_1d(got != want)
        assert not wrong.any(), (
            f"{wrong.sum()} of {wrong.size} differ, e.g. {got[got != want][0]} for {want[got != want][0]}"
        )
        return
    with np.errstate(all="ignore"):
        g, w = got.astype(np.float64), want.astype(np.float64)
        equal = (np.isnan(g) & np.isnan(w)) | (g == w)
        if not ulp and not atol and not loose_zero:
            equal &= np.isnan(g) | (np.signbit(g) == np.signbit(w))
        unit = np.maximum(np.abs(w), float(jnp.finfo(got.dtype).tiny)) * float(jnp.finfo(got.dtype).eps)
        error = np.abs(g - w)
        near = np.isfinite(g) & np.isfinite(w) & ((error <= ulp * unit) | (error <= atol))
    wrong = ~(equal | near)
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(error / unit, nan=np.inf), -1)), wrong.shape)
        raise AssertionError(f"{wrong.sum()} of {wrong.size} differ, e.g. {g[at]!r} for {w[at]!r} at {at}")
