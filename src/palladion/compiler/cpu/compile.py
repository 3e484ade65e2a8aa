"""The native CPU compiler: a kernel call becomes machine code that XLA calls through its FFI.

    jaxpr -> loop nests (program.py, lower/) -> LLVM (emit.py) -> object code (cache.py) -> runtime.py

`lower` is the executor's lowering rule. `PALLADION_DUMP=DIR` writes the jaxpr, the loop nests, the LLVM IR and the
assembly of every kernel compiled.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.cpu import analysis, arena, cache, dtypes, ffi, ir, matmul, runtime, sort, target
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
)
from palladion.compiler.cpu.lower.values import Lowering
from palladion.compiler.cpu.program import Builder, Program, Version
from palladion.errors import KernelCheckError, explain
from palladion.language import ops
from palladion.language.grid import GridMapping


def lower(ctx: Any, *args: Any, **params: Any) -> list[Any]:
    """The lowering rule of `pallas_call` for native CPU code."""
    return runtime.lower_call(ctx, compile_call(_Key(params)), args)


class _Key:
    """The parameters of a call, hashed by identity of their jaxpr."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self._key = (
            params["jaxpr"],
            params["grid_mapping"],
            params["input_output_aliases"],
            params["debug_checks"],
            params["compiler_params"],
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


@functools.lru_cache(1024)
def compile_call(call: _Key) -> int:
    """Compile a kernel call; its content key (runtime.py)."""
    p = call.params
    gm: GridMapping = p["grid_mapping"]
    check_dtypes(p["jaxpr"], p["name"])
    aliases = {i - gm.num_prefetch: o for i, o in p["input_output_aliases"]}
    options = p["compiler_params"]
    declared = getattr(options, "dimension_semantics", None)
    declared = None if declared is None else [getattr(s, "value", s) for s in declared]
    order = analysis.order(p["jaxpr"], gm, declared, aliases)
    with jaxlink.tracing_aside():
        program = Builder(p["jaxpr"], gm, aliases, p["debug_checks"]).build()
    unit = Unit(p["name"], p["jaxpr"], gm, aliases, program, order, getattr(options, "num_threads", None))
    module, description = unit.build()
    dump(unit, module)
    return runtime.load(module, description, unit.sites())


def check_dtypes(jaxpr: Any, name: str) -> None:
    """Refuse Refs of dtypes that are not held natively.

    Raises:
      TypeError: naming the Ref, its dtype and the way out.
    """
    for v in jaxpr.invars:
        if (dtype := str(v.aval.dtype)) not in dtypes.HELD:
            raise TypeError(
                explain(
                    f"{v.aval.label} of the kernel {name} holds {dtype}, which native CPU code does not have.",
                    hint="run this kernel with interpret=True, or convert the operand before the call",
                )
            )


def _array(aval: Any) -> runtime.Array:
    return runtime.Array(tuple(aval.shape), jnp.dtype(aval.dtype).name)


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
        spaces = [matmul.workspace_bytes(_spec(s)) for s in self._statements() if isinstance(s, ir.MatMul)]
        self.arena_bytes = self.workspace_at + -(-max(spaces, default=0) // arena.ALIGN) * arena.ALIGN

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
        version = self.program.inner or self.program.edge
        assert version is not None
        return 20 + _block_cost(version.block, self.lanes)

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
        version = p.inner or p.edge
        assert version is not None
        if p.edge is None or p.inner is None:
            self._emit_version(emitter, version, offsets)
            return
        assert p.inside is not None
        with b.if_else(emitter.value(p.inside)) as (inner, edge):
            for side, chosen in ((inner, p.inner), (edge, p.edge)):
                with side, emitter.branch():
                    self._emit_version(emitter, chosen, offsets)

    def _emit_version(self, emitter: Emitter, version: Version, offsets: dict[Any, int]) -> None:
        offsets.clear()
        offsets.update(self.version_at[id(version)])
        emitter.block(version.block)

    # --- statements that are not scalar loops ---------------------------------------------------------------------
    def _special(self, emitter: Emitter, s: ir.Stmt) -> None:
        b = emitter.b
        if isinstance(s, ir.MatMul):
            function = matmul.emit_matmul(self.module, _spec(s))
            places = [emitter.place(v.buf, v.base) for v in (s.a, s.b, s.out)]
            workspace = gep(b, self.arena, self.workspace_at) if self.arena_bytes else NULL
            b.call(function, [*places, workspace])
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
    ok, *point = values
    if not bool(ok):
        raise KernelCheckError(explain(site.message, where=site.where, grid_point=tuple(int(i) for i in point) or None))


def dump(unit: Unit, module: Any) -> None:
    """Write each stage of a kernel into the folder that PALLADION_DUMP names."""
    folder = os.environ.get("PALLADION_DUMP")
    if not folder:
        return
    text = str(module)
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    stem = f"{unit.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    (path / f"{stem}.jaxpr.txt").write_text(str(unit.jaxpr))
    versions = [(w, v) for w, v in (("inner", unit.program.inner), ("edge", unit.program.edge)) if v is not None]
    nests = "".join(f"# {which}\n{ir.render(v.block)}\n" for which, v in versions)
    (path / f"{stem}.nests.txt").write_text(f"# head\n{ir.render(unit.program.head)}\n{nests}")
    (path / f"{stem}.ll").write_text(text)
    (path / f"{stem}.s").write_text(cache.assembly(module))
