"""Running the program that is checked: as `python FILE ARGS…` would, with its kernel calls recorded.

Calls without `interpret=` run in the reference interpreter (`config.cpu = "interpret"`), so that a program written
for hardware runs to its end here; those for a GPU run on a simulated one (`simulated`). Warnings about kernel calls are
left out: the findings say the same.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

import jax

from palladion import config
from palladion.errors import PalladionWarning
from palladion.language.primitive import observing
from palladion.report.calls import Recorder
from palladion.report.simulated import CheckParams


def run_program(
    file: str, arguments: Sequence[str], recorder: Recorder, interpret: CheckParams
) -> BaseException | None:
    """Run a program to its end.

    Arguments:
      file: the Python file, run as `__main__`.
      arguments: its `sys.argv[1:]`.
      recorder: is told of its kernel calls.
      interpret: how calls run that do not say it.

    Returns:
      what ended it, or None when it ended well (`sys.exit(0)` included).
    """
    with _as_script(file, arguments), _interpreted(interpret), observing(recorder), warnings.catch_warnings():
        warnings.simplefilter("ignore", PalladionWarning)
        try:
            runpy.run_path(file, run_name="__main__")
            jax.effects_barrier()  # prints and failed checks of calls that are still running
        except SystemExit as end:
            return None if end.code in (None, 0) else end
        except Exception as error:
            return error
    return None


@contextlib.contextmanager
def _as_script(file: str, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _interpreted(interpret: CheckParams) -> Iterator[None]:
    """For the whole process: a program may make its calls from other threads."""
    options = {"cpu": "interpret", "interpret": interpret}
    before = {name: config.get(name) for name in options}
    try:
        for name, value in options.items():
            setattr(config, name, value)  # the options are set through the module
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is written to stdout, by Python, by C code and by child processes, to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with _second_stderr() as out, contextlib.redirect_stdout(out):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextlib.contextmanager
def _second_stderr() -> Iterator[TextIO]:
    """Another file that writes where stderr does: the program may close its stdout, and that is not our stderr."""
    try:
        number = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):  # a stderr without a file of the system
        yield sys.stderr
        return
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    with open(number, "w", buffering=1, encoding=encoding, errors=errors) as out:
        yield out


def explain_failure(failure: BaseException, file: str) -> str:
    """The program's traceback, from its own first line on; of `sys.exit`, one sentence."""
    if isinstance(failure, SystemExit):
        code = failure.code
        return f"{file} ended with sys.exit({code!r})."
    trace = failure.__traceback__
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename != file:
        own = own.tb_next
    return "".join(traceback.format_exception(type(failure), failure, own or None)).rstrip()
