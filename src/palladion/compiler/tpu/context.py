"""The MLIR context that kernels are built in: one for each thread, kept from kernel to kernel.

To make a context and to parse attributes takes longer than to emit a small kernel. A context never forgets what it has
seen, so it is replaced after some hundred kernels. It works in one thread: to wake others takes longer than to verify
a kernel's few functions one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mosaic.python import tpu

_KERNELS = 512  # built in one context
_MODULES = 64  # kept for calls that are lowered again


class _Workshop(threading.local):
    """What a thread works with.

    Attributes:
      context: of MLIR, with Mosaic's dialect; built: how many kernels were built in it.
      attributes: those that were parsed in it, by their text.
      types: of elements, by dtype, and of values, by shape and dtype.
      patterns: functions that others are copies of, by what they were made of.
      modules: the last ones that were built in it, by what they were built of.
      constants: scalar constants of the function that is being emitted, by type and value, those of type `index` by
        their number, too; or None.
      start: the insertion point for them: the beginning of the function.
    """

    def __init__(self) -> None:
        self.context: ir.Context | None = None
        self.built = 0
        self.attributes: dict[str, ir.Attribute] = {}
        self.types: dict[Any, Any] = {}
        self.patterns: dict[Any, tuple[ir.Module, ir.Operation]] = {}
        self.modules: dict[Any, ir.Module] = {}
        self.constants: dict[Any, ir.Value] | None = None
        self.start: Any = None


_here = _Workshop()


@contextlib.contextmanager
def entered() -> Iterator[ir.Context]:
    """Work in this thread's context."""
    if _here.context is None or _here.built >= _KERNELS:
        _here.context, _here.built = _new_context(), 0
        _here.attributes, _here.types, _here.patterns, _here.modules = {}, {}, {}, {}
    _here.built += 1
    with _here.context as context:
        yield context


def _new_context() -> ir.Context:
    registry, context = ir.DialectRegistry(), ir.Context()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    tpu.register_dialect(context)
    context.enable_multithreading(False)
    return context


def attr(text: str) -> ir.Attribute:
    """An attribute from its text."""
    if ir.Context.current is not _here.context:
        return ir.Attribute.parse(text)
    found = _here.attributes.get(text)
    if found is None:
        found = _here.attributes[text] = ir.Attribute.parse(text)
    return found


def element(key: Any, make: Callable[[Any], Any]) -> Any:
    """What `make` makes of the key: the type of elements of a dtype, or of values of a shape and a dtype, and such."""
    if ir.Context.current is not _here.context:
        return make(key)
    found = _here.types.get(key)
    if found is None:
        found = _here.types[key] = make(key)
    return found


def copied(key: Any, make: Callable[[], ir.Operation]) -> ir.Operation:
    """A copy, at the insertion point, of the operation that `make` makes; it is made once for a key.

    To copy a small function takes a tenth of the time that it takes to emit it.
    """
    found = _here.patterns.get(key)
    if found is None:
        with ir.Location.unknown():
            home = ir.Module.create()
            with ir.InsertionPoint(home.body):
                found = _here.patterns[key] = home, make()
    return found[1].clone()


def kept(key: Any, build: Callable[[], ir.Module]) -> ir.Module:
    """The module of a key: `build()`, unless this thread has built it lately. Modules are not to be changed."""
    found = _here.modules.pop(key, None)
    found = build() if found is None else found
    _here.modules[key] = found
    while len(_here.modules) > _MODULES:
        del _here.modules[next(iter(_here.modules))]
    return found


def forget() -> None:
    """Build the next modules of this thread anew, even if they are like those before."""
    _here.modules.clear()


def new_function(
    name: str, arguments: Sequence[ir.Type], results: Sequence[ir.Type], attributes: Mapping[str, ir.Attribute] = {}
) -> tuple[ir.Operation, ir.Block]:
    """A function at the insertion point, with all its attributes at once, and its entry."""
    kind = ir.TypeAttr.get(ir.FunctionType.get(list(arguments), list(results)))
    named = {"sym_name": ir.StringAttr.get(name), "function_type": kind, **attributes}
    made = ir.Operation.create("func.func", attributes=named, regions=1).operation
    return made, made.regions[0].blocks.append(*arguments)


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


def scalar(kind: ir.Type, attribute: ir.Attribute) -> ir.Value:
    """A scalar constant of the function that is being emitted."""
    if _here.constants is None:
        return constant(kind, attribute)
    key = kind, attribute
    found = _here.constants.get(key)
    if found is None:
        start = ir.InsertionPoint.at_block_begin(_here.start)
        found = _here.constants[key] = constant(kind, attribute, start, ir.Location.unknown())
    return found


def place(n: int) -> ir.Value:
    """A number as an `index`, of the function that is being emitted."""
    found = None if _here.constants is None else _here.constants.get(n)
    if found is None:
        kind = ir.IndexType.get()
        found = scalar(kind, ir.IntegerAttr.get(kind, n))
        if _here.constants is not None:
            _here.constants[n] = found
    return found


def constant(kind: ir.Type, attribute: ir.Attribute, ip: Any = None, loc: Any = None) -> ir.Value:
    """`arith.constant`, without the detours of the function of that name."""
    return ir.Operation.create("arith.constant", results=[kind], attributes={"value": attribute}, ip=ip, loc=loc).result
