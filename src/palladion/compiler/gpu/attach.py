"""Bringing a kernel into the process for XLA: what the handler (handler.py) asks for at the first call in a context.

The call carries all of it: `image`, the cubin, and `plan`, how it is launched (lower.py). So a program that was
compiled elsewhere, or comes from JAX's compilation cache, runs wherever `palladion.mosaic_gpu` is imported.
"""

from __future__ import annotations

import atexit
import base64
import ctypes as C
import json
import threading
import zlib
from typing import Any

from palladion.compiler.gpu import handler
from palladion.compiler.gpu.driver import DATA_TYPES, FILLS, PORTABLE_CLUSTER, SWIZZLES
from palladion.errors import explain

TARGET_NAME = "palladion_gpu"  # what programs call; part of their text, so it never changes
PROMOTION = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
P, I64, I32, U32 = C.c_void_p, C.c_int64, C.c_int32, C.c_uint32


def _struct(title: str, **fields: Any) -> Any:
    return type(title, (C.Structure,), {"_fields_": list(fields.items())})


Span = _struct("Span", ptr=P, len=C.c_size_t)
Scalar = _struct("Scalar", dtype=I32, value=C.POINTER(I64))
Attrs = _struct(
    "Attrs", struct_size=I64, extension_start=P, size=I64, types=P, names=C.POINTER(C.POINTER(Span)), items=C.POINTER(P)
)
Kernel = _struct(
    "Kernel",
    **dict(id=I64, context=P, next=P, function=P, arguments=I64, results=I64, params=P, count=I64),
    **dict(config=P, name=C.c_char_p),
)
Param = _struct(
    "Param",
    **dict(result=I64, index=I64, map=I64, offset=I64, dtype=I32, rank=I32, dims=P, strides=P, box=P, steps=P),
    **dict(swizzle=I32, promotion=I32, fill=I32),
)
Config = _struct("Config", grid=U32 * 3, block=U32 * 3, smem=U32, stream=P, attributes=P, count=U32)
Attribute = _struct("Attribute", id=U32, pad=U32, value=U32 * 16)

_lock = threading.Lock()
_kept: list[Any] = []  # what the handler reads; never freed


def _library() -> Any:
    try:
        return C.CDLL("libcuda.so.1")
    except OSError:
        raise RuntimeError(explain("There is no NVIDIA driver on this machine: libcuda.so.1 was not found.")) from None


class _Cuda:
    """libcuda, with errors as exceptions."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __call__(self, what: str, function: str, *args: Any) -> None:
        code = getattr(self.library, function)(*args)
        if code:
            words = C.c_char_p()
            self.library.cuGetErrorString(I32(code), C.byref(words))
            said = (words.value or b"unknown error").decode()
            raise RuntimeError(explain(f"{what} failed: {said} (CUDA error {code})."))


def load(image: bytes, plan: dict[str, Any], identity: int, stream: int | None) -> int:
    """Load a kernel into the context of a stream, for the handler.

    Arguments: image: a cubin. plan: as `lower.plan` makes it. identity: of both. stream: XLA's.
    Returns: the address of its `Kernel`.
    Raises: RuntimeError: CUDA refused, or is not there.
    """
    with _lock:
        library = _library()
        cuda = _Cuda(library)
        context = P()
        cuda("Asking for the stream's context", "cuStreamGetCtx", P(stream), C.byref(context))
        for known in _kept:
            if known.id == identity and known.context == context.value:
                return C.addressof(known)  # another thread was faster
        cuda("Entering the stream's context", "cuCtxPushCurrent_v2", context)
        try:
            function = _function(cuda, image, plan)
        finally:
            library.cuCtxPopCurrent_v2(C.byref(P()))
        kernel = _kernel(plan, identity, context, function)
        _publish(library, kernel)
        return C.addressof(kernel)


def _function(cuda: _Cuda, image: bytes, plan: dict[str, Any]) -> Any:
    name, module, function = plan["name"], P(), P()
    cuda(f"Loading the kernel {name}", "cuModuleLoadData", C.byref(module), C.c_char_p(image))
    cuda(f"Finding the kernel {name}", "cuModuleGetFunction", C.byref(function), module, C.c_char_p(name.encode()))
    if plan["smem"]:
        what = f"Asking for {plan['smem']:,} B of shared memory"
        cuda(what, "cuFuncSetAttribute", function, I32(_MAX_DYNAMIC_SHARED), I32(plan["smem"]))
    if plan["cluster"][0] * plan["cluster"][1] * plan["cluster"][2] > PORTABLE_CLUSTER:
        cuda("Asking for large clusters", "cuFuncSetAttribute", function, I32(_NON_PORTABLE_CLUSTER), I32(1))
    return function


def _kernel(plan: dict[str, Any], identity: int, context: Any, function: Any) -> Any:
    kept: list[Any] = []

    def held(x: Any) -> int:
        kept.append(x)
        return C.addressof(x)

    def numbers(kind: Any, values: Any) -> int:
        return held((kind * max(len(values), 1))(*values))

    params = (Param * max(len(plan["params"]), 1))()
    for slot, p in zip(params, plan["params"]):
        slot.result, slot.index = p["result"], p["index"]
        if "dims" in p:
            slot.map, slot.offset, slot.dtype, slot.rank = 1, p["offset"], DATA_TYPES[p["dtype"]], len(p["dims"])
            slot.dims, slot.strides = numbers(C.c_uint64, p["dims"]), numbers(C.c_uint64, p["strides"])
            slot.box, slot.steps = numbers(U32, p["box"]), numbers(U32, p["steps"])
            slot.swizzle, slot.promotion, slot.fill = SWIZZLES[p["swizzle"]], PROMOTION, FILLS[p["fill"]]
    config = Config(grid=tuple(plan["grid"]), block=(plan["threads"], 1, 1), smem=plan["smem"])
    if plan["cluster"] != [1, 1, 1]:
        attribute = Attribute(id=_CLUSTER_DIMENSION)
        attribute.value[:3] = plan["cluster"]
        config.attributes, config.count = held(attribute), 1
    kernel = Kernel(
        id=identity,
        context=context.value,
        function=function.value,
        arguments=plan["arguments"],
        results=plan["results"],
        params=held(params),
        count=len(plan["params"]),
        config=held(config),
        name=plan["name"].encode(),
    )
    kernel.kept = kept
    return kernel


def _publish(library: Any, kernel: Any) -> None:
    """Let the handler find a kernel."""
    places = handler.addresses()
    bucket = P.from_address(places["kernels"] + 8 * (kernel.id % handler.BUCKETS))
    kernel.next = bucket.value
    _kept.append(kernel)
    bucket.value = C.addressof(kernel)
    table = (P * len(handler.CUDA_FUNCTIONS)).from_address(places["cuda"])
    for k in reversed(range(len(table))):  # the first last: by it the handler sees that all are there
        table[k] = C.cast(getattr(library, handler.CUDA_FUNCTIONS[k]), P).value


@C.CFUNCTYPE(P, C.POINTER(Attrs), P, P, I64)
def _hook(attrs: Any, stream: Any, message: Any, room: int) -> Any:
    try:
        given = _attributes(attrs.contents)
        image = zlib.decompress(base64.b64decode(given["image"]))
        return load(image, json.loads(given["plan"]), given["id"], stream)
    except BaseException as error:
        text = str(error) or type(error).__name__
        text = text.encode()[: room - 1].decode(errors="ignore").encode()  # not half a character at the end
        C.memmove(message, text + b"\0", len(text) + 1)
        return None


def _attributes(attrs: Any) -> dict[str, Any]:
    names = [C.string_at(s.contents.ptr, s.contents.len).decode() for s in attrs.names[: attrs.size]]
    if names != ["id", "image", "plan"]:
        raise RuntimeError(
            f"A call of {TARGET_NAME} has the attributes {', '.join(names)}; it takes id, image and plan."
        )
    texts = [C.cast(item, C.POINTER(Span)).contents for item in attrs.items[1:3]]
    image, plan = (C.string_at(s.ptr, s.len) for s in texts)
    identity = C.cast(attrs.items[0], C.POINTER(Scalar)).contents.value.contents.value
    return {"id": identity, "image": image, "plan": plan}


def handler_address() -> int:
    """The handler's address, once a process with `_hook` in its place."""
    places = handler.addresses()
    with _lock:
        P.from_address(places["load"]).value = C.cast(_hook, P).value
    atexit.register(_forget_python)
    return places["ffi_handler"]


def _forget_python() -> None:
    # A thread of XLA's that outlives the interpreter must not call into it.
    P.from_address(handler.addresses()["load"]).value = None
