"""The eager interpreter, which runs the kernel's own Python on concrete Refs, on the corpus.

It is a debugging tool, so a dynamic index out of range (tag `oob`), which compiled executors clamp, is an error.
"""

import pytest

import palladion as pl
from corpus import CASES, check


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.eager and "oob" not in case.tags])
def test_same_result(name: str) -> None:
    check(CASES[name], interpret=pl.EagerParams())


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "oob" in case.tags])
def test_out_of_range_is_an_error(name: str) -> None:
    with pytest.raises(IndexError, match="runs past dimension 0 of"):
        check(CASES[name], interpret=pl.EagerParams())
