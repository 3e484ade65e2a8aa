"""Kernels called with tensors: values, memory and streams, and what is refused. PyTorch is a stand-in (fake_torch.py)
on an emulated device; the last test takes the real one, where it is installed."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from compiler.gpu import fake_torch
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import torch_kernel
from palladion.emulator.driver import EmulatedDriver

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)
CUDA = fake_torch.Device("cuda", 0)


class Device(EmulatedDriver):
    """An emulated device that takes the PTX of a cubin, and remembers streams and loads."""

    streams: list
    ptx: dict
    loads = 0

    def load_module(self, text):
        type(self).loads += 1
        return super().load_module(self.ptx[text])

    def launch(self, *args, stream=None, **options):
        self.streams.append(stream)
        return super().launch(*args, stream=stream, **options)


@pytest.fixture
def torch(monkeypatch):
    made = fake_torch.module()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def cuda(monkeypatch):
    """PyTorch with a device "cuda:0", which is emulated; current there is stream 77."""
    from palladion.compiler.gpu import launch

    driver = Device()
    driver.streams, driver.ptx = [], {}
    made = fake_torch.module(driver, stream=77)
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(torch_kernel, "_driver", lambda index: driver)
    torch_kernel._loaded.cache_clear()
    prepare = launch.prepare

    def remember(params, arch=None):
        program = prepare(params, arch)
        driver.ptx[program.cubin] = program.ptx
        return program

    monkeypatch.setattr(launch, "prepare", remember)
    yield made
    torch_kernel._loaded.cache_clear()


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def add(n=128, dtype=jnp.int32, **options):
    return pl.pallas_call(add_kernel, out_shape=jax.ShapeDtypeStruct([n], dtype), **options)


def doubled(x):
    """Through shared memory, with a barrier and a copy each way."""

    def body(x_ref, o_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


def ints(torch, n=128, start=0):
    return torch.from_numpy(np.arange(start, start + n, dtype=np.int32))


def refusal(kind, f, *args, **kwargs):
    with pytest.raises(kind) as error:
        f(*args, **kwargs)
    return str(error.value)


# --- on the CPU -------------------------------------------------------------------------------------------------------
def test_on_the_cpu_it_is_native_code(torch):
    x = ints(torch)
    out = plgpu.as_torch_kernel(add())(x, x)
    assert isinstance(out, torch.Tensor) and out.device == x.device and out.dtype is torch.int32
    np.testing.assert_array_equal(out.values(), 2 * np.arange(128))
    assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float16"])
def test_narrow_floats_cross_by_their_bits(torch, name):
    x = torch.from_numpy(np.arange(1, 9, dtype=np.float32).astype(jnp.dtype(name)).view(f"i{jnp.dtype(name).itemsize}"))
    x = x.view(getattr(torch, name))

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct([8], name), interpret=True)
    out = plgpu.as_torch_kernel(call)(x)
    assert out.dtype is getattr(torch, name)
    np.testing.assert_array_equal(out.values().astype(np.float32), np.arange(1, 9))


@needs_nvrtc
def test_the_emulator_where_the_call_asks_for_it(torch):
    x = ints(torch)
    with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams()):
        out = plgpu.as_torch_kernel(doubled)(x)
    np.testing.assert_array_equal(out.values(), 2 * np.arange(128))
    assert refusal(ValueError, plgpu.as_torch_kernel(doubled), x).startswith(
        "body is written for the threads of a GPU, and its tensors lie on the CPU."
    )


def test_pytrees_jit_constants_and_the_order_of_results(torch):
    held = jnp.full(128, 5, jnp.int32)

    @jax.jit
    def f(data, *, y):
        sums = add(interpret=True)(data["x"], y)
        return {"sum": sums, "same": data["x"]}

    x, y = ints(torch), ints(torch, start=7)
    out = plgpu.as_torch_kernel(f)({"x": x}, y=y)
    np.testing.assert_array_equal(out["sum"].values(), 2 * np.arange(128) + 7)
    np.testing.assert_array_equal(out["same"].values(), np.arange(128))
    assert out["same"].data_ptr() != x.data_ptr()
    out = plgpu.as_torch_kernel(lambda x: add(interpret=True)(held, x))(x)
    np.testing.assert_array_equal(out.values(), np.arange(128) + 5)
    differentiable = jax.custom_vjp(lambda x: add(interpret=True)(x, x))
    differentiable.defvjp(lambda x: (x, None), lambda _, g: (g,))
    np.testing.assert_array_equal(plgpu.as_torch_kernel(differentiable)(x).values(), 2 * np.arange(128))


def test_it_is_traced_once_for_equal_shapes(torch):
    traced = []

    def f(x, y):
        traced.append(x.shape)
        return add(x.shape[0], interpret=True)(x, y)

    call = plgpu.as_torch_kernel(f)
    for n in (128, 128, 64, 128):
        assert call(ints(torch, n), ints(torch, n)).shape == (n,)
    assert traced == [(128,), (64,)]


# --- on the GPU -------------------------------------------------------------------------------------------------------
@needs_nvrtc
@pytest.mark.parametrize(("f", "count"), [(add(), 2), (doubled, 1)], ids=["blocks", "mesh"])
def test_on_the_gpu_it_is_launched_on_the_current_stream(cuda, f, count):
    x = ints(cuda).to(CUDA)
    call = plgpu.as_torch_kernel(f)
    loads = Device.loads
    for _ in range(2):
        out = call(*[x] * count)
        assert out.device == CUDA
        np.testing.assert_array_equal(out.values(), 2 * np.arange(128))
    assert cuda.driver.streams == [77, 77] and Device.loads == loads + 1


@needs_nvrtc
def test_an_aliased_input_keeps_its_values(cuda):
    x, y = ints(cuda).to(CUDA), ints(cuda, start=3).to(CUDA)
    out = plgpu.as_torch_kernel(add(input_output_aliases={0: 0}))(x, y)
    np.testing.assert_array_equal(out.values(), 2 * np.arange(128) + 3)
    np.testing.assert_array_equal(x.values(), np.arange(128))


def test_other_gpus_are_refused(cuda, monkeypatch):
    monkeypatch.setattr(cuda.driver, "arch", "sm_80a")
    x = ints(cuda).to(CUDA)
    assert refusal(ValueError, plgpu.as_torch_kernel(add()), x, x).startswith(
        "The Mosaic GPU compiler makes code for sm_90a and sm_100a, and cuda:0 is sm_80."
    )


# --- what is refused, and what is copied ------------------------------------------------------------------------------
def test_strided_and_misaligned_tensors_are_copied(torch):
    x = torch.from_numpy(np.arange(256, dtype=np.int32).reshape(128, 2))[:, 1]
    y = torch.from_numpy(np.arange(129, dtype=np.int32))[1:]
    assert not x.is_contiguous()
    out = plgpu.as_torch_kernel(add(interpret=True))(x, y)
    np.testing.assert_array_equal(out.values(), 3 * np.arange(128) + 2)
    assert torch_kernel._plain(y).data_ptr() % 16 == 0 and torch_kernel._plain(x).is_contiguous()


def test_arguments_that_no_kernel_takes(torch):
    call, x = plgpu.as_torch_kernel(add()), ints(torch)
    assert refusal(TypeError, call, x, 3).startswith(
        "A kernel made by plgpu.as_torch_kernel takes tensors, but args[1] is 3 (int)."
    )
    wide = torch.from_numpy(np.arange(128))
    assert refusal(TypeError, call, x, y_ref=wide).splitlines() == [
        "kwargs['y_ref'] holds int64, and JAX has its 64-bit types turned off.",
        '  fix: x.to(torch.int32), or jax.config.update("jax_enable_x64", True)',
    ]
    elsewhere = ints(torch)
    elsewhere.device = fake_torch.Device("cuda", 1)
    assert refusal(ValueError, call, x, elsewhere).startswith("args[0] lies on cpu, and args[1] on cuda:1.")
    assert refusal(TypeError, call, x.requires_grad_(), x).startswith("args[0] requires a gradient, and a kernel")


def test_functions_that_do_more_than_one_call(torch):
    x = ints(torch)
    one = add(interpret=True)
    message = refusal(ValueError, plgpu.as_torch_kernel(lambda x: one(x, x) * 2), x)
    assert "one kernel call and nothing else; this one also runs mul." in message
    assert "test_torch_kernel.py:" in message.splitlines()[1]
    assert "f makes 2." in refusal(ValueError, plgpu.as_torch_kernel(twice(one)), x)
    assert "one kernel call; <lambda> makes 0." in refusal(ValueError, plgpu.as_torch_kernel(lambda x: x), x)


def twice(call):
    def f(x):
        return call(x, x), call(x, x)

    return f


def test_without_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert refusal(ModuleNotFoundError, plgpu.as_torch_kernel(add())).startswith(
        "A kernel made by plgpu.as_torch_kernel needs PyTorch, which is not installed."
    )


def test_with_pytorch_itself():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.arange(128, dtype=torch.int32)
    out = plgpu.as_torch_kernel(add())(x, x * x)
    assert torch.equal(out, x + x * x)
    narrow = torch.arange(128, dtype=torch.bfloat16)
    out = plgpu.as_torch_kernel(add(dtype=jnp.bfloat16, interpret=True))(narrow, narrow)
    assert out.dtype is torch.bfloat16 and torch.equal(out, 2 * narrow)
