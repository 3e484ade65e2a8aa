"""The reference interpreter on the corpus: called as it is, and under jax.jit."""

import jax
import pytest

from corpus import CASES, check


@pytest.mark.parametrize("name", CASES)
def test_call(name: str) -> None:
    check(CASES[name], interpret=True)


@pytest.mark.parametrize("name", CASES)
def test_jit(name: str) -> None:
    check(CASES[name], transform=jax.jit, seed=1, interpret=True)
