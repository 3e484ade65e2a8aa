"""The eager interpreter, which runs the kernel's own Python on concrete Refs, on the corpus."""

import pytest

import palladion as pl
from corpus import CASES, check


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.eager])
def test_eager(name: str) -> None:
    check(CASES[name], interpret=pl.EagerParams())
