"""Machine code on disk, and its way into the process.

    entry = cached("softmax, f32[8,4096], …", build)       # Entry(code, extra); build() -> (module, extra) on a miss
    addresses = link(entry.code, ["softmax"])              # {"softmax": address}; never unloaded

A key is the hash of everything that decides the code: a description of the source, or the IR itself; the machine
(triple, CPU, features, as a home folder may be shared by different ones); LLVM's version and options; Palladion's
version and JAX's and, so that a checkout never runs stale code, the sources of this compiler and of the language.

The folder is `palladion.config.cache_dir`. It holds code that will run, so it is made for its owner alone, and one
that others may write to is not used. A file appears under its name whole (written aside, then renamed) and carries a
checksum; one that is damaged all the same is built again. Several processes may use the folder at once: at worst two
build the same entry. Without a usable folder everything works, but only memory remembers. To empty the cache, delete
the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import llvmlite.binding as llvm

from palladion import config
from palladion.compiler.cpu import target
from palladion.errors import PalladionWarning

MAGIC = b"palladion object 1\n"
_HEADER = struct.Struct("<32sQ")  # SHA-256 of all that follows it; bytes of the JSON, which the object code follows


@dataclasses.dataclass(frozen=True)
class Entry:
    """Object code, and what its builder wants to know when it finds it again.

    code: an object file (ELF). extra: JSON data. from_disk: whether it was found on disk, for reports and tests.
    """

    code: bytes
    extra: Any = None
    from_disk: bool = False


# ------------------------------------------------------------------------------------------------ compiling
_local = threading.local()


def parse(module: Any) -> Any:
    """LLVM's own form of a module (an `ir.Module`, or its text), checked. In a context of its own, whose memory goes
    with it."""
    parsed = llvm.parse_assembly(str(module), context=llvm.create_context())
    parsed.verify()
    return parsed


def compile_module(module: Any) -> bytes:
    """The object code of an `ir.Module`, or of IR text, for this machine."""
    machine = getattr(_local, "machine", None)
    if machine is None:
        machine = _local.machine = target.target_machine()
    return machine.emit_object(parse(module))


def assembly(module: Any) -> str:
    """The assembly code of a module, as `compile_module` makes it; for dumps and reports."""
    return target.target_machine().emit_assembly(parse(module))


@functools.cache
def environment() -> str:
    """All that decides the code besides its source, as text."""
    package, digest = pathlib.Path(__file__).parents[2], hashlib.sha256()
    # What lowering reads and calls; 3 ms, once a process.
    parts = [*(package / "compiler" / "cpu").rglob("*.py"), *(package / "language").rglob("*.py")]
    for path in sorted([*parts, package / "jaxlink.py", package / "rules.py"]):
        digest.update(path.read_bytes())
    host = target.host()
    parts = (
        host.triple,
        host.cpu,
        host.features,
        llvm.llvm_version_info,
        target.CODEGEN_OPT,
        importlib.metadata.version("palladion"),
        jax.__version__,  # what its functions trace to, inside a lowering rule
    )
    return repr((*parts, digest.hexdigest()))


def digest_of(source: Any) -> str:
    """The key, 64 hexadecimal digits, of a source description or of IR (text, or an `ir.Module`)."""
    return hashlib.sha256(f"{environment()}\0{source}".encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- the disk
def folder() -> pathlib.Path | None:
    """The folder of the cache, made if need be; None where there is none that can be used."""
    name = config.get("cache_dir")
    return _prepared(os.path.expanduser(name)) if name else None


@functools.cache
def _prepared(name: str) -> pathlib.Path | None:
    path = pathlib.Path(name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError:
        return None  # no home, or a read-only one: common in containers, and harmless
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        warnings.warn(
            f"{path} is not used as a cache of compiled kernels: others can write to it, and what is there would run "
            "as you.\n  fix: chmod go-w it, or set palladion.config.cache_dir to a folder of your own",
            PalladionWarning,
            stacklevel=2,
        )
        return None
    return path


def read(path: pathlib.Path) -> Entry | None:
    """The entry in a file; None if it is not there, is not readable or is not what was written."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            data = file.read()
    except OSError:
        return None
    start = len(MAGIC) + _HEADER.size
    if not data.startswith(MAGIC) or len(data) < start:
        return None
    checksum, length = _HEADER.unpack_from(data, len(MAGIC))
    if hashlib.sha256(data[len(MAGIC) + 32 :]).digest() != checksum:
        return None
    return Entry(data[start + length :], json.loads(data[start : start + length]), from_disk=True)


def write(path: pathlib.Path, entry: Entry) -> None:
    """Put an entry into a file, whole or not at all. A disk that is full or read-only is not an error."""
    extra = json.dumps(entry.extra).encode()
    length = struct.pack("<Q", len(extra))
    checksum = hashlib.sha256(length + extra + entry.code).digest()
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new")  # for its owner only
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + checksum + length + extra + entry.code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


# --------------------------------------------------------------------------------------------- both together
_memory: dict[str, Entry] = {}
_building: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def cached(source: Any, build: Callable[[], tuple[Any, Any]]) -> Entry:
    """The entry of a source: from memory, from disk, or built now and kept.

    Arguments:
      source: text that decides what `build` makes, or the IR itself.
      build: gives (an `ir.Module` or IR text, JSON-able extra data). Called at most once at a time for one source.
    Raises: what `build` raises; RuntimeError: LLVM refused the IR (a bug of ours).
    """
    digest = digest_of(source)
    with _guard:
        lock = _building.setdefault(digest, threading.Lock())
    with lock:
        found = _memory.get(digest)
        if found is not None:
            return found
        place = folder()
        path = place / f"{digest}.o" if place else None
        entry = read(path) if path else None
        if entry is None:
            module, extra = build()
            entry = Entry(compile_module(module), extra)
            if path:
                write(path, entry)
        _memory[digest] = entry
    return entry


# ------------------------------------------------------------------------------------------------- linking
_link_lock = threading.Lock()
_libraries: list[Any] = []  # for ever: an executable that calls the code may outlive everything that Python sees
_numbers = itertools.count()


@functools.cache
def _linker() -> Any:
    return llvm.create_lljit_compiler(target.target_machine())


def link(code: bytes, exports: Iterable[str], imports: Mapping[str, int] | None = None) -> dict[str, int]:
    """Load object code into the process; the addresses of some of its symbols.

    Each call makes a library with names of its own, so that kernels may repeat them. What it does not define is looked
    up in `imports` (name -> address), then among the C functions of this process.

    Raises: RuntimeError: a symbol is nowhere.
    """
    exports = list(exports)
    builder = llvm.JITLibraryBuilder().add_current_process().add_object_img(code)
    for name, address in (imports or {}).items():
        builder.import_symbol(name, address)
    for name in exports:
        builder.export_symbol(name)
    with _link_lock:
        library = builder.link(_linker(), f"library{next(_numbers)}")
        _libraries.append(library)
    return {name: library[name] for name in exports}
