"""A kernel call as a Triton IR module: one function over pointers to whole arrays, run once for each program.

    tt.func public @add(%x: !tt.ptr<f32> {tt.divisibility = 16}, ..., %out: !tt.ptr<f32> {...})

Arguments are the scalar-prefetch operands, the inputs and the outputs, in that order; JAX's buffers are aligned, and
shapes and strides are constants. Grid axis 0 is CUDA's x, axis 1 its y and axis 2 its z. A grid of more axes, or with
more than 65,535 programs along y or z, is unrolled into x.

Programs run in any order, many at a time, and share nothing but the arrays. Scratch lives in registers for the length
of a program; axes along which a kernel carries scratch or accumulates an output are loops inside it (`sequence.py`).

Source: tutorial 6.2; findings of the spike on Triton (shapes as constants, `tt.divisibility`, masks).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxlib.triton import dialect as tt

from palladion import jaxlink, locations
from palladion.compiler.triton import (
    control,
    elementwise,
    emit,
    functions,
    keys,
    machine,
    memory,
    products,
    races,
    reductions,
    sequence,
    shapes,
)
from palladion.compiler.triton.intervals import of_results
from palladion.compiler.triton.lowering import RULES, Cell, Lowering, fits, rounded_up
from palladion.compiler.triton.refs import Dim, Ref, resolve, store
from palladion.errors import explain
from palladion.language.blocks import BoundedSlice, Element, Indirect, Squeezed
from palladion.language.grid import BlockMapping, GridMapping

RULE_FILES = (
    control,
    elementwise,
    functions,
    keys,
    machine,
    memory,
    products,
    reductions,
    shapes,
)  # imported for their rules

MOST_WARPS, MOST_STAGES = 32, 64  # 1,024 threads a program are CUDA's limit; so many buffers never fit
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # along x, y and z: CUDA's limits
DEFAULT_WARPS, DEFAULT_STAGES = 4, 3  # Triton's own


@dataclasses.dataclass(frozen=True)
class Argument:
    """A pointer that the kernel takes: whose array it is, its type, and whether the kernel fills it."""

    label: str
    shape: tuple[int, ...]
    dtype: str
    output: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A lowered call.

    Attributes:
      name: of the function.
      module: in MLIR.
      grid: programs along x, y and z; None along an axis that only the call knows.
      arguments: in order.
      num_warps, num_stages: for the compiler.
    """

    name: str
    module: ir.Module
    grid: tuple[int | None, int | None, int | None]
    arguments: tuple[Argument, ...]
    num_warps: int
    num_stages: int

    @functools.cached_property
    def text(self) -> str:
        """The module as text, with the user's lines."""
        return str(self.module.operation.get_asm(enable_debug_info=True))

    @functools.cached_property
    def plain(self) -> str:
        """The module as text, for people."""
        return str(self.module)

    @functools.cached_property
    def bytecode(self) -> bytes:
        """The module as MLIR's bytecode."""
        buffer = io.BytesIO()
        self.module.operation.write_bytecode(buffer)
        return buffer.getvalue()


def lower_call(params: dict[str, Any], sm: int) -> Kernel:
    """Lower a call, from the parameters of its `pallas_call` equation.

    Arguments: params: of the equation; sm: the compute capability that the code is for (90).
    Raises: UnsupportedPrimitive, NotImplementedError, TypeError, ValueError: with the user's line.
    """
    if params["mesh"] is not None:
        raise NotImplementedError(
            explain(
                f"The kernel {params['name']} runs on a mesh of cores, which Triton does not have.",
                hint="write it with pl.pallas_call and a grid",
            )
        )
    check_blocks(params)
    options = params["compiler_params"]
    ours = type(options).__module__ == "palladion.language.triton.params"
    warps = (options.num_warps if ours else None) or DEFAULT_WARPS
    stages = DEFAULT_STAGES if not ours or options.num_stages is None else options.num_stages
    for field, value, most in (("num_warps", warps, MOST_WARPS), ("num_stages", stages, MOST_STAGES)):
        if value > most:
            raise ValueError(explain(f"{params['name']} asks for {field}={value}; a GPU can do no more than {most}."))
    name = re.sub(r"\W", "_", params["name"]) or "kernel"
    name = name if not name[0].isdigit() else f"kernel_{name}"
    context = jaxlink.mlir.make_ir_context()
    tt.register_dialect(context)
    with context, _defined_at(params["jaxpr"], name):
        module = ir.Module.create()
        arguments = _arguments(params["grid_mapping"])
        grid = _emit(module, name, params, arguments, sm)
        module.operation.verify()
    return Kernel(name, module, grid, arguments, warps, stages)


def check_blocks(params: dict[str, Any]) -> None:
    """Refuse operands that are read or stored as a whole and whose blocks Triton does not hold.

    Raises: ValueError: naming each such operand, its block and the next larger one.
    """
    gm, jaxpr = params["grid_mapping"], params["jaxpr"]
    mappings = dict(zip(jaxpr.invars, [*gm.prefetch_mappings, *gm.block_mappings]))
    found: dict[Any, Any] = {}
    for access in races.accesses(jaxpr, {v: v for v in mappings}):
        if access.whole and not fits(mappings[access.ref].ref_shape):
            found.setdefault(access.ref, access)
    if not found:
        return
    blocks = [(mappings[v].origin, mappings[v].ref_shape) for v in found]
    (label, shape), *others = blocks
    if 0 in shape:
        headline = f"{label} is a block of shape {shape} without elements; Triton holds none."
        where = locations.location_of(next(iter(found.values())).eqn)
        raise ValueError(explain(headline, where=where, hint="leave the call out when there is nothing to compute"))
    raise ValueError(
        explain(
            f"In Triton every size of a block is a power of two; {label}, a block of shape {shape}, is not.",
            where=locations.location_of(next(iter(found.values())).eqn),
            operand=f"{label}, block {shape}: make it {rounded_up(shape)}",
            nor_is="; ".join(f"{name}, block {s}: make it {rounded_up(s)}" for name, s in others) or None,
            hint="a block may hang over the array's edge; in the kernel pltriton.load/store(ref.at[pl.ds(0, n)], "
            "mask=…) leave lanes out",
        )
    )


def _defined_at(jaxpr: Any, name: str) -> ir.Location:
    """Where the kernel function is written: debuggers and profilers show its file."""
    match = re.fullmatch(r".* at (.*):(\d+)", jaxpr.debug_info.func_src_info or "", re.DOTALL)
    return ir.Location.file(match[1], int(match[2]), 1) if match else ir.Location.name(name)


def _spoken(origin: str) -> str:
    """The kernel's own name for an operand: x_ref of "x_ref (input 0)"."""
    return re.sub(r"\W+", "_", origin.partition(" (")[0]).strip("_") or "operand"


def _arguments(gm: GridMapping) -> tuple[Argument, ...]:
    mappings = [*gm.prefetch_mappings, *gm.block_mappings]
    first_output = len(mappings) - gm.num_outputs
    result = []
    for k, m in enumerate(mappings):
        if str(m.array.dtype) not in emit.HELD:
            raise TypeError(
                explain(
                    f"{m.origin} holds {m.array.dtype}, which Triton does not have.",
                    hint="convert the operand before the call, or run with interpret=True",
                )
            )
        result.append(Argument(m.origin, tuple(m.array.shape), str(jnp.dtype(m.array.dtype)), k >= first_output))
    return tuple(result)


def _emit(module: ir.Module, name: str, params: dict[str, Any], arguments: Sequence[Argument], sm: int) -> Any:
    gm: GridMapping = params["grid_mapping"]
    pointers = [tt.PointerType.get(emit.element_type(a.dtype, memory=True), 1) for a in arguments]
    aligned = ir.DictAttr.get({"tt.divisibility": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 16)})
    with ir.InsertionPoint(module.body):
        kernel = tt.FuncOp(
            name,
            ir.TypeAttr.get(ir.FunctionType.get(pointers, [])),
            sym_visibility="public",
            arg_attrs=ir.ArrayAttr.get([aligned] * len(pointers)),
            res_attrs=ir.ArrayAttr.get([]),
        )
        names = [ir.Location.name(_spoken(a.label)) for a in arguments]
        entry = ir.Block.create_at_start(kernel.body, pointers, names)
    with ir.InsertionPoint(entry):
        plan = sequence.plan(params)
        grid, ids, sizes = _programs(gm, plan.loops)
        ctx = Lowering(gm.kernel_ids(ids), gm.kernel_ids(sizes), sm)
        _Programs(ctx, params, plan, list(entry.arguments)).emit(ids, sizes)
        tt.return_([])
    return grid


@dataclasses.dataclass
class _Programs:
    """The body of the kernel, in loops over the axes whose programs follow each other."""

    ctx: Lowering
    params: dict[str, Any]
    plan: sequence.Plan
    pointers: list[Any]

    def emit(self, ids: list[Any], sizes: list[Any]) -> None:
        """Emit it; `ids` of the axes in loops are the hardware's: 0, where they are not known at run time only."""
        gm, loops = self.params["grid_mapping"], self.plan.loops
        avals = [v.aval for v in self.params["jaxpr"].invars[len(self.pointers) :]]
        cells = [scratch(aval) for aval in avals]
        first = gm.num_prefetch + gm.num_inputs
        outputs = {first + k: _cell_of(gm.outputs[k]) for k in self.plan.outputs}
        carried = [*(cells[k] for k in self.plan.scratch), *outputs.values()]
        for cell in carried:
            cell.value = emit.const(0, cell.dtype, cell.block)
        self._loop(list(ids), sizes, list(loops), cells, outputs, carried)
        tables = self._refs(ids, range(gm.num_prefetch))
        for k, cell in outputs.items():
            at = [0 if a in loops else i for a, i in enumerate(ids)]
            ref = _operand(self.ctx, gm, gm.block_mappings[k - gm.num_prefetch], self.pointers[k], at, tables, k)
            store(self.ctx, ref, resolve(None, ref, ()), cell.value)

    def _loop(self, ids: list[Any], sizes: Any, loops: list[int], cells: Any, outputs: Any, carried: Any) -> None:
        if not loops:
            return self._body(ids, cells, outputs)
        axis, *inner = loops
        upper = emit.like_i32(sizes[axis])
        if isinstance(ids[axis], ir.Value):  # launched as often as there are rounds: all but the first do nothing
            alone = arith.cmpi(arith.CmpIPredicate.eq, ids[axis], emit.like_i32(0))
            upper = arith.select(alone, upper, emit.like_i32(0))
        op = scf.ForOp(emit.like_i32(0), upper, emit.like_i32(1), [c.value for c in carried])
        with ir.InsertionPoint(op.body):
            for cell, value in zip(carried, op.inner_iter_args):
                cell.value = value
            ids[axis] = op.induction_variable
            self._loop(ids, sizes, inner, cells, outputs, carried)
            scf.YieldOp([c.value for c in carried])
        for cell, value in zip(carried, op.results):
            cell.value = value
        return None

    def _body(self, ids: list[Any], cells: list[Cell], outputs: dict[int, Cell]) -> None:
        gm, jaxpr = self.params["grid_mapping"], self.params["jaxpr"]
        self.ctx.ids = gm.kernel_ids(ids)
        refs = self._refs(ids, range(len(self.pointers)), outputs)
        if self.plan.loops:
            self._await_rounds(refs)
        self.ctx.run(jaxpr, [*refs, *cells])

    def _refs(
        self, ids: list[Any], which: Sequence[int], outputs: Mapping[int, Cell] = MappingProxyType({})
    ) -> list[Any]:
        """The Refs of operands, those of `outputs` in registers."""
        gm = self.params["grid_mapping"]
        mappings, refs = [*gm.prefetch_mappings, *gm.block_mappings], []
        for k in which:
            tables, memory = refs[: gm.num_prefetch], _memory(self.params, k)
            own = outputs.get(k)
            refs.append(own or _operand(self.ctx, gm, mappings[k], self.pointers[k], ids, tables, memory))
        return refs

    def _await_rounds(self, refs: list[Any]) -> None:
        """What a round stores, or reads before it is stored, the next round must wait for."""
        jaxpr = self.params["jaxpr"]
        memories = {v: r.memory for v, r in zip(jaxpr.invars, refs) if isinstance(r, Ref)}
        touched = list(races.accesses(jaxpr, {v: v for v in memories}))
        stored = {memories[a.ref] for a in touched if a.kind != "read"}
        self.ctx.pending.update({memories[a.ref]: "written" for a in touched if memories[a.ref] in stored})


def _cell_of(mapping: BlockMapping) -> Cell:
    return Cell(mapping.ref_shape, jnp.dtype(mapping.array.dtype), mapping.origin)


def scratch(aval: Any) -> Cell:
    """A scratch Ref, in registers."""
    if str(aval.dtype) not in emit.HELD:
        raise NotImplementedError(
            explain(
                f"{aval.label} is {aval.dtype}; a Triton program has no such thing.",
                hint="Triton kernels have no semaphores and start no copies: read blocks with x_ref[…]",
            )
        )
    return Cell(tuple(aval.shape), jnp.dtype(aval.dtype), aval.label)


def _memory(params: dict[str, Any], k: int) -> int:
    """Which array an argument is: an aliased input is its output's."""
    gm = params["grid_mapping"]
    aliases = dict(params["input_output_aliases"])
    operands = gm.num_prefetch + gm.num_inputs
    return operands + aliases[k] if k < operands and k in aliases else k


def _programs(gm: GridMapping, loops: Sequence[int]) -> tuple[Any, list[Any], list[Any]]:
    """CUDA's grid, the program's index along each axis, and the sizes of the axes; those in `loops` are run by one."""
    axes = [1 if a in loops and n is not None else n for a, n in enumerate(gm.grid)]
    fits = len(axes) <= 3 and all(n is None or n <= most for n, most in zip(axes, MOST_PROGRAMS))
    dims = list(tt.ProgramIDDim)
    if fits:
        ids = [0 if n == 1 else tt.get_program_id(dims[a]) for a, n in enumerate(axes)]
        sizes = [tt.get_num_programs(dims[a]) if n is None else n for a, n in enumerate(gm.grid)]
        grid = tuple((*axes, 1, 1, 1)[:3])
        return grid, ids, sizes
    if gm.num_dynamic:
        headline = f"A grid of {len(axes)} axes, one of which is known only at run time, does not fit CUDA's three."
        raise NotImplementedError(explain(headline, hint="use at most three axes, or make the sizes Python integers"))
    known = [int(n or 0) for n in axes]
    total = math.prod(known)
    if total > MOST_PROGRAMS[0]:
        raise ValueError(explain(f"A grid of {total:,} programs is more than CUDA's {MOST_PROGRAMS[0]:,}."))
    flat = tt.get_program_id(dims[0])
    ids = []
    for a, n in enumerate(known):
        at = emit.divide(flat, math.prod(known[a + 1 :]))
        ids.append(0 if n == 1 else emit.modulo(at, n) if a else at)
    return (total, 1, 1), ids, list(gm.grid)


def _operand(
    ctx: Lowering, gm: GridMapping, mapping: BlockMapping, pointer: Any, ids: list[Any], tables: list[Ref], memory: int
) -> Ref:
    """The Ref of an operand: where its block begins, by its index map, clamped as the reference says."""
    takes = len(mapping.index_map.invars) - len(ids)
    as_values = [emit.const(i, jnp.int32) if isinstance(i, int) else i for i in ids]
    flat = ctx.run(mapping.index_map, [*as_values, *tables[:takes]])
    known = of_results(mapping.index_map, gm.grid)
    flat = [low if low == high else v for v, (low, high) in zip(flat, known)]
    ranges = mapping.indices(known)
    strides = [math.prod(mapping.array.shape[d + 1 :]) for d in range(len(mapping.array.shape))]
    dims = []
    for (index, size), ((low, high), _), b, n, stride, (least, most) in zip(
        mapping.indices(flat), ranges, mapping.block_shape, mapping.array.shape, strides, mapping.extents
    ):
        if isinstance(b, Indirect):
            headline = f"{mapping.origin} gathers rows (pl.Indirect), which the Triton compiler does not do."
            raise NotImplementedError(explain(headline, hint="index the whole array with an array of rows"))
        if low < least or high > most:
            index = emit.clamp(index, least, most)
            low, high = max(low, least), min(high, most)
        if isinstance(b, Squeezed):
            dims.append(Dim(n, stride, index, False))
        elif isinstance(b, Element):
            start = emit.sub(index, b.padding[0])
            hangs = low - b.padding[0] < 0, high - b.padding[0] + b.block_size > n
            dims.append(Dim(n, stride, start, True, *hangs))
        elif isinstance(b, BoundedSlice):
            length = emit.clamp(size, 0, b.block_size)
            dims.append(Dim(n, stride, index, True, high=high + b.block_size > n, length=length))
        else:
            block = b.block_size
            start = emit.mul(index, block)
            dims.append(Dim(n, stride, start, True, high=(high + 1) * block > n))
    return Ref(mapping.origin, mapping.ref_shape, jnp.dtype(mapping.array.dtype), pointer, tuple(dims), memory)


__all__ = ["RULES", "Argument", "Kernel", "lower_call"]
