"""The reference interpreter on the corpus: called as it is, and under jax.jit.

The cases whose block indices leave the array (tag `clamp`) must say so; no other case may give a warning.
"""

import warnings
from typing import Any

import jax
import pytest

import palladion as pl
from corpus import CASES, Case, check


def _check(case: Case, **more: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(case, interpret=True, **more)
    ours = [str(w.message) for w in caught if issubclass(w.category, pl.PalladionWarning)]
    assert bool(ours) == ("clamp" in case.tags), ours


@pytest.mark.parametrize("name", CASES)
def test_call(name: str) -> None:
    _check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_jit(name: str) -> None:
    _check(CASES[name], transform=jax.jit, seed=1)
