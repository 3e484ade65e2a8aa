"""A libcuda that stands in, and a door through which XLA's CPU client calls the GPU handler.

`FakeCuda` has the functions that the handler and attach.py call. Its launch takes the buffers of the host that the
kernel's pointers name, and runs the kernel's PTX on the emulator. `door(cuda)` is an FFI handler for XLA's CPU: it
hands on XLA's own call frame, with an API in it whose `Stream_Get` gives a stream, as on a GPU.
"""

import ctypes as C
import math
from typing import Any

from palladion.compiler.gpu import attach
from palladion.emulator.driver import EmulatedDriver

P, I64, I32, U32 = C.c_void_p, C.c_int64, C.c_int32, C.c_uint32
STREAM, CONTEXT = 0x5000, 0xC000
ITEMSIZE = {1: 1, 3: 2, 4: 4, 6: 1, 10: 2, 11: 4, 16: 2}  # by XLA_FFI_DataType

Buffer = attach._struct("Buffer", size=I64, extension=P, dtype=I32, data=P, rank=I64, dims=C.POINTER(I64))
Buffers = attach._struct("Buffers", size=I64, extension=P, count=I64, types=P, items=C.POINTER(C.POINTER(Buffer)))
Api = attach._struct("Api", head=I64 * 6, error_create=P, details=P, destroy=P, register=P, stream_get=P)
Frame = attach._struct(
    "Frame", size=I64, extension=P, api=C.POINTER(Api), ctx=P, stage=I32, args=Buffers, rets=Buffers, attrs=attach.Attrs
)
StreamGet = attach._struct("StreamGet", size=I64, extension=P, ctx=P, stream=P)
ErrorCreate = attach._struct("ErrorCreate", size=I64, extension=P, message=C.c_char_p, code=I32)


class FakeCuda:
    """Attributes are C functions, as of a `ctypes.CDLL`; `calls` are their names as they were called.

    `fails`: {function: CUDA's number of the error}. `programs`: {cubin: PTX}.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.programs: dict[bytes, str] = {}
        self.sizes: dict[int, int] = {}  # of the host's buffers, in bytes
        self.loaded: list[tuple[str, str]] = []
        self.maps: dict[int, tuple[Any, ...]] = {}
        self.entered: list[int] = []
        self.attributes: list[tuple[int, int]] = []
        self.words = C.create_string_buffer(b"out of luck")
        for name, types in {
            "cuStreamGetCtx": (P, P),
            "cuCtxPushCurrent_v2": (P,),
            "cuCtxPopCurrent_v2": (P,),
            "cuTensorMapEncodeTiled": (P, I32, U32, P, P, P, P, P, I32, I32, I32, I32),
            "cuLaunchKernelEx": (P, P, P, P),
            "cuGetErrorString": (I32, P),
            "cuModuleLoadData": (P, P),
            "cuModuleGetFunction": (P, P, C.c_char_p),
            "cuFuncSetAttribute": (P, I32, I32),
        }.items():
            setattr(self, name, C.CFUNCTYPE(I32, *types)(self._called(name)))

    def _called(self, name: str) -> Any:
        function = getattr(self, "_" + name)

        def call(*args: Any) -> int:
            if name != "cuGetErrorString":
                self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            function(*args)
            return 0

        return call

    def _cuStreamGetCtx(self, stream: int, context: int) -> None:
        assert stream == STREAM
        P.from_address(context).value = CONTEXT

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self.entered.append(context)

    def _cuCtxPopCurrent_v2(self, context: int) -> None:
        P.from_address(context).value = self.entered.pop()

    def _cuGetErrorString(self, code: int, words: int) -> None:
        P.from_address(words).value = C.addressof(self.words)

    def _cuModuleLoadData(self, module: int, image: int) -> None:
        assert self.entered == [CONTEXT]
        found = [ptx for cubin, ptx in self.programs.items() if C.string_at(image, len(cubin)) == cubin]
        self.loaded.append((found[0], ""))
        P.from_address(module).value = len(self.loaded)

    def _cuModuleGetFunction(self, function: int, module: int, name: bytes) -> None:
        self.loaded[module - 1] = (self.loaded[module - 1][0], name.decode())
        P.from_address(function).value = module

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.attributes.append((attribute, value))

    def _cuTensorMapEncodeTiled(
        self, place, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill
    ) -> None:
        assert place % 64 == 0
        wide, narrow = ((kind * rank).from_address for kind in (C.c_uint64, U32))
        inner = list((C.c_uint64 * (rank - 1)).from_address(strides)) if rank > 1 else []
        sizes = (list(wide(dims)), inner, list(narrow(box)), list(narrow(steps)))
        self.maps[place] = (dtype, rank, address, *sizes, interleave, swizzle, promotion, fill)

    def _cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: int) -> None:
        assert self.entered == [CONTEXT]
        c = attach.Config.from_address(config)
        assert c.stream == STREAM
        ptx, name = self.loaded[function - 1]
        driver = EmulatedDriver("sm_90a")
        kernel = driver.function(driver.load_module(ptx), name)
        params = kernel.loaded.module.functions[name].params
        places: dict[int, int] = {}

        def there(address: Any) -> int:
            """Where a buffer of the host lies on the emulated device; it is copied when first asked for."""
            if address not in places:
                places[address] = driver.alloc(max(self.sizes[address], 1))
                driver.copy_in(places[address], C.string_at(address, self.sizes[address]))
            return places[address]

        values = []
        for pointer, param in zip((P * len(params)).from_address(pointers), params):
            if param.size == 8:
                values.append(there(P.from_address(pointer).value).to_bytes(8, "little"))
            else:
                dtype, rank, address, *rest = self.maps[pointer]
                values.append(driver.encode_tensor_map(dtype, rank, there(address), *rest))
        cluster = (1, 1, 1)
        if c.count:
            assert c.count == 1 and attach.Attribute.from_address(c.attributes).id == 4
            cluster = tuple(attach.Attribute.from_address(c.attributes).value[:3])
        driver.launch(kernel, tuple(c.grid), tuple(c.block), values, cluster=cluster, smem=c.smem)
        for address, place in places.items():
            C.memmove(address, driver.copy_out(place, self.sizes[address]).tobytes(), self.sizes[address])


@C.CFUNCTYPE(P, C.POINTER(StreamGet))
def _stream_get(given: Any) -> None:
    given.contents.stream = STREAM


_HANDLER = C.CFUNCTYPE(P, P)
_current: list[FakeCuda] = []


@_HANDLER
def _door(address: int) -> int | None:
    handler = _HANDLER(attach.handler_address())
    frame = Frame.from_address(address)
    if frame.extension:
        return handler(address)
    for side in (frame.args, frame.rets):
        for item in side.items[: side.count]:
            b = item.contents
            _current[-1].sizes[b.data] = math.prod(b.dims[: b.rank]) * ITEMSIZE[b.dtype]
    api, copy = Api(), Frame()
    C.memmove(C.byref(api), frame.api, C.sizeof(Api))
    C.memmove(C.byref(copy), address, C.sizeof(Frame))
    api.stream_get = C.cast(_stream_get, P).value
    copy.api = C.pointer(api)
    return handler(C.addressof(copy))


def door(cuda: FakeCuda) -> int:
    """The address of a handler that hands calls on; `cuda` learns the sizes of their buffers."""
    _current.append(cuda)
    return C.cast(_door, P).value or 0
