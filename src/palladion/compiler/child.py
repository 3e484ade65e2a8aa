"""Vendors' compilers in child processes, for they end their process on some inputs: none may end the user's.

    reply = child.run(Path(".../worker_tpu.py"), {"module": text, …}, name="libtpu", env={"TPU_MIN_LOG_LEVEL": "3"})

A job is a dictionary of plain values, and so is the reply (`worker.py` is the other side). A worker that aborts, is
killed, takes too long or too much memory ends its job with an exception that says which, with the compiler's last
words; the next job gets a new worker. Workers stay for further jobs, several work at once, threads may ask at the same
time, and a forked process starts workers of its own. All end with the process that started them.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palladion.compiler import worker
from palladion.errors import explain

SECONDS = 300  # for one job, unless the caller says otherwise
IDLE_SECONDS = 600  # a worker that nobody asks for so long ends by itself
LIMIT = max(2, min(4, os.cpu_count() or 1))  # workers that compile at a time
KEPT = LIMIT + 2  # workers in all: of another compiler, one may wait for its next job


_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # signals that no compiler sends itself


class CompilerFailure(RuntimeError):
    """A vendor's compiler did not return.

    Attributes:
      output: what it printed.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class CompilerError(CompilerFailure):
    """The compiler raised an exception: it refuses the program. `kind` is the exception's class name."""

    def __init__(self, kind: str, message: str, output: str = "") -> None:
        super().__init__(message, output)
        self.kind = kind


class CompilerCrashed(CompilerFailure):
    """The compiler ended its process: a failed check of its own, or a fault."""


class CompilerTimedOut(CompilerFailure):
    """The compiler was ended because it took too long."""


class CompilerOutOfMemory(CompilerFailure):
    """The compiler needed more memory than there is."""


class CompilerUnusable(CompilerFailure):
    """The compiler cannot be loaded, whatever the job."""


class _Unused(Exception):
    """The worker had ended before it took the job."""


def run(
    file: Path,
    job: Mapping[str, Any],
    *,
    name: str,
    seconds: float = SECONDS,
    env: Mapping[str, str] | None = None,
    memory: int | None = None,
) -> dict[str, Any]:
    """Have a compiler do one job.

    Arguments:
      file: a Python file with `compile(job) -> reply`, which imports neither palladion nor jax.
      job: plain values.
      name: of the compiler, for messages.
      seconds: how long it may take.
      env: environment variables of the worker; those that the user has set stay as they are.
      memory: bytes that it may take; default: most of the machine's.

    Returns:
      the reply, and under "output" what the compiler printed.

    Raises:
      CompilerError, CompilerCrashed, CompilerTimedOut, CompilerOutOfMemory, CompilerUnusable.
    """
    own = {k: v for k, v in (env or {}).items() if k not in os.environ}
    kind = _Kind(str(file), name, tuple(sorted(own.items())), _most_memory() if memory is None else memory)
    while True:
        process = _pool.take(kind)
        try:
            reply = process.ask(job, seconds)
        except _Unused:
            _pool.drop(process)
        except BaseException as error:
            # After an exception of the compiler's own it can go on; after anything else, Ctrl-C too, it cannot.
            (_pool.give if isinstance(error, CompilerError) else _pool.drop)(process)
            raise
        else:
            _pool.give(process)
            return reply


def _most_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5


# --- one worker -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Kind:
    """What workers must have in common to stand in for each other."""

    file: str
    name: str
    env: tuple[tuple[str, str], ...]
    memory: int


class _Process:
    """A worker, seen from outside."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.has_worked = False
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would have to be read while the compiler runs
        command = [sys.executable, "-P", worker.__file__, kind.file, str(IDLE_SECONDS), str(kind.memory)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env={**os.environ, **dict(kind.env)},
                cwd=_working_folder(),
                bufsize=0,
            )
        except OSError as error:  # no file descriptors, no memory
            self.log.close()
            headline = f"The process of {kind.name} does not start: {error.strerror}."
            hint = "close files, or end other processes: the system has no more to give"
            raise CompilerUnusable(explain(headline, hint=hint)) from error
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)

    def ask(self, job: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        self.log.seek(0)
        self.log.truncate()
        reached = ""
        try:
            self._write(worker.framed((_import_path(), int(seconds) + 1, dict(job))), deadline)
            while (reply := pickle.loads(self._read(deadline)))[0] in (worker.STARTED, worker.READY):
                reached = reply[0]
        except TimeoutError:
            raise self._too_long(seconds) from None
        except (BrokenPipeError, EOFError):
            raise self._death(reached, seconds) from None
        self.has_worked = True
        what, *rest = reply
        output = self._output()
        if what == worker.DONE:
            return {**rest[0], "output": output}
        if what == worker.MEMORY:
            raise self._no_memory(output)
        kind, message = rest
        if reached != worker.READY:
            raise self._unusable(f"{kind}: {message}", output)
        raise CompilerError(kind, message, output)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _wait(self.stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self.stdin.fileno(), view) :]

    def _read(self, deadline: float) -> bytes:
        def exactly(size: int) -> bytes:
            parts = []
            while size:
                _wait(self.stdout.fileno(), select.POLLIN, deadline)
                parts.append(os.read(self.stdout.fileno(), min(size, 1 << 20)))
                if not parts[-1]:
                    raise EOFError
                size -= len(parts[-1])
            return b"".join(parts)

        return exactly(worker.LENGTH.unpack(exactly(worker.LENGTH.size))[0])

    def _output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    # --- why there is no reply
    def _too_long(self, seconds: float) -> CompilerTimedOut:
        self.end()
        text = explain(
            f"{self.kind.name} was ended after {seconds:g} s without a result.",
            hint="a smaller block or grid compiles faster; a loop that is unrolled in Python becomes lax.fori_loop",
        )
        return CompilerTimedOut(text, self._output())

    def _no_memory(self, output: str) -> CompilerOutOfMemory:
        limit = f"{self.kind.memory / 2**30:.1f} GiB"
        text = explain(
            f"{self.kind.name} ran out of memory while it compiled the kernel.",
            limit=limit,
            hint="unroll less: smaller blocks, lax.fori_loop in place of Python loops",
        )
        return CompilerOutOfMemory(text, output)

    def _unusable(self, why: str, output: str) -> CompilerUnusable:
        headline = f"{self.kind.name} cannot be loaded: {why}"
        hint = "what is installed may be broken, or an environment variable wrong that names the library or its options"
        return CompilerUnusable(explain(headline, hint=hint), output)

    def _death(self, reached: str, seconds: float) -> Exception:
        """Why the worker ended, as an exception."""
        status = self.process.wait()
        output = self._output()
        words = last_words(output)
        if not reached and (status == 0 or self.has_worked):  # it left, or was ended, between two jobs
            return _Unused()
        if status == -signal.SIGALRM:
            return self._too_long(seconds)
        if re.search(r"bad_alloc|[Oo]ut of memory|[Cc]annot allocate", words):
            return self._no_memory(output)
        if status == -signal.SIGKILL:
            headline = f"{self.kind.name} was killed while it compiled the kernel, most likely for want of memory."
            hint = "the system does so when memory is short: unroll less, or compile when less else runs"
            return CompilerOutOfMemory(explain(headline, hint=hint), output)
        if -status in _FROM_OUTSIDE:
            headline = f"{self.kind.name} was ended from outside, by signal {signal.Signals(-status).name}."
            return CompilerCrashed(explain(headline, hint="compile again"), output)
        how = f"on signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        if reached != worker.READY:
            return self._unusable(f"it ended {how}, saying: {words or 'nothing'}", output)
        text = explain(
            f"{self.kind.name} crashed on the kernel ({how}): {words or 'it said nothing'}",
            hint="a mistake of the compiler's own; the same written with other operations or block sizes may pass",
        )
        return CompilerCrashed(text, output)

    def end(self) -> None:
        """Kill the worker, if it still runs."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the worker, and let go of its pipes."""
        self.end()
        for file in (self.stdin, self.stdout, self.log):
            with contextlib.suppress(OSError):
                file.close()

    def forget(self) -> None:
        """In a forked process: the worker is the parent's."""
        self.process.returncode = 0  # or Popen warns that a child still runs
        for file in (self.stdin, self.stdout, self.log):
            with contextlib.suppress(OSError):
                file.close()


def _wait(fd: int, event: int, deadline: float) -> None:
    """Wait until a file is ready; other ends that are closed count as ready."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _working_folder() -> str | None:
    """None for this process's own; another where that is gone, for compilers ask for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.sep
    return None


def _import_path() -> list[str]:
    """Where this process finds its packages, so that the worker finds the same."""
    try:
        return [os.path.abspath(p) for p in sys.path]
    except FileNotFoundError:  # the working folder is gone
        return [p for p in sys.path if os.path.isabs(p)]


def last_words(output: str) -> str:
    """What a compiler said before it ended its process: the failed check, else its last line that is no stack frame."""
    fatal = re.search(r"^F\d{4} .*?\] (?:.* is OK \()?(.*)", output, re.MULTILINE)
    if fatal:
        return fatal[1].strip()
    noise = re.compile(r"\s*(https?://symbolize|@|\*\*\*|PC:|#\d+|File \"|\[?0x|$)")
    lines = [line.strip() for line in output.splitlines() if not noise.match(line)]
    return lines[-1] if lines else ""


# --- all workers ------------------------------------------------------------------------------------------------------
class _Pool:
    """The workers of this process."""

    def __init__(self) -> None:
        self.idle: list[_Process] = []
        self.all: set[_Process] = set()
        self.changed = threading.Condition()

    def take(self, kind: _Kind) -> _Process:
        """A worker of a kind, for the caller alone; waits while as many as may be are at work."""
        with self.changed:
            while True:
                if len(self.all) - len(self.idle) < LIMIT:
                    found = next((p for p in reversed(self.idle) if p.kind == kind), None)
                    if found is not None:
                        self.idle.remove(found)
                        return found
                    if len(self.all) >= KEPT:  # the one that has waited longest makes room
                        self._end(self.idle.pop(0))
                    process = _Process(kind)
                    self.all.add(process)
                    return process
                self.changed.wait()

    def give(self, process: _Process) -> None:
        """The caller no longer needs the worker."""
        with self.changed:
            if process in self.all:  # not after a fork, and not at exit
                self.idle.append(process)
            self.changed.notify()

    def drop(self, process: _Process) -> None:
        """The worker is of no more use."""
        with self.changed:
            if process in self.all:
                self._end(process)
            self.changed.notify()

    def _end(self, process: _Process) -> None:
        self.all.discard(process)
        process.close()

    def end_all(self) -> None:
        """At exit. Without the lock: another thread may hold it."""
        for process in list(self.all):
            process.end()

    def forget(self) -> None:
        """In a forked process, where other threads and their locks are gone."""
        for process in self.all:
            process.forget()
        self.__init__()


_pool = _Pool()
atexit.register(_pool.end_all)
os.register_at_fork(after_in_child=_pool.forget)
