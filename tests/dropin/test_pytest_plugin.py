"""`pytest -p palladion.dropin`: a test suite written for Pallas runs on Palladion, conftest and workers included."""

import sys

import pytest

from dropin.programs import file, run

CONFTEST = """\
import os
os.environ["JAX_ENABLE_X64"] = "1"
import jax
from jax.experimental import pallas as pl
module_of_pallas_call = pl.pallas_call.__module__

import pytest

@pytest.fixture
def origin():
    return module_of_pallas_call
"""
TESTS = """\
import sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1

def test_origin(origin):
    assert origin == pl.pallas_call.__module__ == "palladion.language.call"

def test_kernel():
    f = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4,), jnp.float64), interpret=True)
    assert f(jnp.arange(4.0)).tolist() == [1, 2, 3, 4]
    assert "jax._src.pallas.pallas_call" not in sys.modules
"""


@pytest.fixture
def suite(tmp_path):
    file(tmp_path, "conftest.py", CONFTEST)
    file(tmp_path, "test_kernels.py", TESTS)
    file(tmp_path, "pytest.ini", "[pytest]\n")
    return tmp_path


@pytest.mark.parametrize("extra", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_the_suite_passes_on_palladion(suite, extra):
    if extra:
        pytest.importorskip("xdist")
    ran = run(sys.executable, "-m", "pytest", "-q", "-p", "palladion.dropin", *extra, cwd=suite)
    assert ran.status == 0, ran.out + ran.err
    assert "2 passed" in ran.lines[-1]


def test_without_the_plugin_it_is_jaxs_own(suite):
    """The suite can tell the difference: a check of the check."""
    ran = run(sys.executable, "-m", "pytest", "-q", cwd=suite)
    assert ran.status == 1
    assert "2 failed" in ran.lines[-1]
