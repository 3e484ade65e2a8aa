"""What a corpus case is, and how one is checked.

A case is a kernel together with its meaning: a function that builds the call, the inputs, and the result in
NumPy. Floats are expected in float64 (so the expectation does not share the kernel's rounding), integers and
booleans exactly. The build function is handed the modules `pl` and `pltpu` instead of importing them, so one
case can be run on Palladion and, in a throwaway script, on any other implementation of the language, which is
how the expectations were confirmed.

A case never says how it is executed: `make(**options)` passes its options on to every `pallas_call` inside
(`interpret=True`, `interpret=pl.EagerParams()`, `compiler_params=...`), so all executors run one corpus.
"""

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

Build = Callable[..., Callable[..., Any]]
Inputs = Callable[[np.random.Generator], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One kernel with its inputs and its expected result.

    Attributes:
      name: the name of the build function; unique in the corpus.
      build: `build(pl, pltpu, **options)` returns a callable on arrays.
      inputs: draws the operands, a tuple of NumPy arrays (ml_dtypes for bf16, f8, int4) or pytrees of them.
      expect: the result in NumPy; receives the operands with floats widened to float64.
      tags: what the case covers; see the package docstring for the vocabulary.
      rtol, atol: tolerances against float64. Both 0 means bitwise: the expectation rounded once to the
        result's dtype, zeros with their sign, any NaN equal to any NaN.
      out: the dtype of the result's floating (or complex) leaves, where the expectation is float64
        (complex128). An expected leaf of any other dtype states its result's dtype itself.
      eager: False if the case cannot run in an interpreter that executes the kernel's own Python.
    """

    name: str
    build: Build
    inputs: Inputs
    expect: Callable[..., Any]
    tags: frozenset[str]
    rtol: float = 0.0
    atol: float = 0.0
    out: str = "float32"
    eager: bool = True

    def make(self, **options: Any) -> Callable[..., Any]:
        """Builds the call on Palladion; `options` go to every `pallas_call` inside."""
        import palladion as pl  # here, so that the corpus can be read where the package is not importable
        from palladion import tpu as pltpu

        return self.build(pl, pltpu, **options)


def case(
    *,
    inputs: Inputs,
    expect: Callable[..., Any],
    tags: str,
    rtol: float = 0.0,
    atol: float = 0.0,
    out: str = "float32",
    eager: bool = True,
) -> Callable[[Build], Case]:
    """Turns a build function into a `Case` named after it. `tags` is a string of words."""

    def wrap(build: Build) -> Case:
        return Case(
            name=getattr(build, "__name__"),
            build=build,
            inputs=inputs,
            expect=expect,
            tags=frozenset(tags.split()),
            rtol=rtol,
            atol=atol,
            out=out,
            eager=eager,
        )

    return wrap


# Drawing inputs


def normal(rng: np.random.Generator, *shape: int, dtype: Any = "float32", scale: float = 1.0) -> np.ndarray:
    """Normal deviates, rounded to `dtype`."""
    return (scale * rng.standard_normal(shape)).astype(dtype)


def uniform(
    rng: np.random.Generator, *shape: int, low: float = 0.0, high: float = 1.0, dtype: Any = "float32"
) -> np.ndarray:
    """Uniform deviates in [low, high), rounded to `dtype`."""
    return rng.uniform(low, high, shape).astype(dtype)


def integers(rng: np.random.Generator, *shape: int, low: int = -8, high: int = 9, dtype: Any = "int32") -> np.ndarray:
    """Integers in [low, high) in any dtype. As floats they make sums and products that are exact."""
    return rng.integers(low, high, shape).astype(dtype)


def sds(shape: tuple[int, ...], dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """Short for `jax.ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(shape, dtype)


# Checking


def is_float(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)


def widen(x: Any) -> Any:
    """Floats to float64, complex to complex128, int4 to int8; everything else as it is."""
    x = np.asarray(x)
    if is_float(x.dtype):
        return x.astype(np.float64)
    if x.dtype.kind == "c":
        return x.astype(np.complex128)
    if x.dtype in (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)):
        return x.astype(np.int8)
    return x


def arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """The case's operands for a seed; equal on every call."""
    return case.inputs(np.random.default_rng([seed, zlib.crc32(case.name.encode())]))


def expected(case: Case, args: tuple[Any, ...]) -> Any:
    """The result that NumPy gives for these operands."""
    with np.errstate(all="ignore"):
        return case.expect(*jax.tree.map(widen, args))


def compare(case: Case, got: Any, want: Any) -> None:
    """Raises AssertionError if `got` is not `want` within the case's tolerances.

    The trees, the shapes and the dtypes must be equal; the message names the leaf and its worst element.
    """
    got_leaves, got_tree = jax.tree.flatten_with_path(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree, f"{case.name}: result has the structure {got_tree}, expected {want_tree}"
    for (path, g), w in zip(got_leaves, want_leaves):
        where = f"{case.name}: result{jax.tree_util.keystr(path)}"
        g, w = np.asarray(g), np.asarray(w)
        dtype = np.dtype(jax.numpy.dtype(case.out)) if w.dtype in (np.float64, np.complex128) else w.dtype
        assert g.shape == w.shape, f"{where} has shape {g.shape}, expected {w.shape}"
        assert g.dtype == dtype, f"{where} has dtype {g.dtype}, expected {dtype}"
        if dtype.kind == "c":
            pairs = [(" real part", g.real, w.real), (" imaginary part", g.imag, w.imag)]
        else:
            pairs = [("", g, w)]
        for part, g_part, w_part in pairs:
            _compare_leaf(where + part, g_part, w_part, case.rtol, case.atol)


def _compare_leaf(where: str, g: np.ndarray, w: np.ndarray, rtol: float, atol: float) -> None:
    if is_float(g.dtype):
        if rtol == atol == 0:
            with np.errstate(all="ignore"):
                w = w.astype(g.dtype)
        g, w = g.astype(np.float64), w.astype(np.float64)
        same = (np.isnan(g) & np.isnan(w)) | (g == w)
        with np.errstate(all="ignore"):
            if rtol == atol == 0:
                same &= np.isnan(g) | (np.signbit(g) == np.signbit(w))
            else:
                same |= np.isfinite(w) & (np.abs(g - w) <= atol + rtol * np.abs(w))
    else:
        same = np.asarray(g == w)
    if not same.all():
        wrong = np.argwhere(~same)
        at = tuple(int(i) for i in wrong[0])
        if is_float(g.dtype):
            with np.errstate(all="ignore"):
                error = np.where(same, -1, np.nan_to_num(np.abs(g - w), nan=np.inf))
            at = tuple(int(i) for i in np.unravel_index(np.argmax(error), g.shape))
        raise AssertionError(
            f"{where} differs in {len(wrong)} of {g.size} elements; at {list(at)} got {g[at]!r}, "
            f"expected {w[at]!r} (rtol {rtol}, atol {atol})"
        )


def scope(case: Case) -> contextlib.AbstractContextManager[Any]:
    """The configuration that the case runs under: 64-bit types for the tag `x64`, else nothing."""
    return jax.enable_x64(True) if "x64" in case.tags else contextlib.nullcontext()


def check(
    case: Case,
    *,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
    seed: int = 0,
    **options: Any,
) -> None:
    """Builds the case with `options`, runs it, and compares it with NumPy.

    Args:
      case: the case.
      transform: applied to the callable before it is run, e.g. `jax.jit`.
      seed: which inputs to draw.
      **options: passed to every `pallas_call`, e.g. `interpret=True`.

    Raises:
      AssertionError: if structure, shape, dtype or values differ.
    """
    args = arguments(case, seed)
    with scope(case):
        got = jax.tree.map(np.asarray, transform(case.make(**options))(*args))
    compare(case, got, expected(case, args))
