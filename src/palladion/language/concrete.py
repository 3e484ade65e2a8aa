"""Values of calls that run in Python: what a machine gets of concrete arrays, and what the caller gets back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink


def held(x: Any) -> np.ndarray:
    """An operand as NumPy holds it; of PRNG keys their numbers."""
    if jaxlink.is_opaque(getattr(x, "dtype", np.dtype(int))):
        x = jax.random.key_data(x)
    return np.asarray(x)


def returned(x: np.ndarray, aval: Any) -> Any:
    """A result as JAX's array of type `aval`; its memory may become the array's, so nobody may write it any more."""
    if jaxlink.is_opaque(aval.dtype):
        return jaxlink.wrap_keys(jnp.asarray(x), aval.dtype)
    return jax.device_put(x, may_alias=True)
