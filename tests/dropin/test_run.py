"""`palladion run` does what `python FILE` does, on Palladion."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dropin.programs import file, run

PROGRAM = """\
import os, sys
os.environ["JAX_ENABLE_X64"] = "1"      # as programs do, before they import JAX
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
import palladion, helper

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

if __name__ == "__main__":
    f = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4,), jnp.float64), interpret="compiled" not in sys.argv)
    print(pl.pallas_call is palladion.pallas_call, f(jnp.arange(4.0)).tolist(), jnp.arange(4.0).dtype)
    print(sys.argv)
    print(sys.modules["__main__"].kernel is kernel, __spec__ is None, __package__)
    print(os.path.basename(__file__), os.path.isabs(__file__), os.path.basename(sys.path[0]), helper.name)
    if "exit" in sys.argv:
        sys.exit(7)
    if "message" in sys.argv:
        sys.exit("what went wrong")
    if "raise" in sys.argv:
        helper.boom()
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "hook" in sys.argv:
        sys.excepthook = lambda kind, error, traceback: print("hook", kind.__name__, traceback.tb_frame.f_code.co_name)
        helper.boom()
"""
HELPER = """\
name = "the helper"
def boom():
    raise RuntimeError("boom")
"""
FIRST_LINE = "True [0.0, 2.0, 4.0, 6.0] float64"
COMMANDS = "\n  the commands are run, check; palladion --help says more\n"

# {name: (folder under the temporary one, command line)}
CASES = {
    "file": (".", ["run", "programs/program.py", "--cpu", "-m", "a b"]),
    "module": ("programs", ["run", "-m", "program", "one", "-h"]),
    "package": (".", ["run", "-m", "package", "x"]),
    "exit": (".", ["run", "programs/program.py", "exit"]),
    "message": (".", ["run", "programs/program.py", "message"]),
    "raise": (".", ["run", "programs/program.py", "raise"]),
    "interrupt": (".", ["run", "programs/program.py", "interrupt"]),
    "hook": (".", ["run", "programs/program.py", "hook"]),
    "syntax": (".", ["run", "bad.py"]),
    "refuse": (".", ["run", "programs/program.py", "compiled"]),
    "interpret": (".", ["run", "--cpu", "interpret", "programs/program.py", "compiled"]),
    "interpret with =": (".", ["run", "--cpu=interpret", "programs/program.py", "compiled"]),
    "help": (".", ["--help"]),
    "run help": (".", ["run", "--help"]),
}
# Command lines that cannot be understood, or name no program: exit status and what is said.
REFUSED = {
    "frobnicate": (2, "palladion: there is no command or option 'frobnicate'." + COMMANDS),
    "": (2, "palladion: no command given." + COMMANDS),
    "run": (2, "palladion run: no FILE given." + COMMANDS),
    "run --cpu": (2, "palladion run: --cpu needs a value." + COMMANDS),
    "run --cpu fast x.py": (2, "palladion run: --cpu takes refuse, interpret or native, not 'fast'." + COMMANDS),
    "run --fast x.py": (
        2,
        "palladion run: there is no option '--fast'; a program's own options follow FILE." + COMMANDS,
    ),
    "run nothing.py": (2, "palladion run: there is no file 'nothing.py'\n"),
    "run programs": (1, "palladion run: 'programs' is a folder; name a Python file in it\n"),
    "run -m nothing.at.all": (1, "palladion run: there is no module 'nothing.at.all'\n"),
    "run -m plain": (1, "palladion run: 'plain' is a package without a __main__ module\n"),
    "run -m sys": (1, "palladion run: the module 'sys' is not a Python file\n"),
}


@pytest.fixture(scope="module")
def ran(forks, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    file(root, "programs/program.py", PROGRAM)
    file(root, "programs/helper.py", HELPER)
    file(root, "bad.py", "x = = 1")
    file(root, "package/__init__.py", "value = 3")
    file(root, "package/__main__.py", "from . import value; import sys; print(value, __package__, sys.argv[1:])")
    file(root, "plain/__init__.py", "")
    cases = CASES | {line: (".", line.split()) for line in REFUSED}
    return {name: forks.palladion(*args, cwd=root / folder) for name, (folder, args) in cases.items()}


def test_runs_a_file_as_python_would(ran):
    assert (ran["file"].status, ran["file"].err) == (0, "")
    assert ran["file"].lines == [
        FIRST_LINE,
        "['programs/program.py', '--cpu', '-m', 'a b']",
        "True True None",
        "program.py True programs the helper",
    ]


def test_runs_a_module(ran):
    assert (ran["module"].status, ran["module"].err) == (0, "")
    first, argv, *rest = ran["module"].lines
    assert first == FIRST_LINE
    assert re.fullmatch(r"\['/.*/programs/program.py', 'one', '-h'\]", argv)
    assert rest == ["True False ", "program.py True programs the helper"]


def test_runs_the_main_of_a_package(ran):
    assert ran["package"].lines == ["3 package ['x']"]


def test_exit_status_and_message(ran):
    assert (ran["exit"].status, ran["exit"].err) == (7, "")
    assert (ran["message"].status, ran["message"].err) == (1, "what went wrong\n")


def test_an_exception_shows_the_program_alone(ran):
    err = re.sub(r'File ".*/', 'File "', ran["raise"].err)
    assert ran["raise"].status == 1
    frames = [line.strip() for line in err.splitlines() if line.startswith("  File")]
    boom = PROGRAM.splitlines().index("        helper.boom()") + 1
    assert frames == [f'File "program.py", line {boom}, in <module>', 'File "helper.py", line 3, in boom']
    assert err.startswith("Traceback (most recent call last):\n") and err.endswith("RuntimeError: boom\n")


def test_interrupts_syntax_errors_and_hooks_of_the_program(ran):
    assert ran["interrupt"].status in (130, -2)  # a shell's or the system's way to say SIGINT
    assert ran["interrupt"].err.endswith("KeyboardInterrupt\n") and "cli.py" not in ran["interrupt"].err
    first, *_, last = ran["syntax"].err.splitlines()
    assert ran["syntax"].status == 1
    assert re.fullmatch(r'  File "/.*/bad.py", line 1', first) and last == "SyntaxError: invalid syntax"
    assert (ran["hook"].status, ran["hook"].lines[-1], ran["hook"].err) == (1, "hook RuntimeError <module>", "")


def test_on_the_cpu_a_compiled_call_is_refused_or_interpreted(ran):
    assert ran["refuse"].status == 1
    assert "ValueError: Only interpret mode is supported on CPU backend." in ran["refuse"].err
    assert "palladion run --cpu interpret FILE" in ran["refuse"].err
    for name in ("interpret", "interpret with ="):
        assert (ran[name].status, ran[name].lines[0]) == (0, FIRST_LINE), ran[name].err


@pytest.mark.parametrize("line", REFUSED)
def test_command_lines_that_cannot_be_run(ran, line):
    status, err = REFUSED[line]
    assert (ran[line].status, ran[line].out, ran[line].err) == (status, "", err)


def test_help(ran):
    for name, first in (("help", "usage: palladion COMMAND ..."), ("run help", "usage: palladion run [--cpu")):
        assert ran[name].status == 0 and ran[name].out.startswith(first) and not ran[name].err


def test_version_of_the_module_and_of_the_installed_command():
    ran = run(sys.executable, "-m", "palladion", "--version")
    assert re.fullmatch(rf"palladion \d+\.\d+.*, jax {re.escape(jax.__version__)}\n", ran.out) and ran.status == 0
    command = shutil.which("palladion", path=str(Path(sys.executable).parent))
    if command is not None:
        assert run(command, "--version") == ran


@pytest.mark.parametrize(
    ("body", "status", "last_line"),
    [
        ("print('x')", 141, b""),
        ("for i in range(20_000): print(i)", 141, b""),
        ("import sys; print('x', file=sys.stderr)", 0, b"x"),
    ],
)
def test_a_reader_that_leaves_ends_it_without_a_word(tmp_path, body, status, last_line):
    """`palladion run FILE | head`."""
    (tmp_path / "program.py").write_text(body)
    process = subprocess.Popen(
        [sys.executable, "-m", "palladion", "run", "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    with process.stderr as err:
        assert err.read().strip() == last_line
    assert process.wait() == status


def test_another_broken_pipe_is_the_programs_error(tmp_path):
    (tmp_path / "program.py").write_text("raise BrokenPipeError('a socket')")
    command = [sys.executable, "-m", "palladion", "run", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "BrokenPipeError: a socket"
