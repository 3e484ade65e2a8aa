"""One kernel call as an LLVM module: the function over grid programs, and what the runtime must know of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.cpu import (
    analysis,
    arena,
    dtypes,
    ffi,
    ir,
    loopnotes,
    matmul,
    matmul_spread,
    pages,
    runtime,
    sort,
    target,
)
from palladion.compiler.cpu.builder import (
    NULL,
    const,
    define,
    gep,
    global_bytes,
    i32,
    i64,
    load,
    loop,
    new_module,
    ptr,
)
from palladion.compiler.cpu.emit import Emitter
from palladion.compiler.cpu.lower import (  # noqa: F401 - they register their rules
    control,
    dot,
    elementwise,
    gather,
    host,
    random,
    reduce,
    refs,
    shapes,
    window,
)
from palladion.compiler.cpu.lower.values import Lowering
from palladion.compiler.cpu.program import Builder, Program, Version
from palladion.errors import failed_check
from palladion.language import ops
from palladion.language.grid import GridMapping


def _array(aval: Any) -> runtime.Array:
    name = jnp.dtype(aval.dtype).name
    return runtime.Array(tuple(aval.shape), dtypes.UNPACKED.get(name, name))


class Unit:
    """One kernel call on its way to LLVM."""

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        gm: GridMapping,
        aliases: dict[int, int],
        program: Program,
        order: analysis.Order,
        num_threads: int | None,
    ) -> None:
        self.name, self.jaxpr, self.gm, self.aliases, self.program = name, jaxpr, gm, aliases, program
        self.order, self.num_threads = order, num_threads
        self.spread = False  # whether some product is
        self.notes: tuple[loopnotes.Note, ...] = ()  # of the main version's loops, once they are built
        self.module = new_module(name)
        self.lanes = target.host().LANES_F32
        offset = 0
        self.scratch_at: dict[Any, int] = {}
        for buf in program.scratch:
            self.scratch_at[buf.memory] = offset
            offset += -(-buf.nbytes // arena.ALIGN) * arena.ALIGN
        self.head_at, offset = arena.place([_Everything(program.head)], offset)
        self.version_at: dict[int, dict[Any, int]] = {}
        ends = [offset]
        for version in (program.inner, program.edge):
            if version is not None:
                self.version_at[id(version)], end = arena.place(version.block, offset)
                ends.append(end)
        self.prepare_block = self._prepare()
        _, end = arena.place(self.prepare_block, offset)
        self.workspace_at = max(*ends, end)
        spaces = [self._products().workspace_bytes(_spec(s)) for s in self._statements() if isinstance(s, ir.MatMul)]
        self.arena_bytes = self.workspace_at + -(-max(spaces, default=0) // arena.ALIGN) * arena.ALIGN

    def products(self) -> list[ir.MatMul]:
        """The matrix products of the main version, for reports."""
        version = self.program.inner or self.program.edge
        return [s for s in ir.statements(version.block if version else ()) if isinstance(s, ir.MatMul)]

    @classmethod
    def of(cls, params: dict[str, Any]) -> Unit:
        """The unit of a call, from the parameters of its `pallas_call` equation."""
        jaxpr, gm = params["jaxpr"], params["grid_mapping"]
        aliases = {i - gm.num_prefetch: o for i, o in params["input_output_aliases"]}
        options = params["compiler_params"]
        declared = getattr(options, "dimension_semantics", None)
        declared = None if declared is None else [str(getattr(s, "value", s)) for s in declared]
        order = analysis.order(jaxpr, gm, declared, aliases)
        with jaxlink.tracing_aside():
            program = Builder(jaxpr, gm, aliases, params["debug_checks"]).build()
        return cls(params["name"], jaxpr, gm, aliases, program, order, getattr(options, "num_threads", None))

    @property
    def main(self) -> Version:
        """The version that most programs run: the one inside the arrays, if there is one."""
        version = self.program.inner or self.program.edge
        assert version is not None
        return version

    def _products(self) -> Any:
        """How products are formed: on several threads if there is only one group of programs."""
        return matmul_spread if self.order.groups == 1 else matmul

    def _statements(self):
        for block in (self.program.head, *(v.block for v in (self.program.inner, self.program.edge) if v)):
            yield from ir.statements(block)

    # --- outputs that start uninitialised -------------------------------------------------------------------------
    def _prepare(self) -> tuple[ir.Stmt, ...]:
        """Fill the outputs that the kernel may leave partly unwritten, as the reference interpreter shows them."""
        ctx = Lowering([], [])
        n_pre, n_in = self.gm.num_prefetch, self.gm.num_inputs
        for o, mapping in enumerate(self.gm.outputs):
            if o in self.aliases.values():
                continue
            var = self.jaxpr.invars[n_pre + n_in + o]
            covered = analysis.every_block_visited(mapping, self.gm.grid)
            if not (covered and analysis.written_in_any_case(self.jaxpr, var)):
                number = self.gm.num_dynamic + n_pre + n_in + o
                size = (math.prod(mapping.array.shape),)
                dtype = jnp.dtype(mapping.array.dtype)
                flat = ir.Buf(f"array{number}", size, dtype, (1,), "array", ("array", number))
                refs.uninitialized(ctx, flat)
        return tuple(ctx.block)

    # --- the module -----------------------------------------------------------------------------------------------
    def build(self) -> tuple[Any, runtime.KernelDescription]:
        """The LLVM module, and what the runtime needs to know."""
        gm = self.gm
        phases = []
        if self._emit_pages():
            phases.append(runtime.Phase("pages", 0, 1, parallel=False))
        if self.prepare_block:
            self._emit_prepare()
            phases.append(runtime.Phase("prepare", 0, 1, parallel=False))
        if gm.num_programs != 0:
            self._emit_run()
            cost = int(self._cost() * (gm.num_programs or 1))
            phases.append(runtime.Phase("run", 0, self.order.groups, parallel=self.order.groups > 1, cost_ns=cost))
        sizes = [runtime.Array((), "int32")] * gm.num_dynamic
        mappings = [*gm.prefetch_mappings, *gm.inputs]
        first = gm.num_dynamic + gm.num_prefetch
        return self.module, runtime.KernelDescription(
            name=self.name,
            args=(*sizes, *(_array(m.array) for m in mappings)),
            results=tuple(_array(m.array) for m in gm.outputs),
            phases=tuple(phases),
            arena_bytes=self.arena_bytes,
            aliases=tuple((first + i, o) for i, o in self.aliases.items()),
            num_threads=self.num_threads,
            spread=self.spread,
        )

    def sites(self) -> list[runtime.HostSite]:
        """The Python functions that the kernel's host calls run."""
        values: dict[int, tuple[ir.Buf, ...]] = {}
        for s in self._statements():
            if isinstance(s, ir.HostCall):
                values.setdefault(s.site, s.values)
        result = []
        for k, site in enumerate(self.program.sites):
            arrays = tuple(runtime.Array(b.shape, b.dtype.name) for b in values[k])
            result.append(runtime.HostSite(repr(site), functools.partial(_act, site), arrays))
        return result

    def _cost(self) -> float:
        """Nanoseconds of one program, roughly."""
        return 20 + _block_cost(self.main.block, self.lanes)

    def _emit_pages(self) -> bool:
        """Ask for large pages for large results; whether there are any."""
        outs = [(o, _array(m.array).nbytes) for o, m in enumerate(self.gm.outputs) if o not in self.aliases.values()]
        outs = [(o, nbytes) for o, nbytes in outs if nbytes >= pages.LARGE]
        if not outs:
            return False
        _, b = self._function("pages")
        first = self.gm.num_dynamic + self.gm.num_prefetch + self.gm.num_inputs
        for o, nbytes in outs:
            pages.advise(b, self.data[first + o], nbytes)
        b.ret(const(0, i32))
        return True

    def _emit_prepare(self) -> None:
        _, b = self._function("prepare")
        offsets, _ = arena.place(self.prepare_block, 0)
        Emitter(b, self.lanes, lambda buf: self._pointer(b, buf, offsets, {}), self._special).block(self.prepare_block)
        b.ret(const(0, i32))

    def _function(self, name: str):
        fn, b = define(self.module, name, i32, ptr, i64, i64, i64)
        self.buffers, self.begin, self.end, worker = fn.args
        gm = self.gm
        count = gm.num_dynamic + gm.num_prefetch + gm.num_inputs + gm.num_outputs
        self.data = [load(b, ptr, gep(b, self.buffers, k, ptr)) for k in range(count)]
        self.arena = NULL
        if self.arena_bytes:
            whole = load(b, ptr, gep(b, self.buffers, count, ptr))
            self.arena = gep(b, whole, b.mul(worker, const(self.arena_bytes)))
        return fn, b

    def _pointer(self, b: Any, buf: ir.Buf, offsets: dict[Any, int], windows: dict[ir.Buf, Any]) -> Any:
        buf = buf.root or buf
        if buf in windows:
            return windows[buf]
        if buf.kind == "const":
            return global_bytes(self.module, buf.memory[1], "table")
        if buf.kind == "array":
            return self.data[buf.memory[1]]
        for table in (self.scratch_at, self.head_at, offsets):
            if buf.memory in table:
                return gep(b, self.arena, table[buf.memory])
        raise AssertionError(f"buffer {buf} has no place")

    def _emit_run(self) -> None:
        p, gm = self.program, self.gm
        _, b = self._function("run")
        dynamic = iter(range(gm.num_dynamic))
        sizes = [load(b, i32, self.data[next(dynamic)]) if n is None else n for n in gm.grid]
        if p.scratch:
            ctx = Lowering([], [])
            for buf in p.scratch:
                refs.uninitialized(ctx, buf)
            Emitter(b, self.lanes, lambda buf: self._pointer(b, buf, {}, {}), self._special).block(ctx.block)
        total: Any = const(1)
        for n in sizes:
            total = b.mul(total, const(n) if isinstance(n, int) else b.sext(n, i64))
        per_group = total if self.order.groups == 1 else const((gm.num_programs or 0) // self.order.groups)
        with loop(b, self.begin, self.end) as groups:
            first = b.mul(groups.i, per_group)
            with loop(b, first, b.add(first, per_group)) as programs:
                self._emit_program(b, programs.i, sizes)
        b.ret(const(0, i32))

    def _emit_program(self, b: Any, number: Any, sizes: Sequence[Any]) -> None:
        p = self.program
        windows: dict[ir.Buf, Any] = {}
        offsets: dict[Any, int] = {}

        def special(emitter: Emitter, s: ir.Stmt) -> None:
            if isinstance(s, ir.Point):
                windows[s.buf] = emitter.place(s.array, s.index)
            else:
                self._special(emitter, s)

        emitter = Emitter(b, self.lanes, lambda buf: self._pointer(b, buf, offsets, windows), special)
        rest = number
        values = []
        for axis in reversed(range(len(sizes))):
            size = const(sizes[axis]) if isinstance(sizes[axis], int) else b.sext(sizes[axis], i64)
            last = axis == 0
            values.append(b.trunc(rest if last else b.urem(rest, size), i32))
            rest = rest if last else b.udiv(rest, size)
        for var, value in zip(p.ids, reversed(values)):
            emitter.define(var, value)
        for var, value in zip(p.sizes, sizes):
            if isinstance(var, ir.Var):
                emitter.define(var, value)
        emitter.block(p.head)
        if p.edge is None or p.inner is None:
            self._emit_version(emitter, self.main, offsets)
            return
        assert p.inside is not None
        with b.if_else(emitter.value(p.inside)) as (inner, edge):
            for side, chosen in ((inner, p.inner), (edge, p.edge)):
                with side, emitter.branch():
                    self._emit_version(emitter, chosen, offsets)

    def _emit_version(self, emitter: Emitter, version: Version, offsets: dict[Any, int]) -> None:
        offsets.clear()
        offsets.update(self.version_at[id(version)])
        before = len(emitter.notes)
        emitter.block(version.block)
        if version is self.main:
            self.notes = tuple(emitter.notes.values())[before:]

    # --- statements that are not scalar loops ---------------------------------------------------------------------
    def _special(self, emitter: Emitter, s: ir.Stmt) -> None:
        b = emitter.b
        if isinstance(s, ir.MatMul):
            spec = _spec(s)
            places = [emitter.place(v.buf, v.base) for v in (s.a, s.b, s.out)]
            workspace = gep(b, self.arena, self.workspace_at) if self.arena_bytes else NULL
            if self._products() is matmul_spread and matmul_spread.split(spec):
                self.spread = True
                matmul_spread.emit_spread(self.module, b, spec, self.buffers, places, workspace, self.arena_bytes)
            else:
                b.call(matmul.emit_matmul(self.module, spec), [*places, workspace])
        elif isinstance(s, ir.Sort):
            sort.emit_sort(emitter, s)
        else:
            assert isinstance(s, ir.HostCall)
            values = [emitter.place(buf, tuple(ir.index(0) for _ in buf.shape)) for buf in s.values]
            status = ffi.host_call(b, self.buffers, s.site, values)
            with b.if_then(b.icmp_unsigned("!=", status, const(0, i32)), likely=False):
                b.ret(status)


class _Everything(ir.Stmt):
    """A block taken as one statement, so that all its temporaries live together."""

    def __init__(self, block: Sequence[ir.Stmt]) -> None:
        object.__setattr__(self, "body", tuple(block))


def _spec(s: ir.MatMul) -> matmul.MatmulSpec:
    (sa, *a), (sb, *b), (sc, *c) = (v.strides for v in (s.a, s.b, s.out))
    names = [v.buf.dtype.name for v in (s.a, s.b, s.out)]
    return matmul.MatmulSpec(
        s.m, s.n, s.k, (a[0], a[1]), (b[0], b[1]), (c[0], c[1]), *names, accumulate=s.accumulate, batch=s.batch,
        batch_strides=(sa, sb, sc),
    )  # fmt: skip


def _block_cost(block: Sequence[ir.Stmt], lanes: int) -> float:
    total = 0.0
    for s in block:
        if isinstance(s, ir.For):
            rounds = s.extent if isinstance(s.extent, int) else 16
            total += rounds * _block_cost(s.body, lanes)
        elif isinstance(s, ir.MatMul):
            total += 2 * s.batch * s.m * s.n * s.k / 60
        elif isinstance(s, ir.Store):
            for e in ir.walk(s.value):
                total += 0.3 * (e.extent if isinstance(e, ir.Reduce) else 1) / lanes
        elif isinstance(s, ir.Sort):
            n = math.prod(s.bufs[0].shape)
            total += n * 20
        else:
            total += 2 + max((_block_cost(inner, lanes) for inner in ir.stmt_blocks(s)), default=500.0)
    return total


def _act(site: Any, *values: np.ndarray) -> None:
    """What a host call does in Python."""
    if isinstance(site, host.PrintSite):
        print(ops.format_values(site.fmt, values), flush=True)
        return
    if isinstance(site, host.JaxPrintSite):
        args, named = jax.tree.unflatten(site.tree, values)
        print(site.fmt.format(*args, **named), flush=True)
        return
    ok, *rest = values
    if not bool(ok):
        shown, point = rest[: site.n_values], [int(i) for i in rest[site.n_values :]]
        raise failed_check(site.message.format(*shown), site.where, point)
