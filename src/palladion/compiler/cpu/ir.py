"""The loop-nest IR of the native CPU compiler: scalar expressions, loops over buffers, and a printer.

A kernel's jaxpr computes on whole blocks. Lowering turns it into loops that compute one element at a time:

    for i < 64:
      for j < 1024:
        t0[i, j] = exp(sub(x[i, j], t1[i]))

Buffers are windows of operands, scratch, and temporaries in the arena. Expressions are trees of scalars with shared
nodes; an index is an expression of type `index` (i64). Vectorisation is not visible here: the emitter runs the
innermost loop a vector at a time. The design follows Exo and Halide: one typed IR, one pass a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

INDEX = "index"  # the type of indices and loop variables; all other types are NumPy dtypes


# --- buffers --------------------------------------------------------------------------------------------------------
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Buf:
    """Memory that statements read and write.

    Attributes:
      name: for the printer and for messages.
      shape, dtype: of the array it holds.
      strides: in elements, one for each dimension.
      kind: "window" (of an operand, set up for each program), "array" (a whole operand), "scratch" (kept from program
        to program), "const" (data of the module) or "temp".
      memory: buffers with the same token may overlap; a temporary has one of its own.
      root: the buffer whose memory this one shows in another shape, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]
    kind: str
    memory: Any
    root: Any = None

    @property
    def size(self) -> int:
        """Elements from the first to the last one, with gaps."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return self.name


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def temp(shape: Sequence[int], dtype: Any, name: str = "t", kind: str = "temp") -> Buf:
    """A fresh contiguous buffer in the arena."""
    number = next(_numbers)
    shape = tuple(map(int, shape))
    return Buf(f"{name}{number}", shape, jnp.dtype(dtype), row_major(shape), kind, number)


# --- expressions ----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, eq=False)
class Expr:
    """A scalar. Equality is identity: a node that is used twice is computed once."""

    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Const(Expr):
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Var(Expr):
    """A loop variable (an index), or a program id (int32)."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Local(Var):
    """A value that a statement of the same loop body has defined; in a vector loop, a vector."""


@dataclasses.dataclass(frozen=True, eq=False)
class Load(Expr):
    buf: Buf
    index: tuple[Expr, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Op(Expr):
    """An operation by its name in the emitter's table; `params` are static."""

    name: str
    args: tuple[Expr, ...]
    params: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Reduce(Expr):
    """`op` over `body` for all values of `var`; `init` is its identity."""

    op: str
    var: Var
    extent: int
    init: Any
    body: Expr
    where: tuple[Any, ...] = ()  # the equations that it computes


def new_var(prefix: str = "i") -> Var:
    """A fresh loop variable."""
    return Var(INDEX, f"{prefix}{next(_numbers)}")


def index(value: int) -> Const:
    """A constant index."""
    return Const(INDEX, int(value))


def add(a: Expr, b: Expr | int) -> Expr:
    """Index addition, folded where an operand is known."""
    b = b if isinstance(b, Expr) else index(b)
    if isinstance(a, Const) and isinstance(b, Const):
        return index(a.value + b.value)
    if isinstance(b, Const) and b.value == 0:
        return a
    if isinstance(a, Const) and a.value == 0:
        return b
    return Op(INDEX, "add", (a, b))


def mul(a: Expr, factor: int) -> Expr:
    """An index times a constant."""
    if isinstance(a, Const):
        return index(a.value * factor)
    if factor == 1:
        return a
    return index(0) if factor == 0 else Op(INDEX, "mul", (a, index(factor)))


def children(e: Expr) -> tuple[Expr, ...]:
    """The operands of an expression."""
    if isinstance(e, Op):
        return e.args
    if isinstance(e, Load):
        return e.index
    return (e.body,) if isinstance(e, Reduce) else ()


def walk(e: Expr, seen: set[int] | None = None) -> Iterator[Expr]:
    """All nodes of an expression, once each."""
    seen = set() if seen is None else seen
    if id(e) in seen:
        return
    seen.add(id(e))
    yield e
    for child in children(e):
        yield from walk(child, seen)


# --- statements -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, eq=False)
class Stmt:
    """Something done for its effect."""


@dataclasses.dataclass(frozen=True, eq=False)
class Store(Stmt):
    buf: Buf
    index: tuple[Expr, ...]
    value: Expr


@dataclasses.dataclass(frozen=True, eq=False)
class For(Stmt):
    """`body` for var in range(extent); the extent is a constant or an index expression.

    `ordered` loops carry values from round to round through memory and are never vectorised or fused. A `tiled` loop
    has one other loop as its body, and the two run in square tiles: each is contiguous in some of the memory. `where`
    holds the equations that it computes, for reports.
    """

    var: Var
    extent: int | Expr
    body: tuple[Stmt, ...]
    ordered: bool = False
    reverse: bool = False
    where: tuple[Any, ...] = ()
    tiled: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Scan(Stmt):
    """For each value of `var` in turn, buf[index] = `op` over `value` for all values of `var` up to this one."""

    op: str
    var: Var
    extent: int
    init: Any
    buf: Buf
    index: tuple[Expr, ...]
    value: Expr
    where: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class If(Stmt):
    """Branch number `which` (an int32 expression in range) is run."""

    which: Expr
    branches: tuple[tuple[Stmt, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class While(Stmt):
    """Run `before`, test `cond` (a bool read from memory), run `body`, and again."""

    before: tuple[Stmt, ...]
    cond: Expr
    body: tuple[Stmt, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A matrix in a buffer, for products: element (batch, row, column) is at base + batch*s0 + row*s1 + column*s2."""

    buf: Buf
    base: tuple[Expr, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class MatMul(Stmt):
    """out (+)= a @ b for each of `batch` matrices of m x k and k x n; `where` holds its equation, for reports."""

    out: View
    a: View
    b: View
    batch: int
    m: int
    n: int
    k: int
    accumulate: bool
    where: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Sort(Stmt):
    """Sort each row of the buffers (last dimension) in step, by the first `keys` of them, stably and in place."""

    bufs: tuple[Buf, ...]
    spare: tuple[Buf, ...]
    keys: int
    descending: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class HostCall(Stmt):
    """Hand scalars or whole buffers to Python: a print, or a check that may stop the kernel."""

    site: int
    values: tuple[Buf, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Define(Stmt):
    """Give a variable its value."""

    var: Var
    value: Expr


@dataclasses.dataclass(frozen=True, eq=False)
class Point(Stmt):
    """From here on `buf` begins at an element of `array`."""

    buf: Buf
    array: Buf
    index: tuple[Expr, ...]


Block = tuple[Stmt, ...]


def stmt_exprs(s: Stmt) -> tuple[Expr, ...]:
    """The expressions that a statement itself evaluates (not those of statements inside it)."""
    if isinstance(s, (Store, Scan)):
        return (*s.index, s.value)
    if isinstance(s, Define):
        return (s.value,)
    if isinstance(s, Point):
        return s.index
    if isinstance(s, For):
        return () if isinstance(s.extent, int) else (s.extent,)
    if isinstance(s, If):
        return (s.which,)
    if isinstance(s, While):
        return (s.cond,)
    if isinstance(s, MatMul):
        return (*s.out.base, *s.a.base, *s.b.base)
    return ()


def stmt_blocks(s: Stmt) -> tuple[Block, ...]:
    """The blocks of statements inside a statement."""
    if isinstance(s, For):
        return (s.body,)
    if isinstance(s, If):
        return s.branches
    if isinstance(s, While):
        return (s.before, s.body)
    return (s.body,) if hasattr(s, "body") else ()  # pyright: ignore[reportAttributeAccessIssue]


def statements(block: Sequence[Stmt]) -> Iterator[Stmt]:
    """All statements of a block, nested ones included."""
    for s in block:
        yield s
        for inner in stmt_blocks(s):
            yield from statements(inner)


def reads(block: Sequence[Stmt]) -> Iterator[Buf]:
    """The buffers that a block reads (with repeats)."""
    for s in statements(block):
        for e in stmt_exprs(s):
            for node in walk(e):
                if isinstance(node, Load):
                    yield node.buf
        if isinstance(s, MatMul):
            yield s.a.buf
            yield s.b.buf
            if s.accumulate:
                yield s.out.buf
        elif isinstance(s, Sort):
            yield from s.bufs
        elif isinstance(s, HostCall):
            yield from s.values


def writes(block: Sequence[Stmt]) -> Iterator[Buf]:
    """The buffers that a block writes (with repeats)."""
    for s in statements(block):
        if isinstance(s, (Store, Scan)):
            yield s.buf
        elif isinstance(s, MatMul):
            yield s.out.buf
        elif isinstance(s, Sort):
            yield from s.bufs
            yield from s.spare


# --- printer --------------------------------------------------------------------------------------------------------
def show(e: Expr | int) -> str:
    """An expression as text."""
    if isinstance(e, int):
        return str(e)
    if isinstance(e, Const):
        return str(e.value)
    if isinstance(e, Var):
        return e.name
    if isinstance(e, Load):
        return f"{e.buf}[{', '.join(map(show, e.index))}]"
    if isinstance(e, Reduce):
        return f"{e.op}({e.var.name} < {e.extent}: {show(e.body)})"
    assert isinstance(e, Op)
    infix = {"add": "+", "sub": "-", "mul": "*"}.get(e.name) if e.dtype == INDEX else None
    if infix:
        return f"({show(e.args[0])} {infix} {show(e.args[1])})"
    params = f"<{', '.join(map(str, e.params))}>" if e.params else ""
    return f"{e.name}{params}({', '.join(map(show, e.args))})"


def render(block: Sequence[Stmt], indent: str = "") -> str:
    """A block of statements as text, one a line."""
    return "".join(_render(s, indent) for s in block)


def _render(s: Stmt, indent: str) -> str:
    deeper = indent + "  "
    if isinstance(s, Store):
        return f"{indent}{s.buf}[{', '.join(map(show, s.index))}] = {show(s.value)}\n"
    if isinstance(s, Scan):
        place = f"{s.buf}[{', '.join(map(show, s.index))}]"
        return f"{indent}for {s.var.name} < {s.extent}: {place} = running {s.op} of {show(s.value)}\n"
    if isinstance(s, Define):
        return f"{indent}{s.var.name} = {show(s.value)}\n"
    if isinstance(s, Point):
        return f"{indent}{s.buf} = {s.array}[{', '.join(map(show, s.index))}:]\n"
    if isinstance(s, For):
        order = " in order" * s.ordered + " reversed" * s.reverse + " in tiles" * s.tiled
        return f"{indent}for {s.var.name} < {show(s.extent)}{order}:\n{render(s.body, deeper)}"
    if isinstance(s, If):
        branches = "".join(f"{indent}case {k}:\n{render(b, deeper)}" for k, b in enumerate(s.branches))
        return f"{indent}switch {show(s.which)}:\n{branches}"
    if isinstance(s, While):
        return (
            f"{indent}loop:\n{render(s.before, deeper)}{deeper}while {show(s.cond)}:\n{render(s.body, deeper + '  ')}"
        )
    if isinstance(s, MatMul):
        sign = "+=" if s.accumulate else "="
        return f"{indent}{s.out.buf} {sign} {s.a.buf} @ {s.b.buf}  # {s.batch} x ({s.m} x {s.k} @ {s.k} x {s.n})\n"
    if isinstance(s, Sort):
        return f"{indent}sort {', '.join(b.name for b in s.bufs)} by the first {s.keys}\n"
    assert isinstance(s, HostCall)
    return f"{indent}host {s.site}({', '.join(b.name for b in s.values)})\n"
