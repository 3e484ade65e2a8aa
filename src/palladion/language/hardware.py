"""Which device a question about "the" hardware is about (`pltpu.get_tpu_info`, `pltriton.get_gpu_info`, ...).

In order: the abstract device of the mesh set by `jax.sharding.use_abstract_mesh` (so that a kernel can be
traced for a chip that is not there), the device set by `jax.default_device`, the first local device.
"""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["current_device"]


def current_device() -> Any:
    """The device meant here: a `jax.Device` or a `jax.sharding.AbstractDevice`; both have `.device_kind`."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return abstract
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default if default is not None else jax.local_devices()[0]
