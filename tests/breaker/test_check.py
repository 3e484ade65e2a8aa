"""`palladion check` on programs that behave oddly: calls from threads, a closed standard output."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import threading, sys
    import jax, jax.numpy as jnp
    import palladion as pl

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def call(n):
        x = jnp.zeros((n,))
        blocks, out = pl.BlockSpec((8,), lambda i: (i * 8,)), pl.BlockSpec((8,), lambda i: (i,))  # offsets: an error
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        pl.pallas_call(copy, shape, grid=(n // 8,), in_specs=[blocks], out_specs=out)(x)
"""
THREADS = """
    threads = [threading.Thread(target=call, args=(n,)) for n in (16, 24, 16)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def check(tmp_path, body, *options, **popen):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(body))
    command = [sys.executable, "-m", "palladion", "check", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **popen)


def test_calls_from_other_threads_are_seen(tmp_path):
    """They went unseen: "makes no kernel call", exit status 0."""
    done = check(tmp_path, THREADS)
    assert done.returncode == 1, done.stderr
    assert "2 kernel calls in" in done.stdout
    assert done.stdout.count("out-of-bounds") == 2


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["tables", "json"])
def test_a_program_that_closes_its_standard_output(tmp_path, options):
    done = check(tmp_path, "call(16)\nsys.stdout.close()\n", *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "out-of-bounds" in done.stdout + done.stderr


def test_run_of_a_program_that_closes_its_standard_output(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint('said')\nsys.stdout.close()\n")
    done = subprocess.run(
        [sys.executable, "-m", "palladion", "run", str(file)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")
