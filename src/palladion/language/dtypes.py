"""What the language says of a dtype: the bits of an element, and what memory of it holds before it is written.

Executors and reports take both from here, so that they agree. And the dtypes of semaphores, which are no data.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import mistake


def element_bits(dtype: Any) -> int:
    """Bits that an element takes in memory (of a PRNG key: 64, of a semaphore: 32)."""
    if isinstance(dtype, SemaphoreDType):
        return dtype.itemsize * 8
    if jaxlink.is_opaque(dtype):
        return 64
    dtype = jnp.dtype(dtype)
    return 8 if dtype == np.bool_ else jax.dtypes.itemsize_bits(dtype)


@functools.cache
def unwritten(dtype: Any) -> np.ndarray:
    """The value of memory that nothing has written, a NumPy scalar: NaN, or the lowest integer (tutorial 2.1).

    No JAX option (`jax_debug_nans`, say) has a part in it.
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan, dtype)
    return np.array(False if dtype == np.bool_ else jnp.iinfo(dtype).min, dtype)


# --- semaphores -------------------------------------------------------------------------------------------------------
class semaphore_dtype(jax.dtypes.extended):
    """What all semaphores are, for `jnp.issubdtype(ref.dtype, …)`."""


class semaphore(semaphore_dtype):
    """A counter that software signals and waits for."""


class barrier_semaphore(semaphore_dtype):
    """A counter that is there on every device, outside any one kernel."""


class _Rules:
    """What JAX asks of an extended dtype: how it is held, and that nothing converts to it."""

    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype: Any) -> Any:
        return jaxlink.ShapedArray((), jnp.dtype("int32"))

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        return jax.dtypes.float0

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
        raise mistake(
            TypeError,
            f"A semaphore ({aval.str_short()}) cannot leave a compiled program.",
            hint="call the kernel that makes it and the one that waits for it in one jitted function",
        )


class SemaphoreDType(jaxlink.ExtendedDType):
    """The dtype of a semaphore Ref.

    Attributes:
      name: as jaxprs print it.
      type: the class of such dtypes.
    """

    _rules = _Rules
    itemsize = 4

    def __init__(self, name: str, kind: type[semaphore_dtype]) -> None:
        self.name, self._type = name, kind
        kind.dtype = self  # pyright: ignore[reportAttributeAccessIssue]  # the class may stand for its one dtype

    @property
    def type(self) -> Any:
        return self._type

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SemaphoreDType) and self.name == other.name

    def __hash__(self) -> int:
        return hash((SemaphoreDType, self.name))
