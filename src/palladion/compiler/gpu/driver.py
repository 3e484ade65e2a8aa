"""The CUDA driver behind one thin interface: memory, modules, tensor maps and launches.

`Driver` is what a launch needs; the emulated device has the same methods, so that one launch path serves both.
`CudaDriver` calls libcuda through cuda-bindings, in the primary context of a device, which JAX and PyTorch use too:
their arrays and streams are valid here. What the driver refuses is a `DriverError`, in words.

Sources: CUDA driver API; for limits and attributes of launches also the programming guide, "Thread Block Clusters" and
"Programmatic Dependent Launch".
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from palladion.compiler.gpu.generated import TensorMap
from palladion.errors import explain

PORTABLE_CLUSTER = 8
# CUtensorMapDataType by the names of arrays' dtypes: what has no type of its own is copied as bits.
DATA_TYPES = {
    "uint8": 0, "int8": 0, "bool": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "int16": 1, "uint32": 2,
    "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by bytes
FILLS = {"zeros": 0, "nan": 1}  # CUtensorMapFloatOOBfill


class Driver(Protocol):
    """What a launch needs of a device. Pointers are integers; a module or a function is whatever the device makes it.

    Attributes: arch: of its code, "sm_90a".
    """

    arch: str

    def alloc(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes."""
        ...

    def free(self, ptr: int, /) -> None:
        """Give device memory back."""
        ...

    def copy_in(self, ptr: int, data: Any, /) -> None:
        """Copy an array or bytes of the host to device memory."""
        ...

    def copy_out(self, ptr: int, nbytes: int, /) -> np.ndarray:
        """Copy device memory to the host, as uint8[nbytes]."""
        ...

    def load_module(self, image: Any, /) -> Any:
        """Load code: a cubin (bytes), or PTX (text)."""
        ...

    def function(self, module: Any, name: str, /) -> Any:
        """A kernel of a module."""
        ...

    def encode_tensor_map(
        self,
        dtype: int | str,
        rank: int,
        address: int,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        interleave: int = 0,
        swizzle: int = 0,
        l2_promotion: int = 0,
        oob_fill: int = 0,
        /,
    ) -> bytes:
        """The 128 bytes of a tensor map, as `cuTensorMapEncodeTiled` makes it; enumerations by their numbers, `dtype`
        also by its name."""
        ...

    def launch(
        self,
        function: Any,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[bytes],
        cluster: Sequence[int] = (1, 1, 1),
        smem: int = 0,
        stream: Any = None,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> Any:
        """Start a kernel; what comes back is the device's own.

        Arguments:
          function: from `function`. grid: blocks, not clusters. block: threads. args: the bytes of each parameter.
          cluster: blocks. smem: bytes of dynamic shared memory. stream: as an integer; None: the default stream.
          pdl: whether it may start before the kernel in front of it has ended. cooperative: all blocks run at once.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all kernels have ended. Raises: what went wrong in them."""
        ...


def encode(driver: Driver, map: TensorMap, base: int) -> bytes:
    """A kernel parameter's tensor map, for an operand at the address `base`."""
    address = base + map.offset
    steps, swizzle, fill = map.element_strides, SWIZZLES[map.swizzle], FILLS[map.fill]
    # Promotion to 256 B of L2: a hint that changes no value.
    return driver.encode_tensor_map(
        map.dtype, len(map.dims), address, map.dims, map.strides, map.box, steps, 0, swizzle, 3, fill
    )


class DriverError(RuntimeError):
    """The CUDA driver refused something, or there is none.

    Attributes: code: the driver's name for it, "CUDA_ERROR_NO_DEVICE"; "" where there is no driver.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


_EMULATE = "interpret=plgpu.EmulateParams(…) runs the kernel's PTX without a GPU"
_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": f"see what nvidia-smi lists, and CUDA_VISIBLE_DEVICES; {_EMULATE}",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel module and libcuda differ: reload it, or reboot",
    "CUDA_ERROR_OUT_OF_MEMORY": "JAX takes most of the memory at its start: XLA_PYTHON_CLIENT_PREALLOCATE=false",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "code for sm_90a runs on Hopper only, and code for sm_100a on B200 only",
    "CUDA_ERROR_INVALID_IMAGE": "code for sm_90a runs on Hopper only, and code for sm_100a on B200 only",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the compiler: update it, or load the cubin",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": "a smaller cluster: 8 blocks are portable, and 16 the most",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "fewer threads or registers a block; palladion.compile reports them",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "a grid of no more blocks than the GPU runs at once",
    "CUDA_ERROR_ILLEGAL_ADDRESS": f"an access outside of its array; {_EMULATE} and names the line",
    "CUDA_ERROR_MISALIGNED_ADDRESS": f"{_EMULATE} and names the line",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": f"{_EMULATE} and names the line",
    "CUDA_ERROR_LAUNCH_FAILED": f"{_EMULATE} and names the line",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a wait without end, perhaps: interpret=plgpu.InterpretGPUParams() finds deadlocks",
}


class CudaDriver:
    """A CUDA device of this machine, through cuda-bindings. Threads may use it at once.

    Attributes:
      arch: "sm_90a" for a device of compute capability 9.0.
    """

    def __init__(self, device: int = 0, cuda: Any = None) -> None:
        """Arguments: device: its number. cuda: in place of `cuda.bindings.driver`, for tests.

        Raises: DriverError: there is no driver, or no such device.
        """
        self._cuda = cuda if cuda is not None else _bindings()
        try:
            self._call("Starting the CUDA driver", "cuInit", 0)
        except DriverError:
            raise
        except Exception as error:  # cuda-pathfinder's own, of a libcuda that is nowhere
            raise _no_driver() from error
        self._device = self._call(f"Opening device {device}", "cuDeviceGet", device)
        self._context = self._call(f"Opening device {device}", "cuDevicePrimaryCtxRetain", self._device)
        self.arch = f"sm_{self._attribute('MAJOR')}{self._attribute('MINOR')}a"
        self._lock = threading.Lock()
        self._prepared: dict[Any, tuple[int, bool]] = {}

    def _attribute(self, which: str) -> int:
        name = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{which}")
        return int(self._call("Asking for the compute capability", "cuDeviceGetAttribute", name, self._device))

    def _call(self, what: str, name: str, *args: Any) -> Any:
        """Call the driver; its result, or all of them if it has several."""
        result, *values = getattr(self._cuda, name)(*args)
        if int(result) != 0:
            raise self._refusal(what, result)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _refusal(self, what: str, result: Any) -> DriverError:
        code = getattr(result, "name", str(result))
        try:
            text = self._cuda.cuGetErrorString(result)[1].decode()
        except Exception:  # a result that this driver does not know
            text = "the driver has no words for it"
        return DriverError(explain(f"{what} failed: {text} ({code}).", hint=_ADVICE.get(code)), code)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The device's context is the thread's, inside."""
        self._call("Entering the device's context", "cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("Leaving the device's context", "cuCtxPopCurrent")

    # --- memory -------------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes."""
        with self._current():
            return int(self._call(f"Allocating {nbytes:,} B", "cuMemAlloc", max(nbytes, 1)))

    def free(self, ptr: int) -> None:
        """Give device memory back, once all work that uses it has ended."""
        with self._current():
            self._call("Freeing memory", "cuMemFree", ptr)

    def copy_in(self, ptr: int, data: Any) -> None:
        """Copy an array or bytes of the host to device memory."""
        array = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray)) else np.ascontiguousarray(data)
        if array.nbytes:
            with self._current():
                self._call(f"Copying {array.nbytes:,} B in", "cuMemcpyHtoD", ptr, array.ctypes.data, array.nbytes)

    def copy_out(self, ptr: int, nbytes: int) -> np.ndarray:
        """Copy device memory to the host, as uint8[nbytes], when the work before it has ended."""
        array = np.empty(nbytes, np.uint8)
        if nbytes:
            with self._current():
                self._call(f"Copying {nbytes:,} B out", "cuMemcpyDtoH", array.ctypes.data, ptr, nbytes)
        return array

    def synchronize(self, stream: Any = None) -> None:
        """Wait until the work of a stream, or of all, has ended. Raises: DriverError: what went wrong in it."""
        with self._current():
            if stream is None:
                self._call("Running the kernel", "cuCtxSynchronize")
            else:
                self._call("Running the kernel", "cuStreamSynchronize", self._cuda.CUstream(int(stream)))

    # --- code ---------------------------------------------------------------------------------------------------
    def load_module(self, image: Any) -> Any:
        """Load code: a cubin (bytes), or PTX (text)."""
        data = image.encode() + b"\0" if isinstance(image, str) else bytes(image)
        with self._current():
            return self._call(f"Loading a kernel on {self.arch}", "cuModuleLoadData", data)

    def function(self, module: Any, name: str) -> Any:
        """A kernel of a module."""
        with self._current():
            return self._call(f"Finding the kernel {name}", "cuModuleGetFunction", module, name.encode())

    def encode_tensor_map(
        self,
        dtype: int | str,
        rank: int,
        address: int,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        interleave: int = 0,
        swizzle: int = 0,
        l2_promotion: int = 0,
        oob_fill: int = 0,
    ) -> bytes:
        """The 128 bytes of a tensor map; see `Driver`."""
        c = self._cuda
        number = DATA_TYPES[dtype] if isinstance(dtype, str) else int(dtype)
        array, boxes = "×".join(map(str, dims)), "×".join(map(str, box))
        made = self._call(
            f"Describing an array of {array} (innermost first) in boxes of {boxes}",
            "cuTensorMapEncodeTiled",
            c.CUtensorMapDataType(number),
            rank,
            address,
            [c.cuuint64_t(n) for n in dims],
            [c.cuuint64_t(n) for n in strides_bytes],
            [c.cuuint32_t(n) for n in box],
            [c.cuuint32_t(n) for n in element_strides],
            c.CUtensorMapInterleave(interleave),
            c.CUtensorMapSwizzle(swizzle),
            c.CUtensorMapL2promotion(l2_promotion),
            c.CUtensorMapFloatOOBfill(oob_fill),
        )
        return ctypes.string_at(int(made.getPtr()), 128)

    # --- launches -----------------------------------------------------------------------------------------------
    def launch(
        self,
        function: Any,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[bytes],
        cluster: Sequence[int] = (1, 1, 1),
        smem: int = 0,
        stream: Any = None,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Start a kernel; see `Driver`."""
        c = self._cuda
        config = c.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
        config.sharedMemBytes, config.hStream = smem, c.CUstream(int(stream or 0))
        attributes = self._attributes(_three(cluster), pdl, cooperative)
        if attributes:  # an empty list would be a null pointer all the same
            config.attrs, config.numAttrs = attributes, len(attributes)
        # The driver copies each parameter before it returns; a pointer needs no alignment for that.
        buffers = [ctypes.create_string_buffer(bytes(arg), len(arg)) for arg in args]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(ctypes.addressof(b) for b in buffers))
        with self._current():
            self._prepare(function, smem, math.prod(cluster))
            self._call("Launching the kernel", "cuLaunchKernelEx", config, function, ctypes.addressof(pointers), 0)

    def _attributes(self, cluster: tuple[int, ...], pdl: bool, cooperative: bool) -> list[Any]:
        c = self._cuda
        found = []

        def add(name: str) -> Any:
            attribute = c.CUlaunchAttribute()
            attribute.id = getattr(c.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
            found.append(attribute)
            return attribute.value

        if math.prod(cluster) > 1:
            size = add("CLUSTER_DIMENSION").clusterDim
            size.x, size.y, size.z = cluster
        if pdl:
            add("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
        if cooperative:
            add("COOPERATIVE").cooperative = 1
        return found

    def _prepare(self, function: Any, smem: int, cluster: int) -> None:
        """Ask leave for dynamic shared memory and large clusters, once a function.

        48 KiB need no leave, of which static memory takes its part: asking is cheaper than knowing that.
        """
        key = int(function)
        with self._lock:
            allowed, large = self._prepared.get(key, (0, False))
            attribute = self._cuda.CUfunction_attribute
            if smem > allowed:
                name = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call(f"Asking for {smem:,} B of shared memory", "cuFuncSetAttribute", function, name, smem)
            if cluster > PORTABLE_CLUSTER and not large:
                name = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                self._call(f"Asking for clusters of {cluster} blocks", "cuFuncSetAttribute", function, name, 1)
            self._prepared[key] = (max(allowed, smem), large or cluster > PORTABLE_CLUSTER)


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*map(int, sizes), 1, 1)[:3]


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        message = "Launching on a GPU needs cuda-bindings, which is not installed."
        raise DriverError(explain(message, hint="pip install 'palladion[gpu]'")) from None


def _no_driver() -> DriverError:
    return DriverError(explain("There is no NVIDIA driver on this machine.", hint=_EMULATE))
