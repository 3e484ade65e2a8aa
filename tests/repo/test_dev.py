"""`./dev test` says and returns what happened: each part can fail the whole, and all parts are run.

The script runs in a checkout of its own, whose environment is this one and whose linters, tests and tutorial
are small stand-ins that pass or fail as a test asks. Setting up an environment is exercised by CI itself.
"""

import shutil
import subprocess
import sys

import pytest

from repo.tree import ROOT

TARGET = int((ROOT / "tests" / "conformance_target.txt").read_text())


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose environment is already set up, with everything passing and no ../shared."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    for name in ("dev", "pyproject.toml", "tests/conformance_target.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "tests" / "test_it.py").write_text("def test_it(): pass\n")
    for name in ("ruff", "pyright", "palladion"):
        executable(root / ".venv" / "bin" / name, f"#!/bin/sh\necho ran {name}\n")
    executable(root / ".venv" / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    checksum = subprocess.run(["cksum"], input=(root / "pyproject.toml").read_bytes(), capture_output=True)
    (root / ".venv" / ".palladion-stamp").write_text(f"{checksum.stdout.decode().strip()} {root}\n")
    return root


def dev(root, *arguments):
    return subprocess.run(
        ["sh", str(root / "dev"), *arguments],
        cwd=root.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def verdicts(output):
    lines = output[output.index("== summary") :].splitlines()[1:]
    return {line[:24].strip(): line[24:].strip() for line in lines if line}


def test_everything_passes(checkout):
    run = dev(checkout, "test")
    assert run.returncode == 0, run.stdout
    assert verdicts(run.stdout) == {"lint": "passed", "pytest": "passed"}
    assert "1 passed" in run.stdout


@pytest.mark.parametrize(
    ("part", "file", "text"),
    [
        ("lint", ".venv/bin/ruff", "#!/bin/sh\nexit 1\n"),
        ("lint", ".venv/bin/pyright", "#!/bin/sh\nexit 1\n"),
        ("pytest", "tests/test_it.py", "def test_it(): assert False\n"),
        ("pytest", "tests/test_it.py", "# no test at all\n"),
    ],
)
def test_one_part_that_fails_fails_the_whole_and_the_rest_still_runs(checkout, part, file, text):
    executable(checkout / file, text)
    run = dev(checkout, "test")
    assert run.returncode != 0
    found = verdicts(run.stdout)
    assert found.pop(part) == "FAILED"
    assert set(found.values()) == {"passed"}


@pytest.mark.parametrize(
    ("last_line", "verdict"),
    [
        (f"tutorial: {TARGET} of 61 cells pass", "passed"),
        (f"tutorial: {TARGET + 1} of 61 cells pass", "passed"),
        (f"tutorial: {TARGET - 1} of 61 cells pass", "FAILED"),
        ("FAIL JAX's own Pallas was loaded: []", "FAILED"),
    ],
)
def test_the_tutorial_counts_where_shared_is_there(checkout, last_line, verdict):
    """Its exit status is 1 whenever any cell fails, so only the count decides."""
    cells = checkout.parent / "shared" / "conformance" / "run_tutorial.py"
    executable(cells, f"print('line 36 pass')\nprint({last_line!r})\nraise SystemExit(1)\n")
    run = dev(checkout, "test")
    assert verdicts(run.stdout)["tutorial"] == verdict, run.stdout
    assert (run.returncode == 0) == (verdict == "passed")


@pytest.mark.parametrize(("status", "verdict"), [(0, "passed"), (1, "FAILED")])
def test_the_mosaic_gpu_sample_counts_where_shared_is_there(checkout, status, verdict):
    shared = checkout.parent / "shared" / "conformance"
    executable(shared / "run_tutorial.py", f"print('tutorial: {TARGET} of 61 cells pass')\n")
    executable(shared / "mgpu_sample.py", f"raise SystemExit({status})\n")
    run = dev(checkout, "test")
    assert verdicts(run.stdout)["Mosaic GPU sample"] == verdict, run.stdout
    assert (run.returncode == 0) == (verdict == "passed")


@pytest.mark.parametrize(("status", "verdict"), [(0, "passed"), (1, "FAILED")])
def test_copied_code_counts_where_shared_is_there(checkout, status, verdict):
    executable(checkout.parent / "shared" / "tools" / "own_code.py", f"raise SystemExit({status})\n")
    run = dev(checkout, "test")
    assert verdicts(run.stdout)["own code"] == verdict, run.stdout
    assert (run.returncode == 0) == (verdict == "passed")


def test_slow_tests_run_only_when_asked_for(checkout):
    (checkout / "tests" / "test_it.py").write_text(
        "import pytest\ndef test_it(): pass\n@pytest.mark.slow\ndef test_slow(): pass\n"
    )
    assert "1 passed" in dev(checkout, "test").stdout
    assert "2 passed" in dev(checkout, "test", "--all").stdout
    assert "1 deselected" in dev(checkout, "test", "tests/test_it.py").stdout


def test_arguments_go_to_pytest_alone(checkout):
    run = dev(checkout, "test", "tests/test_it.py", "-k", "it")
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
    assert "ran ruff" not in run.stdout


@pytest.mark.parametrize(
    ("statuses", "passes"), [((0, 1, 1), True), ((1, 1, 1), False), ((0, 0, 1), False), ((0, 1, 2), False)]
)
def test_the_demo_passes_only_when_each_example_ends_as_expected(checkout, statuses, passes):
    examples = ("clean_matmul", "reduction_first", "offset_index_map")
    cases = "".join(f"  *{e}.py) exit {s} ;;\n" for e, s in zip(examples, statuses, strict=True))
    executable(checkout / ".venv" / "bin" / "palladion", f'#!/bin/sh\ncase "$2" in\n{cases}esac\n')
    run = dev(checkout, "demo")
    assert (run.returncode == 0) is passes, run.stdout
    assert run.stdout.count("\nexpected: ") == 3


def test_exec_runs_in_the_environment_and_passes_the_status_on(checkout):
    run = dev(checkout, "exec", "sh", "-c", "palladion; echo $JAX_PLATFORMS; exit 7")
    assert run.returncode == 7
    assert run.stdout.splitlines()[0] == "ran palladion"


def test_an_unknown_command_is_refused_by_name(checkout):
    run = dev(checkout, "tset")
    assert run.returncode != 0
    assert "no command 'tset'" in run.stdout
