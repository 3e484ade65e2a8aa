"""The CUDA driver's interface: what is asked of libcuda, recorded by a stand-in, and what is said when it refuses."""

import ctypes
import types

import numpy as np
import pytest

from palladion.compiler.gpu import driver
from palladion.compiler.gpu.driver import CudaDriver, DriverError
from palladion.compiler.gpu.generated import TensorMap

cuda = pytest.importorskip(
    "cuda.bindings.driver", reason="the CUDA driver is reached through cuda-bindings: pip install 'palladion[gpu]'"
)
OK = cuda.CUresult.CUDA_SUCCESS


class Fake:
    """cuda.bindings.driver, whose functions remember their arguments; its types are the real ones."""

    def __init__(self, fail=None, capability=(9, 0)):
        self.calls, self.fail, self.capability, self.memory = [], fail or {}, capability, {}
        self.launched = []

    def __getattr__(self, name):
        real = getattr(cuda, name)  # an AttributeError here: there is no such name in cuda-bindings
        if not name.startswith("cu") or isinstance(real, type):
            return real

        def function(*args):
            self.calls.append((name, *args))
            if name in self.fail:
                return (self.fail[name], *([None] if "Get" in name else []))
            return OK, *getattr(self, f"_{name}", lambda *a: ())(*args)

        return function

    def names(self):
        return [call[0] for call in self.calls if call[0] not in ("cuCtxPushCurrent", "cuCtxPopCurrent")]

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]

    def _cuDeviceGet(self, n):
        return (n,)

    def _cuDevicePrimaryCtxRetain(self, device):
        return ("context",)

    def _cuDeviceGetAttribute(self, attribute, device):
        return (self.capability["MINOR" in attribute.name],)

    def _cuMemAlloc(self, n):
        return (cuda.CUdeviceptr(0x1000),)

    def _cuMemcpyHtoD(self, ptr, host, n):
        self.memory[ptr] = ctypes.string_at(host, n)
        return ()

    def _cuMemcpyDtoH(self, host, ptr, n):
        ctypes.memmove(host, self.memory[ptr], n)
        return ()

    def _cuModuleLoadData(self, data):
        return ("module",)

    def _cuModuleGetFunction(self, module, name):
        return (cuda.CUfunction(7),)

    def _cuGetErrorString(self, result):
        return (b"words of the driver",)

    def _cuTensorMapEncodeTiled(self, *args):
        made = cuda.CUtensorMap()
        ctypes.memmove(int(made.getPtr()), bytes(range(128)), 128)
        return (made,)

    def _cuLaunchKernelEx(self, config, function, params, extra):
        """What the driver would read: the numbers of the configuration, and the parameters through their pointers."""
        self.launched.append(types.SimpleNamespace(config=config, function=function, params=params))
        return ()


def device(**options):
    fake = Fake(**options)
    return fake, CudaDriver(0, fake)


# --- what is asked of the driver --------------------------------------------------------------------------------------
def test_a_device_is_opened_in_its_primary_context():
    fake, d = device(capability=(10, 0))
    assert d.arch == "sm_100a"
    assert fake.names()[:3] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_bytes_go_in_and_out():
    fake, d = device()
    ptr = d.alloc(16)
    assert ptr == 0x1000 and type(ptr) is int
    data = np.arange(12, dtype="f").reshape(3, 4)[:, ::2]  # not contiguous
    d.copy_in(ptr, data)
    np.testing.assert_array_equal(d.copy_out(ptr, 24).view("f").reshape(3, 2), data)
    d.copy_in(ptr, b"abc")
    assert d.copy_out(ptr, 3).tobytes() == b"abc"
    assert d.copy_out(ptr, 0).size == 0
    d.free(ptr)
    assert fake.named("cuMemFree") == [(ptr,)]
    pushes, pops = len(fake.named("cuCtxPushCurrent")), len(fake.named("cuCtxPopCurrent"))
    assert pushes == pops == 6


def test_modules_are_cubins_or_ptx():
    fake, d = device()
    d.load_module(b"\x7fELF")
    d.load_module(".version 9.0")
    assert fake.named("cuModuleLoadData") == [(b"\x7fELF",), (b".version 9.0\0",)]
    d.function("module", "scale")
    assert fake.named("cuModuleGetFunction") == [("module", b"scale")]


def launched(**options):
    fake, d = device()
    args = [(5).to_bytes(8, "little"), bytes(range(128)), b"\x01\x02\x03\x04"]
    seen = []

    def read(config, function, params, extra):
        pointers = (ctypes.c_void_p * 3).from_address(params)
        seen.extend(ctypes.string_at(p, len(a)) for p, a in zip(pointers, args))
        fake.launched.append(config)
        return ()

    fake._cuLaunchKernelEx = read
    d.launch(cuda.CUfunction(7), (132, 2), (384,), args, **options)
    assert seen == args
    (config,) = fake.launched
    return fake, config


def test_a_launch_hands_on_sizes_and_parameters():
    fake, config = launched(smem=1000, stream=99)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (384, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs) == (1000, 99, 0)
    assert [(int(attribute), value) for _, attribute, value in fake.named("cuFuncSetAttribute")] == [(8, 1000)]


def test_clusters_and_dependent_launches_are_attributes():
    _, config = launched(cluster=(2, 1, 4), pdl=True, cooperative=True)
    names = [a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_") for a in config.attrs]
    assert names == ["CLUSTER_DIMENSION", "PROGRAMMATIC_STREAM_SERIALIZATION", "COOPERATIVE"]
    assert [int(a.id) for a in config.attrs[:2]] == [4, 6]  # as the facts of the hardware number them
    size = config.attrs[0].value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 4)
    assert config.attrs[1].value.programmaticStreamSerializationAllowed == 1
    assert config.attrs[2].value.cooperative == 1


def test_shared_memory_and_large_clusters_ask_for_leave_once():
    fake, d = device()
    function = cuda.CUfunction(7)
    for smem in (48 << 10, 200_000, 200_000, 100_000, 232_448):
        d.launch(function, (16,), (128,), [], cluster=(16, 1, 1), smem=smem)
    asked = [(int(attribute), value) for _, attribute, value in fake.named("cuFuncSetAttribute")]
    assert asked == [(8, 48 << 10), (14, 1), (8, 200_000), (8, 232_448)]
    d.launch(cuda.CUfunction(8), (16,), (128,), [], smem=200_000)
    assert len(fake.named("cuFuncSetAttribute")) == 5  # another function asks for itself


def test_tensor_maps_reach_the_encoder_in_its_own_types():
    fake, d = device()
    found = TensorMap(0, "bfloat16", 256, (512, 300), (1024,), (64, 128), (1, 1), 128, "nan")
    assert driver.encode(d, found, 0x10000) == bytes(range(128))
    ((dtype, rank, address, dims, strides, box, steps, *modes),) = fake.named("cuTensorMapEncodeTiled")
    assert (dtype.name, rank, address) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2, 0x10100)
    assert [list(map(int, v)) for v in (dims, strides, box, steps)] == [[512, 300], [1024], [64, 128], [1, 1]]
    assert [m.name.rpartition("TENSOR_MAP_")[2] for m in modes] == [
        "INTERLEAVE_NONE", "SWIZZLE_128B", "L2_PROMOTION_L2_256B", "FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA",
    ]  # fmt: skip


def test_the_names_of_dtypes_are_those_of_the_encoder():
    for name, number in driver.DATA_TYPES.items():
        theirs = cuda.CUtensorMapDataType(number).name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_").lower()
        bits = int("".join(c for c in theirs if c.isdigit()))
        ours = 8 if name in ("bool",) or name.startswith("float8") else int("".join(c for c in name if c.isdigit()))
        assert bits == ours, (name, theirs)
    with pytest.raises(KeyError):
        device()[1].encode_tensor_map("complex64", 1, 0, (8,), (), (8,), (1,))


# --- what it refuses --------------------------------------------------------------------------------------------------
def test_a_machine_without_a_driver_says_so():
    class NoLibrary(Fake):
        def _cuInit(self, flags):
            raise OSError("libcuda.so.1: cannot open shared object file")

    with pytest.raises(DriverError, match=r"^There is no NVIDIA driver on this machine\.\n  fix: interpret=plgpu\.Emu"):
        CudaDriver(0, NoLibrary())


def test_this_machine_has_a_gpu_or_says_why_not():
    try:
        found = CudaDriver()
    except DriverError as error:
        assert error.code or "no NVIDIA driver" in str(error)
    else:
        assert found.arch.startswith("sm_")


@pytest.mark.parametrize(
    ("function", "code", "first", "fix"),
    [
        ("cuInit", "NO_DEVICE", "Starting the CUDA driver failed: words of the driver (", "nvidia-smi"),
        ("cuDeviceGet", "INVALID_DEVICE", "Opening device 0 failed", None),
        ("cuMemAlloc", "OUT_OF_MEMORY", "Allocating 1,024 B failed", "PREALLOCATE"),
        ("cuModuleLoadData", "NO_BINARY_FOR_GPU", "Loading a kernel on sm_90a failed", "Hopper only"),
        ("cuLaunchKernelEx", "INVALID_CLUSTER_SIZE", "Launching the kernel failed", "smaller cluster"),
        ("cuCtxSynchronize", "LAUNCH_TIMEOUT", "Running the kernel failed", "InterpretGPUParams"),
        ("cuStreamSynchronize", "ILLEGAL_ADDRESS", "Running the kernel failed", "EmulateParams"),
        ("cuTensorMapEncodeTiled", "INVALID_VALUE", "Describing an array of 8 (innermost first) in boxes of 8", None),
    ],
)  # fmt: skip
def test_what_the_driver_refuses_is_said_in_words(function, code, first, fix):
    result = getattr(cuda.CUresult, f"CUDA_ERROR_{code}")
    fake = Fake(fail={function: result})
    with pytest.raises(DriverError) as error:
        d = CudaDriver(0, fake)
        d.alloc(1024)
        d.load_module(b"cubin")
        d.launch(cuda.CUfunction(7), (1,), (128,), [])
        d.encode_tensor_map("uint8", 1, 0, (8,), (), (8,), (1,))
        d.synchronize(3)
        d.synchronize()
    text = str(error.value)
    assert text.startswith(first) and error.value.code == result.name
    assert (fix in text.partition("  fix: ")[2]) if fix else "fix" not in text
    assert len(fake.named("cuCtxPushCurrent")) == len(fake.named("cuCtxPopCurrent"))


def test_advice_is_for_errors_that_exist():
    assert all(hasattr(cuda.CUresult, code) for code in driver._ADVICE)


def test_without_cuda_bindings_the_command_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(driver.importlib, "import_module", missing)
    with pytest.raises(DriverError, match=r"needs cuda-bindings.*\n  fix: pip install 'palladion\[gpu\]'"):
        CudaDriver()
