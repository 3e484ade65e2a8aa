"""`palladion check FILE`: run a program, look at every kernel call it makes, report.

Exit status: 0 without findings of level "error", 1 with some, 2 when the program fails or the command is not
understood. With `--json` standard output holds one JSON document, and the program's own output goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress

from palladion.report.analysis import CallReport, analyse, steps_of
from palladion.report.calls import Call, Recorder
from palladion.report.documents import document
from palladion.report.findings import CHECKS
from palladion.report.program import explain_failure, run_program, stdout_to_stderr
from palladion.report.tables import count_levels, print_report, print_summary

USAGE = """\
usage: palladion check [--json] FILE [ARGS...]

Runs a Python program and reports every kernel call that it makes: grid, blocks, what is copied and held on chip,
and what is wrong with it. Calls without `interpret=` are interpreted.

  FILE      the program; jax.experimental.pallas means Palladion in it
  ARGS      its own arguments
  --json    one JSON document on standard output (docs/check.md describes it)

Exit status: 1 when a finding is an error, 2 when the program fails, 0 otherwise."""


@dataclasses.dataclass(frozen=True)
class _Options:
    file: str
    arguments: tuple[str, ...]
    json: bool


class _Usage(Exception):
    """What is wrong with the command line, in one sentence."""


def main(argv: Sequence[str], prepare: Callable[[], object] | None = None) -> int:
    """The command.

    Arguments:
      argv: its arguments, without the name of the command.
      prepare: called before the program is run; the command line passes `palladion.dropin.install`.

    Returns:
      the exit status.
    """
    if any(word in ("-h", "--help") for word in _before_file(argv)):
        print(USAGE)
        return 0
    try:
        options = _parse(argv)
    except _Usage as problem:
        print(f"palladion check: {problem}", file=sys.stderr)
        return 2
    if prepare is not None:
        prepare()
    recorder = Recorder()
    with stdout_to_stderr() if options.json and sys.stdout is not None else contextlib.nullcontext():
        failure = run_program(options.file, options.arguments, recorder)
    with _open_stdout():
        return _report(options, recorder, failure)


@contextlib.contextmanager
def _open_stdout() -> Iterator[None]:
    """Where the program has closed its stdout, or there was none: the report goes to stderr."""
    if sys.stdout is not None and not sys.stdout.closed:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _report(options: _Options, recorder: Recorder, failure: BaseException | None) -> int:
    """Analyse and print what was recorded; the exit status."""
    reports = _analyse(recorder.calls)
    status = 2 if failure is not None else 1 if count_levels(reports)["error"] else 0
    if options.json:
        found = document(options.file, options.arguments, reports, recorder.symbolic, status, failure)
        print(json.dumps(found, indent=2))
    else:
        _print(reports, options.file, recorder.symbolic, failure is not None)
    if failure is not None:
        sys.stdout.flush()
        print(explain_failure(failure, options.file), file=sys.stderr)
    return status


def _before_file(argv: Sequence[str]) -> list[str]:
    """The options that stand before FILE: those after it are the program's."""
    result = []
    for word in argv:
        if not word.startswith("-") or word == "--":
            break
        result.append(word)
    return result


def _parse(argv: Sequence[str]) -> _Options:
    words = list(argv)
    options = _before_file(words)
    for option in options:
        if option != "--json":
            raise _Usage(f"there is no option {option}; the only one is --json, and FILE comes before its own options.")
    rest = words[len(options) :]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise _Usage("name the program to check: palladion check FILE [ARGS...].")
    file, *arguments = rest
    as_json = "--json" in options
    if "--json" in arguments:  # also after FILE, as people write it; a program's own --json comes after "--"
        own = arguments.index("--") if "--" in arguments else len(arguments)
        as_json = as_json or "--json" in arguments[:own]
        arguments = [a for a in arguments[:own] if a != "--json"] + arguments[own + 1 :]
    if not os.path.exists(file):
        raise _Usage(f"there is no file {file}.")
    if os.path.isdir(file):
        raise _Usage(f"{file} is a folder; name the Python file to run.")
    return _Options(file, tuple(arguments), as_json)


# --- analysis, with a progress bar when it takes long -----------------------------------------------------------------
def _analyse(calls: Sequence[Call]) -> list[CallReport]:
    with _progress(sum(map(steps_of, calls))) as tick:
        return [analyse(call, CHECKS, tick) for call in calls]


@contextlib.contextmanager
def _progress(steps: int, patience: float = 1.0) -> Iterator[Callable[[], None]]:
    """A function to call after each step; after `patience` seconds it shows a bar, on a terminal only."""
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("looking at the grid", total=steps)
    start, shown = time.monotonic(), False

    def tick() -> None:
        nonlocal shown
        bar.advance(task)
        if not shown and bar.console.is_terminal and time.monotonic() - start > patience:
            shown = True
            bar.start()

    try:
        yield tick
    finally:
        if shown:
            bar.stop()


def _print(reports: Sequence[CallReport], program: str, symbolic: int, failed: bool) -> None:
    if not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf"):
        with contextlib.suppress(AttributeError):  # a stdout that is not a text file
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    # On a terminal as it comes; in a file or pipe without the blanks that fill up a line.
    with contextlib.nullcontext() if console.is_terminal else console.capture() as captured:
        for report in reports:
            print_report(console, report)
        print_summary(console, reports, program, symbolic, failed)
    if captured is not None:
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
