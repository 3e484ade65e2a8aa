"""The `palladion` command.

    palladion run [--cpu {refuse,interpret,native}] FILE [ARGS...]     a Pallas program, unchanged, on Palladion
    palladion run [--cpu {refuse,interpret,native}] -m MODULE [ARGS...]
    palladion check [--target cpu] FILE [ARGS...]               the kernel calls it makes, their mistakes, what they
                                                                compile to

`run` does what `python FILE` does (`__main__`, `sys.argv`, `sys.path`, exit status, tracebacks that start in the
program), after `palladion.dropin.install()`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import select
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from palladion import config, dropin

_USAGE = """usage: palladion COMMAND ...

Write a kernel once on Refs; check it, debug it, run it.

commands:
  run FILE [ARGS...]      run a Pallas program on Palladion: its `jax.experimental.pallas` is Palladion
  run -m MODULE [ARGS...] the same for a module, as `python -m` does
  check FILE [ARGS...]    find the kernel calls that a program makes, and mistakes in them

options:
  -h, --help              this text; `palladion COMMAND --help` for a command's own
  --version               the version of Palladion and of JAX
"""

_RUN_USAGE = """usage: palladion run [--cpu {refuse,interpret,native}] FILE [ARGS...]
       palladion run [--cpu {refuse,interpret,native}] -m MODULE [ARGS...]

Run a Pallas program as `python FILE ARGS...` would, with `jax.experimental.pallas` being Palladion.

options:
  --cpu refuse            kernel calls without `interpret` fail on the CPU, as in Pallas (the default)
  --cpu interpret         they run in the reference interpreter
  --cpu native            they are compiled to native code for this machine
  -m MODULE               run a module, as `python -m MODULE` does
  -h, --help              this text

Options stand before FILE; what follows FILE or MODULE goes to the program.
"""


_PIPE_BROKEN = 141  # 128 + SIGPIPE, as shells report a command whose reader has left


class _UsageError(Exception):
    """What is wrong with a command line, in one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `palladion` command.

    Arguments:
      argv: the arguments after the program's name; default: those of this process.

    Returns:
      the exit status: 0, or 2 for a command line that cannot be understood; that of `check` for `check`; 141 when
      nobody reads standard output any longer. A program's own exit status and exceptions (SystemExit too) come out of
      `run` as they are.
    """
    try:
        status = _command(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()  # here, for what Python writes at its own end cannot be caught
        return status
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return _PIPE_BROKEN


def _command(argv: list[str]) -> int:
    command, *rest = argv or [""]
    try:
        if command in _COMMANDS:
            return _COMMANDS[command](rest)
        if command in ("-h", "--help", "help"):
            print(_USAGE, end="")
        elif command == "--version":
            print(f"palladion {importlib.metadata.version('palladion')}, jax {importlib.metadata.version('jax')}")
        elif not command:
            raise _UsageError("palladion: no command given")
        else:
            raise _UsageError(f"palladion: there is no command or option {command!r}")
    except _UsageError as error:
        names = ", ".join(_COMMANDS)
        print(f"{error}.\n  the commands are {names}; palladion --help says more", file=sys.stderr)
        return 2
    return 0


def _nobody_reads() -> bool:
    """Whether standard output is a pipe without a reader (`palladion check FILE | head`); it then goes to nowhere.

    Any other broken pipe, such as a socket of the program's, is an error like all others.
    """
    try:
        out = sys.stdout.fileno()
        poll = select.poll()
    except (AttributeError, OSError, ValueError):  # a stdout without a file, or a system without poll
        return False
    poll.register(out, 0)  # errors are always told
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out)
    os.close(nowhere)
    return True


def _check(argv: Sequence[str]) -> int:
    def prepare() -> None:
        dropin.install()
        dropin.follow_environment()

    return importlib.import_module("palladion.report.command").main(list(argv), prepare)


# --- palladion run: the command line --------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Run:
    """A parsed command line of `palladion run`."""

    target: str
    is_module: bool
    args: tuple[str, ...]
    cpu: str | None


def _parse_run(argv: Sequence[str]) -> _Run | None:
    """The command line of `palladion run`, or None when it asks for help."""
    rest, cpu = list(argv), None
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in ("-h", "--help"):
            return None
        if option in ("-m", "--cpu") and not equals:
            if not rest:
                raise _UsageError(f"palladion run: {option} needs a value")
            value = rest.pop(0)
        if option == "-m":
            return _Run(value, True, tuple(rest), cpu)
        if option != "--cpu":
            raise _UsageError(f"palladion run: there is no option {option!r}; a program's own options follow FILE")
        if value not in ("refuse", "interpret", "native"):
            raise _UsageError(f"palladion run: --cpu takes refuse, interpret or native, not {value!r}")
        cpu = value
    if not rest:
        raise _UsageError("palladion run: no FILE given")
    return _Run(rest[0], False, tuple(rest[1:]), cpu)


def _run(argv: Sequence[str]) -> int:
    parsed = _parse_run(argv)
    if parsed is None:
        print(_RUN_USAGE, end="")
        return 0
    dropin.install()
    try:
        program = _module(parsed.target) if parsed.is_module else _file(parsed.target)
    except _CannotRun as error:
        print(f"palladion run: {error}", file=sys.stderr)
        return error.status
    if parsed.cpu is not None:
        config.cpu = parsed.cpu  # pyright: ignore[reportAttributeAccessIssue] - an option, by the module's __setattr__
    _execute(program, parsed.args)
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"run": _run, "check": _check}


# --- palladion run: finding the program -------------------------------------------------------------------------------
class _CannotRun(Exception):
    """There is no such program. `status` is what Python itself exits with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class _Program:
    """What is to run as `__main__`.

    Attributes:
      compile: gives the code; a SyntaxError in it is the program's.
      argv0: what `sys.argv[0]` shall be.
      attributes: `__file__`, `__spec__` and the like.
    """

    compile: Callable[[], types.CodeType]
    argv0: str
    attributes: dict[str, Any]


def _file(path: str) -> _Program:
    if os.path.isdir(path):
        raise _CannotRun(f"{path!r} is a folder; name a Python file in it", 1)
    if not os.path.exists(path):
        raise _CannotRun(f"there is no file {path!r}", 2)
    full = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    _set_import_path(os.path.dirname(os.path.realpath(path)))

    def code() -> types.CodeType:
        return loader.source_to_code(loader.get_data(full), full)

    attributes = dict(__file__=full, __loader__=loader, __package__=None, __spec__=None)
    return _Program(code, path, attributes)


def _module(name: str) -> _Program:
    _set_import_path(os.getcwd())
    spec = _find_module(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module(f"{name}.__main__")
        if spec is None:
            raise _CannotRun(f"{name!r} is a package without a __main__ module", 1)
    if spec is None:
        raise _CannotRun(f"there is no module {name!r}", 1)
    if spec.origin is None or not spec.has_location or not hasattr(spec.loader, "get_code"):
        raise _CannotRun(f"the module {name!r} is not a Python file", 1)
    loader: Any = spec.loader
    attributes = dict(__file__=spec.origin, __loader__=loader, __package__=spec.parent, __spec__=spec)
    return _Program(lambda: loader.get_code(spec.name), spec.origin, attributes)


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None  # it or a package it lies in; anything else is an import of theirs that failed
        raise
    except ValueError:  # a module without a spec, or a name such as ".x"
        return None


def _set_import_path(folder: str) -> None:
    """The folder of the program comes first in `sys.path`, in place of the folder of the `palladion` command."""
    if sys.flags.safe_path:
        return
    own = {"", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0])), os.path.dirname(sys.argv[0])}
    sys.path[:1] = [folder] if sys.path and sys.path[0] in own else [folder, *sys.path[:1]]


# --- palladion run: running it ----------------------------------------------------------------------------------------
def _execute(program: _Program, args: Sequence[str]) -> None:
    """Run a program as `__main__`, in place of this command's own."""
    main_module = types.ModuleType("__main__")
    vars(main_module).update(program.attributes, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    sys.argv = [program.argv0, *args]
    dropin.follow_environment()
    try:
        exec(program.compile(), vars(main_module))
    except SystemExit:
        raise
    except BaseException:  # shown by Python when it comes out of this process, as it shows any program's
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise


def _without_our_frames(show: Callable[..., Any]) -> Callable[[type, BaseException, Any], None]:
    """An excepthook whose traceback starts where the program starts."""

    def hook(kind: type, error: BaseException, traceback: types.TracebackType | None) -> None:
        entry = traceback
        while entry is not None and entry.tb_frame.f_code is not _execute.__code__:
            entry = entry.tb_next
        traceback = traceback if entry is None else _first_of_the_program(entry.tb_next)
        show(kind, error.with_traceback(traceback), traceback)

    return hook


def _first_of_the_program(entry: types.TracebackType | None) -> types.TracebackType | None:
    """Skips what stands between `exec` and the program: a compilation that failed has no frame of the program."""
    ours = (__name__, "importlib._bootstrap", "importlib._bootstrap_external")
    while entry is not None and entry.tb_frame.f_globals.get("__name__") in ours:
        entry = entry.tb_next
    return entry
