"""What the tests of the simulated GPU share: running a call, and what it found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import palladion
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding, PalladionWarning

SCHEDULES = ["lazy", "eager", 1, 2]


def params(**given: Any) -> Any:
    """Parameters of the simulated GPU: races looked for, unless told otherwise."""
    return plgpu.InterpretGPUParams(**{"detect_races": True, **given})


def quiet(call: Callable[[], Any]) -> Any:
    """Run a call that must find nothing, not even a warning; its result."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PalladionWarning)
        result = call()
    assert palladion.last_report().findings == ()
    return result


def finding(call: Callable[[], Any], kind: str, text: str = "") -> Any:
    """Run a call that must raise a finding of this kind, with this text in its message; the finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PalladionWarning)
        with pytest.raises(KernelFinding) as error:
            call()
    found = error.value.finding
    assert found.kind == kind, str(error.value)
    assert text in str(error.value), str(error.value)
    assert found.where is None or ".py:" in found.where
    assert found.hint
    return found


def warned(call: Callable[[], Any], kind: str) -> Any:
    """Run a call that must warn of this kind; its result."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = call()
    assert [f.kind for f in palladion.last_report().findings] == [kind]
    assert any(issubclass(w.category, PalladionWarning) and kind in str(w.message) for w in seen)
    return result


def numbers(*shape: int, dtype: Any = jnp.float32) -> Any:
    """Small integers, exact in every dtype."""
    size = int(np.prod(shape))
    return jnp.asarray((np.arange(size) % 7 - 3).reshape(shape), dtype)
