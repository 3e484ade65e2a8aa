"""One kernel call as a native function: the loop over programs, their windows, and the kernel's loop nests.

For each program the index maps give the window of every operand. Where all windows lie inside their arrays the kernel
runs on the arrays' own memory, through strides. Where one hangs over the edge, a second version of the kernel runs,
whose ragged windows are copied into the arena, uninitialised outside the array, and whose results are copied back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.cpu import analysis, ir
from palladion.compiler.cpu.fuse import fuse, shrink
from palladion.compiler.cpu.loops import arrange
from palladion.compiler.cpu.lower import refs as lower_refs
from palladion.compiler.cpu.lower.refs import Ref
from palladion.compiler.cpu.lower.values import Lazy, Lowering, as_index, clamp_index, derived, of_const
from palladion.language.blocks import Blocked, BoundedSlice, Element, Indirect, Squeezed
from palladion.language.grid import BlockMapping, GridMapping


@dataclasses.dataclass(frozen=True)
class Window:
    """One operand of a program.

    Attributes:
      mapping: how its array is cut.
      array: the whole array as a buffer; number: which of the call's buffers it is.
      starts: a variable for each dimension of the array: where the window begins.
      lengths: for BoundedSlice dimensions the variable with the real size, else None.
      rows: for an Indirect dimension, a buffer of its indices.
      buf: what the kernel sees.
      copied: whether `buf` is a copy in the arena.
    """

    mapping: BlockMapping
    array: ir.Buf
    number: int
    starts: tuple[ir.Expr, ...]
    lengths: tuple[ir.Expr | None, ...]
    rows: ir.Buf | None
    buf: ir.Buf
    copied: bool


@dataclasses.dataclass(frozen=True)
class Version:
    """The kernel's loop nests, with their windows.

    Attributes:
      block: as they are compiled; stages: the same as lowered, and after each pass, by name.
    """

    windows: tuple[Window, ...]
    block: tuple[ir.Stmt, ...]
    stages: tuple[tuple[str, tuple[ir.Stmt, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of the grid in loop nests.

    Attributes:
      ids: the program's index along each grid axis (int32 variables).
      sizes: the grid; variables for dynamic axes.
      head: statements that find the windows: index maps, the variables and the windows' places.
      inside: whether every window lies inside its array (None: always).
      inner, edge: the two versions; edge is None when it is never needed.
      scratch: buffers that keep their contents from program to program.
      sites: what the kernel's host calls do.
    """

    ids: tuple[ir.Var, ...]
    sizes: tuple[Any, ...]
    head: tuple[ir.Stmt, ...]
    inside: ir.Expr | None
    inner: Version | None
    edge: Version | None
    scratch: tuple[ir.Buf, ...]
    sites: tuple[Any, ...]


PASSES = (("fused", fuse), ("shrunk", shrink), ("arranged", arrange))

_BOOL = np.dtype(np.bool_)
_INT32 = np.dtype(np.int32)


def _and(a: ir.Expr | None, b: ir.Expr) -> ir.Expr:
    return b if a is None else ir.Op(_BOOL, "and", (a, b))


def _compare(name: str, a: ir.Expr, b: int) -> ir.Expr:
    return ir.Op(_BOOL, name, (a, ir.index(b)))


class Builder:
    """Builds a `Program`.

    Arguments:
      jaxpr, gm: the kernel and its grid mapping.
      aliases: {input: output}, counting blocked inputs.
      checks: whether run-time indices are checked.
    """

    def __init__(self, jaxpr: Any, gm: GridMapping, aliases: dict[int, int], checks: bool) -> None:
        self.jaxpr, self.gm, self.aliases, self.checks = jaxpr, gm, aliases, checks
        self.ids = tuple(ir.Var(_INT32, f"id{a}") for a in range(len(gm.grid)))
        dynamic = iter(range(gm.num_dynamic))
        self.sizes = tuple(ir.Var(_INT32, f"size{next(dynamic)}") if n is None else n for n in gm.grid)
        n_refs = gm.num_prefetch + len(gm.block_mappings)
        self.scratch = tuple(ir.temp(v.aval.shape, v.aval.dtype, "scratch", "scratch") for v in jaxpr.invars[n_refs:])

    def build(self) -> Program:
        gm = self.gm
        ids = [self._number(v) for v in self.ids]
        ctx = Lowering(ids, [])
        seen = [self._window(ctx, m, k, []) for k, m in enumerate(gm.prefetch_mappings)]
        tables = [Ref(w.buf, w.mapping.origin) for w in seen]
        for k, m in enumerate(gm.block_mappings):
            seen.append(self._window(ctx, m, gm.num_prefetch + k, tables))
        inside = None
        for w in seen:
            inside = self._inside(inside, w)
        always_edge = any(w.rows is not None for w in seen)
        sites: list[Any] = []
        inner = None if always_edge else self._version(seen, sites)
        edge = None
        if always_edge or inside is not None:
            edge = self._version([self._copied(w) for w in seen], sites)
        return Program(self.ids, self.sizes, tuple(ctx.block), inside, inner, edge, self.scratch, tuple(sites))

    def _number(self, v: Any) -> Lazy:
        return of_const(v, np.int32) if isinstance(v, int) else Lazy((), np.int32, lambda _: v)

    def _bound(self, ctx: Lowering, e: ir.Expr, name: str) -> ir.Expr:
        """A variable for a value that the head computes; constants stay as they are."""
        if isinstance(e, ir.Const):
            return e
        var = ir.new_var(name)
        ctx.emit(ir.Define(var, e))
        return var

    def _window(self, ctx: Lowering, mapping: BlockMapping, k: int, tables: list[Ref]) -> Window:
        """Where a mapping's window begins, by its index map, clamped as the reference says."""
        takes = len(mapping.index_map.invars) - len(self.ids)
        flat = ctx.run(mapping.index_map, [*ctx.isolated(ctx.ids), *tables[:takes]])
        starts: list[ir.Expr] = []
        lengths: list[ir.Expr | None] = []
        rows = None
        for (value, size), b, (low, high) in zip(mapping.indices(flat), mapping.block_shape, mapping.extents):
            if isinstance(b, Indirect):
                clamped = derived(
                    value.shape,
                    np.int32,
                    [value],
                    lambda i, v=value, hi=high: ir.Op(
                        _INT32, "min", (ir.Op(_INT32, "max", (v.at(i), ir.Const(_INT32, 0))), ir.Const(_INT32, hi))
                    ),
                    2,
                )
                rows = ctx.materialise(clamped, "rows", copy=True)
                starts.append(ir.index(0))
                lengths.append(None)
                continue
            e = clamp_index(as_index(ctx.scalar(value)), low, high)
            if isinstance(b, Element):
                e = ir.add(e, -b.padding[0])
            elif not isinstance(b, (Squeezed, BoundedSlice)):
                e = ir.mul(e, b.block_size)
            starts.append(self._bound(ctx, e, "start"))
            if isinstance(b, BoundedSlice):
                e = clamp_index(as_index(ctx.scalar(size)), 0, b.block_size)
                lengths.append(self._bound(ctx, e, "length"))
            else:
                lengths.append(None)
        number = self._buffer_number(k)
        memory = ("array", number)
        shape, dtype = mapping.array.shape, jnp.dtype(mapping.array.dtype)
        array = ir.Buf(f"array{number}", shape, dtype, ir.row_major(shape), "array", memory)
        kept = [d for d, b in enumerate(mapping.block_shape) if not isinstance(b, Squeezed)]
        buf = ir.Buf(
            self._name(mapping, k), mapping.ref_shape, dtype, tuple(array.strides[d] for d in kept), "window", memory
        )
        ctx.emit(ir.Point(buf, array, tuple(starts)))
        return Window(mapping, array, number, tuple(starts), tuple(lengths), rows, buf, copied=False)

    def _name(self, mapping: BlockMapping, k: int) -> str:
        word = mapping.origin.split(" ")[0].split("[")[0]
        return word if word.isidentifier() else f"operand{k}"

    def _buffer_number(self, k: int) -> int:
        """The call's buffer that a mapping's array is; an aliased input is its output's."""
        k_block = k - self.gm.num_prefetch
        first = self.gm.num_dynamic + self.gm.num_prefetch
        if k_block < 0:
            return self.gm.num_dynamic + k
        if k_block in self.aliases:
            return first + self.gm.num_inputs + self.aliases[k_block]
        return first + k_block

    def _inside(self, inside: ir.Expr | None, w: Window) -> ir.Expr | None:
        if not analysis.may_hang_over(w.mapping) or w.rows is not None:
            return inside
        for start, length, b, n, size in zip(
            w.starts, w.lengths, w.mapping.block_shape, w.mapping.array.shape, w.mapping.sizes
        ):
            if isinstance(b, Element):
                inside = _and(inside, _compare("ge", start, 0))
            inside = _and(inside, _compare("le", start, n - size))
            if length is not None:
                inside = _and(inside, _compare("eq", length, size))
        return inside

    def _copied(self, w: Window) -> Window:
        """The same window as a copy in the arena, if it may hang over the edge."""
        if not analysis.may_hang_over(w.mapping):
            return w
        return dataclasses.replace(w, buf=ir.temp(w.buf.shape, w.buf.dtype, w.buf.name), copied=True)

    # --- one version of the kernel --------------------------------------------------------------------------------
    def _version(self, windows: Sequence[Window], sites: list[Any]) -> Version:
        gm, n_pre = self.gm, self.gm.num_prefetch
        ids = [self._number(v) for v in gm.kernel_ids(self.ids)]
        ctx = Lowering(ids, [self._number(n) for n in gm.kernel_ids(self.sizes)], self.checks)
        ctx.sites = sites
        written = jaxlink.written_vars(self.jaxpr)
        bufs = []
        for k, w in enumerate(windows):
            buf = w.buf
            if w.copied:
                self._copy_in(ctx, w)
            elif k - n_pre in self.aliases:
                out = n_pre + gm.num_inputs + self.aliases[k - n_pre]
                same = analysis.same_window(w.mapping, windows[out].mapping, gm.grid) and not windows[out].copied
                if analysis.must_copy(self.jaxpr, self.jaxpr.invars[k], self.jaxpr.invars[out], same):
                    buf = ir.temp(buf.shape, buf.dtype, buf.name)
                    ctx.fill(buf, lower_refs.of_buffer(w.buf))
            bufs.append(buf)
        labels = [w.mapping.origin for w in windows] + [v.aval.label for v in self.jaxpr.invars[len(windows) :]]
        ctx.run(self.jaxpr, [Ref(buf, label) for buf, label in zip([*bufs, *self.scratch], labels)])
        for k, w in enumerate(windows):
            if w.copied and self.jaxpr.invars[k] in written:
                self._copy_out(ctx, w)
        stages = [("lowered", tuple(ctx.block))]
        for name, run in PASSES:
            stages.append((name, run(stages[-1][1])))
        return Version(tuple(windows), stages[-1][1], tuple(stages))

    def _place(self, w: Window, index: Sequence[ir.Expr]) -> tuple[list[ir.Expr], ir.Expr | None]:
        """The array's element under an element of the block, and whether there is one."""
        rest = iter(index)
        place, exists = [], None
        for d, (b, n) in enumerate(zip(w.mapping.block_shape, w.mapping.array.shape)):
            if isinstance(b, Squeezed):
                place.append(w.starts[d])
                continue
            i = next(rest)
            if isinstance(b, Indirect):
                assert w.rows is not None
                place.append(as_index(ir.Load(_INT32, w.rows, (i,))))
                continue
            at = ir.add(i, w.starts[d])
            length = w.lengths[d]
            if length is not None:
                exists = _and(exists, ir.Op(_BOOL, "lt", (i, length)))
            if isinstance(b, Element):
                exists = _and(exists, _compare("ge", at, 0))
            if isinstance(b, (Element, BoundedSlice)) or n < w.mapping.sizes[d] or n % w.mapping.sizes[d]:
                exists = _and(exists, _compare("lt", at, n))
            place.append(at)
        if 0 in w.mapping.array.shape:
            exists = ir.Const(_BOOL, False)
        return place, exists

    def _copy_in(self, ctx: Lowering, w: Window) -> None:
        lower_refs.uninitialized(ctx, w.buf)
        self._copy(ctx, w, lambda place, index: ir.Store(w.buf, index, ir.Load(w.buf.dtype, w.array, place)))

    def _copy_out(self, ctx: Lowering, w: Window) -> None:
        self._copy(ctx, w, lambda place, index: ir.Store(w.array, place, ir.Load(w.buf.dtype, w.buf, index)))

    def _copy(self, ctx: Lowering, w: Window, store: Callable[[Any, Any], ir.Stmt]) -> None:
        """Copy the elements of a window that exist."""
        if not all(isinstance(b, (Blocked, Squeezed)) for b in w.mapping.block_shape) or 0 in w.mapping.array.shape:

            def one(index):
                place, exists = self._place(w, index)
                ctx.emit(_guarded(exists, store(tuple(place), tuple(index))))

            _in_order(ctx, w.buf.shape, one)
            return
        kept = [d for d, b in enumerate(w.mapping.block_shape) if not isinstance(b, Squeezed)]
        for s in self._parts(ctx, w, store, kept, []):
            ctx.emit(s)

    def _parts(
        self, ctx: Lowering, w: Window, store: Callable[[Any, Any], ir.Stmt], dims: Sequence[int], extents: list[int]
    ) -> list[ir.Stmt]:
        """Loops of fixed sizes: a block is whole in a dimension, or it is the last one, whose size is known, too."""
        if not dims:
            with ctx.nested() as block:
                ctx.loops(extents, lambda index: ctx.emit(store(tuple(self._place(w, index)[0]), tuple(index))))
            return list(block)
        d, *rest = dims
        n, size = w.mapping.array.shape[d], w.mapping.sizes[d]
        if n % size == 0:
            return self._parts(ctx, w, store, rest, [*extents, size])
        last = self._parts(ctx, w, store, rest, [*extents, n % size])
        if n < size:
            return last
        whole = self._parts(ctx, w, store, rest, [*extents, size])
        fits = _compare("le", w.starts[d], n - size)
        return [ir.If(ir.Op(ir.INDEX, "convert", (fits,)), (tuple(last), tuple(whole)))]


def _guarded(exists: ir.Expr | None, store: ir.Stmt) -> ir.Stmt:
    if exists is None:
        return store
    return ir.If(ir.Op(ir.INDEX, "convert", (exists,)), ((), (store,)))


def _in_order(ctx: Lowering, shape: Sequence[int], one: Any) -> None:
    with ctx.nested() as block:
        ctx.loops(shape, one)

    def ordered(s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.For):
            return ir.For(s.var, s.extent, tuple(map(ordered, s.body)), ordered=True, where=s.where)
        return s

    for s in block:
        ctx.emit(ordered(s))
