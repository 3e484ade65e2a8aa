"""The structs that the runtime reads: XLA's FFI call frame, mirrored from its C header, and our own descriptors.

The mirrors are `ctypes.Structure`s because ctypes applies the C layout rules, so that no compiler is needed; the
functions below emit loads and stores of their fields. Source: `xla/ffi/api/c_api.h`, shipped with jaxlib, API 0.5.
XLA only ever adds fields at the end without a new major version, which it would refuse at registration.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu.builder import (
    NULL,
    Value,
    call_pointer,
    const,
    gep,
    i8,
    i32,
    i64,
    load,
    on_stack,
    ptr,
    store,
)

API_VERSION = (0, 5)  # XLA_FFI_API_MAJOR and _MINOR of the header that these mirrors follow
METADATA_EXTENSION = 1  # XLA_FFI_Extension_Metadata
INVALID_ARGUMENT, NOT_FOUND, INTERNAL = 3, 5, 13  # XLA_FFI_Error_Code

# XLA_FFI_DataType by NumPy dtype name (ml_dtypes' names for what NumPy lacks)
DTYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 15,
    "bfloat16": 16,
    "complex128": 18,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
    "int4": 21,
    "uint4": 22,
    "float8_e4m3b11fnuz": 23,
    "float8_e5m2fnuz": 24,
    "float8_e4m3fnuz": 25,
    "int2": 26,
    "uint2": 27,
    "float8_e4m3": 28,
    "float8_e3m4": 29,
    "float4_e2m1fn": 32,
    "float8_e8m0fnu": 33,
}

P, I64, I32, STR = C.c_void_p, C.c_int64, C.c_int32, C.c_char_p


def struct(name: str, *fields: tuple[str, Any], head: bool = True) -> Any:
    """A struct type; nearly every one of the FFI has a head, its own size and a pointer to extensions."""
    first = [("struct_size", I64), ("extension_start", P)] if head else []
    return type(name, (C.Structure,), {"_fields_": first + list(fields)})


# ----------------------------------------------------------------------------------------------- XLA's own
Buffer = struct("Buffer", ("dtype", I32), ("data", P), ("rank", I64), ("dims", P))
Args = struct("Args", ("size", I64), ("types", P), ("items", P))  # XLA_FFI_Rets has the same layout
Attrs = struct("Attrs", ("size", I64), ("types", P), ("names", P), ("items", P))
CallFrame = struct(
    "CallFrame", ("api", P), ("ctx", P), ("stage", I32), ("args", Args), ("rets", Args), ("attrs", Attrs), ("future", P)
)
Scalar = struct("Scalar", ("dtype", I32), ("value", P), head=False)
Version = struct("Version", ("major", I32), ("minor", I32))
Extension = struct("Extension", ("struct_size", I64), ("type", I32), ("next", P), ("metadata", P), head=False)
Metadata = struct("Metadata", ("struct_size", I64), ("api_version", Version), ("traits", I32), head=False)
_API_FUNCTIONS = (
    "Error_Create Error_GetDetails Error_Destroy Handler_Register Stream_Get Type_Register InvokeContext_Get State_Set "
    "State_Get DeviceMemory_Allocate DeviceMemory_Free ThreadPool_Schedule ThreadPool_NumThreads"
)
Api = struct("Api", ("api_version", Version), ("internal_api", P), *[(name, P) for name in _API_FUNCTIONS.split()])
ErrorCreate = struct("ErrorCreate", ("message", P), ("code", I32))
ErrorDestroy = struct("ErrorDestroy", ("error", P))
Schedule = struct("Schedule", ("ctx", P), ("task", P), ("data", P))
NumThreads = struct("NumThreads", ("ctx", P), ("num_threads", P))

# ----------------------------------------------------------------- ours: filled in by runtime.py, read by the handler
Spec = struct("Spec", ("dtype", I64), ("rank", I64), ("dims", P), head=False)
Alias = struct("Alias", ("arg", I64), ("ret", I64), head=False)
# fn runs grid programs begin..end-1; chunk 0: let the runtime choose; threads: how many are worth using
Phase = struct("Phase", ("fn", P), ("begin", I64), ("end", I64), ("chunk", I64), ("threads", I64), head=False)
Kernel = struct(
    "Kernel",
    *(("key", I64), ("name", STR), ("nargs", I64), ("nrets", I64), ("specs", P)),
    *(("naliases", I64), ("aliases", P), ("nphases", I64), ("phases", P), ("nerrors", I64), ("errors", P)),
    ("workers", I64),  # parts of the arena: how many threads may work on one call
    head=False,
)
Table = struct("Table", ("mask", I64), ("slots", P * 1), head=False)  # open addressing; slots: mask + 1 of them


# ------------------------------------------------------------------------------------- emitting access to their fields
_TYPES = {P: ptr, STR: ptr, I64: i64, I32: i32}


def field(b: ir.IRBuilder, kind: Any, base: Value, path: str) -> tuple[Value, Any]:
    """The address and the LLVM type of a field, such as "args.size", of the struct at `base`."""
    offset = 0
    for part in path.split("."):
        offset += getattr(kind, part).offset
        kind = dict(kind._fields_)[part]
    return gep(b, base, offset), _TYPES.get(kind, i8)


def get(b: ir.IRBuilder, kind: Any, base: Value, path: str) -> Value:
    """The value of a field."""
    address, ty = field(b, kind, base, path)
    return load(b, ty, address)


def put(b: ir.IRBuilder, kind: Any, base: Value, **values: Any) -> None:
    """Set fields (`a__b` for the field b of the struct a) to ints or values."""
    for path, value in values.items():
        address, ty = field(b, kind, base, path.replace("__", "."))
        store(b, const(value, ty) if isinstance(value, int) else value, address)


def item(b: ir.IRBuilder, kind: Any, base: Value, index: Value) -> Value:
    """The address of one struct of an array."""
    return gep(b, base, b.mul(index, const(C.sizeof(kind))))


def argument(b: ir.IRBuilder, kind: Any, **values: Any) -> Value:
    """An argument struct of an FFI function, on the stack, with its head filled in."""
    p = on_stack(b, i64, (C.sizeof(kind) + 7) // 8)
    last = getattr(kind, kind._fields_[-1][0])
    put(b, kind, p, struct_size=last.offset + last.size, extension_start=NULL, **values)
    return p


def call_api(b: ir.IRBuilder, frame: Value, name: str, arguments: Value) -> Value:
    """Call a function of XLA's FFI by name. Most give an XLA_FFI_Error*, which is ours to destroy."""
    function = get(b, Api, get(b, CallFrame, frame, "api"), name)
    return call_pointer(b, ptr, function, arguments)


def discard_error(b: ir.IRBuilder, frame: Value, error: Value) -> None:
    """Destroy an error that a function of the FFI gave us."""
    call_api(b, frame, "Error_Destroy", argument(b, ErrorDestroy, error=error))


def fail(b: ir.IRBuilder, frame: Value, code: int, message: Value) -> None:
    """Return an XLA error from the handler; XLA copies the message (a C string)."""
    b.ret(call_api(b, frame, "Error_Create", argument(b, ErrorCreate, message=message, code=code)))
