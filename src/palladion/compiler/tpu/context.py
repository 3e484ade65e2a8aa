"""The MLIR context that kernels are built in: one for each thread, kept from kernel to kernel.

To make a context and to parse attributes takes longer than to emit a small kernel. A context never forgets what it has
seen, so it is replaced after some hundred kernels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from palladion import jaxlink

_KERNELS = 512  # built in one context


class _Workshop(threading.local):
    """What a thread works with.

    Attributes:
      context: of MLIR, with Mosaic's dialect; built: how many kernels were built in it.
      attributes: those that were parsed in it, by their text.
      constants: scalar constants of the function that is being emitted, by type and value, or None.
      start: the insertion point for them: the beginning of the function.
    """

    def __init__(self) -> None:
        self.context: ir.Context | None = None
        self.built = 0
        self.attributes: dict[str, ir.Attribute] = {}
        self.constants: dict[Any, ir.Value] | None = None
        self.start: Any = None


_here = _Workshop()


@contextlib.contextmanager
def entered() -> Iterator[ir.Context]:
    """Work in this thread's context."""
    if _here.context is None or _here.built >= _KERNELS:
        context = jaxlink.mlir.make_ir_context()
        tpu.register_dialect(context)
        _here.context, _here.built, _here.attributes = context, 0, {}
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
