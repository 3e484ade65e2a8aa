"""The whole corpus as native code: plain, under jit, and what is refused."""

import jax
import pytest

import palladion as pl
from corpus import CASES
from corpus.case import check

# Native code holds no 4-bit integers (XLA passes them packed) yet; it says so.
REFUSED = {"four_bit_integers": (TypeError, "holds int4")}


def native(name, **kwargs):
    with pl.config.state("cpu")("native"):
        check(CASES[name], **kwargs)


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("name", [n for n in CASES if n not in REFUSED])
def test_native(name):
    native(name)


@pytest.mark.filterwarnings("ignore::palladion.PalladionWarning")
@pytest.mark.parametrize("name", [n for n in CASES if n not in REFUSED][::3])
def test_native_under_jit(name):
    native(name, transform=jax.jit)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        native(name)
