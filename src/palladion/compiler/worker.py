"""The inside of a compiler's child process; `child.py` starts it as a script and talks to it.

    python -P worker.py FILE IDLE_SECONDS MEMORY_BYTES

FILE is a Python file with `compile(job: dict) -> dict`, which calls a vendor's compiler, and where that takes more than
imports, `prepare()`, which loads it: a compiler that cannot be loaded is told apart from one that a job breaks. Neither
this file nor FILE imports palladion or jax: a process that only compiles is there in less than half a second.

Requests come on standard input and replies go to what was standard output, as frames: eight bytes of length, then a
pickle. What the compiler itself prints goes to standard error, which the parent keeps. A vendor's compiler may abort,
hang or take all memory; then this process dies, and the parent says why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
STARTED, READY, DONE, FAILED, MEMORY = "started", "ready", "done", "failed", "memory"
GRACE_SECONDS = 30  # after the parent's own limit: it may be gone


def main(file: str, idle: int, memory: int) -> None:
    """Serve requests until nobody makes any."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    _be_modest(memory)
    compile: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    while (frame := receive(requests, idle)) is not None:
        path, seconds, job = pickle.loads(frame)
        send(replies, (STARTED,))
        signal.alarm(seconds + GRACE_SECONDS)  # ends the process even in the middle of native code
        try:
            if compile is None:
                sys.path[:] = path
                compile = _load(file)
            send(replies, (READY,))
            reply: tuple[Any, ...] = (DONE, compile(job))
        except MemoryError as error:
            reply = (MEMORY, str(error))
        except Exception as error:
            reply = (FAILED, type(error).__name__, str(error))
        signal.alarm(0)
        sys.stderr.flush()
        send(replies, reply)
    os._exit(0)  # the compiler's threads and destructors have nothing left to do


def _be_modest(memory: int) -> None:
    """Leave Ctrl-C to the parent, write no core files, and die before the user's process does when memory is short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _load(file: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("palladion_vendor", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, "prepare", lambda: None)()
    return module.compile


def receive(fd: int, idle: int | None = None) -> bytes | None:
    """One frame; None at the end of the stream, or when `idle` seconds pass before it begins."""
    if idle is not None and not select.select([fd], [], [], idle)[0]:
        return None
    head = _read(fd, LENGTH.size)
    return None if head is None else _read(fd, LENGTH.unpack(head)[0])


def _read(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(fd: int, message: tuple[Any, ...]) -> None:
    """Write one frame."""
    data = memoryview(framed(message))
    while data:
        data = data[os.write(fd, data) :]


def framed(message: tuple[Any, ...]) -> bytes:
    """A message as the bytes of a frame."""
    body = pickle.dumps(message)
    return LENGTH.pack(len(body)) + body


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
