"""NumPy's matrix products on one thread, for the products of tiles that a simulated GPU does by the hundred.

OpenBLAS wakes its threads from some 64^3 on. For a tile that costs more than it gains, and where other processes want
the cores it costs a hundred times as much, because its threads spin until all of them have come.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import threadpoolctl

_lock = threading.Lock()
_inside: list[Any] = []  # the limits of the blocks that run now; the first one changed the setting


@functools.cache
def _libraries() -> Any:
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run a block with NumPy's products on one thread. The setting is the process's; the last block puts it back."""
    with _lock:
        _inside.append(None if _inside else _libraries().limit(limits=1))
    try:
        yield
    finally:
        with _lock:
            first = _inside[0]
            _inside.pop()
            if not _inside:
                first.restore_original_limits()
