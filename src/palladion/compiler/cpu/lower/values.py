"""Block values that are not computed until something needs them in memory, and the state of lowering one kernel.

A `Lazy` knows how to give any one of its elements as a scalar expression. Elementwise operations, broadcasts,
transposes, slices and the like only build such functions, so chains of them fuse into the loop that finally stores
the result. A value is *materialised* (computed by a loop into a temporary) when it would otherwise be computed many
times over (reductions, products, costly values used twice) or when memory that it reads is about to be overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.cpu import ir
from palladion.rules import RuleTable

RULES = RuleTable("native CPU")

Index = tuple[ir.Expr, ...]
EXPENSIVE = 4  # from this cost on, a value that is used more than once is kept


@dataclasses.dataclass(frozen=True)
class Affine:
    """A value that is a strided view of a buffer.

    Attributes:
      base: index of its first element in the buffer.
      strides: elements from one element to the next along each dimension of the value.
    """

    buf: ir.Buf
    base: Index
    strides: tuple[int, ...]


class Lazy:
    """A block value.

    Attributes:
      shape, dtype: of the value.
      memories: tokens of the memory that its elements are read from.
      cost: how much one element costs, roughly in operations.
      affine: set when it is a strided view of a buffer.
    """

    __slots__ = ("__weakref__", "_at", "_seen", "affine", "cost", "dtype", "memories", "shape")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        at: Callable[[Index], ir.Expr],
        *,
        memories: frozenset = frozenset(),
        cost: int = 0,
        affine: Affine | None = None,
    ) -> None:
        self.shape, self.dtype, self._at = tuple(map(int, shape)), jnp.dtype(dtype), at
        self.memories, self.cost, self.affine = memories, cost, affine
        self._seen: dict[tuple[int, ...], tuple[Index, ir.Expr]] = {}

    def at(self, index: Index) -> ir.Expr:
        """The element at an index; the same node for the same index nodes, so that it is computed once."""
        key = tuple(i.value if isinstance(i, ir.Const) else -1 - id(i) for i in index)
        if key not in self._seen:
            self._seen[key] = index, self._at(index)  # holding the index keeps its ids from being reused
        return self._seen[key][1]

    def become(self, other: Lazy) -> None:
        """From now on, be that value (of the same type)."""
        self._at, self._seen = other._at, {}
        self.memories, self.cost, self.affine = other.memories, other.cost, other.affine

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def of_buffer(buf: ir.Buf) -> Lazy:
    """The whole of a buffer, read when it is needed."""
    zero = tuple(ir.index(0) for _ in buf.shape)
    return Lazy(
        buf.shape,
        buf.dtype,
        lambda index: ir.Load(buf.dtype, buf, index),
        memories=frozenset([buf.memory]),
        cost=1,
        affine=Affine(buf, zero, buf.strides),
    )


def of_const(value: Any, dtype: Any, shape: Sequence[int] = ()) -> Lazy:
    """A constant in every element."""
    dtype = jnp.dtype(dtype)
    node = ir.Const(dtype, np.asarray(value).astype(dtype).item() if dtype != np.bool_ else bool(value))
    return Lazy(shape, dtype, lambda index: node)


def of_array(value: Any) -> Lazy:
    """A constant array, kept in the module's data."""
    value = np.ascontiguousarray(value)
    if not value.shape:
        return of_const(value, value.dtype)
    data = value.astype(np.uint8) if value.dtype == np.bool_ else value
    memory = ("const", data.tobytes(), value.dtype.name)
    return of_buffer(ir.Buf("const", value.shape, value.dtype, ir.row_major(value.shape), "const", memory))


def derived(
    shape: Sequence[int],
    dtype: Any,
    inputs: Sequence[Lazy],
    at: Callable[[Index], ir.Expr],
    cost: int = 0,
    affine: Affine | None = None,
) -> Lazy:
    """A value made from other values element by element or by moving elements."""
    memories = frozenset().union(*(x.memories for x in inputs))
    return Lazy(shape, dtype, at, memories=memories, cost=cost + sum(x.cost for x in inputs), affine=affine)


def op(name: str, dtype: Any, *args: ir.Expr, params: tuple = ()) -> ir.Expr:
    """A scalar operation."""
    return ir.Op(dtype if dtype == ir.INDEX else jnp.dtype(dtype), name, args, params)


def as_index(e: ir.Expr) -> ir.Expr:
    """An integer expression as an index."""
    if isinstance(e, ir.Const):
        return ir.index(e.value)
    return e if e.dtype == ir.INDEX else ir.Op(ir.INDEX, "convert", (e,))


def clamp_index(e: ir.Expr, low: int, high: int) -> ir.Expr:
    """An index held in low..high (inclusive)."""
    if isinstance(e, ir.Const):
        return ir.index(min(max(e.value, low), high))
    return ir.Op(ir.INDEX, "clamp", (ir.index(low), e, ir.index(high)))


class Lowering:
    """The state of lowering one kernel to loops.

    Attributes:
      ids: the program's index along each grid axis (int32 values); sizes: the grid.
      checks: whether run-time indices are checked.
      sites: what the kernel's host calls do, in the order of their numbers.
    """

    def __init__(self, ids: Sequence[Lazy], sizes: Sequence[Any], checks: bool = False) -> None:
        self.ids, self.sizes, self.checks = list(ids), list(sizes), checks
        self.sites: list[Any] = []
        self.wanted: list[bool] = []  # which results of the current equation are used
        self.block: list[ir.Stmt] = []
        self.here: tuple[Any, ...] = ()  # the equation that is being lowered, for reports
        self._frames: list[dict[Any, Any]] = []

    # --- emitting -------------------------------------------------------------------------------------------------
    def emit(self, stmt: ir.Stmt) -> None:
        """Append a statement to the current block."""
        self.block.append(stmt)

    @contextlib.contextmanager
    def nested(self):
        """Collect statements into a block of their own: `with ctx.nested() as block: …`."""
        outer, self.block = self.block, []
        try:
            yield self.block
        finally:
            self.block = outer

    def loops(self, shape: Sequence[int], body: Callable[[Index], None]) -> None:
        """Emit a loop for each dimension, with `body(index)` inside; nothing for an empty shape."""
        shape = tuple(map(int, shape))
        if 0 in shape:
            return
        variables = [ir.new_var() for _ in shape]
        with self.nested() as inner:
            body(tuple(ir.index(0) if n == 1 else v for v, n in zip(variables, shape)))
        stmts = tuple(inner)
        for v, n in reversed(list(zip(variables, shape))):
            stmts = stmts if n == 1 else (ir.For(v, n, stmts, where=self.here),)
        for s in stmts:
            self.emit(s)

    def fill(self, buf: ir.Buf, value: Lazy) -> None:
        """Store a value in the whole of a buffer, element by element."""
        self.loops(buf.shape, lambda index: self.emit(ir.Store(buf, index, value.at(index))))

    def materialise(self, value: Lazy, name: str = "t", *, copy: bool = False) -> ir.Buf:
        """The value in memory: where it already is (unless it must be a copy), or computed into a temporary."""
        if not copy and value.affine is not None and self._is_whole(value):
            return value.affine.buf
        buf = ir.temp(value.shape, value.dtype, name)
        self.fill(buf, value)
        value.become(of_buffer(buf))
        return buf

    def _is_whole(self, value: Lazy) -> bool:
        a = value.affine
        assert a is not None
        at_start = all(isinstance(i, ir.Const) and i.value == 0 for i in a.base)
        return at_start and a.buf.shape == value.shape and a.strides == a.buf.strides

    def keep(self, value: Lazy) -> Lazy:
        """The value, computed once now (constants and plain reads stay as they are)."""
        if value.cost > 1 or (value.affine is None and value.cost):
            self.materialise(value)
        return value

    def scalar(self, value: Lazy) -> ir.Expr:
        """A rank-0 value, computed now, as an expression that loops can use at no cost and no store disturbs."""
        if isinstance(e := value.at(()), (ir.Const, ir.Var)):
            return e
        buf = ir.temp((), value.dtype, "scalar")
        self.fill(buf, value)
        return ir.Load(buf.dtype, buf, ())

    def isolated(self, values: Sequence[Any]) -> list[Any]:
        """The same values for use inside a branch or loop body: what is computed there stays there."""
        return [
            Lazy(v.shape, v.dtype, v.at, memories=v.memories, cost=v.cost, affine=v.affine)
            if isinstance(v, Lazy)
            else v
            for v in values
        ]

    # --- what a store disturbs -------------------------------------------------------------------------------------
    def before_write(self, buf: ir.Buf) -> None:
        """Compute every pending value that reads this memory and is used later (a store's own operand may be)."""
        for frame in self._frames:
            for value in list(frame.values()):
                if isinstance(value, Lazy) and buf.memory in value.memories:
                    self.materialise(value, "kept", copy=True)

    def store(self, buf: ir.Buf, shape: Sequence[int], place: Callable[[Index], Index], value: Lazy) -> None:
        """Store `value` of `shape` at `place(index)` of a buffer."""
        self.before_write(buf)
        if buf.memory in value.memories:
            probe = tuple(ir.index(0) if n == 1 else ir.new_var() for n in shape)
            if not _reads_only_at(value.at(probe), buf, place(probe)):
                self.materialise(value, copy=True)
        self.loops(shape, lambda index: self.emit(ir.Store(buf, place(index), value.at(index))))

    # --- walking a jaxpr -------------------------------------------------------------------------------------------
    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Lower a jaxpr on Lazy values and Refs; its results."""
        frame: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        frame.update((v, of_array(c)) for v, c in zip(jaxpr.constvars, jaxpr.consts))
        uses = _uses(jaxpr)
        self._frames.append(frame)
        sums = _PATTERNS[0](jaxpr) if _PATTERNS else {}
        skipped = {k for get, _, add in sums.values() for k in (get, add)}
        products = {product: k for k, (_, product, _) in sums.items()}
        waiting: dict[int, Any] = {}
        outside = self.here  # a function under jit was perhaps traced for another kernel: its lines are not this one's
        inside_call = bool(outside) and outside[0].primitive in jaxlink.CALLED
        try:
            for number, eqn in enumerate(jaxpr.eqns):
                self.here = outside if inside_call else (eqn,)
                rule = RULES.get(eqn.primitive)
                if rule is None:
                    raise RULES.unsupported(eqn)
                known = [a for a in eqn.invars if isinstance(a, jaxlink.Literal) or a in frame]
                inputs = [_read(frame, a) for a in known]
                for a in eqn.invars:  # forget what is used for the last time, so that no store keeps it alive
                    if not isinstance(a, jaxlink.Literal) and uses.drop(a):
                        frame.pop(a, None)
                if number in skipped:
                    continue
                if number in products:
                    waiting[products[number]] = eqn, inputs
                    continue
                if number in waiting:
                    _PATTERNS[1](self, waiting[number][0], inputs[0], *waiting.pop(number)[1])
                    continue
                self.wanted = [not isinstance(v, jaxlink.DropVar) and uses.count(v) > 0 for v in eqn.outvars]
                outputs = rule(self, eqn, *inputs)
                del inputs
                for var, value in zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs]):
                    if isinstance(var, jaxlink.DropVar) or not uses.count(var):
                        continue
                    if isinstance(value, Lazy) and uses.count(var) > 1 and value.cost >= EXPENSIVE:
                        self.materialise(value)
                    frame[var] = value
                del outputs
            return [_read(frame, a) for a in jaxpr.outvars]
        finally:
            self._frames.pop()
            self.here = outside


# How `ref[...] += dot(…)` is found and emitted; dot.py fills it in, as it stands on this module.
_PATTERNS: list[Callable] = []


def set_patterns(find: Callable, emit: Callable) -> None:
    """Give the functions that find accumulations into Refs in a jaxpr, and that emit them."""
    _PATTERNS[:] = [find, emit]


class _Uses:
    def __init__(self, counts: dict[Any, int]) -> None:
        self._left = counts

    def count(self, var: Any) -> int:
        return self._left.get(var, 0)

    def drop(self, var: Any) -> bool:
        self._left[var] -= 1
        return self._left[var] == 0


def _uses(jaxpr: Any) -> _Uses:
    counts: dict[Any, int] = {}
    for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars):
        for a in atoms:
            if not isinstance(a, jaxlink.Literal):
                counts[a] = counts.get(a, 0) + 1
    return _Uses(counts)


def _read(frame: dict[Any, Any], atom: Any) -> Any:
    if isinstance(atom, jaxlink.Literal):
        aval: Any = atom.aval
        if aval.shape:
            return of_array(np.asarray(atom.val).astype(aval.dtype))
        return of_const(atom.val, aval.dtype)
    return frame[atom]


def _reads_only_at(e: ir.Expr, buf: ir.Buf, place: Index) -> bool:
    """Whether an expression reads the memory of `buf` only from the element at `place`, and no other element has it."""
    if any(
        isinstance(n, ir.Load) and any(not isinstance(i, ir.Const) for i in n.index) for p in place for n in ir.walk(p)
    ):
        return False  # an index array may name an element twice
    for node in ir.walk(e):
        if isinstance(node, ir.Load) and node.buf.memory == buf.memory:
            same = node.buf is buf or node.buf.strides == buf.strides
            if not same or not all(_same(a, b) for a, b in zip(node.index, place)):
                return False
        if isinstance(node, ir.Reduce) and any(
            isinstance(n, ir.Load) and n.buf.memory == buf.memory for n in ir.walk(node.body)
        ):
            return False
    return True


def _same(a: ir.Expr, b: ir.Expr) -> bool:
    """Whether two index expressions are equal by structure."""
    if a is b:
        return True
    if isinstance(a, ir.Const) and isinstance(b, ir.Const):
        return a.value == b.value
    if isinstance(a, ir.Op) and isinstance(b, ir.Op) and a.name == b.name and len(a.args) == len(b.args):
        return a.params == b.params and all(_same(x, y) for x, y in zip(a.args, b.args))
    if isinstance(a, ir.Load) and isinstance(b, ir.Load) and a.buf is b.buf:
        return all(_same(x, y) for x, y in zip(a.index, b.index))
    return False
