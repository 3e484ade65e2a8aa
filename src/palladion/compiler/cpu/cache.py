"""Machine code on disk, and its way into the process.

    entry = cached("softmax, f32[8,4096], …", build)       # Entry(code, extra); build() -> (module, extra) on a miss
    addresses = link(entry.code, ["softmax"])              # {"softmax": address}; never unloaded

A key is the hash of everything that decides the code: a description of the source, or the IR itself; the machine
(triple, CPU, features, as a home folder may be shared by different ones); LLVM's version and options; Palladion's
version and JAX's and, so that a checkout never runs stale code, the sources of this compiler and of the language.

Where it lies and who may use it: compiler/disk.py.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import llvmlite.binding as llvm

from palladion.compiler.cpu import target
from palladion.compiler.disk import Entry, Store

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


# --------------------------------------------------------------------------------------------- both together
_store = Store(".o")


def cached(source: Any, build: Callable[[], tuple[Any, Any]]) -> Entry:
    """The entry of a source: from memory, from disk, or built now and kept.

    Arguments:
      source: text that decides what `build` makes, or the IR itself.
      build: gives (an `ir.Module` or IR text, JSON-able extra data). Called at most once at a time for one source.
    Raises: what `build` raises; RuntimeError: LLVM refused the IR (a bug of ours).
    """

    def make() -> Entry:
        module, extra = build()
        return Entry(compile_module(module), extra)

    return _store.get(digest_of(source), make)


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
