"""`palladion.compile` for TPUs: what libtpu says of a kernel, in numbers or in words, from a child process."""

import json
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mosaic
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

import palladion as pl
from benchmarks import compilers_memory
from palladion import tpu as pltpu
from palladion.compiler import child, entry
from palladion.compiler.tpu import aot, refusals
from palladion.compiler.tpu.topologies import CHIPS
from palladion.jaxlink import mlir

HERE = pathlib.Path(__file__).name
needs_libtpu = pytest.mark.skipif(
    not aot.is_installed(), reason="compiling for TPU needs libtpu: pip install 'palladion[tpu]'"
)


def sds(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def softmax_kernel(x_ref, o_ref):
    e = jnp.exp(x_ref[...] - jnp.max(x_ref[...], axis=-1, keepdims=True))
    o_ref[...] = e / jnp.sum(e, axis=-1, keepdims=True)


def rows(kernel, n=64, columns=512, **options):
    spec = pl.BlockSpec((8, columns), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds(n, columns), grid=(n // 8,), in_specs=[spec], out_specs=spec, **options)


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(n, b, **options):
    return pl.pallas_call(
        matmul_kernel,
        sds(n, n, dtype="bfloat16"),
        grid=(n // b,) * 3,
        in_specs=[pl.BlockSpec((b, b), lambda i, j, k: (i, k)), pl.BlockSpec((b, b), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((b, b), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((b, b), jnp.float32)],
        compiler_params=pltpu.CompilerParams(**options),
    )


def compiled(f, *args, target="tpu:v5e"):
    (call,) = pl.compile(f, *args, target=target).calls
    return call


def compiled_matmul(n, b, target="tpu:v5e", **options):
    x = sds(n, n, dtype="bfloat16")
    return compiled(matmul(n, b, **options), x, x, target=target)


def line_of(text):
    """The number of the one line of this file that has a text in it (and does not ask for it)."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return number


# --- names of targets -------------------------------------------------------------------------------------------------
def test_unknown_targets_are_told_what_there_is():
    with pytest.raises(ValueError, match=r"There is no compile target 'tpu:v9'\.") as error:
        pl.compile(jnp.sin, 1.0, target="tpu:v9")
    for name in ("cpu", "tpu:v4", "tpu:v5e", "tpu:v5p", "tpu:v6e", "tpu:v7x", "triton:sm_80", "triton:sm_120"):
        assert name in str(error.value) and name in entry.TARGETS
    with pytest.raises(ValueError, match="no compile target"):
        pl.compile(jnp.sin, 1.0, target="tpu")


@pytest.mark.parametrize(("target", "package"), [("tpu:v5e", "libtpu"), ("triton:sm_90", "triton")])
def test_a_missing_wheel_is_one_sentence_with_the_command(monkeypatch, target, package):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    find = entry.importlib.util.find_spec
    monkeypatch.setattr(entry.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(ModuleNotFoundError) as error:
        pl.compile(rows(softmax_kernel), sds(64, 512), target=target)
    first, _, fix = str(error.value).splitlines()
    assert first == f"Compiling for {target} needs the package {package}, which is not installed."
    assert fix == f"  fix: pip install 'palladion[{target.partition(':')[0]}]'"


# --- numbers ----------------------------------------------------------------------------------------------------------
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_compiles_a_kernel(chip):
    call = compiled(rows(softmax_kernel), sds(64, 512), target=f"tpu:{chip}")
    assert call.ok, call.refusal
    assert 500 < call.fact("code_bytes") < 100_000 and call.fact("libtpu_seconds") > 0
    # two windows of 16 KiB for each operand; on 7x XLA itself moves the small input into VMEM
    assert call.fact("vmem_bytes") == (2 if chip == "v7x" else 4) * 8 * 512 * 4
    assert call.fact("vmem_limit_bytes") == CHIPS[chip].vmem_limit_bytes


@needs_libtpu
def test_vmem_is_read_from_the_compiled_program():
    call = compiled_matmul(1024, 256)
    assert call.fact("vmem_bytes") == 3 * 2 * 256 * 256 * 2 + 256 * 256 * 4
    report = json.loads(
        pl.compile(matmul(1024, 256), *[sds(1024, 1024, dtype="bfloat16")] * 2, target="tpu:v5e").json()
    )
    assert report["target"] == "tpu:v5e" and report["calls"][0]["facts"]["vmem_bytes"] == call.fact("vmem_bytes")


@needs_libtpu
def test_the_cost_is_the_calls_own():
    cost = pl.CostEstimate(flops=12_345, transcendentals=6, bytes_accessed=7_000)
    call = compiled(rows(softmax_kernel, cost_estimate=cost), sds(64, 512))
    assert call.fact("flops") == 12_345 and call.fact("moved_bytes") == 7_000
    assert compiled(rows(softmax_kernel), sds(64, 512)).fact("flops") is None


@needs_libtpu
def test_stages():
    call = compiled(rows(softmax_kernel), sds(64, 512))
    assert call.stages == ("jaxpr", "mosaic", "stablehlo", "hlo")
    assert "math.exp" in call.text("mosaic") and "iteration_bounds = array<i64: 8>" in call.text("mosaic")
    assert "stablehlo.custom_call @tpu_custom_call" in call.text("stablehlo")
    assert "used_scoped_memory_configs" in call.text("hlo") and "exp" in call.text("jaxpr")
    with pytest.raises(ValueError, match="the stages are jaxpr, mosaic"):
        call.text("asm")


@needs_libtpu
def test_interpret_and_parameters_of_other_targets_do_not_matter():
    from palladion import triton as pltriton

    for options in ({"interpret": True}, {"compiler_params": pltriton.CompilerParams(num_warps=4)}):
        assert compiled(rows(softmax_kernel, **options), sds(64, 512)).ok


@needs_libtpu
def test_aliased_operands_are_not_copied():
    def add_one(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    plain, aliased = (compiled(rows(add_one, input_output_aliases=a), sds(64, 512)) for a in ({}, {0: 0}))
    assert " copy(" not in aliased.text("hlo") and "input_output_alias" in aliased.text("hlo")
    assert "input_output_alias" not in plain.text("hlo")


@needs_libtpu
def test_a_kernel_of_several_devices_is_compiled_in_their_mesh():
    def to_the_right(x_ref, o_ref, send, receive):
        right = (jax.lax.axis_index("x") + 1) % 4
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, receive, device_id=right)
        copy.start()
        copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        to_the_right,
        sds(8, 128),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
    )
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    found = compiled(f, sds(32, 128))
    assert found.ok, found.refusal
    assert "num_partitions = 4" in found.text("stablehlo") and "device_id" in found.text("mosaic")


# --- refusals ---------------------------------------------------------------------------------------------------------
def doubled(rows, target="tpu:v5e", **options):
    """Doubling an array of f32[4096,1024] in blocks of whole rows."""

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((rows, 1024), lambda i: (i, 0))
    params = pltpu.CompilerParams(**options)
    shape = sds(4096, 1024)
    call = pl.pallas_call(
        double, shape, grid=(-(-4096 // rows),), in_specs=[spec], out_specs=spec, compiler_params=params
    )
    return compiled(call, shape, target=target)


@needs_libtpu
def test_vmem_overflow():
    call = doubled(2048)  # four windows of 8 MiB
    assert call.refusal.type == "VmemOverflow" and not call.facts
    assert call.refusal.message.startswith(
        "The kernel needs 32.0 MiB of VMEM on tpu:v5e, of which it may use 16.0 MiB."
    )
    assert "vmem_limit_bytes=…) allows up to 128.0 MiB" in call.refusal.message
    assert doubled(2048, vmem_limit_bytes=40 << 20).fact("vmem_bytes") == 32 << 20
    assert "on tpu:v4, which has 16.0 MiB" in doubled(2048, target="tpu:v4").refusal.message
    assert doubled(1024).fact("vmem_bytes") == 16 << 20


@needs_libtpu
def test_what_can_never_fit_is_refused_at_once():
    call = compiled_matmul(16384, 8192, vmem_limit_bytes=1 << 30)
    assert call.refusal.message.startswith(
        "The kernel needs at least 640.0 MiB of VMEM on tpu:v5e, which has 128.0 MiB."
    )


@needs_libtpu
def test_an_operation_that_a_chip_has_not_comes_with_the_line():
    def product(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.int32)  # int8 on a v4

    call = pl.pallas_call(product, sds(128, 128, dtype="int32"))
    x = sds(128, 128, dtype="int8")
    refusal = compiled(call, x, x, target="tpu:v4").refusal
    assert refusal.type == "UnsupportedByMosaic" and "does not take `matmul`" in refusal.message
    assert f"{HERE}:{line_of('# int8 on a v4')} (" in refusal.where and refusal.where in refusal.message
    assert compiled(call, x, x, target="tpu:v5e").ok


@needs_libtpu
def test_a_block_that_no_tpu_takes_comes_with_the_operand():
    spec = pl.BlockSpec((100, 512), lambda i: (i, 0))
    f = pl.pallas_call(softmax_kernel, sds(1000, 1024), grid=(10,), in_specs=[spec], out_specs=spec)
    refusal = compiled(f, sds(1000, 1024)).refusal
    assert refusal.type == "ValueError" and "last two dimensions of your block shape" in refusal.message
    assert HERE in refusal.where


@needs_libtpu
def test_a_block_that_begins_off_a_tile_comes_with_the_operand_and_its_index_map():
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    window = pl.BlockSpec((pl.Element(8), pl.Element(128)), lambda i: (3 * i, 0))  # begins off a tile
    out = pl.BlockSpec((8, 128), lambda i: (i, 0))
    f = pl.pallas_call(copy, sds(32, 128), grid=(4,), in_specs=[window], out_specs=out)
    refusal = compiled(f, sds(64, 128)).refusal
    assert refusal.type == "UnprovenAlignment"
    first = "The compiler cannot prove that the index map of x_ref (input 0) returns a multiple of 8 in dimension 0."
    assert refusal.message.splitlines()[0] == first
    assert f"{HERE}:{line_of('# begins off a tile')} (" in refusal.where


@needs_libtpu
def test_calls_that_compile_stand_beside_those_that_do_not():
    def cholesky(x_ref, o_ref):
        o_ref[...] = jax.lax.linalg.cholesky(x_ref[...])

    def f(x):
        return pl.pallas_call(cholesky, sds(64, 64))(x[:, :64]), rows(softmax_kernel)(x)

    report = pl.compile(f, sds(64, 512), target="tpu:v6e")
    assert [c.ok for c in report.calls] == [False, True] and not report.ok
    assert report.calls[0].refusal.type == "UnsupportedPrimitive"
    assert str(report).splitlines()[-1] == "2 kernel calls in f, 1 refused by tpu:v6e"


# --- libtpu itself, with modules that no lowering makes ---------------------------------------------------------------
def lowered(body, attributes=""):
    """A program that calls a Mosaic kernel, given as text, of x: f32[16,256] and o: i32[16,256]."""
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    text = f"""
        func.func @main(%x: memref<16x256xf32, #tpu.memory_space<vmem>>,
                        %o: memref<16x256xi32, #tpu.memory_space<vmem>>) {attributes} {{
          %c0 = arith.constant 0 : index
          {body}
          vector.store %r, %o[%c0, %c0] : memref<16x256xi32, #tpu.memory_space<vmem>>, vector<16x256xi32>
          return
        }}"""
    with context, ir.Location.unknown():
        f = mosaic.as_tpu_kernel(ir.Module.parse(text), sds(16, 256, dtype="int32"))
    program = jax.jit(f).trace(sds(16, 256)).lower(lowering_platforms=("tpu",))
    return aot.Lowered(program.as_text().encode(), program.as_text(), 1)


CRASHES = """
    %i = tpu.iteration_bound 0 : i32
    %r = vector.broadcast %i : i32 to vector<16x256xi32>"""
REFUSED = """
    %i = vector.step : vector<256xindex>
    %k = arith.index_cast %i : vector<256xindex> to vector<256xi32>
    %r = vector.broadcast %k : vector<256xi32> to vector<16x256xi32>"""
FINE = "%r = tpu.iota {dimensions = array<i32: 1>} : vector<16x256xi32>"


def explained(program):
    with pytest.raises(child.CompilerFailure) as error:
        aot.compile(program, "v5e:2x2")
    return refusals.explained(error.value, refusals.Compiled(CHIPS["v5e"], "tpu:v5e", 16 << 20))


@needs_libtpu
def test_a_module_that_aborts_libtpu_leaves_this_process_alive():
    refusal = explained(lowered(CRASHES))
    assert type(refusal).__name__ == "CompilerCrashed" and isinstance(refusal, refusals.TpuRefusal)
    assert "libtpu crashed on the kernel (on signal SIGABRT)" in str(refusal) and "Invalid dimension" in str(refusal)
    assert aot.compile(lowered(FINE), "v5e:2x2").memory["generated_code_size_in_bytes"] > 0


@needs_libtpu
def test_what_mosaic_refuses_is_named():
    refusal = explained(lowered(REFUSED))
    assert type(refusal) is refusals.UnsupportedByMosaic and "`step`" in str(refusal)


@needs_libtpu
def test_libtpu_is_silent_and_the_environment_as_it_was(tmp_path):
    program = """
import os, sys, tempfile
import jax, jax.numpy as jnp, palladion as pl
before = dict(os.environ)
def k(x_ref, o_ref): o_ref[...] = x_ref[...] * 2
x = jax.ShapeDtypeStruct((8, 128), "float32")
report = pl.compile(pl.pallas_call(k, x), x, target="tpu:v5e")
assert report.ok, report
assert dict(os.environ) == before
assert not any("pallas" in m for m in sys.modules if m.startswith("jax"))
assert not [m for m in sys.modules if m.startswith("libtpu.")]
assert jax.devices()[0].platform == "cpu" and float((jnp.ones((4, 4)) @ jnp.ones((4, 4)))[0, 0]) == 4
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []  # no log files


@needs_libtpu
def test_several_processes_compile_at_once():
    program = """
import palladion as pl, jax
def k(x_ref, o_ref): o_ref[...] = x_ref[...] * 2
x = jax.ShapeDtypeStruct((8, 128), "float32")
print(pl.compile(pl.pallas_call(k, x), x, target="tpu:v5e").ok)
"""
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=300)[0] for p in running] == ["True\n"] * 2


@needs_libtpu
def test_threads_compile_at_once():
    f, found = rows(softmax_kernel), {}
    targets = ["tpu:v4", "tpu:v5e", "tpu:v5p", "tpu:v6e", "cpu"]
    threads = [
        threading.Thread(target=lambda t=t: found.setdefault(t, compiled(f, sds(64, 512), target=t))) for t in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[t].ok and found[t].target for t in targets] == targets
    assert found["tpu:v5e"].text("mosaic") == compiled(f, sds(64, 512)).text("mosaic")


# --- words ------------------------------------------------------------------------------------------------------------
def test_locations_in_libtpus_messages():
    text = 'Not implemented\n\nat location: loc("kernel"("/somewhere/else.py":12:4))\n\nThe MLIR operation involved:'
    assert refusals.location_in(text) == "/somewhere/else.py:12 (kernel)"
    here = os.path.abspath("here.py")
    assert refusals.location_in(f'x\nat location: loc("{here}":3:1)') == "here.py:3"
    assert refusals.location_in('x\nat location: loc("-":9:6)') is None
    assert refusals.location_in("no location") is None


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("Ran out of memory in memory space vmem. Used 72.95M of 63.94M vmem.", "VmemOverflow", "needs 72.9 MiB"),
        (
            "Allocation (size=268435456) would exceed memory (size=134217728) :: #a [shape = 'f32[]', space=vmem]",
            "VmemOverflow",
            "needs 256.0 MiB of VMEM on tpu:v5e, which has 128.0 MiB",
        ),
        (
            "E2003: cannot statically prove that index in dimension 1 is a multiple of 128",
            "UnprovenAlignment",
            "a run-time index in dimension 1 is a multiple of 128.",
        ),
        (
            "E1000: Ran out of memory on HBM, the memory required for HLO (32.00G) exceeds available HBM (15.75G).",
            "HbmOverflow",
            "The arrays of the call take 32.0 GiB of HBM; tpu:v5e has 15.8 GiB.",
        ),
        ("E2002: CompileTimeMosaicMisalignedBlockAndTiling: Operand", "IllegalBlock", "libtpu says: E2002"),
        ("INTERNAL: something new. And more", "UnsupportedByMosaic", "on tpu:v5e: something new.\n  libtpu says: And"),
    ],
)
def test_libtpus_messages_in_our_words(said, kind, words):
    of = refusals.Compiled(CHIPS["v5e"], "tpu:v5e", 16 << 20)
    refusal = refusals.explained(child.CompilerError("JaxRuntimeError", said), of)
    assert type(refusal).__name__ == kind and words in str(refusal)


@needs_libtpu
@pytest.mark.parametrize("name", [name for name, *_ in compilers_memory.kernels()])
def test_vmem_is_what_the_tutorials_formula_says_and_what_registers_spill(name):
    (kernel,) = (k for k in compilers_memory.kernels() if k[0] == name)
    _, f, operands = kernel
    expected = compilers_memory.formula(f, operands)
    assert expected <= compiled(f, *operands).fact("vmem_bytes") <= 1.25 * expected
