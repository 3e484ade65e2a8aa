"""What a kernel of the GPU corpus is, and small helpers that all of them use.

Kernels spell every synchronisation as `plgpu.<operation>(…)` or `pl.semaphore_<operation>(…)`, so that a tool can find
and mutate those calls in their source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import mosaic_gpu as plgpu

f16, bf16, f32, i32, i8 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel with operands and the result in float64.

    Attributes:
      name: unique in the corpus.
      kernel: the function of arrays that makes and runs the kernel.
      run: calls it: (actual, expected, tolerance); the tolerance is relative to the largest expected magnitude, and 0
        where the operands are small integers, of which every sum is exact.
      arch: of the simulated GPU. devices: how many of them.
      options: further fields of `plgpu.InterpretGPUParams`.
      small: whether it is quick enough for more schedules.
    """

    name: str
    kernel: Callable[..., Any]
    run: Callable[[], tuple[Any, np.ndarray, float]]
    arch: str
    devices: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    small: bool = True


class Table(dict[str, Case]):
    """Cases by name; `@table.case(kernel, arch=…)` adds one."""

    def case(self, kernel: Callable[..., Any], arch: str, devices: int = 1, small: bool = True, **options: Any) -> Any:
        """Decorator: enter a function () -> (actual, expected, tolerance) under its name."""

        def enter(run: Callable[[], Any]) -> Callable[[], Any]:
            name = run.__name__
            assert name not in self, name
            self[name] = Case(name, kernel, run, arch, devices, options, small)
            return run

        return enter


HOPPER, BLACKWELL = "sm_90a", "sm_100a"


def off_by(actual: Any, expected: np.ndarray) -> float:
    """The largest error, relative to the largest expected magnitude (at least 1)."""
    assert np.shape(actual) == expected.shape, (np.shape(actual), expected.shape)
    errors = np.abs(f64(actual) - expected)
    return float(np.max(np.where(np.isnan(errors), np.inf, errors)) / max(1.0, np.abs(expected).max()))


def struct(shape: tuple[int, ...], dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(seed: int, shape: tuple[int, ...], dtype: Any = f16, lo: int = -3, hi: int = 4) -> jax.Array:
    """Small integers."""
    return jnp.asarray(np.random.default_rng(seed).integers(lo, hi, size=shape).astype(np.float32), dtype)


def reals(seed: int, shape: tuple[int, ...], dtype: Any = f32) -> jax.Array:
    """Normally distributed numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32), dtype)


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def mma_transforms(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """How the tensor core wants a matrix in SMEM: the widest swizzle that its rows allow, and tiles as wide."""
    size = jnp.dtype(dtype).itemsize
    for swizzle in (128, 64, 32):
        if shape[-1] % (swizzle // size) == 0 and shape[-2] % 8 == 0:
            return (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    raise ValueError(f"no transforms for {shape} of {dtype}")


def tiled_smem(shape: tuple[int, ...], dtype: Any = f16) -> Any:
    """A buffer for matrices of a tensor core product; leading dimensions count buffers."""
    return plgpu.SMEM(shape, dtype, transforms=mma_transforms(shape, dtype))
