"""One forking process for all tests of this folder."""

import pytest

from dropin.programs import Forks


@pytest.fixture(scope="session")
def forks():
    server = Forks()
    yield server
    server.close()
