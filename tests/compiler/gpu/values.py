"""Running functions of arrays inside of a kernel on the emulated device, and beside it in JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import palladion as pl
from palladion import mosaic_gpu as plgpu


def in_kernel(function: Callable[..., Any], *args: Any, layout: Any = None) -> list[np.ndarray]:
    """The results of a function of arrays, computed by one block of the emulated device.

    Arguments:
      function: of arrays; gives a sequence of arrays. layout: of the operands; None: the compiler's choice.
    """
    outs = jax.eval_shape(function, *args)

    def kernel(*refs: Any) -> None:
        given = [r[...] for r in refs[: len(args)]]
        if layout is not None:
            given = [plgpu.layout_cast(x, layout) for x in given]
        for ref, value in zip(refs[len(args) :], function(*given)):
            ref[...] = value

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs]
    call = pl.pallas_call(kernel, shapes, interpret=plgpu.EmulateParams())
    return [np.asarray(x) for x in call(*args)]


def differences(
    names: Sequence[str], actual: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float
) -> list[str]:
    """Which results differ, and where first."""
    found = []
    for name, a, e in zip(names, actual, expected, strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.dtype, a.shape) == (e.dtype, e.shape), f"{name}: {a.dtype}{a.shape}, not {e.dtype}{e.shape}"
        if e.dtype.kind in "biu":
            same = a == e
        else:
            x, y = a.astype(np.float64), e.astype(np.float64)
            with np.errstate(all="ignore"):
                same = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= atol + rtol * np.abs(y))
            if rtol == 0:
                same &= np.isnan(y) | (np.signbit(x) == np.signbit(y))
        if not same.all():
            at = tuple(np.argwhere(~same)[0])
            found.append(f"{name}[{', '.join(map(str, at))}]: {a[at]}, not {e[at]} ({(~same).sum()} of {e.size})")
    return found
