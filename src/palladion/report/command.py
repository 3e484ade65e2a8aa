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
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import Progress

from palladion.compiler import entry
from palladion.compiler.entry import TARGETS, compile_call
from palladion.errors import Finding
from palladion.report.analysis import CallReport, analyse, steps_of
from palladion.report.calls import Call, Recorder
from palladion.report.documents import document
from palladion.report.findings import CHECKS
from palladion.report.machines import column, found_in, merged
from palladion.report.program import explain_failure, run_program, stdout_to_stderr
from palladion.report.simulated import GPUS, CheckParams, Journal, Outcome, identity
from palladion.report.tables import count_levels, print_report, print_summary, refusals

USAGE = """\
usage: palladion check [--json] [--target TARGET]... FILE [ARGS...]

Runs a Python program and reports every kernel call that it makes: grid, blocks, what is copied and held on chip,
and what is wrong with it. Calls without `interpret=` are interpreted, those for GPUs on a simulated one.

  FILE      the program; jax.experimental.pallas means Palladion in it
  ARGS      its own arguments
  --json    one JSON document on standard output (docs/check.md describes it)
  --target TARGET
            also compile each call for TARGET, or run it there, and report what came of it; may be repeated
            cpu: native code for this machine
            tpu:v4i, v4, v5e, v5p, v6e, v7x: by libtpu, for a TPU that need not be here
            triton:sm_80, sm_86, sm_89, sm_90, sm_100, sm_120: by Triton, for a GPU that need not be here
            gpu:sm_90a, gpu:sm_100a: by the Mosaic GPU compiler and NVRTC, for a GPU that need not be here
            gpu:h100, gpu:b200: run calls without `interpret=` on a simulated GPU, races looked for

Exit status: 1 when a finding is an error or a target refuses a call, 2 when the program fails, 0 otherwise."""


@dataclasses.dataclass(frozen=True)
class _Options:
    file: str
    arguments: tuple[str, ...]
    json: bool
    targets: tuple[str, ...] = ()


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
    try:
        options = _parse(argv)
        if options is None:
            print(USAGE)
            return 0
    except _Usage as problem:
        print(f"palladion check: {problem}", file=sys.stderr)
        return 2
    if prepare is not None:
        prepare()
    recorder, journal = Recorder(), Journal()
    gpus = CheckParams(tuple(t for t in options.targets if t in GPUS), journal)
    with stdout_to_stderr() if options.json and sys.stdout is not None else contextlib.nullcontext():
        failure = run_program(options.file, options.arguments, recorder, gpus)
    with _open_stdout():
        return _report(options, recorder, journal, failure)


@contextlib.contextmanager
def _open_stdout() -> Iterator[None]:
    """Where the program has closed its stdout, or there was none: the report goes to stderr."""
    if sys.stdout is not None and not sys.stdout.closed:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _report(options: _Options, recorder: Recorder, journal: Journal, failure: BaseException | None) -> int:
    """Analyse and print what was recorded; the exit status."""
    reports = _analyse(recorder.calls, options.targets, journal)
    found_by = found_in(failure, journal) if reports else None
    if found_by is not None:  # what a check is for, and no failure of the program
        failure = None
        if identity(found_by) not in {identity(f) for report in reports for f in report.findings}:
            reports = _with(reports, found_by)
    wrong = count_levels(reports)["error"] or refusals(reports)
    status = 2 if failure is not None else 1 if wrong else 0
    try:
        if options.json:
            found = document(options.file, options.arguments, reports, recorder.symbolic, status, failure)
            print(json.dumps(found, indent=2))
        else:
            _print(reports, options.file, recorder.symbolic, failure is not None)
            if found_by is not None:
                print("The program ended with the error that was found; what comes after it was not looked at.")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any longer: the command line ends quietly
        raise
    except OSError as error:  # a full disk
        _close_stdout()
        print(f"palladion check: the report cannot be written: {error.strerror}.", file=sys.stderr)
        status = 2
    if failure is not None:
        print(explain_failure(failure, options.file), file=sys.stderr)
    return status


def _with(reports: Sequence[CallReport], finding: Finding) -> list[CallReport]:
    """The reports with what a simulator found in the last call."""
    *before, last = reports
    return [*before, dataclasses.replace(last, findings=(finding, *last.findings))]


def _close_stdout() -> None:
    """Send what is still buffered for stdout to nowhere, or Python would fail on it once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _parse(argv: Sequence[str]) -> _Options | None:
    """The command line; None when it asks for help. Options stand before FILE: those after it are the program's."""
    words, as_json, targets = list(argv), False, []
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option == "--":
            break
        if option in ("-h", "--help"):
            return None
        if option == "--target":
            if not equals and not words:
                raise _Usage("--target needs a value.")
            targets.append(_target(value if equals else words.pop(0)))
        elif option == "--json" and not equals:
            as_json = True
        else:
            raise _Usage(
                f"there is no option {option}; there are --json and --target, and the program's own follow FILE."
            )
    if not words:
        raise _Usage("name the program to check: palladion check FILE [ARGS...].")
    file, *arguments = words
    if "--json" in arguments or "--target" in arguments:  # also after FILE, as people write them
        as_json, arguments = _after_file(arguments, as_json, targets)
    if not os.path.exists(file):
        raise _Usage(f"there is no file {file}.")
    if os.path.isdir(file):
        raise _Usage(f"{file} is a folder; name the Python file to run.")
    return _Options(file, tuple(arguments), as_json, tuple(dict.fromkeys(targets)))


def _after_file(arguments: list[str], as_json: bool, targets: list[str]) -> tuple[bool, list[str]]:
    """Takes out options of ours that stand after FILE: `--json`, and `--target` with a target that we know. A program's
    own come after "--"."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words, own = arguments[:end], []
    while words:
        word = words.pop(0)
        if word == "--target" and words and words[0] in (*TARGETS, *GPUS):
            targets.append(_target(words.pop(0)))
        elif word == "--json":
            as_json = True
        else:
            own.append(word)
    return as_json, own + arguments[end + 1 :]


def _target(name: str) -> str:
    if name not in (*TARGETS, *GPUS):
        raise _Usage(f"there is no target {name}; the targets are: {', '.join((*TARGETS, *GPUS))}.")
    if name not in GPUS:
        try:
            entry.known_target(name)
        except ModuleNotFoundError as missing:  # a vendor's compiler that is not installed
            first, *_, fix = str(missing).splitlines()
            raise _Usage(f"{first}\n{fix}") from None
    return name


# --- analysis, with a progress bar when it takes long -----------------------------------------------------------------
def _analyse(calls: Sequence[Call], targets: Sequence[str], journal: Journal) -> list[CallReport]:
    with _progress(sum(map(steps_of, calls)) + len(calls) * len(targets)) as tick:
        reports = [analyse(call, CHECKS, tick) for call in calls]
        return [_on_targets(r, targets, ran, tick) for r, ran in zip(reports, journal.of(calls))]


def _on_targets(
    report: CallReport, targets: Sequence[str], ran: Mapping[str, Outcome], tick: Callable[[], None]
) -> CallReport:
    """A report with what came of its call on each target: compiled there, or run."""
    call, columns = report.call, []
    for target in targets:
        if target in GPUS:
            columns.append(column(call, target, ran.get(target)))
        else:
            columns.append(compile_call(entry.Call(call.params, call.kernel_at, call.called_at, call.mesh), target))
        tick()
    return dataclasses.replace(report, compiled=tuple(columns), findings=merged(report.findings, ran))


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
