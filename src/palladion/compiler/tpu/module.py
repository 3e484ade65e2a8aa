"""A kernel call as a Mosaic TPU module: `main`, and a function for each operand's window.

    func.func @main(%i: i32 …,              one for each grid axis
                    %s: memref<…, smem> …,  prefetched scalars
                    %x: memref<block> …,    blocks of the inputs, then of the outputs
                    %t: memref<…> …)        scratch, kept from program to program
        attributes {iteration_bounds, dimension_semantics, window_params, scalar_prefetch, scratch_operands, …}

The compiler makes the loop over the grid of it, last axis fastest, and the copies between HBM and VMEM. A call without
a grid on whole arrays has no windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from jaxlib.mosaic.python import tpu

from palladion import jaxlink, locations
from palladion.compiler.tpu import aliases, blocks, rules_refs, windows
from palladion.compiler.tpu.context import attr, entered, function, kept, new_function
from palladion.compiler.tpu.emit import Emitter, Kernel, Ref
from palladion.compiler.tpu.kinds import Refusal, i32, ref_type
from palladion.compiler.tpu.rules_dma import check_waits
from palladion.errors import count_of, explain
from palladion.language import kernel as kernels
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.tpu import allocation
from palladion.language.tpu.mesh import TensorCoreMesh
from palladion.language.tpu.params import LoweringException

_DYNAMIC = -(2**63)  # a bound that is an operand of the call


def build_module(params: Mapping[str, Any], devices: Mapping[Any, int] | None = None) -> ir.Module:
    """The Mosaic module of a kernel call. It is kept for later calls: it must not be changed.

    Arguments:
      params: of the `pallas_call` equation.
      devices: {axis name: size} of the mesh of devices around the call, in order.

    Raises:
      ValueError: a block shape that TPUs do not take. UnsupportedPrimitive, LoweringException: an operation, at the
        user's line.
    """
    key = (tuple(params.items()), None if devices is None else tuple(devices.items()))
    return kept(key, lambda: _build(params, params["grid_mapping"], devices))


def _build(params: Mapping[str, Any], mapping: GridMapping, devices: Any) -> ir.Module:
    for block in mapping.block_mappings:
        blocks.check_block(block)
    if params["mesh"] is not None and not isinstance(params["mesh"], TensorCoreMesh):
        headline = f"The kernel {params['name']} runs on {type(params['mesh']).__name__}, which a TPU has not."
        raise LoweringException(explain(headline, hint="pltpu.TensorCoreMesh(axis_name='core')"))
    with entered(), ir.Location.name(params["name"]):
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get(params["name"])
        try:
            with ir.InsertionPoint(module.body):
                _Call(params, mapping, devices).emit()
            module.operation.verify()
        except Refusal as refusal:
            headline = f"The kernel {params['name']} cannot be compiled for TPU: {refusal.headline}"
            where = locations.traced_at(params["jaxpr"])
            raise LoweringException(explain(headline, where=where, hint=refusal.hint)) from None
        except ir.MLIRError as error:
            said = str(error)
            found = re.search(r'"([^"]+)":(\d+):\d+', said)
            headline = f"The Mosaic module of the kernel {params['name']} is not valid."
            where = f"{found[1]}:{found[2]}" if found else None
            raise LoweringException(explain(headline, where=where, Mosaic=said)) from error
    return module


class _Call:
    def __init__(self, params: Mapping[str, Any], mapping: GridMapping, devices: Any) -> None:
        self.params, self.mapping, self.devices = params, mapping, devices
        self.jaxpr = params["jaxpr"]
        operands = [m for m in mapping.block_mappings if has_elements(m)]
        in_place = all(m.covers_array or windows.space_of(m) in blocks.LEFT_IN_PLACE for m in operands)
        self.grid: tuple[int | None, ...] = mapping.grid or (() if in_place else (1,))
        n_refs = mapping.num_prefetch + len(mapping.block_mappings)
        self.operands = operands
        self.scratch = [v.aval for v in self.jaxpr.invars[n_refs:]]
        self.for_call = [e for e in _equations(self.jaxpr) if e.primitive in _FOR_THE_CALL]

    def emit(self) -> None:
        self._main()
        if self.grid:
            for n, operand in enumerate(self.operands):
                if windows.space_of(operand) not in blocks.LEFT_IN_PLACE:
                    windows.emit_window(operand, f"transform_{n}", self.grid, self.mapping.prefetch_mappings)

    def _main(self) -> None:
        mapping, n_grid = self.mapping, len(self.grid)
        operands = (*mapping.prefetch_mappings, *self.operands)
        allocated = [e.outvars[0].aval for e in self.for_call]
        scratch = [_typed(ref_type, a, a.label) for a in (*self.scratch, *allocated)]
        kinds = [_typed(windows.prefetch_type, m, m.origin) for m in mapping.prefetch_mappings]
        kinds += [_typed(windows.window_type, m, m.origin) for m in self.operands]
        _, entry = new_function("main", [i32()] * n_grid + kinds + scratch, [], self._attributes(len(scratch)))
        with function(entry):
            arguments = list(entry.arguments)
            ids, rest = arguments[:n_grid], arguments[n_grid:]
            memory = iter(rest)
            refs = [
                self._ref(next(memory) if has_elements(m) else None, m, var.aval)
                for m, var in zip((*mapping.prefetch_mappings, *mapping.block_mappings), self.jaxpr.invars)
            ]
            buffers = rest[len(operands) :]
            refs += [Ref(b, a, a.label) for b, a in zip(buffers, self.scratch)]
            kernel = self._kernel(ids)
            for eqn, buffer in zip(self.for_call, buffers[len(self.scratch) :]):
                kernel.globals[id(eqn)] = Ref(buffer, eqn.outvars[0].aval, eqn.outvars[0].aval.label)
            aliases.fill_read_outputs(self.params, ids, refs, _copy)
            Emitter(kernel).run(self.jaxpr, refs)
            check_waits(kernel, self.params["name"], refs[: len(refs) - len(self.scratch)])
            func.ReturnOp([])

    def _kernel(self, ids: Sequence[ir.Value]) -> Kernel:
        mapping, mesh = self.mapping, self.params["mesh"]
        sizes = [tpu.iteration_bound(d) if n is None else n for d, n in enumerate(self.grid)]
        cores = {} if mesh is None else {a: (n, i) for (a, n), i in zip(mesh.shape.items(), ids)}
        own = range(len(mapping.grid))
        return Kernel(
            ids=[ids[a] for a in own if a not in mapping.vmapped_dims],
            sizes=[sizes[a] for a in own if a not in mapping.vmapped_dims],
            cores=cores,
            devices=self.devices,
            checks=self.params["debug_checks"],
            params=self.params["compiler_params"],
        )

    def _ref(self, memory: Any, mapping: BlockMapping, aval: Any) -> Ref:
        squeezed = mapping.squeezed
        if squeezed and windows.space_of(mapping) in blocks.LEFT_IN_PLACE:
            squeezed = ()
        return Ref(memory, aval, mapping.origin, squeezed)

    def _attributes(self, n_scratch: int) -> dict[str, ir.Attribute]:
        of_all = {
            "scalar_prefetch": attr(f"{self.mapping.num_prefetch} : i64"),
            "scratch_operands": attr(f"{n_scratch} : i64"),
            "tpu.core_type": attr("#tpu.core_type<tc>"),
        }
        if not self.grid:
            return of_all
        semantics = [attr(f"#tpu.dimension_semantics<{s}>") for s in self._semantics()]
        params = [windows.window_params(m, f"transform_{n}") for n, m in enumerate(self.operands)]
        return {
            **of_all,
            "iteration_bounds": ir.DenseI64ArrayAttr.get([_DYNAMIC if n is None else n for n in self.grid]),
            "dimension_semantics": ir.ArrayAttr.get(semantics),
            "window_params": ir.ArrayAttr.get(params),
        }

    def _semantics(self) -> list[str]:
        """What the programs along each axis may do; along an axis that vmap added they are independent."""
        given, mesh = getattr(self.params["compiler_params"], "dimension_semantics", None), self.params["mesh"]
        if mesh is not None:
            return ["core_parallel" if n > 1 else "arbitrary" for n in self.grid if n is not None]
        if given is None or not self.mapping.grid:
            return ["arbitrary"] * len(self.grid)
        axes = [a for a in range(len(self.grid)) if a not in self.mapping.vmapped_dims]
        if len(given) != len(axes):
            raise ValueError(
                explain(
                    f"dimension_semantics has {count_of(len(given), 'entry', 'entries')}, but the grid of "
                    f"{self.params['name']} has {count_of(len(axes), 'axis', 'axes')}.",
                    dimension_semantics=tuple(getattr(s, "value", s) for s in given),
                    grid=self.mapping.kernel_grid,
                    hint='give "parallel" or "arbitrary" for each grid axis, reductions last',
                )
            )
        result = ["parallel"] * len(self.grid)
        for axis, kind in zip(axes, given):
            result[axis] = getattr(kind, "value", kind)
        return result


def _typed(type_of: Callable[[Any], ir.Type], x: Any, name: str) -> ir.Type:
    """The type of an operand's memory; a refusal names the operand."""
    try:
        return type_of(x)
    except Refusal as refusal:
        raise Refusal(f"{name}: {refusal.headline}", refusal.hint) from None


def _copy(source: Ref, target: Ref) -> None:
    rules_refs.store(target, (), rules_refs.load(source, ()))


def has_elements(mapping: BlockMapping) -> bool:
    """Whether an operand is passed to the kernel: Mosaic has no arrays without elements."""
    return 0 not in mapping.array.shape


_FOR_THE_CALL = (kernels.get_global_p, allocation.allocate_p)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from _equations(inner)
