"""The whole corpus as native code, plain and under jit."""

import jax
import pytest

import palladion as pl
from corpus import CASES
from corpus.case import check


def native(name, **kwargs):
    with pl.config.state("cpu")("native"):
        check(CASES[name], **kwargs)


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_native(name):
    native(name)


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("name", list(CASES)[::3])
def test_native_under_jit(name):
    native(name, transform=jax.jit)
