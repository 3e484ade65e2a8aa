"""What broke the TPU compiler once: each case from an attempt to break it, or from a newcomer's first hour."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import palladion as pl
from compiler.tpu.calls import lowered, sds
from palladion import tpu as pltpu
from palladion.compiler import child
from palladion.compiler.reports import Refusal
from palladion.compiler.tpu import aot, refusals
from palladion.compiler.tpu.topologies import CHIPS
from palladion.report import command

HERE = pathlib.Path(__file__).name
needs_libtpu = pytest.mark.skipif(
    not aot.is_installed(), reason="compiling for TPU needs libtpu: pip install 'palladion[tpu]'"
)
ANY = pl.BlockSpec(memory_space=pl.ANY)


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def of(function):
    """A kernel that stores a function of its inputs."""

    def kernel(*refs):
        refs[-1][...] = function(*refs[:-1])

    return kernel


def compiled(kernel, out, *operands, **options):
    (call,) = pl.compile(pl.pallas_call(kernel, out, **options), *operands, target="tpu:v5e").calls
    return call


def refusal_of(call) -> Refusal:
    """Why a call was refused, which must be at a line of this file, with a way out."""
    assert call.refusal is not None
    assert HERE in str(call.refusal.where) and "\n  fix: " in call.refusal.message
    return call.refusal


# --- scalars have 32 bits ---------------------------------------------------------------------------------------------
@needs_libtpu
@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        ("bfloat16", lambda x, y: x * y + jnp.exp(x)),
        ("bfloat16", lambda x, y: jnp.where(x > y, x, y) - jnp.floor(x)),
        ("bfloat16", jnp.nextafter),
        ("bfloat16", jnp.minimum),
        ("float8_e4m3fn", lambda x, y: x + y),
        ("float32", jnp.power),
        ("int8", lambda x, y: (x & y) ^ (x | y)),
        ("int8", lambda x, y: jnp.where(x > y, x, y)),
        ("int32", lambda x, y: lax.population_count(x)),
    ],
)
def test_scalars_of_every_width(dtype, function):
    call = compiled(of(lambda x, y: function(x[...], y[...])), sds(dtype=dtype), *[sds(dtype=dtype)] * 2)
    assert call.ok, call.refusal


@needs_libtpu
def test_narrow_scalars_are_carried():
    def kernel(x_ref, o_ref):
        total = lax.fori_loop(
            0, 5, lambda i, c: lax.cond(i > 2, lambda c: c + x_ref[0, 0], lambda c: c, c), x_ref[1, 1]
        )
        o_ref[...] = x_ref[...] + total

    call = compiled(kernel, sds(8, 128, dtype="bfloat16"), sds(8, 128, dtype="bfloat16"))
    assert call.ok, call.refusal


@needs_libtpu
def test_reductions_of_masks():
    kernel = of(lambda x: x[...].max(axis=1, keepdims=True) & ~x[...].min(axis=1, keepdims=True))
    call = compiled(kernel, sds(8, 1, dtype="bool"), sds(8, 128, dtype="bool"))
    assert call.ok, call.refusal
    places = of(lambda x: jnp.argmax(x[...], axis=1, keepdims=True))
    call = compiled(places, sds(8, 1, dtype="int32"), sds(8, 128, dtype="bool"))
    assert call.ok, call.refusal


# --- nothing ----------------------------------------------------------------------------------------------------------
def test_sums_of_nothing():
    product = of(lambda x, y: jnp.dot(x[...], y[...]))
    text = lowered(pl.pallas_call(product, sds(8, 8)), sds(8, 0), sds(0, 8))
    assert "tpu_custom_call" in text
    several = of(lambda x: x[...] + jnp.any(x[:0] > 0) + jnp.all(x[:0] > 0) + x[:0].sum())
    assert "tpu_custom_call" in lowered(pl.pallas_call(several, sds(8, 128)), sds(8, 128))
    update = of(lambda x: lax.dynamic_update_slice(x[...], x[:0], (0, 0)))
    assert "tpu_custom_call" in lowered(pl.pallas_call(update, sds(8, 128)), sds(8, 128))


@needs_libtpu
@pytest.mark.parametrize("shape", [(0,), (0, 128), (8, 0), (5, 0, 3)])
def test_code_of_nothing_is_not_negative(shape):
    call = compiled(double, sds(*shape), sds(*shape))
    assert call.ok and call.fact("code_bytes") == 0 and call.fact("vmem_bytes") == 0


@needs_libtpu
@pytest.mark.parametrize("grid", [(0,), (0, 4), (1, 1, 1, 1), (7,), (1 << 20, 1 << 10)])
def test_grids_of_any_size(grid):
    block = pl.BlockSpec((8, 128), lambda *ids: (0, 0))
    call = compiled(double, sds(8, 128), sds(8, 128), grid=grid, in_specs=[block], out_specs=block)
    assert call.ok, call.refusal


# --- refusals say where, and how to go on -----------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "fix"), [("uint64", "jnp.uint32"), ("int64", "jnp.int32"), ("float64", "float32")])
def test_a_dtype_names_its_operand_and_the_kernel(dtype, fix):
    with jax.enable_x64(True):
        array = sds(8, 128, dtype=dtype)
        with pytest.raises(pltpu.LoweringException) as caught:
            lowered(pl.pallas_call(double, array), array)
    message = str(caught.value)
    assert f"for TPU: x_ref (input 0): TPUs have no {dtype}." in message and fix in message
    assert f"{HERE}:{double.__code__.co_firstlineno}" in message


@needs_libtpu
@pytest.mark.parametrize(
    ("scratch", "kind", "words"),
    [
        (pltpu.SMEM((1 << 19,), jnp.int32), "SmemOverflow", "needs 2.0 MiB of SMEM on tpu:v5e, which has 1.0 MiB."),
        (pltpu.SemaphoreType.DMA((1 << 16,)), "SemaphoreOverflow", "has about 65,536 semaphores; tpu:v5e has 512"),
        (pltpu.VMEM((1 << 20, 1 << 20), jnp.float32), "VmemOverflow", "needs at least 4,194,304.0 MiB of VMEM"),
    ],
)
def test_memories_that_overflow(scratch, kind, words):
    call = compiled(lambda x, o, s: double(x, o), sds(8, 128), sds(8, 128), scratch_shapes=[scratch])
    assert refusal_of(call).type == kind and words in refusal_of(call).message


@needs_libtpu
@pytest.mark.parametrize(
    ("params", "words"),
    [
        (dict(vmem_limit_bytes=1 << 70), "is more than the 63 bits that the compiler takes"),
        (dict(vmem_limit_bytes=1), "needs 16.0 KiB of VMEM on tpu:v5e, of which it may use 1 B"),
        (dict(flags={"nonsense": 1}), "libtpu does not know the enum value: 'nonsense'"),
        (dict(serialization_format=99), "libtpu does not know the serialization format"),
        (dict(dimension_semantics=("core_parallel",)), "with 2 programs, one for each core; tpu:v5e has 1 TensorC"),
        (dict(dimension_semantics=("subcore_parallel",)), "which is for SparseCores"),
        (dict(collective_id=1 << 40), "is more than the 31 bits"),
    ],
)  # fmt: skip
def test_parameters_that_the_compiler_does_not_take(params, words):
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    options = dict(grid=(2,), in_specs=[block], out_specs=block, compiler_params=pltpu.CompilerParams(**params))
    call = compiled(double, sds(16, 128), sds(16, 128), **options)
    assert words in refusal_of(call).message


def test_what_libtpu_does_not_know_says_how_to_go_on():
    compiled_for = refusals.Compiled(CHIPS["v5e"], "tpu:v5e", 16 << 20)
    for said, fix in [
        ("infer-vector-layout: unsupported shape cast", "multiples of 128"),
        ("failed to legalize operation 'scf.for': (i32, i32, bf16) -> bf16", "scalars have 32 bits"),
        ("Invalid vector type for load", "x.astype"),
        ("something new", "jax.numpy"),
    ]:
        told = str(refusals.explained(child.CompilerError("JaxRuntimeError", said), compiled_for))
        assert fix in told.partition("\n  fix: ")[2]


def test_a_wait_for_a_copy_that_nothing_starts():
    def kernel(x_ref, o_ref, buffer, sem):
        pltpu.make_async_copy(x_ref, buffer, sem).wait()
        o_ref[...] = buffer[...]

    call = pl.pallas_call(kernel, sds(8, 128), in_specs=[ANY],
                          scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA])  # fmt: skip
    with pytest.raises(pltpu.LoweringException, match=r"waits for a copy that signals sem \(scratch 1\)") as caught:
        lowered(call, sds(8, 128))
    assert f"{HERE}:{kernel.__code__.co_firstlineno + 1} (" in str(caught.value)


# --- wrong arguments --------------------------------------------------------------------------------------------------
def test_arguments_of_compile():
    call, x = pl.pallas_call(double, sds(8, 128)), sds(8, 128)
    with pytest.raises(TypeError, match=r"(?s)arguments of f, which 'tpu:v5e' is not.*fix: target='tpu:v5e'"):
        pl.compile(call, x, "tpu:v5e")
    for target in (None, 5, ["tpu:v5e"]):
        with pytest.raises(TypeError, match="target is a string, not"):
            pl.compile(call, x, target=target)  # pyright: ignore[reportArgumentType]
    for target in ("", "tpu:", "TPU:v5e", "tpu:v5e "):
        with pytest.raises(ValueError, match="There is no compile target"):
            pl.compile(call, x, target=target)


@needs_libtpu
def test_an_eager_call_is_refused():
    refusal = refusal_of(compiled(double, sds(8, 128), sds(8, 128), interpret=pl.EagerParams()))
    assert "there is nothing to compile." in refusal.message and "fix: leave interpret out" in refusal.message


# --- processes --------------------------------------------------------------------------------------------------------
PROGRAM = """
import os, sys
import jax, palladion as pl

def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

def told():
    x = jax.ShapeDtypeStruct((8, 128), "float32")
    (call,) = pl.compile(pl.pallas_call(double, x), x, target="tpu:v5e").calls
    return "ok" if call.ok else f"{call.refusal.type}: {call.refusal.message}"

"""


def outcome(program, **env):
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=False,
                          env=os.environ | env, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_libtpu
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"TPU_LIBRARY_PATH": __file__}, f"{HERE}: invalid ELF header"),
        ({"LIBTPU_INIT_ARGS": "--nonsense"}, "it ended with status 1, saying: ERROR: Unknown command line flag"),
    ],
)
def test_a_libtpu_that_does_not_load_is_no_fault_of_the_kernel(env, words):
    told = outcome("print(told())", **env)
    assert told.startswith("CompilerUnusable: libtpu cannot be loaded: ") and words in told


@needs_libtpu
def test_a_working_folder_that_is_gone(tmp_path):
    program = (
        f"os.mkdir({str(tmp_path / 'x')!r}); os.chdir({str(tmp_path / 'x')!r}); os.rmdir(os.getcwd()); print(told())"
    )
    assert outcome(program) == "ok\n"


@needs_libtpu
def test_a_worker_killed_between_two_calls_is_replaced():
    program = """
from palladion.compiler import child
print(told())
(worker,) = child._pool.all
worker.process.kill(); worker.process.wait()
print(told())
"""
    assert outcome(program) == "ok\nok\n"


COMPILER = """
import os, signal, time
def compile(job):
    os.kill(os.getpid(), job["signal"])
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (signal.SIGTERM, child.CompilerCrashed, "the compiler was ended from outside, by signal SIGTERM."),
        (signal.SIGKILL, child.CompilerOutOfMemory, "was killed while it compiled the kernel, most likely for want of"),
    ],
)
def test_a_worker_ended_from_outside(tmp_path, number, kind, words):
    file = tmp_path / "compiler.py"
    file.write_text(COMPILER)
    with pytest.raises(kind) as error:
        child.run(file, {"signal": int(number)}, name="the compiler")
    assert words in str(error.value)


@pytest.mark.parametrize("line", ["raise OSError('no library')", "import os; os._exit(7)"])
def test_a_compiler_that_does_not_load(tmp_path, line):
    file = tmp_path / "compiler.py"
    file.write_text(f"def prepare():\n    {line}\n\ndef compile(job):\n    return {{}}\n")
    with pytest.raises(child.CompilerUnusable, match="the compiler cannot be loaded: ") as error:
        child.run(file, {}, name="the compiler")
    assert "no library" in str(error.value) or "with status 7" in str(error.value)


def test_last_words_are_no_addresses_of_stack_frames():
    assert child.last_words("it is over\nhttps://symbolize.example/r/?trace=7f68d92a3f16&map=\n") == "it is over"


def test_check_takes_its_target_after_the_file_too(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint(sys.argv[1:])\n")
    parse = command._parse
    assert parse([str(file), "a", "--target", "cpu", "b"]) == parse(["--target", "cpu", str(file), "a", "b"])
    for own in (["--target", "production"], ["--", "--target", "cpu"], ["--target"]):
        options = parse([str(file), *own])
        assert options is not None and options.targets == () and "--target" in options.arguments
