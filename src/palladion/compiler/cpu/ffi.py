"""The one XLA FFI handler behind every native kernel, in LLVM IR: no Python and no lock on the way of a call.

    a jitted program --XLA custom call "palladion_cpu"--> handler(frame)
        finds the kernel's descriptor by the content key that the call carries,
        checks number, dtypes, shapes and aliasing of the buffers against it,
        runs each phase over its grid (jobs.py) --> kernel(buffers, begin, end, worker), see runtime.py

The key is a hash of the kernel's code, never an address: programs are the same text in every process, so that JAX's
persistent compilation cache works, and an executable from elsewhere meets a clear NOT_FOUND instead of a wild jump.

buffers[-1] is the kernel's descriptor, which gives `palladion_host_call` the key, buffers[-2] the frame, by which
`palladion_spread` reaches the pool. What a kernel says on the host goes through two pointers, `host_hook` and
`message_hook`, that runtime.py stores in the loaded module: no address is in the IR, or it could not be cached.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from palladion.compiler.cpu.abi import (
    API_VERSION,
    DTYPES,
    INTERNAL,
    INVALID_ARGUMENT,
    METADATA_EXTENSION,
    NOT_FOUND,
    Alias,
    Api,
    Buffer,
    CallFrame,
    Extension,
    Kernel,
    Metadata,
    Phase,
    Scalar,
    Spec,
    Table,
    fail,
    field,
    get,
    item,
    put,
)
from palladion.compiler.cpu.builder import (
    NULL,
    Value,
    blocks,
    call_extern,
    call_pointer,
    const,
    declare,
    define,
    gep,
    global_bytes,
    i8,
    i32,
    i64,
    load,
    loop,
    new_module,
    on_stack,
    ptr,
    smin,
    store,
)
from palladion.compiler.cpu.jobs import FRAME_AT, KERNEL_AT, SPREAD, emit_run, emit_spread, run_phase

TARGET_NAME = "palladion_cpu"  # what programs call; part of their text, so it never changes
HOST_CALL = "palladion_host_call"  # i32(ptr buffers, i32 site, ptr values, i64 count)
MESSAGE_BYTES = 8192
EXPORTS = ("ffi_handler", "kernel_table", "host_hook", "message_hook", HOST_CALL, SPREAD)


def host_call(b: ir.IRBuilder, buffers: Value, site: int, values: list[Value]) -> Value:
    """Emit, in a kernel, a call of Python on the host; takes the GIL.

    Arguments:
      buffers: the kernel's first argument.
      site: index in the kernel's `HostSite`s (runtime.py).
      values: pointers to the values, in the shapes and dtypes that the site states.
    Returns: an i32 value; if it is not zero, the kernel must return it at once.
    """
    slots = on_stack(b, ptr, max(1, len(values)))
    for n, value in enumerate(values):
        store(b, value, gep(b, slots, n, ptr))
    return call_extern(b, i32, HOST_CALL, buffers, const(site, i32), slots, const(len(values)))


# ---------------------------------------------------------------------------------------------- error messages
def _string(b: ir.IRBuilder, text: str) -> Value:
    return global_bytes(b.module, text.encode() + b"\0", "string", align=1)


def _format(b: ir.IRBuilder, text: str, *values: Value, room: int = 512) -> Value:
    """A C string on the stack: printf's format, filled in, cut off where the room (in bytes) ends."""
    message = on_stack(b, i8, room)
    snprintf = declare(b.module, "snprintf", i32, ptr, i64, ptr, var_arg=True)
    b.call(snprintf, [message, const(room), _string(b, text), *values])
    return message


def _global_pointer(m: Any, name: str) -> Value:
    g: Any = ir.GlobalVariable(m, ptr, name)
    g.initializer = NULL
    g.type = ptr
    return g


def _dtype_names(m: Any) -> Value:
    """A table of C strings, 32 bytes each, by XLA_FFI_DataType."""
    names = {number: name for name, number in DTYPES.items()}
    rows = [names.get(n, f"XLA dtype {n}").encode().ljust(32, b"\0") for n in range(64)]
    return global_bytes(m, b"".join(rows), "dtype_names")


def _emit_wrong(m: Any) -> dict[str, Any]:
    """XLA_FFI_Error* wrong_…(frame, kernel, side, index, …): the errors for buffers that do not fit the kernel."""
    functions = {}
    names = _dtype_names(m)

    def row(b, number):
        inside = b.and_(number, const(63))
        return gep(b, names, b.mul(inside, const(32)))

    texts = {
        "dtype": ("kernel '%s', %s %lld: its dtype is %s, expected %s", row),
        "rank": ("kernel '%s', %s %lld: it has %lld dimensions, expected %lld", None),
        "dim": ("kernel '%s', %s %lld: dimension %lld is %lld, expected %lld", None),
    }
    for what, (text, show) in texts.items():
        extra = [i64] * (3 if what == "dim" else 2)
        f, b = define(m, f"wrong_{what}", ptr, ptr, ptr, ptr, i64, *extra, internal=True)
        frame, kernel, side, index, *values = f.args
        values = [show(b, v) for v in values] if show else values
        message = _format(b, text, get(b, Kernel, kernel, "name"), side, index, *values)
        fail(b, frame, INVALID_ARGUMENT, message)
        functions[what] = f
    return functions


def _emit_check(m: Any) -> Any:
    """XLA_FFI_Error* check(frame, kernel, side, items, count, specs, bufs): compare the arguments or the results with
    their specs, and put their data pointers into bufs."""
    wrong = _emit_wrong(m)
    f, b = define(m, "check_buffers", ptr, ptr, ptr, ptr, ptr, i64, ptr, ptr, internal=True)
    frame, kernel, side, items, count, specs, bufs = f.args

    def expect(got, want, what, *extra):
        with b.if_then(b.icmp_signed("!=", got, want), likely=False):
            b.ret(b.call(wrong[what], [frame, kernel, side, L.i, *extra, got, want]))

    with loop(b, 0, count) as L:
        buffer, spec = load(b, ptr, gep(b, items, L.i, ptr)), item(b, Spec, specs, L.i)
        expect(b.sext(get(b, Buffer, buffer, "dtype"), i64), get(b, Spec, spec, "dtype"), "dtype")
        rank = get(b, Buffer, buffer, "rank")
        expect(rank, get(b, Spec, spec, "rank"), "rank")
        got, want = get(b, Buffer, buffer, "dims"), get(b, Spec, spec, "dims")
        with loop(b, 0, rank) as D:
            expect(load(b, i64, gep(b, got, D.i, i64)), load(b, i64, gep(b, want, D.i, i64)), "dim", D.i)
        store(b, get(b, Buffer, buffer, "data"), gep(b, bufs, L.i, ptr))
    b.ret(NULL)
    return f


def _emit_failure(m: Any, message_hook: Value) -> Any:
    """XLA_FFI_Error* failure(frame, kernel, status): the error of a kernel that returned a nonzero status.

    A positive status is a ticket for a message that Python keeps; -n is the kernel's static message number n - 1.
    """
    f, b = define(m, "failure", ptr, ptr, ptr, i32, internal=True)
    frame, kernel, status = f.args
    name = get(b, Kernel, kernel, "name")
    with b.if_then(b.icmp_signed(">", status, const(0, i32))):
        hook = load(b, ptr, message_hook)
        with b.if_then(b.icmp_unsigned("!=", hook, NULL)):
            message = on_stack(b, i8, MESSAGE_BYTES)
            call_pointer(b, i32, hook, status, message, const(MESSAGE_BYTES))
            fail(b, frame, INVALID_ARGUMENT, message)
    number = b.sub(const(-1), b.sext(status, i64))
    with b.if_then(b.icmp_unsigned("<", number, get(b, Kernel, kernel, "nerrors"))):
        text = load(b, ptr, gep(b, get(b, Kernel, kernel, "errors"), number, ptr))
        fail(b, frame, INVALID_ARGUMENT, _format(b, "kernel '%s': %s", name, text, room=MESSAGE_BYTES))
    fail(b, frame, INTERNAL, _format(b, "kernel '%s' stopped with status %d", name, status))
    return f


def _emit_host_call(m: Any, host_hook: Value) -> None:
    """i32 palladion_host_call(buffers, site, values, count): what kernels link to."""
    f, b = define(m, HOST_CALL, i32, ptr, i32, ptr, i64)
    buffers, site, values, count = f.args
    hook = load(b, ptr, host_hook)
    with b.if_then(b.icmp_unsigned("==", hook, NULL), likely=False):  # Python is going away
        b.ret(const(-(1 << 31), i32))
    kernel = load(b, ptr, gep(b, buffers, KERNEL_AT, ptr))
    b.ret(call_pointer(b, i32, hook, get(b, Kernel, kernel, "key"), site, values, count))


# ------------------------------------------------------------------------------------------------- the handler
def _find(b: ir.IRBuilder, frame: Value, table: Value) -> Value:
    """The descriptor of the kernel that the call names; the table is never full, so that probing ends."""
    with b.if_then(b.icmp_signed("!=", get(b, CallFrame, frame, "attrs.size"), const(1)), likely=False):
        fail(b, frame, INVALID_ARGUMENT, _string(b, f"a call of {TARGET_NAME} needs one attribute, kernel"))
    attribute = load(b, ptr, get(b, CallFrame, frame, "attrs.items"))
    key = load(b, i64, get(b, Scalar, attribute, "value"))
    known = load(b, ptr, table)
    mask, slots = get(b, Table, known, "mask"), field(b, Table, known, "slots")[0]
    before, (probe, found) = b.block, blocks(b, "probe", "found")
    b.branch(probe)
    b.position_at_end(probe)
    slot = b.phi(i64)
    kernel = load(b, ptr, gep(b, slots, b.and_(slot, mask), ptr))
    with b.if_then(b.icmp_unsigned("==", kernel, NULL), likely=False):
        text = (
            "no native kernel with key %016llx is loaded in this process; a compiled program that comes from another "
            "process needs its kernels traced, or loaded, here first"
        )
        fail(b, frame, NOT_FOUND, _format(b, text, key))
    slot.add_incoming(key, before)
    slot.add_incoming(b.add(slot, const(1)), b.block)
    b.cbranch(b.icmp_signed("==", get(b, Kernel, kernel, "key"), key), found, probe)
    b.position_at_end(found)
    return kernel


def _emit_handler(m: Any, table: Value, message_hook: Value) -> None:
    """XLA_FFI_Error* ffi_handler(XLA_FFI_CallFrame*)"""
    check, failure, run = _emit_check(m), _emit_failure(m, message_hook), emit_run(m)
    emit_spread(m, run)
    f, b = define(m, "ffi_handler", ptr, ptr)
    (frame,) = f.args

    # XLA asks once, at registration, what this handler is. Nothing else in the frame is set then but the API.
    extension = get(b, CallFrame, frame, "extension_start")
    with b.if_then(b.icmp_unsigned("!=", extension, NULL), likely=False):
        kind = get(b, Extension, extension, "type")
        with b.if_then(b.icmp_signed("==", kind, const(METADATA_EXTENSION, i32))):
            minor = smin(b, const(API_VERSION[1], i32), _api_minor(b, frame))
            metadata = get(b, Extension, extension, "metadata")
            put(b, Metadata, metadata, api_version__major=API_VERSION[0], api_version__minor=minor, traits=0)
            b.ret(NULL)

    kernel = _find(b, frame, table)
    nargs, nrets = get(b, Kernel, kernel, "nargs"), get(b, Kernel, kernel, "nrets")
    base = b.alloca(ptr, b.add(b.add(nargs, nrets), const(-FRAME_AT)))
    base.type = ptr
    bufs, specs = gep(b, base, -FRAME_AT, ptr), get(b, Kernel, kernel, "specs")
    store(b, kernel, gep(b, bufs, KERNEL_AT, ptr))
    store(b, frame, gep(b, bufs, FRAME_AT, ptr))
    for side, name, first, want in (("args", "argument", None, nargs), ("rets", "result", nargs, nrets)):
        count = get(b, CallFrame, frame, f"{side}.size")
        with b.if_then(b.icmp_signed("!=", count, want), likely=False):
            text = f"kernel '%s': it is called with %lld {name}s, expected %lld"
            fail(b, frame, INVALID_ARGUMENT, _format(b, text, get(b, Kernel, kernel, "name"), count, want))
        own_specs = specs if first is None else item(b, Spec, specs, first)
        own_bufs = bufs if first is None else gep(b, bufs, first, ptr)
        items = get(b, CallFrame, frame, f"{side}.items")
        error = b.call(check, [frame, kernel, _string(b, name), items, count, own_specs, own_bufs])
        with b.if_then(b.icmp_unsigned("!=", error, NULL), likely=False):
            b.ret(error)

    with loop(b, 0, get(b, Kernel, kernel, "naliases")) as L:
        alias = item(b, Alias, get(b, Kernel, kernel, "aliases"), L.i)
        arg, ret = get(b, Alias, alias, "arg"), get(b, Alias, alias, "ret")
        same = b.icmp_unsigned(
            "==", load(b, ptr, gep(b, bufs, arg, ptr)), load(b, ptr, gep(b, bufs, b.add(nargs, ret), ptr))
        )
        with b.if_then(b.not_(same), likely=False):
            text = "kernel '%s': argument %lld and result %lld are not in the same memory, as its aliases state"
            fail(b, frame, INTERNAL, _format(b, text, get(b, Kernel, kernel, "name"), arg, ret))

    with loop(b, 0, get(b, Kernel, kernel, "nphases")) as L:
        phase = item(b, Phase, get(b, Kernel, kernel, "phases"), L.i)
        status = run_phase(b, run, frame, phase, bufs)
        with b.if_then(b.icmp_signed("!=", status, const(0, i32)), likely=False):
            b.ret(b.call(failure, [frame, kernel, status]))
    b.ret(NULL)


def _api_minor(b: ir.IRBuilder, frame: Value) -> Value:
    """The minor version of XLA's own API, so that an older one accepts this handler too."""
    api = get(b, CallFrame, frame, "api")
    known = b.icmp_unsigned("!=", api, NULL)
    minor = on_stack(b, i32)
    store(b, const(API_VERSION[1], i32), minor)
    with b.if_then(known):
        store(b, get(b, Api, api, "api_version.minor"), minor)
    return load(b, i32, minor)


def build_runtime() -> Any:
    """The module of the handler and of everything that it calls."""
    m = new_module("palladion_runtime")
    table, host_hook, message_hook = (
        _global_pointer(m, name) for name in ("kernel_table", "host_hook", "message_hook")
    )
    _emit_host_call(m, host_hook)
    _emit_handler(m, table, message_hook)
    return m
