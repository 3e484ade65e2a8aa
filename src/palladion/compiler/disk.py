"""Compiled code on disk and in memory, for every compiler here: who may use the folder, what a file is, who builds.

    store = Store(".o")
    entry = store.get(digest, build)      # Entry(code, extra); build() -> Entry, called on a miss only

A compiler makes the key (`digest`), which must name everything that decides the code.

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
import json
import os
import pathlib
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

from palladion import config
from palladion.errors import PalladionWarning

MAGIC = b"palladion object 1\n"
_HEADER = struct.Struct("<32sQ")  # SHA-256 of all that follows it; bytes of the JSON, which the object code follows


@dataclasses.dataclass(frozen=True)
class Entry:
    """Compiled code, and what its builder wants to know when it finds it again.

    code: an object file (ELF). extra: JSON data. from_disk: whether it was found on disk, for reports and tests.
    """

    code: bytes
    extra: Any = None
    from_disk: bool = False


class Store:
    """Entries of one compiler, by their digest.

    Attributes:
      suffix: of its files.
      memory: what this process has met; to forget it, clear it.
    """

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.memory: dict[str, Entry] = {}
        self._building: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, digest: str, build: Callable[[], Entry]) -> Entry:
        """The entry of a key: from memory, from disk, or built now and kept.

        Arguments:
          digest: the key, as a file may be named.
          build: makes the entry. Called at most once at a time for one key.
        Raises: what `build` raises.
        """
        with self._guard:
            lock = self._building.setdefault(digest, threading.Lock())
        with lock:
            found = self.memory.get(digest)
            if found is not None:
                return found
            place = folder()
            path = place / f"{digest}{self.suffix}" if place else None
            entry = read(path) if path else None
            if entry is None:
                entry = build()
                if path:
                    write(path, entry)
            self.memory[digest] = entry
        return entry


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
