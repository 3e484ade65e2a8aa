"""`palladion check` as a command: what it prints, its exit status, its JSON, and what it does to the program."""

import json
import os
import re
import subprocess
import sys
import textwrap
import warnings

import pytest
from rich.console import Console

import palladion.report.command as command
from palladion import config
from palladion.language.index_maps import MAX_POINTS
from palladion.report.command import main
from repo.tree import ROOT

HEADER = """
import sys
import jax, jax.numpy as jnp
import palladion as pl

def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]

x = jnp.zeros((32, 128))
def call(in_map=lambda i: (i, 0), **options):
    spec = lambda index_map: pl.BlockSpec((8, 128), index_map)
    return pl.pallas_call(copy, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(4,), in_specs=[spec(in_map)],
                          out_specs=spec(lambda i: (i, 0)), **options)(x)
"""
CLEAN = "call()"
WRONG = "call(lambda i: (8 * i, 0))"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a program and gives its name, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def write(body, name="program.py", header=HEADER):
        (tmp_path / name).write_text(header + textwrap.dedent(body) + "\n")
        return name

    return write


def run(*words, **environment):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "palladion", "check", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


# --- exit status ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (CLEAN, 0),
        (WRONG, 1),
        ("call(); raise RuntimeError('oh')", 2),
        (f"{WRONG}; raise RuntimeError('oh')", 2),
        ("call(); sys.exit(0)", 0),
        (f"{WRONG}; sys.exit()", 1),
        ("call(); sys.exit(3)", 2),
        ("call(); sys.exit('no luck')", 2),
        ("", 0),
    ],
)
def test_exit_status(program, body, status):
    assert main([program(body)]) == status


def test_exit_status_of_the_process(program):
    assert [run(program(body)).returncode for body in (WRONG, "1 / 0")] == [1, 2]


# --- the command line -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--target", "riscv", "x.py"], "there is no target riscv; the targets are: cpu"),
        (["--target=riscv", "x.py"], "there is no target riscv; the targets are: cpu"),
        (["--target"], "--target needs a value"),
        (["--target", "cpu"], "name the program to check"),
        (["-v", "x.py"], "there is no option -v"),
        (["nowhere.py"], "there is no file nowhere.py."),
        ([], "name the program to check"),
        (["--json"], "name the program to check"),
        (["."], ". is a folder"),
    ],
)
def test_a_command_line_that_is_not_understood(words, sentence, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"palladion check: {sentence}")


def test_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: palladion check") and "--json" in out


def test_arguments_belong_to_the_program(program, capsys):
    name = program("print(sys.argv)")
    assert main([name, "--size", "8", "-h"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"['{name}', '--size', '8', '-h']"
    assert main([name, "a", "--json", "--", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == f"['{name}', 'a', '--json']"
    assert json.loads(out)["arguments"] == ["a", "--json"]


# --- what the program meets -----------------------------------------------------------------------------------------
def test_the_program_runs_as_a_script(program):
    body = """
    import helper
    assert __name__ == "__main__" and __file__.endswith("program.py")
    assert helper.value == 7
    """
    program("value = 7", "helper.py", header="")
    before = list(sys.argv), list(sys.path), config.get("cpu")
    assert main([program(body)]) == 0
    assert (list(sys.argv), list(sys.path), config.get("cpu")) == before


def test_calls_without_interpret_run_and_give_values(program):
    assert main([program("assert (call() == x).all(); call(interpret=False)")]) == 0


def test_prepare_comes_before_the_program(program):
    prepared = []
    assert main([program("")], lambda: prepared.append(True)) == 0
    assert main(["nowhere.py"], lambda: prepared.append(False)) == 2
    assert prepared == [True]


def test_a_program_written_for_jaxs_own_pallas(program):
    name = program(WRONG, header=HEADER.replace("import palladion as pl", "from jax.experimental import pallas as pl"))
    source = "import sys; from palladion import dropin; from palladion.report.command import main; "
    source += f"sys.exit(main(['--json', {name!r}], dropin.install))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (call,) = json.loads(done.stdout)["calls"]
    assert [f["kind"] for f in call["findings"]] == ["out-of-bounds"]


def test_the_command_line_gives_a_program_palladion_as_jaxs_pallas(program):
    """Without the drop-in the program would run on JAX's own Pallas, and no call of it would be seen."""
    name = program(WRONG, header=HEADER.replace("import palladion as pl", "from jax.experimental import pallas as pl"))
    done = run(name)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert "error  out-of-bounds at program.py:14 (<lambda>)" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 kernel call in program.py: 1 error"


def test_the_interpreters_warning_is_left_to_the_finding(program):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([program(WRONG)]) == 1


# --- text -----------------------------------------------------------------------------------------------------------
def test_text_of_a_finding(program, capsys):
    main([program("print('mine')\n" + WRONG)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine" and lines[1].startswith("copy ──")
    assert lines[2:4] == ["program.py:6", "grid (4,) = 4 programs, called once at program.py:12"]
    text = "\n".join(lines)
    assert "  in   x_ref    f32[32,128]  (8, 128)  default  2 x 4.0 KiB       2" in text
    assert "error  out-of-bounds at program.py:15 (<lambda>)" in text
    assert lines[-1] == "1 kernel call in program.py: 1 error"


def test_text_is_plain_and_80_columns_wide(program):
    done = run(
        program(f"{WRONG}; call(name='a_kernel_with_a_rather_long_name' * 4)"), COLUMNS="", TERM="xterm-256color"
    )
    assert "\x1b" not in done.stdout and done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_a_long_path_is_never_broken(program, capsys):
    folder = "a_folder_with_a_long_name/" * 4
    os.makedirs(folder)
    name = program(WRONG, f"{folder}program.py")
    main([name])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  error  out-of-bounds")
    assert [line for line in lines if folder in line] == [
        f"{name}:6",
        f"{name}:12",
        f"         at {name}:14 (<lambda>)",
        f"{name}:",
    ]
    assert f"at {name}" in lines[at + 1]
    assert max(len(line) for line in lines if folder not in line) <= 80


def test_a_reader_that_leaves_ends_it_without_a_word(program):
    """`palladion check FILE | head`, for what the program prints and for what the check does."""
    for body in ("call()", "for i in range(20_000): print(i)"):
        command = [sys.executable, "-u", "-m", "palladion", "check", program(body)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141
        process.stderr.close()


def test_text_where_the_terminal_knows_ascii_only(program):
    done = run(program(CLEAN), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0 and done.stdout.isascii() and "no findings" in done.stdout


def test_colours_on_a_terminal(program, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    main([program(WRONG)])
    assert "\x1b[1;31merror" in capsys.readouterr().out


def test_a_program_without_kernels_says_so(program, capsys):
    main([program("")])
    assert capsys.readouterr().out == "program.py makes no kernel call.\n"


def test_calls_up_to_a_failure_are_shown_and_the_traceback_starts_in_the_program(program, capsys):
    body = WRONG + "\ndef inner():\n    raise RuntimeError('oh')\ninner()"
    assert main([program(body)]) == 2
    out, err = capsys.readouterr()
    assert "out-of-bounds" in out and "The program failed" in out
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "RuntimeError: oh"
    assert re.fullmatch(r'  File "program.py", line \d+, in <module>', lines[1])
    assert "runpy" not in err and "report" not in err


def test_a_program_that_fails_in_its_first_kernel_is_not_said_to_make_no_call(program, capsys):
    assert main([program("pl.pallas_call(lambda o: bool(o[0]), jax.ShapeDtypeStruct((8,), jnp.float32))()")]) == 2
    assert capsys.readouterr().out == "program.py failed before it had made any kernel call.\n"


def test_a_syntax_error_is_the_programs(program, capsys):
    assert main([program("def (")]) == 2
    err = capsys.readouterr().err
    assert "SyntaxError" in err and "program.py" in err and "runpy" not in err


def test_sys_exit_with_a_status_is_a_failure_in_one_sentence(program, capsys):
    main([program("sys.exit(3)")])
    assert capsys.readouterr().err == "program.py ended with sys.exit(3).\n"


# --- JSON -----------------------------------------------------------------------------------------------------------
def as_json(*words, capfd):
    status = main([*words, "--json"])
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["exit_status"] == status
    return found, err


DOCS = (ROOT / "docs" / "check.md").read_text()


def test_json_has_the_keys_that_are_documented(program, capfd):
    found, _ = as_json(program(WRONG), capfd=capfd)
    tables = re.findall(r"^\| key \| value \|\n\|---\|---\|\n((?:\|.*\n)+)", DOCS, re.MULTILINE)
    document_keys, call_keys = (re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", t, re.M))) for t in tables)
    assert list(found) == document_keys
    (call,) = found["calls"]
    assert list(call) == call_keys
    buffers = DOCS[DOCS.index("An object of `buffers`:") :]
    assert all(f"`{key}`" in buffers for key in call["buffers"][0])
    limits = re.search(r"^\| `on_chip` .*$", DOCS, re.MULTILINE).group()
    assert all(f"`{key}`" in limits for key in (*call["on_chip"], *call["on_chip"]["limits"][0]))
    assert all(f"`{key}`" in DOCS for key in call["findings"][0])


def test_json_values(program, capfd):
    found, _ = as_json(program(WRONG), "a", capfd=capfd)
    assert (found["schema"], found["program"], found["arguments"]) == (1, "program.py", ["a"])
    assert found["counts"] == {"errors": 1, "warnings": 0, "notes": 0} and found["failure"] is None
    (call,) = found["calls"]
    assert (call["name"], call["grid"], call["programs"], call["count"]) == ("copy", [4], 4, 1)
    assert call["kernel"] == "program.py:6" and call["target"] == "any"
    block = dict(shape=[32, 128], dtype="float32", block=[8, 128], memory_space="default", block_bytes=4096, buffers=2)
    assert call["buffers"] == [
        dict(role="input", name="x_ref", **block, copies=2, moved_bytes=8192, index_map="program.py:14 (<lambda>)"),
        dict(role="output", name="o_ref", **block, copies=4, moved_bytes=16384, index_map="program.py:13 (<lambda>)"),
    ]
    assert call["moved_bytes"] == 24576 and call["on_chip"]["bytes"] == 16384
    (finding,) = call["findings"]
    assert (finding["kind"], finding["level"], finding["operand"]) == ("out-of-bounds", "error", "x_ref (input 0)")
    assert finding["where"] == "program.py:14 (<lambda>)" and finding["when"] == "program (1,), the first of 3"


def test_json_alone_is_on_stdout(program, capfd):
    body = """
    import os, subprocess
    print("from python"); os.write(1, b"from C\\n")
    subprocess.run(["echo", "from a child"])
    pl.pallas_call(lambda o_ref: pl.debug_print("from a kernel"), jax.ShapeDtypeStruct((8,), jnp.float32))()
    """
    found, err = as_json(program(body), capfd=capfd)
    assert len(found["calls"]) == 1
    for line in ("from python", "from C", "from a child", "from a kernel"):
        assert line in err.splitlines()
    print("stdout is back")
    assert capfd.readouterr().out == "stdout is back\n"


def test_json_of_a_failure(program, capfd):
    found, err = as_json(program("call(); raise RuntimeError('oh')"), capfd=capfd)
    assert found["failure"] == {"type": "RuntimeError", "message": "oh"} and found["exit_status"] == 2
    assert len(found["calls"]) == 1 and err.rstrip().endswith("RuntimeError: oh")


# --- progress -------------------------------------------------------------------------------------------------------
def test_a_bar_is_shown_on_a_terminal_once_it_takes_long(monkeypatch, capsys):
    shown = []
    for terminal, patience in ((True, 0.0), (True, 60.0), (False, 0.0)):
        consoles = []
        monkeypatch.setattr(
            command,
            "Console",
            lambda **kwargs: consoles.append(Console(force_terminal=terminal, **kwargs)) or consoles[0],
        )
        with command._progress(3, patience) as tick:
            for _ in range(3):
                tick()
        shown.append("looking at the grid" in capsys.readouterr().err)
    assert shown == [True, False, False]


def test_a_grid_of_a_million_programs(program, capfd):
    body = f"""
    rows = pl.BlockSpec((1, 1), lambda i, j: (i, 0))
    shape = jax.ShapeDtypeStruct((4096, 1), jnp.int8)
    f = pl.pallas_call(copy, shape, grid=(4096, {MAX_POINTS // 1024}), in_specs=[rows], out_specs=rows)
    jax.eval_shape(f, shape)
    """
    found, _ = as_json(program(body), capfd=capfd)
    (call,) = found["calls"]
    assert call["sampled"] and call["programs"] == 4 * MAX_POINTS
    assert "not-checked" in {f["kind"] for f in call["findings"]}


SIMULATED = """
from palladion import tpu as pltpu

def start_only(x_ref, o_ref, sem):
    pltpu.make_async_copy(x_ref, o_ref, sem).start()

in_hbm = pl.BlockSpec(memory_space=pl.ANY)
call()
pl.pallas_call(start_only, x, in_specs=[in_hbm], out_specs=in_hbm, scratch_shapes=[pltpu.SemaphoreType.DMA],
               interpret=pltpu.InterpretParams())(x)
call()
"""


def test_what_the_simulated_tpu_finds_is_in_the_report(program, capsys):
    file = program(SIMULATED)
    assert main([file]) == 1
    text = capsys.readouterr().out
    assert "error  missing-wait at program.py" in text
    assert "2 kernel calls in program.py: 1 error" in text
    assert "The program ended with the error that was found" in text
    assert main(["--json", file]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["failure"], found["counts"]["errors"]) == (None, 1)
    assert found["calls"][-1]["findings"][0]["kind"] == "missing-wait"
