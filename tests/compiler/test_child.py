"""Compilers in child processes: what becomes of a job whose process aborts, hangs, is killed or runs out of memory.

The compiler here is a file of a few lines that does as it is told.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from palladion.compiler import child

COMPILER = """
import ctypes, os, signal, sys, threading, time

count = 0

def compile(job):
    global count
    count += 1
    what = job["do"]
    if what == "echo":
        return {"pid": os.getpid(), "count": count, "x": job["x"], "variable": os.environ.get("CHILD_TEST"),
                "path": sys.path, "modules": [m for m in sys.modules if m in ("jax", "palladion")]}
    if what == "print":
        print("on stdout", flush=True)
        os.write(2, b"on stderr")
        return {}
    if what == "raise":
        raise KeyError("not here")
    if what == "abort":
        os.write(2, b"F1130 02:29:44.289443  2506 table.cc:725] Operation not supported: kVectorAddS16\\n"
                    b"*** Check failure stack trace: ***\\n    @  0x7f99  SendToLog()\\n")
        os.abort()
    if what == "segfault":
        ctypes.string_at(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os.write(2, b"goodbye\\n")
        os._exit(3)
    if what == "sleep":
        time.sleep(60)
    if what == "ignore everything":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    if what == "memory":
        return {"n": len(bytearray(4 << 30))}
    if what == "native memory":
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
        os.abort()
    raise AssertionError(what)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiler") / "compiler.py"
    path.write_text(COMPILER)
    return path


@pytest.fixture
def do(file):
    def run(what, **options):
        job = {"do": what, "x": options.pop("x", None)}
        return child.run(file, job, name="the compiler", **options)

    return run


def test_a_worker_stays_for_further_jobs_and_imports_no_more_than_it_must(do):
    first = do("echo", x=[1, b"two", {"three": 4.0}])
    second = do("echo", x=None)
    assert first["x"] == [1, b"two", {"three": 4.0}]
    assert first["pid"] == second["pid"] != os.getpid() and second["count"] == first["count"] + 1
    assert first["modules"] == [] and first["output"] == ""
    assert first["path"] == [os.path.abspath(p) for p in sys.path]


def test_large_jobs_and_replies_go_through(do):
    x = os.urandom(3 << 20)
    assert do("echo", x=x)["x"] == x


def test_what_the_compiler_prints_comes_with_the_reply_and_nowhere_else(do, capfd):
    do("echo")
    assert do("print")["output"] == "on stdout\non stderr"
    assert do("echo")["output"] == ""
    assert capfd.readouterr() == ("", "")


def test_an_exception_of_the_compiler_leaves_the_worker_alive(do):
    before = do("echo")
    with pytest.raises(child.CompilerError, match="not here") as error:
        do("raise")
    assert error.value.kind == "KeyError"
    assert do("echo")["pid"] == before["pid"]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("abort", child.CompilerCrashed, "the compiler crashed on the kernel (on signal SIGABRT): Operation not supp"),
        ("segfault", child.CompilerCrashed, "on signal SIGSEGV"),
        ("kill", child.CompilerOutOfMemory, "killed while it compiled the kernel, most likely for want of memory"),
        ("exit", child.CompilerCrashed, "(with status 3): goodbye"),
        ("memory", child.CompilerOutOfMemory, "limit: 1.0 GiB"),
        ("native memory", child.CompilerOutOfMemory, "limit: 1.0 GiB"),
    ],
)
def test_a_death_is_told_and_the_next_job_gets_a_new_worker(do, what, kind, words):
    before = do("echo", memory=1 << 30)
    with pytest.raises(child.CompilerFailure) as error:
        do(what, memory=1 << 30)
    assert type(error.value) is kind and words in str(error.value)
    after = do("echo", memory=1 << 30)
    assert after["count"] == 1 and after["pid"] != before["pid"]


@pytest.mark.parametrize("what", ["sleep", "ignore everything"])
def test_a_job_that_takes_too_long_is_ended(do, what):
    pid = do("echo")["pid"]
    start = time.monotonic()
    with pytest.raises(child.CompilerTimedOut, match=r"ended after 0\.3 s"):
        do(what, seconds=0.3)
    assert time.monotonic() - start < 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_users_environment_is_not_touched_and_wins(do, monkeypatch):
    assert do("echo", env={"CHILD_TEST": "ours"})["variable"] == "ours"
    assert "CHILD_TEST" not in os.environ
    monkeypatch.setenv("CHILD_TEST", "theirs")
    assert do("echo", env={"CHILD_TEST": "ours"}, memory=2 << 30)["variable"] == "theirs"


def test_threads_share_a_few_workers(do):
    replies = []
    threads = [threading.Thread(target=lambda n=n: replies.append(do("echo", x=n))) for n in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(r["x"] for r in replies) == list(range(12))
    assert 1 <= len({r["pid"] for r in replies}) <= child.LIMIT


def test_an_interrupted_wait_ends_the_worker(do, monkeypatch):
    pid = do("echo")["pid"]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        do("echo")
    monkeypatch.undo()
    assert do("echo")["pid"] != pid


def test_a_worker_that_has_left_for_want_of_jobs_is_replaced(do, monkeypatch):
    monkeypatch.setattr(child, "IDLE_SECONDS", 0)
    first = do("echo", memory=3 << 30)
    os.waitid(os.P_PID, first["pid"], os.WEXITED | os.WNOWAIT)
    second = do("echo", memory=3 << 30)
    assert second["pid"] != first["pid"] and second["count"] == 1


PROGRAM = """
import os, sys, threading
from pathlib import Path
from palladion.compiler import child

def pid():
    return child.run(Path(sys.argv[1]), {"do": "echo", "x": None}, name="c")["pid"]

def main():
    mine = pid()
    child_pid = os.fork()
    if not child_pid:
        theirs = pid()
        print("fork", theirs != mine, pid() == theirs, flush=True)
        os._exit(0) if "hard" in sys.argv else sys.exit(0)
    assert os.waitpid(child_pid, 0)[1] == 0
    print("parent", pid() == mine, mine, flush=True)
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)

main()
"""


@pytest.mark.parametrize("end", ["", "killed"])
def test_forked_processes_have_their_own_workers_and_all_end_with_their_process(file, end):
    command = [sys.executable, "-W", "error::ResourceWarning", "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run([*command, file, end], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert done.returncode == (-signal.SIGKILL if end else 0)
    fork, parent = done.stdout.splitlines()
    assert fork == "fork True True" and parent.startswith("parent True ")
    pid = int(parent.split()[-1])
    for _ in range(100):  # it ends when it sees that its standard input is closed
        if not _runs(pid):
            return
        time.sleep(0.05)
    pytest.fail("the worker outlives the process that started it")


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_last_words():
    check = (
        "F1130 02:29:46 2 a.cc:7] Check failed: Run([&] { }, true) is OK (INTERNAL: Invalid dimension\n\nat location"
    )
    assert child.last_words(check) == "INTERNAL: Invalid dimension"
    assert child.last_words("LLVM ERROR: no\n#0 0x12 f\n  @ 0x1\n\n") == "LLVM ERROR: no"
    assert child.last_words("") == ""
