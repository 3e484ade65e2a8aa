"""Cubins on disk: a kernel is compiled once for a source, an architecture, options and a version of NVRTC.

    binary = compile_source(source, "sm_90a", "softmax")     # as nvrtc.compile_source, but remembered

The code generator is not part of the key: its output is. Where the files lie and who may use them: compiler/disk.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from palladion.compiler.disk import Entry, Store
from palladion.compiler.gpu import nvrtc
from palladion.compiler.gpu.nvrtc import Binary

FORMAT = 1  # of what is stored beside the cubin
_store = Store(".cubin")


def digest_of(source: str, arch: str, name: str, options: Sequence[str] = ()) -> str:
    """The key of a compilation, 64 hexadecimal digits."""
    every = (FORMAT, nvrtc.version(), name, *nvrtc.default_options(arch), *options)
    return hashlib.sha256(f"{every!r}\0{source}".encode(errors="backslashreplace")).hexdigest()


def compile_source(source: str, arch: str, name: str, *, options: Sequence[str] = ()) -> Binary:
    """A translation unit, compiled now or found in the cache; arguments and exceptions as of `nvrtc.compile_source`."""

    def build() -> Entry:
        made = nvrtc.compile_source(source, arch, name, options=options)
        return Entry(made.cubin, {"ptx": made.ptx, "log": made.log, "seconds": made.seconds})

    nvrtc.require()
    entry = _store.get(digest_of(source, arch, name, options), build)
    binary = Binary(cubin=entry.code, arch=arch, name=name, source=source, options=tuple(options), **entry.extra)
    return dataclasses.replace(binary, from_disk=entry.from_disk)
