"""The MLIR context that kernels are built in: one for each thread, kept from kernel to kernel.

To make a context and to parse attributes takes longer than to emit a small kernel. A context never forgets what it has
seen, so it is replaced after some hundred kernels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from palladion import jaxlink

_KERNELS = 512  # built in one context
_MODULES = 64  # kept for calls that are lowered again


class _Workshop(threading.local):
    """What a thread works with.

    Attributes:
      context: of MLIR, with Mosaic's dialect; built: how many kernels were built in it.
      attributes: those that were parsed in it, by their text; types: of elements, by dtype.
      modules: the last ones that were built in it, by what they were built of.
      constants: scalar constants of the function that is being emitted, by type and value, or None.
      start: the insertion point for them: the beginning of the function.
    """

    def __init__(self) -> None:
        self.context: ir.Context | None = None
        self.built = 0
        self.attributes: dict[str, ir.Attribute] = {}
        self.types: dict[Any, ir.Type] = {}
        self.modules: dict[Any, ir.Module] = {}
        self.constants: dict[Any, ir.Value] | None = None
        self.start: Any = None


_here = _Workshop()


@contextlib.contextmanager
def entered() -> Iterator[ir.Context]:
    """Work in this thread's context."""
    if _here.context is None or _here.built >= _KERNELS:
        context = jaxlink.mlir.make_ir_context()
        tpu.register_dialect(context)
        _here.context, _here.built = context, 0
        _here.attributes, _here.types, _here.modules = {}, {}, {}
    _here.built += 1
    with _here.context as context:
        yield context


def attr(text: str) -> ir.Attribute:
    """An attribute from its text."""
    if ir.Context.current is not _here.context:
        return ir.Attribute.parse(text)
    found = _here.attributes.get(text)
    if found is None:
        found = _here.attributes[text] = ir.Attribute.parse(text)
    return found


def element(dtype: Any, make: Callable[[Any], ir.Type]) -> ir.Type:
    """The type of elements of a dtype, which `make` makes."""
    if ir.Context.current is not _here.context:
        return make(dtype)
    found = _here.types.get(dtype)
    if found is None:
        found = _here.types[dtype] = make(dtype)
    return found


def kept(key: Any, build: Callable[[], ir.Module]) -> ir.Module:
    """The module of a key: `build()`, unless this thread has built it lately. Modules are not to be changed."""
    found = _here.modules.pop(key, None)
    found = build() if found is None else found
    _here.modules[key] = found
    while len(_here.modules) > _MODULES:
        del _here.modules[next(iter(_here.modules))]
    return found


@contextlib.contextmanager
def function(block: ir.Block) -> Iterator[None]:
    """Emit a function whose entry is `block`: scalar constants are made once, at its beginning."""
    before = _here.constants, _here.start
    _here.constants, _here.start = {}, block
    try:
        with ir.InsertionPoint(block):
            yield
    finally:
        _here.constants, _here.start = before


def scalar(kind: ir.Type, attribute: ir.Attribute, make: Any) -> ir.Value:
    """A scalar constant of the function that is being emitted."""
    if _here.constants is None:
        return make(kind, attribute)
    key = kind, attribute
    found = _here.constants.get(key)
    if found is None:
        with ir.InsertionPoint.at_block_begin(_here.start), ir.Location.unknown():
            found = _here.constants[key] = make(kind, attribute)
    return found
