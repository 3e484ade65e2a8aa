"""What the language says of a dtype: the bits of an element, and what memory of it holds before it is written.

Executors and reports take both from here, so that they agree.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink


def element_bits(dtype: Any) -> int:
    """Bits that an element takes in memory (of a PRNG key: 64)."""
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
