"""Kernels inside a program for XLA: the custom call, its handler, and what it asks of a CUDA that stands in."""

import ctypes as C
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from compiler.gpu.fake_cuda import CONTEXT, ErrorCreate, FakeCuda, Frame, door
from palladion import executors
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import attach, handler, launch, lower

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)
f32, i32 = jnp.float32, jnp.int32
struct = jax.ShapeDtypeStruct


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def add(**options):
    return pl.pallas_call(add_kernel, struct([128], i32), compiler_params=plgpu.CompilerParams(), **options)


def doubled(x):
    """Through shared memory, by TMA."""

    def body(x_ref, o_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=struct(x.shape, x.dtype), scratch_types=scratch)(x)


def counted(x):
    """Two blocks, and a semaphore between them: it needs memory that is zero at the start."""

    def body(x_ref, o_ref, sem):
        i = jax.lax.axis_index("i")

        @pl.when(i == 0)
        def _():
            o_ref[0] = x_ref[0] + 1
            pl.semaphore_signal(sem)

        @pl.when(i == 1)
        def _():
            pl.semaphore_wait(sem)
            o_ref[1] = o_ref[0] + x_ref[1]

    return plgpu.kernel(
        body,
        out_type=struct(x.shape, x.dtype),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        grid=(2,),
        grid_names=("i",),
    )(x)


def for_cuda(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def plan_of(text):
    (plan,) = re.findall(r'plan = "(.*?)"[,}]', text)
    return json.loads(plan.replace(r"\22", '"'))


@pytest.fixture
def cuda(monkeypatch):
    """XLA's CPU takes the GPU's lowering, and the handler a CUDA that stands in."""
    fake = FakeCuda()
    found, prepare = executors.for_lowering, launch.prepare

    def remember(params, arch=None):
        program = prepare(params, arch)
        fake.programs[program.cubin] = program.ptx
        return program

    monkeypatch.setattr(launch, "prepare", remember)
    monkeypatch.setattr(executors, "for_lowering", lambda p, *rest: lower if p == "cpu" else found(p, *rest))
    monkeypatch.setattr(attach, "_library", lambda: fake)
    if attach.TARGET_NAME not in _registered:
        jax.ffi.register_ffi_target(attach.TARGET_NAME, jax.ffi.pycapsule(door(fake)), platform="cpu")
        _registered.append(attach.TARGET_NAME)
    else:
        door(fake)
    places = handler.addresses()
    attach._kept.clear()
    for name, count in (("kernels", handler.BUCKETS), ("cuda", len(handler.CUDA_FUNCTIONS))):
        C.memset(places[name], 0, 8 * count)
    jax.clear_caches()
    yield fake
    jax.clear_caches()


_registered: list[str] = []


# --- lowering -------------------------------------------------------------------------------------------------------
def test_a_gpu_call_is_a_custom_call_with_all_that_a_launch_needs():
    x = struct((128,), i32)
    text = for_cuda(add(), x, x)
    assert "stablehlo.custom_call @palladion_gpu" in text
    plan = plan_of(text)
    assert (plan["threads"], plan["arguments"], plan["results"]) == (128, 2, 1)
    assert [(p["result"], p["index"]) for p in plan["params"]] == [(0, 0), (0, 1), (1, 0)]


def test_operations_of_the_dialect_name_the_compiler():
    assert any("box" in p for p in plan_of(for_cuda(doubled, struct((128,), i32)))["params"])


def test_memory_that_starts_at_zero_is_an_operand_that_a_result_shares():
    text = for_cuda(counted, struct((2, 128), f32))
    plan = plan_of(text)
    assert (plan["arguments"], plan["results"]) == (2, 2)
    assert "output_tuple_indices = [1], operand_index = 1" in text


def test_no_blocks_no_call():
    call = pl.pallas_call(add_kernel, struct((8,), f32), grid=(0,), compiler_params=plgpu.CompilerParams())
    assert "custom_call" not in for_cuda(call, struct((8,), f32), struct((8,), f32))


PROGRAM = """
import hashlib, jax
from compiler.gpu.test_lower import doubled, for_cuda, i32, struct
print(hashlib.sha256(for_cuda(doubled, struct((128,), i32)).encode()).hexdigest())
"""


def test_programs_are_the_same_text_in_every_process():
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": "tests:src", "PALLADION_CACHE_DIR": ""}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=_root(), check=True
    )
    here = hashlib.sha256(for_cuda(doubled, struct((128,), i32)).encode()).hexdigest()
    assert run.stdout.strip() == here


def _root():
    from repo.tree import ROOT

    return ROOT


# --- calls ----------------------------------------------------------------------------------------------------------
def test_the_handler_launches_on_xlas_stream(cuda):
    f = jax.jit(lambda x: add()(x, x + 1) * 10)
    x = jnp.arange(128, dtype=i32)
    for _ in range(2):
        np.testing.assert_array_equal(f(x), (2 * np.arange(128) + 1) * 10)
    assert Counter(cuda.calls)["cuLaunchKernelEx"] == 2 and Counter(cuda.calls)["cuModuleLoadData"] == 1
    assert not cuda.entered


def test_tensor_maps_follow_the_buffers(cuda):
    f = jax.jit(doubled)
    for n in (3, 5):
        np.testing.assert_array_equal(f(jnp.full(128, n, i32)), np.full(128, 2 * n))
    assert Counter(cuda.calls)["cuTensorMapEncodeTiled"] == 4


def test_workspaces_start_at_zero_in_every_call(cuda):
    f = jax.jit(counted)
    x = jnp.stack([jnp.full(128, 2.0), jnp.arange(128.0)])
    for _ in range(2):
        np.testing.assert_array_equal(f(x), np.stack([np.full(128, 3.0), np.arange(128) + 3.0]))


def test_aliased_operands_share_their_memory(cuda):
    f = jax.jit(lambda x, y: (add(input_output_aliases={0: 0})(x, y), x))
    x, y = jnp.arange(128, dtype=i32), jnp.full(128, 7, i32)
    out, same = f(x, y)
    np.testing.assert_array_equal(out, np.arange(128) + 7)
    np.testing.assert_array_equal(same, np.arange(128))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuModuleLoadData", "Loading the kernel .* failed: out of luck \\(CUDA error 200\\)"),
        ("cuLaunchKernelEx", "kernel '.*': the launch failed: out of luck \\(CUDA error 200\\)"),
        ("cuTensorMapEncodeTiled", "kernel '.*': describing an array to TMA failed: out of luck"),
        ("cuStreamGetCtx", "Asking for the stream's context failed: out of luck"),
    ],
)
def test_what_cuda_refuses_is_an_error_in_its_words(cuda, function, message):
    cuda.fails[function] = 200
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(doubled)(jnp.arange(128, dtype=i32)))
    assert not cuda.entered


def test_a_machine_without_a_driver(cuda, monkeypatch):
    def nothing():
        raise RuntimeError("There is no NVIDIA driver on this machine: libcuda.so.1 was not found.")

    monkeypatch.setattr(attach, "_library", nothing)
    with pytest.raises(Exception, match="There is no NVIDIA driver on this machine"):
        jax.block_until_ready(jax.jit(add())(jnp.arange(128, dtype=i32), jnp.arange(128, dtype=i32)))


def test_shared_memory_and_clusters_are_asked_for(cuda):
    plan = {
        "name": "k", "grid": [16, 1, 1], "cluster": [16, 1, 1], "threads": 128, "smem": 1000, "arguments": 0,
        "results": 0, "params": [],
    }  # fmt: skip
    cuda.programs[b"image"] = "ptx"
    address = attach.load(b"image", plan, 5, 0x5000)
    assert cuda.attributes == [(8, 1000), (14, 1)]
    assert attach.load(b"image", plan, 5, 0x5000) == address and Counter(cuda.calls)["cuModuleLoadData"] == 1
    kernel = attach.Kernel.from_address(address)
    assert kernel.context == CONTEXT
    config = attach.Config.from_address(kernel.config)
    assert list(config.grid) == [16, 1, 1] and list(config.block) == [128, 1, 1] and config.count == 1
    assert list(attach.Attribute.from_address(config.attributes).value[:3]) == [16, 1, 1]


# --- a frame made by hand -------------------------------------------------------------------------------------------
def handle(stage=3, attributes=0):
    """Call the handler with a frame that has nothing but a stage; the message of its error, or None."""
    messages = []

    @C.CFUNCTYPE(C.c_void_p, C.POINTER(ErrorCreate))
    def error_create(given):
        messages.append((given.contents.code, given.contents.message.decode()))
        return 1

    from compiler.gpu.fake_cuda import Api

    frame, api = Frame(stage=stage), Api(error_create=C.cast(error_create, C.c_void_p).value)
    frame.api, frame.attrs.size = C.pointer(api), attributes
    result = C.CFUNCTYPE(C.c_void_p, C.c_void_p)(handler.addresses()["ffi_handler"])(C.addressof(frame))
    assert (result is not None) == bool(messages)
    return messages[0] if messages else None


def test_stages_before_execution_do_nothing():
    assert [handle(stage) for stage in range(3)] == [None] * 3


def test_a_call_without_its_attributes():
    assert handle() == (3, "a call of palladion_gpu needs the attributes id, image and plan")
