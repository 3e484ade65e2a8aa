"""Native kernels in this process: loading them, and calling them from JAX programs.

    description = KernelDescription(
        name="scale",
        args=(Array((64, 128), "float32"),),
        results=(Array((64, 128), "float32"),),
        phases=(Phase("scale", 0, 64, cost_ns=2_000),),        # function of the module, grid programs 0..63
    )
    key = load(module, description)                            # or load_cached(source, build): skips building the IR
    ...
    def lowering_rule(ctx, x, **params):                       # of a primitive, for the platform "cpu"
        return lower_call(ctx, key, [x])                       # in an MLIR lowering rule; or, in traced code:
    y, = call(key, x)

**A kernel** is a function `i32 name(ptr buffers, i64 begin, i64 end, i64 worker)` that runs the grid programs begin to
end - 1 of one phase. buffers[i] are the data pointers, 64-byte aligned and dense row-major, of the arguments, then of
the results, then (with `arena_bytes`) of the arena, of which this thread owns the bytes from worker * arena_bytes on
for as long as the function runs. It must be re-entrant: XLA may run a call several times at once. It returns 0, or
nonzero to stop the call, which becomes an error in XLA: what `ffi.host_call` returned (the message is the one of the
Python exception), or -1 - i for `description.errors[i]`.

**Phases** run one after the other, each over its own range of programs, on XLA's intra-op thread pool where that is
worth its while (jobs.py). A phase may rely on all of the previous one being done and visible.

**Loading** is for ever, as an executable that JAX keeps may call a kernel whenever it likes. It is idempotent and may
be done on any thread. A kernel is known by a content key: the same code and description have the same key in every
process on this kind of machine.

**Element types** are passed as XLA stores them: bool as one byte, 0 or 1; int4, uint4 and float4_e2m1fn two elements a
byte, int2 and uint2 four, the first one in the lowest bits, in row-major order with no gap at the end of a row.
"""

from __future__ import annotations

import atexit
import ctypes as C
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.cpu import abi, cache, ffi

SERIAL_BELOW_NS = 15_000  # measured: with less work than this, waking a helper costs more than it brings
NS_PER_THREAD = 7_500
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


@dataclasses.dataclass(frozen=True)
class Array:
    """Shape and dtype (NumPy's or ml_dtypes' name, such as "bfloat16") of a buffer."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in memory, as XLA stores it."""
        bits = _PACKED_BITS.get(self.dtype) or 8 * jnp.dtype(self.dtype).itemsize
        return (math.prod(self.shape) * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Phase:
    """One pass over a range of grid programs.

    Attributes:
      function: its name in the module.
      begin, end: the grid programs begin..end-1.
      parallel: whether chunks of programs may run at once and in any order; False: one call runs them all.
      cost_ns: estimate of the whole phase on one thread, in nanoseconds; below 15,000 it runs on the caller alone.
      chunk: programs a chunk; 0: about four chunks a thread.
    """

    function: str
    begin: int
    end: int
    parallel: bool = True
    cost_ns: int = 0
    chunk: int = 0


@dataclasses.dataclass(frozen=True)
class HostSite:
    """A place in a kernel that calls Python, by `ffi.host_call(b, buffers, site, pointers)`.

    Attributes:
      name: tells this site's action from others' (it is part of the kernel's key): a format, a message.
      function: called with one NumPy array (a copy) for each value. It may print. If it raises, the kernel stops, and
        the text of the exception is the error's. It must not run JAX programs.
      values: shape and dtype of each value; elements of less than a byte take one each, as in NumPy.
    """

    name: str
    function: Callable[..., Any]
    values: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelDescription:
    """What the runtime needs to know of a kernel.

    Attributes:
      name: for messages.
      args, results: the buffers; the handler checks them against it at each call.
      phases: in order.
      arena_bytes: scratch memory of one worker, a multiple of 64; 0: none.
      aliases: pairs (argument, result) that are the same memory. XLA copies an argument that it still needs.
      num_threads: at most so many threads; None: as many as XLA's pool has.
      errors: static messages, by the status that the kernel returns: -1 - index.
      side_effect: keep the call even if nobody uses its results.
      spread: phases that are not parallel share single statements among threads (`jobs.spread`).
    """

    name: str
    args: tuple[Array, ...]
    results: tuple[Array, ...]
    phases: tuple[Phase, ...]
    arena_bytes: int = 0
    aliases: tuple[tuple[int, int], ...] = ()
    num_threads: int | None = None
    errors: tuple[str, ...] = ()
    side_effect: bool = False
    spread: bool = False

    @property
    def workers(self) -> int:
        """How many threads may run it at once: the arena has so many parts."""
        return max([self.most_threads if self.spread else 1, *map(self.threads, self.phases)])

    @property
    def most_threads(self) -> int:
        """How many threads it may use: of those of XLA's pool."""
        return cpu_count() if self.num_threads is None else max(1, min(self.num_threads, cpu_count()))

    def threads(self, phase: Phase) -> int:
        """How many threads a phase is worth."""
        if not phase.parallel or phase.cost_ns < SERIAL_BELOW_NS:
            return 1
        return max(1, min(self.most_threads, phase.end - phase.begin, max(2, phase.cost_ns // NS_PER_THREAD)))


@functools.cache
def cpu_count() -> int:
    """The threads of XLA's pool: so many as these variables say, else as this process may use CPUs."""
    asked = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
    return int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------------ calls of the host
@dataclasses.dataclass(frozen=True)
class _Loaded:
    digest: str
    description: KernelDescription
    sites: tuple[HostSite, ...]
    memory: Any  # the descriptor structs


_kernels: dict[int, _Loaded] = {}  # by content key; never shrinks
_messages: dict[int, str] = {}
_tickets = itertools.count(1)


def _host_hook(key: int, site: int, values: int, count: int) -> int:
    """Run a site's function on what the kernel passed; 0, or the ticket of a message that stops the kernel."""
    try:
        place = _kernels[key].sites[site]
        pointers = (C.c_void_p * count).from_address(values)
        place.function(*(_array_at(pointers[i], a) for i, a in enumerate(place.values)))
        return 0
    except BaseException as error:
        return _ticket(str(error) or type(error).__name__)


def _ticket(message: str) -> int:
    ticket = next(_tickets) % 0x7FFFFFFF + 1
    _messages[ticket] = message
    while len(_messages) > 256:  # those of chunks that failed after another one
        _messages.pop(next(iter(_messages)), None)
    return ticket


def _array_at(address: int, array: Array) -> np.ndarray:
    dtype = jnp.dtype(array.dtype)
    data = C.string_at(address, math.prod(array.shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(array.shape)


def _message_hook(ticket: int, out: int, room: int) -> int:
    """Write a ticket's message, as a C string, where the handler wants it."""
    text = _messages.pop(ticket, "the message is lost: too many chunks of kernels failed at once").encode()[: room - 1]
    text = text.decode(errors="ignore").encode()  # not half a character at the end
    C.memmove(out, text + b"\0", len(text) + 1)
    return 0


_HOST_HOOK = C.CFUNCTYPE(C.c_int32, C.c_int64, C.c_int32, C.c_void_p, C.c_int64)(_host_hook)
_MESSAGE_HOOK = C.CFUNCTYPE(C.c_int32, C.c_int32, C.c_void_p, C.c_int64)(_message_hook)


# --------------------------------------------------------------------------------------------- the runtime
_lock = threading.RLock()
_pointers: dict[str, Any] = {}  # exports of the runtime: addresses, and the pointer variables as ctypes objects
_tables: list[Any] = []  # every table of kernels so far: a handler may still be reading an old one


def _start() -> None:
    """Load the handler and register it with XLA, once a process."""
    with _lock:
        if _pointers:
            return
        entry = cache.cached("the runtime", lambda: (ffi.build_runtime(), None))
        addresses = cache.link(entry.code, ffi.EXPORTS)
        variables = {name: C.c_void_p.from_address(addresses[name]) for name in ("host_hook", "message_hook")}
        variables["host_hook"].value = C.cast(_HOST_HOOK, C.c_void_p).value
        variables["message_hook"].value = C.cast(_MESSAGE_HOOK, C.c_void_p).value
        variables["kernel_table"] = C.c_void_p.from_address(addresses["kernel_table"])
        jax.ffi.register_ffi_target(ffi.TARGET_NAME, jax.ffi.pycapsule(addresses["ffi_handler"]), platform="cpu")
        _pointers.update(addresses, **{f"&{name}": variable for name, variable in variables.items()})
        _resize_table(64)
        atexit.register(_forget_python)


def _forget_python() -> None:
    # A pool thread that outlives the interpreter must not call into it.
    _pointers["&host_hook"].value = _pointers["&message_hook"].value = None


def _resize_table(size: int) -> None:
    table = (C.c_int64 * (1 + size))(size - 1)
    _tables.append(table)
    for kernel in _kernels.values():
        _enter(kernel.memory)
    _pointers["&kernel_table"].value = C.addressof(table)


def _enter(memory: Any) -> None:
    table = _tables[-1]
    mask, slot = table[0], memory.key
    while table[1 + (slot & mask)]:
        slot += 1
    table[1 + (slot & mask)] = C.addressof(memory)


def _descriptor(key: int, d: KernelDescription, addresses: dict[str, int]) -> Any:
    """The structs that the handler reads. They are kept alive by the one that is returned."""
    buffers = (*d.args, *d.results, *_arena(d))
    dims = [(C.c_int64 * len(a.shape))(*a.shape) for a in buffers]
    specs = (abi.Spec * len(buffers))(
        *(abi.Spec(abi.DTYPES[a.dtype], len(a.shape), C.addressof(n)) for a, n in zip(buffers, dims))
    )
    aliases = (abi.Alias * len(d.aliases))(*(abi.Alias(a, r) for a, r in d.aliases))
    phases = (abi.Phase * len(d.phases))(
        *(abi.Phase(addresses[p.function], p.begin, p.end, p.chunk, d.threads(p)) for p in d.phases)
    )
    errors = (C.c_char_p * len(d.errors))(*(text.encode() for text in d.errors))
    kernel = abi.Kernel(
        key=key,
        name=d.name.encode(),
        nargs=len(d.args),
        nrets=len(buffers) - len(d.args),
        specs=C.addressof(specs),
        naliases=len(aliases),
        aliases=C.addressof(aliases),
        nphases=len(phases),
        phases=C.addressof(phases),
        nerrors=len(errors),
        errors=C.addressof(errors),
        workers=d.workers,
    )
    kernel.kept = dims, specs, aliases, phases, errors
    return kernel


def _arena(d: KernelDescription) -> tuple[Array, ...]:
    return (Array((d.workers * d.arena_bytes,), "uint8"),) if d.arena_bytes else ()


# --------------------------------------------------------------------------------------------------- loading
def load(module: Any, description: KernelDescription, sites: Sequence[HostSite] = ()) -> int:
    """Compile a kernel, or find its object code in the cache, and make it callable.

    Arguments:
      module: an `ir.Module`, or IR text, that defines the functions of the phases.
      description: of the kernel.
      sites: what its `host_call`s do, by site.
    Returns: its content key.
    Raises: ValueError: the description contradicts itself. target.UnsupportedHost: no native kernels on this machine.
      RuntimeError: LLVM refused the IR, or a function that it calls is nowhere.
    """
    text = str(module)
    return _load(text, cache.cached(text, lambda: (text, None)), description, sites)


def load_cached(
    source: str,
    build: Callable[[], tuple[Any, KernelDescription]],
    sites: Sequence[HostSite] = (),
) -> tuple[int, KernelDescription]:
    """`load` of what `build` makes; where the cache knows the source already, nothing is built.

    Arguments:
      source: text that decides all that `build` makes (the kernel's jaxpr, blocks, options). This compiler's own
        version is part of the key anyway.
      build: gives the module and the description.
      sites: as in `load`; not built by `build`, as functions cannot be on disk.
    Returns: the content key, and the description.
    """

    def make() -> tuple[Any, Any]:
        module, description = build()
        return module, _to_json(description)

    entry = cache.cached(source, make)
    description = _from_json(entry.extra)
    return _load(source, entry, description, sites), description


def _load(source: str, entry: cache.Entry, d: KernelDescription, sites: Sequence[HostSite]) -> int:
    sites = tuple(sites)
    _validate(d)
    identity = (cache.digest_of(source), d, d.workers, [(s.name, s.values) for s in sites])
    digest = hashlib.sha256(repr(identity).encode())
    key = int.from_bytes(digest.digest()[:8], "little", signed=True)
    with _lock:
        known = _kernels.get(key)
        if known is not None:
            if known.digest != digest.hexdigest():  # once in 2^64
                raise RuntimeError(f"the kernels {known.description.name} and {d.name} have the same key {key:#x}")
            return key
        _start()
        imports = {name: _pointers[name] for name in (ffi.HOST_CALL, ffi.SPREAD)}
        addresses = cache.link(entry.code, {p.function for p in d.phases}, imports)
        memory = _descriptor(key, d, addresses)
        if 2 * (len(_kernels) + 1) > len(_tables[-1]):
            _resize_table(2 * (len(_tables[-1]) - 1))
        _kernels[key] = _Loaded(digest.hexdigest(), d, sites, memory)
        _enter(memory)
    return key


def _validate(d: KernelDescription) -> None:
    for array in (*d.args, *d.results):
        if array.dtype not in abi.DTYPES:
            raise ValueError(f"kernel {d.name!r}: the CPU has no buffers of dtype {array.dtype}")
    if d.arena_bytes % 64:
        raise ValueError(f"kernel {d.name!r}: arena_bytes is {d.arena_bytes}, which is not a multiple of 64")
    for arg, result in d.aliases:
        if d.args[arg] != d.results[result]:
            raise ValueError(f"kernel {d.name!r}: argument {arg} and result {result} cannot be the same memory")


def _to_json(d: KernelDescription) -> Any:
    return dataclasses.asdict(d)


def _from_json(data: Any) -> KernelDescription:
    def arrays(items):
        return tuple(Array(tuple(a["shape"]), a["dtype"]) for a in items)

    fields = dict(data, args=arrays(data["args"]), results=arrays(data["results"]), errors=tuple(data["errors"]))
    fields["phases"] = tuple(Phase(**p) for p in data["phases"])
    fields["aliases"] = tuple(tuple(pair) for pair in data["aliases"])
    return KernelDescription(**fields)


# --------------------------------------------------------------------------------------------------- calling
def lower_call(ctx: Any, key: int, args: Sequence[Any]) -> list[Any]:
    """Emit the call of a loaded kernel, in a lowering rule (MLIR) of a primitive.

    Arguments: ctx: the rule's context; key: what `load` returned; args: MLIR values of the arguments, which must be
      as the description says.
    Returns: MLIR values of the results, one each.
    """
    kernel = _kernels[key]
    d = kernel.description
    ctx = ctx.replace(avals_in=_avals(d.args), avals_out=_avals((*d.results, *_arena(d))))
    rule = jax.ffi.ffi_lowering(
        ffi.TARGET_NAME,
        operand_output_aliases=dict(d.aliases) or None,
        has_side_effect=_has_side_effect(kernel),
    )
    return list(rule(ctx, *args, kernel=np.int64(key)))[: len(d.results)]


def _has_side_effect(kernel: _Loaded) -> bool:
    return kernel.description.side_effect or bool(kernel.sites)


def _avals(arrays: Sequence[Array]) -> list[Any]:
    return [jaxlink.ShapedArray(a.shape, jnp.dtype(a.dtype)) for a in arrays]


def call(key: int, *args: Any) -> list[jax.Array]:
    """Call a loaded kernel on JAX arrays, traced or not; its results."""
    return _native_call_p.bind(*args, key=key)


_native_call_p = jaxlink.Primitive("native_cpu_call")
_native_call_p.multiple_results = True
_native_call_p.def_impl(jaxlink.compile_and_run(_native_call_p))


@_native_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, key: int) -> Any:
    kernel = _kernels[key]
    effects = {jaxlink.debug_effect} if _has_side_effect(kernel) else set()
    return jaxlink.varying_as(_avals(kernel.description.results), avals), effects


jaxlink.mlir.register_lowering(_native_call_p, lambda ctx, *args, key: lower_call(ctx, key, args), platform="cpu")
