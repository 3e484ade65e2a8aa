"""The cache of object code: what is a hit, what is damaged, who may use the folder; and JAX's own cache on top."""

import dataclasses
import json
import os
import pathlib
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

import palladion
from compiler.cpu import kernels
from palladion import config
from palladion.compiler import disk
from palladion.compiler.cpu import cache, runtime, target
from palladion.errors import PalladionWarning

TESTS = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    """An empty cache folder, and an empty memory."""
    with config.state("cache_dir")(str(tmp_path / "cache")):
        cache._store.memory.clear()
        yield tmp_path / "cache"
    cache._store.memory.clear()


class Build:
    """A builder that counts its calls."""

    def __init__(self, shape=(4,)):
        self.module, self.description, self.calls = *kernels.add(shape), 0

    def __call__(self):
        self.calls += 1
        return self.module, {"shape": list(self.description.args[0].shape)}


def files(folder):
    return sorted(p for p in folder.iterdir())


def run(code, **env):
    given = {**os.environ, "PYTHONPATH": str(TESTS), **env}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], env=given, **pipes)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# --- hits and misses ------------------------------------------------------------------------------------------------
def test_a_miss_builds_and_hits_do_not(folder):
    build = Build()
    first = cache.cached("a source", build)
    assert not first.from_disk and first.code[:4] == b"\x7fELF" and build.calls == 1
    assert cache.cached("a source", build) is first
    cache._store.memory.clear()
    again = cache.cached("a source", build)
    assert again.from_disk and (again.code, again.extra) == (first.code, {"shape": [4]}) and build.calls == 1
    cache.cached("another source", build)
    assert build.calls == 2 and len(files(folder)) == 2


def test_what_is_found_runs(folder):
    m, d = kernels.add((3,), name="found")
    cache.cached(str(m), lambda: (m, None))
    cache._store.memory.clear()
    assert cache.cached(str(m), lambda: pytest.fail("built again")).from_disk
    key = runtime.load(m, d)
    np.testing.assert_array_equal(runtime.call(key, np.ones(3, "f"), np.ones(3, "f"))[0], 2)


def test_the_key_is_of_everything_that_decides_the_code(folder, monkeypatch):
    keys = {cache.digest_of("source"), cache.digest_of("other source")}
    for changed in ("triple", "cpu", "features"):
        host = dataclasses.replace(target.host(), **{changed: "something else"})
        with monkeypatch.context() as patch:
            patch.setattr(target, "host", lambda host=host: host)
            cache.environment.cache_clear()
            keys.add(cache.digest_of("source"))
    for module, name, value in ((target, "CODEGEN_OPT", 0), (cache.llvm, "llvm_version_info", (99, 0, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            cache.environment.cache_clear()
            keys.add(cache.digest_of("source"))
    with monkeypatch.context() as patch:
        patch.setattr(cache.importlib.metadata, "version", lambda name: "99.0")
        cache.environment.cache_clear()
        keys.add(cache.digest_of("source"))
    cache.environment.cache_clear()
    assert len(keys) == 8 and cache.digest_of("source") in keys


def test_load_cached_builds_once_and_remembers_the_description(folder):
    m, d = kernels.two_phases(64)
    calls = []

    def build():
        calls.append(1)
        return m, d

    key, first = runtime.load_cached("two phases of 64", build)
    cache._store.memory.clear()
    again, second = runtime.load_cached("two phases of 64", build)
    assert (again, second, len(calls)) == (key, first, 1) and second == d
    x = np.arange(64, dtype="f")
    np.testing.assert_array_equal(runtime.call(again, x)[1], 2 * x + 2 * x[::-1])


def test_every_field_of_a_description_survives_the_disk():
    a, b = runtime.Array((2, 3), "float32"), runtime.Array((), "bfloat16")
    phases = (runtime.Phase("f", 1, 9, parallel=False, cost_ns=77, chunk=3), runtime.Phase("g", 0, 0))
    d = runtime.KernelDescription("n", (a, b), (a,), phases, 128, ((0, 0),), 5, ("one", "two"), True)
    entry = json.loads(json.dumps(runtime._to_json(d)))
    assert runtime._from_json(entry) == d


def test_a_builder_that_fails_leaves_nothing_behind(folder):
    def fail():
        raise ZeroDivisionError("in the builder")

    with pytest.raises(ZeroDivisionError):
        cache.cached("fails at first", fail)
    with pytest.raises(RuntimeError, match="expected top-level entity"):
        cache.cached("fails at first", lambda: ("this is no IR", None))
    assert files(folder) == []
    assert cache.cached("fails at first", Build()).code


def test_threads_build_an_entry_once(folder):
    build = Build()
    threads = [threading.Thread(target=cache.cached, args=("by threads", build)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert build.calls == 1


# --- damage ---------------------------------------------------------------------------------------------------------
def _flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[: len(disk.MAGIC) + 20],
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: _flip(data, 0),
        lambda data: _flip(data, len(disk.MAGIC) + 3),  # the checksum
        lambda data: _flip(data, len(disk.MAGIC) + 33),  # the length of the JSON
        lambda data: _flip(data, len(disk.MAGIC) + 42),  # the JSON
        lambda data: _flip(data, len(data) - 40),
        lambda data: b"\x7fELF" + bytes(5000),
    ],
)
def test_a_damaged_entry_is_built_again_and_repaired(folder, damage):
    build = Build()
    good = cache.cached("to be damaged", build)
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    cache._store.memory.clear()
    again = cache.cached("to be damaged", build)
    assert build.calls == 2 and not again.from_disk and again.code == good.code
    assert path.read_bytes() == whole
    cache._store.memory.clear()
    assert cache.cached("to be damaged", build).from_disk


# --- the folder -----------------------------------------------------------------------------------------------------
def test_the_folder_is_private(folder):
    before = os.umask(0)
    try:
        cache.cached("private", Build())
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(p.stat().st_mode) for p in files(folder)] == [0o600]


def test_a_folder_that_others_may_write_to_is_not_used(folder):
    folder.mkdir()
    folder.chmod(0o777)
    build = Build()
    with pytest.warns(PalladionWarning, match="others can write to it"):
        cache.cached("where others write", build)
    assert files(folder) == [] and build.calls == 1
    cache.cached("where others write", build)
    assert build.calls == 1  # memory remembers


@pytest.mark.parametrize("place", ["under a file", "proc", "none", "empty"])
def test_without_a_usable_folder_memory_remembers(tmp_path, place):
    (tmp_path / "file").write_text("")
    names = {"under a file": tmp_path / "file" / "cache", "proc": "/proc/nowhere/cache", "none": None, "empty": ""}
    build = Build()
    with config.state("cache_dir")(names[place]):
        cache._store.memory.clear()
        for _ in range(2):
            assert cache.cached(f"no folder: {place}", build).code
    assert build.calls == 1


def test_a_disk_that_is_full_is_no_error(folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cache.cached("on a full disk", Build()).code
    assert files(folder) == []


def test_a_folder_may_be_deleted_at_any_time(folder):
    cache.cached("before", Build())
    for path in files(folder):
        path.unlink()
    folder.rmdir()
    assert cache.cached("after", Build()).code


def test_where_the_folder_is(monkeypatch):
    for name in ("PALLADION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert config._default_cache_dir() == os.path.join("~", ".cache", "palladion")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert config._default_cache_dir() == "/xdg/palladion"
    monkeypatch.setenv("PALLADION_CACHE_DIR", "/mine")
    assert config._default_cache_dir() == "/mine"
    before = palladion.config.cache_dir
    with config.state("cache_dir")("/elsewhere"):
        assert palladion.config.cache_dir == "/elsewhere"
    assert palladion.config.cache_dir == before


# --- several processes ----------------------------------------------------------------------------------------------
SECOND_PROCESS = """if True:
    import jax, numpy as np
    from compiler.cpu import kernels
    from palladion.compiler.cpu import cache, runtime
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    built = []
    def build():
        built.append(1)
        return kernels.add((1024,), name="shared")
    key, _ = runtime.load_cached("shared by processes", build)
    x = np.arange(1024, dtype="f")
    assert (np.asarray(jax.jit(lambda x: runtime.call(key, x, x)[0])(x)) == 2 * x).all()
    print(len(built), len(hits), key)
"""


def test_a_second_process_finds_the_code_and_the_program_that_calls_it(tmp_path):
    env = {
        "PALLADION_CACHE_DIR": str(tmp_path / "ours"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = (finish(run(SECOND_PROCESS, **env)).split() for _ in range(2))
    assert first[:2] == ["1", "0"] and second[:2] == ["0", "1"] and first[2] == second[2]


AT_ONCE = """if True:
    import sys, time, numpy as np
    from compiler.cpu import kernels
    from palladion.compiler.cpu import cache, runtime
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(1, 30):
        key, _ = runtime.load_cached(f"at once {n}", lambda: kernels.add((n,)))
    x = np.ones(n, "f")
    assert (np.asarray(runtime.call(key, x, x)[0]) == 2).all()
    print("done", flush=True)
"""


def test_two_processes_at_once(tmp_path):
    both = [run(AT_ONCE, PALLADION_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        assert finish(process).strip() == "done"
    found = files(tmp_path / "cache")
    assert len(found) == 30 and all(p.suffix == ".o" for p in found)  # 29 kernels and the runtime; no leftovers
    assert all(disk.read(p) is not None for p in found)
