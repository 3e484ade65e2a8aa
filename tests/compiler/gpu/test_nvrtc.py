"""NVRTC: PTX and machine code, errors with the user's line, threads, crashes; and the cache in front of it."""

import threading

import pytest

from compiler.gpu import sources
from compiler.gpu.sources import SCALE, needs_nvrtc
from palladion import config
from palladion.compiler import child
from palladion.compiler.gpu import cache, nvrtc, places
from palladion.compiler.gpu.nvrtc import NvrtcError, compile_source
from palladion.errors import TargetNotBuilt


def refused(source, arch="sm_90a", **options):
    with pytest.raises(NvrtcError) as error:
        compile_source(source, arch, "k", **options)
    return error.value


def kernel(*lines):
    """A kernel k(float* a) with these lines, the first of which is line 3."""
    body = "\n".join(lines)
    return f'// user.py:2 (kernel)\nextern "C" __global__ void k(float* a) {{\n{body}\n}}\n'


# --- what comes out ---------------------------------------------------------------------------------------------------
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_one_call_gives_ptx_cubin_and_log(arch):
    binary = compile_source(SCALE, arch, "scale")
    assert f".target {arch}" in binary.ptx and ".visible .entry scale(" in binary.ptx
    assert binary.cubin[:4] == b"\x7fELF" and 0 < binary.seconds < 30
    assert f"Compiling entry function 'scale' for '{arch}'" in binary.log and "spill stores" in binary.log
    assert "\0" not in binary.ptx + binary.log


@needs_nvrtc
def test_the_same_source_gives_the_same_code_wherever_it_is_compiled(tmp_path, monkeypatch):
    first = compile_source(SCALE, "sm_90a", "scale")
    monkeypatch.chdir(tmp_path)
    again = compile_source(SCALE, "sm_90a", "scale")
    assert (first.ptx, first.cubin) == (again.ptx, again.cubin)
    assert '.file\t1 "/palladion/scale.cu"' in first.ptx


@needs_nvrtc
def test_options_reach_the_compiler():
    source = "#ifndef N\n#error no N\n#endif\n" + kernel("a[0] = N;")
    assert "no N" in refused(source).reason
    ptx = [compile_source(source, "sm_90a", "k", options=[f"-DN={n}"]).ptx for n in (5, 6)]
    assert ptx[0] != ptx[1] and "1084227584" in ptx[0]  # the bits of 5.0


@needs_nvrtc
def test_threads_compile_at_once():
    found = {}

    def work(n):
        found[n] = compile_source(kernel(f"a[0] = {n};"), "sm_90a", f"k{n}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({b.cubin for b in found.values()}) == 6


@needs_nvrtc
def test_file_names_that_are_no_unicode_are_no_error():
    assert compile_source(kernel("// caf\udce9.py:3", "a[0] = 1;"), "sm_90a", "kérnel<1>").cubin
    with pytest.raises(ValueError, match="NUL"):
        compile_source("\0", "sm_90a", "k")


# --- errors -----------------------------------------------------------------------------------------------------------
@needs_nvrtc
def test_an_error_in_cuda_names_the_line_and_the_users():
    error = refused(kernel("// user.py:7 (kernel)  x_ref[...] + y", "a[0] = y;", "// user.py:8", "a[1] = 2;"))
    assert error.reason == 'identifier "y" is undefined' and (error.line, error.where) == (4, "user.py:7 (kernel)")
    first, *rest = str(error).splitlines()
    assert first == 'NVRTC does not compile k for sm_90a: identifier "y" is undefined'
    assert rest[:2] == ["  at: user.py:7 (kernel)", "  line 4 of the CUDA: a[0] = y;"]
    assert rest[2].startswith("  fix: ") and len(rest) == 3


@needs_nvrtc
def test_an_error_in_inline_ptx_names_the_ptx_too():
    error = refused(kernel("a[0] = 1;", "// user.py:9", 'asm volatile("bar.sync %0, 3;" :: "f"(a[1]));'))
    assert error.reason == "ptxas: Arguments mismatch for instruction 'bar'" and error.where == "user.py:9"
    assert "\n  the PTX: bar.sync %f" in str(error) and error.line == 5


@needs_nvrtc
def test_an_error_in_an_inlined_function_is_where_the_kernel_calls_it():
    functions = (
        '__device__ inline void f(int x) {\n  asm volatile("foo %0;" :: "r"(x)); }\n'
        "__device__ inline void g(int x) {\n  f(x + 1); }\n"
    )
    error = refused(
        functions + kernel("// user.py:5", "a[0] = 1;", "// user.py:6", "g(3);", "// user.py:7", "a[1] = 1;")
    )
    assert error.where == "user.py:6" and "known instruction: 'foo'" in error.reason


@needs_nvrtc
def test_what_is_wrong_with_options_is_said():
    assert refused(kernel(), arch="sm_99").reason == "invalid value for --gpu-architecture (-arch)"
    assert "--frobnicate" in refused(kernel(), options=["--frobnicate"]).reason
    assert "cuda_fp16.h" in refused("#include <cuda_fp16.h>").reason


@needs_nvrtc
@pytest.mark.parametrize(
    "source", ["", "}", "\\", "/*", "#include __FILE__", "extern", "x" * 100_000, "{" * 5_000, "?" * 1_000]
)
def test_odd_sources_end_in_words(source):
    try:
        compile_source(source, "sm_90a", "odd")
    except NvrtcError as error:
        assert str(error).startswith("NVRTC does not compile odd for sm_90a: ") and len(error.reason) > 5
    compile_source(SCALE, "sm_90a", "scale")  # and the next one compiles


@needs_nvrtc
def test_a_kernel_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(nvrtc, "SECONDS", 0.5)
    lines = [f"x = x * a[{i}] + a[{i * 7 % 4000}];" for i in range(4000)]
    with pytest.raises(child.CompilerTimedOut, match=r"^NVRTC was ended after 0.5 s without a result\."):
        compile_source(kernel("float x = 0;", *lines, "a[0] = x;"), "sm_90a", "long")


def test_without_the_extra_the_command_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    for compiler in (compile_source, cache.compile_source):
        with pytest.raises(TargetNotBuilt, match=r"needs NVRTC .*\n  fix: pip install 'palladion\[gpu\]'"):
            compiler(SCALE, "sm_90a", "scale")


@needs_nvrtc
def test_without_the_library_too(monkeypatch):
    def missing(*args, **options):
        raise child.CompilerError("DynamicLibNotFoundError", "no nvrtc")

    monkeypatch.setattr(nvrtc.child, "run", missing)
    with pytest.raises(TargetNotBuilt, match=r"pip install 'palladion\[gpu\]'"):
        compile_source(SCALE, "sm_90a", "scale")


# --- lines ------------------------------------------------------------------------------------------------------------
def test_a_users_line_is_the_nearest_comment_above_or_beside():
    lines = ["int a;", "// k.py:3 (f)", "int b;", "int c; // <cell 2>:4", "int d;  // k.py:5", "int e; // not: one"]
    source = "\n".join([*lines, "// k.py:6  x + 1", "int f;"])
    found = [places.user_line(source, n) for n in range(1, 9)]
    assert found == [None, "k.py:3 (f)", "k.py:3 (f)", "k.py:3 (f)", "k.py:5", "k.py:5", "k.py:6", "k.py:6"]
    assert places.user_line(source, None) is None and places.user_line("", 1) is None
    assert places.user_line(source, 99) == "k.py:6"


PTX = """.visible .entry k(
.loc 1 3 0
add;
.loc 1 20 3, function_name $f, inlined_at 1 12 5
mul;
.loc 1 12 5, function_name $g, inlined_at 1 7 1
sub;
.loc 1 20 3, function_name $f, inlined_at 1 12 5
div;
.loc 1 8 0
neg;
.visible .entry l(
abs;"""


def test_a_line_of_ptx_leads_to_the_kernels_own_line():
    numbers = {text[:-1]: n for n, text in enumerate(PTX.splitlines(), 1)}
    assert [places.cuda_line(PTX, numbers[i]) for i in ("add", "mul", "sub", "div", "neg", "abs")] == [
        3,
        12,
        7,
        7,
        8,
        None,
    ]


# --- the cache --------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    """An empty cache folder, and an empty memory."""
    with config.state("cache_dir")(str(tmp_path / "cache")):
        cache._store.memory.clear()
        yield tmp_path / "cache"
    cache._store.memory.clear()


@needs_nvrtc
def test_a_kernel_is_compiled_once(folder, monkeypatch):
    first = cache.compile_source(SCALE, "sm_90a", "scale")
    assert not first.from_disk and len(list(folder.iterdir())) == 1
    monkeypatch.setattr(nvrtc.child, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert cache.compile_source(SCALE, "sm_90a", "scale") == first
    cache._store.memory.clear()
    again = cache.compile_source(SCALE, "sm_90a", "scale")
    assert again.from_disk
    for name in ("ptx", "cubin", "log", "seconds", "arch", "name", "source", "options"):
        assert getattr(again, name) == getattr(first, name), name


@needs_nvrtc
def test_the_key_is_of_everything_that_decides_the_code(monkeypatch):
    keys = [
        cache.digest_of(SCALE, "sm_90a", "scale"),
        cache.digest_of(SCALE + " ", "sm_90a", "scale"),
        cache.digest_of(SCALE, "sm_100a", "scale"),
        cache.digest_of(SCALE, "sm_90a", "other"),
        cache.digest_of(SCALE, "sm_90a", "scale", ["-DN=1"]),
    ]
    monkeypatch.setattr(cache.nvrtc, "version", lambda: "99.0")
    keys.append(cache.digest_of(SCALE, "sm_90a", "scale"))
    assert len(set(keys)) == 6


@needs_nvrtc
def test_a_failure_is_not_kept(folder):
    with pytest.raises(NvrtcError):
        cache.compile_source("}", "sm_90a", "k")
    assert not folder.exists() or not list(folder.iterdir())


@needs_nvrtc
def test_the_version_is_that_of_the_library():
    assert nvrtc._ask({})["version"] == ".".join(nvrtc.version().split(".")[:2])


@needs_nvrtc
def test_a_pipelined_product_compiles_in_time():
    assert compile_source(sources.matmul(), "sm_90a", "matmul").seconds < 2
