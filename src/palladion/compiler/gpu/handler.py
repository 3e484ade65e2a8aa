"""The XLA FFI handler behind every compiled GPU kernel, in LLVM IR: no Python and no lock on the way of a call.

    a jitted program --XLA custom call "palladion_gpu"--> ffi_handler(frame)
        takes XLA's stream and the CUDA context that it belongs to,
        finds the kernel by the call's `id` and that context; `load` (Python, attach.py) brings it in the first time,
        writes its parameters: addresses of buffers, and tensor maps, which hold addresses and so are made anew,
        launches it on the stream with cuLaunchKernelEx.

The driver's functions are a table that attach.py fills from libcuda, so that the module links on a machine without one.
The structs are those of `xla/ffi/api/c_api.h` (API 0.5), of the CUDA driver API, and two of ours (attach.py mirrors
them); LLVM lays them out as C does.
"""

from __future__ import annotations

import functools

import llvmlite.binding as llvm

BUCKETS = 256
EXPORTS = ("ffi_handler", "cuda", "load", "kernels")
CUDA_FUNCTIONS = (
    "cuStreamGetCtx",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernelEx",
    "cuGetErrorString",
)
"""Of the table `cuda`, in this order."""

_STRUCTS = """
%Version = type { i64, ptr, i32, i32 }
; … Error_Create, Error_GetDetails, Error_Destroy, Handler_Register, Stream_Get
%Api = type { i64, ptr, %Version, ptr, ptr, ptr, ptr, ptr, ptr }
%Buffers = type { i64, ptr, i64, ptr, ptr }  ; XLA_FFI_Args and _Rets: size, types, items
%Attrs = type { i64, ptr, i64, ptr, ptr, ptr }  ; size, types, names, items
%Frame = type { i64, ptr, ptr, ptr, i32, %Buffers, %Buffers, %Attrs, ptr }
%Buffer = type { i64, ptr, i32, ptr, i64, ptr }
%Scalar = type { i32, ptr }
%Extension = type { i64, i32, ptr, ptr }
%Metadata = type { i64, %Version, i32 }
%ErrorCreate = type { i64, ptr, ptr, i32 }
%StreamGet = type { i64, ptr, ptr, ptr }
%LaunchConfig = type { [7 x i32], ptr, ptr, i32 }
; id, context, next, function, arguments, results, parameters, their number, launch config, name
%Kernel = type { i64, ptr, ptr, ptr, i64, i64, ptr, i64, ptr, ptr }
; result?, its number, tensor map?, offset, dtype, rank, dims, strides, box, steps, swizzle, promotion, fill
%Param = type { i64, i64, i64, i64, i32, i32, ptr, ptr, ptr, ptr, i32, i32, i32 }
"""


def _text(name: str, words: str) -> str:
    """A C string in a module."""
    data = words.encode() + b"\0"
    escaped = "".join(chr(c) if 32 <= c < 127 and c not in b'"\\' else f"\\{c:02X}" for c in data)
    return f'@{name} = private constant [{len(data)} x i8] c"{escaped}"'


_GLOBALS = "\n".join(
    [
        f"@cuda = global [{len(CUDA_FUNCTIONS)} x ptr] zeroinitializer",
        "@load = global ptr null",
        f"@kernels = global [{BUCKETS} x ptr] zeroinitializer",
        _text("of_counts", "kernel '%s': it is called with %lld arguments and %lld results, expected %lld and %lld"),
        _text("of_driver", "kernel '%s': %s failed: %s (CUDA error %d)"),
        _text("of_attributes", "a call of palladion_gpu needs the attributes id, image and plan"),
        _text("of_python", "a GPU kernel was called, and Python, which loads it, has ended"),
        _text("unknown", "unknown error"),
        _text("entering", "entering the context of XLA's stream"),
        _text("encoding", "describing an array to TMA"),
        _text("launching", "the launch"),
        "declare i32 @snprintf(ptr, i64, ptr, ...)",
    ]
)

_FUNCTIONS = """
define internal ptr @fail(ptr %frame, i32 %code, ptr %message) {
  %args = alloca %ErrorCreate
  store i64 28, ptr %args
  %p1 = getelementptr %ErrorCreate, ptr %args, i32 0, i32 1
  store ptr null, ptr %p1
  %p2 = getelementptr %ErrorCreate, ptr %args, i32 0, i32 2
  store ptr %message, ptr %p2
  %p3 = getelementptr %ErrorCreate, ptr %args, i32 0, i32 3
  store i32 %code, ptr %p3
  %at = getelementptr %Frame, ptr %frame, i32 0, i32 2
  %api = load ptr, ptr %at
  %create.at = getelementptr %Api, ptr %api, i32 0, i32 4
  %create = load ptr, ptr %create.at
  %error = call ptr %create(ptr %args)
  ret ptr %error
}

; The error of a driver's function, in the driver's words. %what: what was being done.
define internal ptr @driver_error(ptr %frame, ptr %kernel, ptr %what, i32 %result) {
  %words = alloca ptr
  store ptr @unknown, ptr %words
  %message = alloca [1024 x i8]
  %get.at = getelementptr ptr, ptr @cuda, i64 5
  %get = load ptr, ptr %get.at
  %ignored = call i32 %get(i32 %result, ptr %words)
  %found = load ptr, ptr %words
  %none = icmp eq ptr %found, null
  %said = select i1 %none, ptr @unknown, ptr %found
  %name.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 9
  %name = load ptr, ptr %name.at
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %message, i64 1024, ptr @of_driver, ptr %name, ptr %what, ptr %said,
                                          i32 %result)
  %error = call ptr @fail(ptr %frame, i32 13, ptr %message)
  ret ptr %error
}

define internal ptr @find(i64 %id, ptr %context) {
entry:
  %bucket = and i64 %id, LAST_BUCKET
  %head.at = getelementptr ptr, ptr @kernels, i64 %bucket
  br label %probe
probe:
  %link = phi ptr [ %head.at, %entry ], [ %next.at, %other ]
  %kernel = load atomic ptr, ptr %link acquire, align 8
  %end = icmp eq ptr %kernel, null
  br i1 %end, label %absent, label %compare
compare:
  %its.id = load i64, ptr %kernel
  %its.context.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 1
  %its.context = load ptr, ptr %its.context.at
  %same.id = icmp eq i64 %its.id, %id
  %same.context = icmp eq ptr %its.context, %context
  %same = and i1 %same.id, %same.context
  br i1 %same, label %found, label %other
other:
  %next.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 2
  br label %probe
found:
  ret ptr %kernel
absent:
  ret ptr null
}

; XLA_FFI_Error*: put parameter number %n into its place of 128 bytes, which is aligned to 64.
define internal ptr @write_parameter(ptr %frame, ptr %kernel, i64 %n, ptr %place) {
entry:
  %all.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 6
  %all = load ptr, ptr %all.at
  %p = getelementptr %Param, ptr %all, i64 %n
  %of.results = load i64, ptr %p
  %is.result = icmp ne i64 %of.results, 0
  %args = getelementptr %Frame, ptr %frame, i32 0, i32 5
  %rets = getelementptr %Frame, ptr %frame, i32 0, i32 6
  %side = select i1 %is.result, ptr %rets, ptr %args
  %items.at = getelementptr %Buffers, ptr %side, i32 0, i32 4
  %items = load ptr, ptr %items.at
  %index.at = getelementptr %Param, ptr %p, i32 0, i32 1
  %index = load i64, ptr %index.at
  %buffer.at = getelementptr ptr, ptr %items, i64 %index
  %buffer = load ptr, ptr %buffer.at
  %data.at = getelementptr %Buffer, ptr %buffer, i32 0, i32 3
  %data = load ptr, ptr %data.at
  %is.map.at = getelementptr %Param, ptr %p, i32 0, i32 2
  %is.map = load i64, ptr %is.map.at
  %plain = icmp eq i64 %is.map, 0
  br i1 %plain, label %pointer, label %map
pointer:
  store ptr %data, ptr %place
  ret ptr null
map:
  %offset.at = getelementptr %Param, ptr %p, i32 0, i32 3
  %offset = load i64, ptr %offset.at
  %address = getelementptr i8, ptr %data, i64 %offset
  %dtype.at = getelementptr %Param, ptr %p, i32 0, i32 4
  %dtype = load i32, ptr %dtype.at
  %rank.at = getelementptr %Param, ptr %p, i32 0, i32 5
  %rank = load i32, ptr %rank.at
  %dims.at = getelementptr %Param, ptr %p, i32 0, i32 6
  %dims = load ptr, ptr %dims.at
  %strides.at = getelementptr %Param, ptr %p, i32 0, i32 7
  %strides = load ptr, ptr %strides.at
  %box.at = getelementptr %Param, ptr %p, i32 0, i32 8
  %box = load ptr, ptr %box.at
  %steps.at = getelementptr %Param, ptr %p, i32 0, i32 9
  %steps = load ptr, ptr %steps.at
  %swizzle.at = getelementptr %Param, ptr %p, i32 0, i32 10
  %swizzle = load i32, ptr %swizzle.at
  %promotion.at = getelementptr %Param, ptr %p, i32 0, i32 11
  %promotion = load i32, ptr %promotion.at
  %fill.at = getelementptr %Param, ptr %p, i32 0, i32 12
  %fill = load i32, ptr %fill.at
  %encode.at = getelementptr ptr, ptr @cuda, i64 3
  %encode = load ptr, ptr %encode.at
  %result = call i32 %encode(ptr %place, i32 %dtype, i32 %rank, ptr %address, ptr %dims, ptr %strides, ptr %box,
                             ptr %steps, i32 0, i32 %swizzle, i32 %promotion, i32 %fill)
  %well = icmp eq i32 %result, 0
  br i1 %well, label %done, label %bad
done:
  ret ptr null
bad:
  %error = call ptr @driver_error(ptr %frame, ptr %kernel, ptr @encoding, i32 %result)
  ret ptr %error
}

; XLA_FFI_Error*: write the parameters and launch, with the context entered.
define internal ptr @start(ptr %frame, ptr %kernel, ptr %stream) {
entry:
  %count.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 7
  %count = load i64, ptr %count.at
  %places = alloca [128 x i8], i64 %count, align 64
  %pointers = alloca ptr, i64 %count, align 8
  br label %next
next:
  %n = phi i64 [ 0, %entry ], [ %after, %written ]
  %more = icmp slt i64 %n, %count
  br i1 %more, label %write, label %call
write:
  %place = getelementptr [128 x i8], ptr %places, i64 %n
  %error = call ptr @write_parameter(ptr %frame, ptr %kernel, i64 %n, ptr %place)
  %well = icmp eq ptr %error, null
  br i1 %well, label %written, label %bad
written:
  %pointer.at = getelementptr ptr, ptr %pointers, i64 %n
  store ptr %place, ptr %pointer.at
  %after = add i64 %n, 1
  br label %next
call:
  %config = alloca %LaunchConfig, align 8
  %model.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 8
  %model = load ptr, ptr %model.at
  %values = load %LaunchConfig, ptr %model
  store %LaunchConfig %values, ptr %config
  %stream.at = getelementptr %LaunchConfig, ptr %config, i32 0, i32 1
  store ptr %stream, ptr %stream.at
  %function.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 3
  %function = load ptr, ptr %function.at
  %launch.at = getelementptr ptr, ptr @cuda, i64 4
  %launch = load ptr, ptr %launch.at
  %result = call i32 %launch(ptr %config, ptr %function, ptr %pointers, ptr null)
  %started = icmp eq i32 %result, 0
  br i1 %started, label %done, label %refused
refused:
  %why = call ptr @driver_error(ptr %frame, ptr %kernel, ptr @launching, i32 %result)
  ret ptr %why
done:
  ret ptr null
bad:
  ret ptr %error
}

define ptr @ffi_handler(ptr %frame) {
entry:
  ; XLA asks once, at registration, what this handler is. Nothing else in the frame is set then but the API.
  %extension.at = getelementptr %Frame, ptr %frame, i32 0, i32 1
  %extension = load ptr, ptr %extension.at
  %no.extension = icmp eq ptr %extension, null
  br i1 %no.extension, label %stages, label %extended
extended:
  %kind.at = getelementptr %Extension, ptr %extension, i32 0, i32 1
  %kind = load i32, ptr %kind.at
  %is.metadata = icmp eq i32 %kind, 1
  br i1 %is.metadata, label %describe, label %stages
describe:
  %metadata.at = getelementptr %Extension, ptr %extension, i32 0, i32 3
  %metadata = load ptr, ptr %metadata.at
  %major.at = getelementptr %Metadata, ptr %metadata, i32 0, i32 1, i32 2
  store i32 0, ptr %major.at
  %api.at = getelementptr %Frame, ptr %frame, i32 0, i32 2
  %api = load ptr, ptr %api.at
  %no.api = icmp eq ptr %api, null
  br i1 %no.api, label %described, label %older
older:  ; an XLA that is older than these structs is told its own version
  %theirs.at = getelementptr %Api, ptr %api, i32 0, i32 2, i32 3
  %theirs = load i32, ptr %theirs.at
  br label %described
described:
  %theirs.or.ours = phi i32 [ 5, %describe ], [ %theirs, %older ]
  %is.older = icmp slt i32 %theirs.or.ours, 5
  %minor = select i1 %is.older, i32 %theirs.or.ours, i32 5
  %minor.at = getelementptr %Metadata, ptr %metadata, i32 0, i32 1, i32 3
  store i32 %minor, ptr %minor.at
  %traits.at = getelementptr %Metadata, ptr %metadata, i32 0, i32 2
  store i32 0, ptr %traits.at
  ret ptr null

stages:
  %stage.at = getelementptr %Frame, ptr %frame, i32 0, i32 4
  %stage = load i32, ptr %stage.at
  %executes = icmp eq i32 %stage, 3
  br i1 %executes, label %named, label %nothing
nothing:
  ret ptr null

named:
  %attrs = getelementptr %Frame, ptr %frame, i32 0, i32 7
  %size.at = getelementptr %Attrs, ptr %attrs, i32 0, i32 2
  %size = load i64, ptr %size.at
  %three = icmp eq i64 %size, 3
  br i1 %three, label %streams, label %misnamed
misnamed:
  %e.attributes = call ptr @fail(ptr %frame, i32 3, ptr @of_attributes)
  ret ptr %e.attributes
streams:
  %items.at = getelementptr %Attrs, ptr %attrs, i32 0, i32 5
  %items = load ptr, ptr %items.at
  %first = load ptr, ptr %items  ; they are sorted by name
  %value.at = getelementptr %Scalar, ptr %first, i32 0, i32 1
  %value = load ptr, ptr %value.at
  %id = load i64, ptr %value
  %get = alloca %StreamGet
  store i64 32, ptr %get
  %g1 = getelementptr %StreamGet, ptr %get, i32 0, i32 1
  store ptr null, ptr %g1
  %ctx.at = getelementptr %Frame, ptr %frame, i32 0, i32 3
  %ctx = load ptr, ptr %ctx.at
  %g2 = getelementptr %StreamGet, ptr %get, i32 0, i32 2
  store ptr %ctx, ptr %g2
  %g3 = getelementptr %StreamGet, ptr %get, i32 0, i32 3
  store ptr null, ptr %g3
  %xla.at = getelementptr %Frame, ptr %frame, i32 0, i32 2
  %xla = load ptr, ptr %xla.at
  %stream.get.at = getelementptr %Api, ptr %xla, i32 0, i32 8
  %stream.get = load ptr, ptr %stream.get.at
  %e.stream = call ptr %stream.get(ptr %get)
  %has.stream = icmp eq ptr %e.stream, null
  br i1 %has.stream, label %contexts, label %no.stream
no.stream:
  ret ptr %e.stream
contexts:
  %stream = load ptr, ptr %g3
  %context.slot = alloca ptr
  %context.of = load atomic ptr, ptr @cuda acquire, align 8
  %fresh = icmp eq ptr %context.of, null
  br i1 %fresh, label %bring, label %look
look:
  %r.context = call i32 %context.of(ptr %stream, ptr %context.slot)
  %context = load ptr, ptr %context.slot
  %known = call ptr @find(i64 %id, ptr %context)
  %unknown.kernel = icmp eq ptr %known, null
  br i1 %unknown.kernel, label %bring, label %check

bring:  ; Python loads the kernel
  %loader = load ptr, ptr @load
  %no.python = icmp eq ptr %loader, null
  br i1 %no.python, label %gone, label %ask
gone:
  %e.gone = call ptr @fail(ptr %frame, i32 13, ptr @of_python)
  ret ptr %e.gone
ask:
  %words = alloca [8192 x i8]
  %brought = call ptr %loader(ptr %attrs, ptr %stream, ptr %words, i64 8192)
  %not.brought = icmp eq ptr %brought, null
  br i1 %not.brought, label %unloaded, label %check
unloaded:
  %e.load = call ptr @fail(ptr %frame, i32 13, ptr %words)
  ret ptr %e.load

check:
  %kernel = phi ptr [ %known, %look ], [ %brought, %ask ]
  %nargs.at = getelementptr %Frame, ptr %frame, i32 0, i32 5, i32 2
  %nargs = load i64, ptr %nargs.at
  %nrets.at = getelementptr %Frame, ptr %frame, i32 0, i32 6, i32 2
  %nrets = load i64, ptr %nrets.at
  %want.args.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 4
  %want.args = load i64, ptr %want.args.at
  %want.rets.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 5
  %want.rets = load i64, ptr %want.rets.at
  %args.fit = icmp eq i64 %nargs, %want.args
  %rets.fit = icmp eq i64 %nrets, %want.rets
  %fits = and i1 %args.fit, %rets.fit
  br i1 %fits, label %enter, label %misfit
misfit:
  %message = alloca [512 x i8]
  %name.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 9
  %name = load ptr, ptr %name.at
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %message, i64 512, ptr @of_counts, ptr %name, i64 %nargs, i64 %nrets,
                                          i64 %want.args, i64 %want.rets)
  %e.counts = call ptr @fail(ptr %frame, i32 3, ptr %message)
  ret ptr %e.counts

enter:
  %its.context.at = getelementptr %Kernel, ptr %kernel, i32 0, i32 1
  %its.context = load ptr, ptr %its.context.at
  %push.at = getelementptr ptr, ptr @cuda, i64 1
  %push = load ptr, ptr %push.at
  %r.push = call i32 %push(ptr %its.context)
  %entered = icmp eq i32 %r.push, 0
  br i1 %entered, label %go, label %outside
outside:
  %e.push = call ptr @driver_error(ptr %frame, ptr %kernel, ptr @entering, i32 %r.push)
  ret ptr %e.push
go:
  %e.start = call ptr @start(ptr %frame, ptr %kernel, ptr %stream)
  %left = alloca ptr
  %pop.at = getelementptr ptr, ptr @cuda, i64 2
  %pop = load ptr, ptr %pop.at
  %r.pop = call i32 %pop(ptr %left)
  ret ptr %e.start
}
"""


def module() -> str:
    """The handler's module, for any machine with pointers of 64 bits."""
    return "\n".join([_STRUCTS, _GLOBALS, _FUNCTIONS.replace("LAST_BUCKET", str(BUCKETS - 1))])


@functools.cache
def addresses() -> dict[str, int]:
    """Compile the handler into this process, once: the addresses of `EXPORTS`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, reloc="pic", codemodel="small")
    builder = llvm.JITLibraryBuilder().add_current_process().add_ir(module())
    for name in EXPORTS:
        builder.export_symbol(name)
    _kept.append(llvm.create_lljit_compiler(machine))
    _kept.append(builder.link(_kept[-1], "palladion_gpu"))
    return {name: _kept[-1][name] for name in EXPORTS}


_kept: list = []  # for ever: XLA holds the handler's address
