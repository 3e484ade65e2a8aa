"""One forking process for all tests of this folder; and the drop-in in this process, for tests of a file."""

import pytest

from dropin.programs import Forks
from palladion import dropin


@pytest.fixture(scope="session")
def forks():
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def installed():
    dropin.install()
    yield
    dropin.uninstall()
