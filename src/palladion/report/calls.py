"""The kernel calls that a program makes, recorded while it runs.

`Recorder` is an observer of `language.primitive`: it is told of every call, with concrete operands outside jit and
tracers inside. Calls that are alike (same kernel, grid, blocks and types) become one `Call` with a count, however
many times a loop makes them. Of the operands it keeps only what decides which blocks are visited: the sizes of
dynamic grid axes and the values of scalar-prefetch operands, copied, for the program may donate them.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import jax
import numpy as np

from palladion import jaxlink, locations
from palladion.compiler.entry import kernel_location
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.primitive import EagerKernel

MAX_VALUES = 16  # different run-time values of one call that are looked at


@dataclasses.dataclass(frozen=True)
class Values:
    """What was known, at one call, of the values that decide which blocks are visited.

    Attributes:
      grid: the number of programs along each axis; None where the size was a tracer.
      prefetch: the scalar-prefetch operands; None when any of them was a tracer.
    """

    grid: tuple[int | None, ...]
    prefetch: tuple[np.ndarray, ...] | None

    @property
    def key(self) -> Any:
        """Equal for equal values."""
        prefetch = self.prefetch
        return self.grid, None if prefetch is None else tuple((p.shape, p.tobytes()) for p in prefetch)


@dataclasses.dataclass
class Call:
    """One kernel call of the program, made once or many times.

    Attributes:
      params: the parameters of the `pallas_call` equation.
      kernel_at: `file:line` of the kernel function.
      called_at: `file:line (function)` of the line that made the call first, or None.
      mesh: axes of the `shard_map` around that call, and their sizes; None outside.
      count: how often it was made.
      traced: how many of those times with tracers (in jit, scan, grad …), each of which may run any number of times.
      batches: sizes of the axes that vmap adds to the grid, outermost first, for each way it was vmapped.
      values: the different run-time values it was made with, at most `MAX_VALUES`.
    """

    params: dict[str, Any]
    kernel_at: str | None
    called_at: str | None
    mesh: dict[str, int] | None = None
    count: int = 0
    traced: int = 0
    batches: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    values: dict[Any, Values] = dataclasses.field(default_factory=dict)
    values_left_out: bool = False

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self.params["name"]

    @property
    def grid_mapping(self) -> GridMapping:
        return self.params["grid_mapping"]

    @functools.cached_property
    def key(self) -> Any:
        """Equal for calls that a table need not tell apart."""
        return _key(self.params)

    @property
    def origin(self) -> Any:
        """The name and the function of the kernel."""
        jaxpr = self.jaxpr
        return self.name, None if jaxpr is None else jaxpr.debug_info.func_src_info

    @property
    def aliased_outputs(self) -> frozenset[int]:
        """Numbers of the outputs that start as an operand."""
        return frozenset(output for _, output in self.params["input_output_aliases"])

    @property
    def jaxpr(self) -> Any:
        """The kernel over Refs, or None for a call with `interpret=pl.EagerParams()`, which is not traced."""
        body = self.params["jaxpr"]
        return None if isinstance(body, EagerKernel) else body

    @property
    def kernel_refs(self) -> tuple[Any, ...]:
        """Abstract Refs of the kernel's parameters: scalar prefetch, inputs, outputs, scratch."""
        body = self.params["jaxpr"]
        return body.refs if isinstance(body, EagerKernel) else tuple(v.aval for v in body.invars)

    @property
    def scratch_refs(self) -> tuple[Any, ...]:
        mapping = self.grid_mapping
        return self.kernel_refs[mapping.num_prefetch + len(mapping.block_mappings) :]

    @property
    def output_vars(self) -> tuple[Any, ...]:
        """The kernel's output Refs as variables of `jaxpr`; none for a kernel that is not traced."""
        if self.jaxpr is None:
            return ()
        first = self.grid_mapping.num_prefetch + self.grid_mapping.num_inputs
        return tuple(self.jaxpr.invars[first : first + self.grid_mapping.num_outputs])


class Recorder:
    """An observer of kernel calls: `with primitive.observing(recorder): …`; then read `calls`.

    Attributes:
      symbolic: how many calls had symbolic shapes (`jax.export`); these have no sizes to look at and are left out.
    """

    def __init__(self) -> None:
        self.symbolic = 0
        self._lock = threading.Lock()  # a program may make calls from several threads
        self._calls: dict[Any, Call] = {}
        self._by_params: dict[int, Call] = {}

    @property
    def calls(self) -> list[Call]:
        """The calls, in the order in which the program first made them."""
        return list(self._calls.values())

    def __call__(self, operands: tuple, params: dict) -> None:
        if _is_symbolic(params["grid_mapping"]):
            with self._lock:
                self.symbolic += 1
            return
        # Outside the lock, for it may wait for arrays whose computation makes kernel calls itself.
        values = _values(operands, params["grid_mapping"])
        with self._lock:
            self._count(operands, params, values)

    def _count(self, operands: tuple, params: dict, values: Values) -> None:
        call = self._by_params.get(id(params))
        if call is None or call.params is not params:
            call = self._record(params)
        call.count += 1
        call.traced += any(isinstance(x, jaxlink.Tracer) for x in operands)
        if (batch := _batch(operands)) and batch not in call.batches:
            call.batches.append(batch)
        if values.key in call.values:
            return
        if len(call.values) < MAX_VALUES:
            call.values[values.key] = values
        else:
            call.values_left_out = True

    def _record(self, params: dict) -> Call:
        key = _key(params)
        call = self._calls.get(key)
        if call is None:
            call = Call(params, kernel_location(params["jaxpr"]), locations.current_location(), _mesh())
            self._calls[key] = call
        if call.params is params:  # kept alive by the call, so its id stays its own
            self._by_params[id(params)] = call
        return call


def _mesh() -> dict[str, int] | None:
    """Axes of the `shard_map` in which this is traced, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {str(a): mesh.shape[a] for a in mesh.manual_axes} or None


def _is_symbolic(mapping: GridMapping) -> bool:
    arrays = [m.array for m in (*mapping.prefetch_mappings, *mapping.block_mappings)]
    return any(jaxlink.is_symbolic_dim(n) for sizes in (mapping.grid, *(x.shape for x in arrays)) for n in sizes)


def _values(operands: tuple, mapping: GridMapping) -> Values:
    known = [_concrete(x) for x in operands[: mapping.num_dynamic + mapping.num_prefetch]]
    sizes = iter(known[: mapping.num_dynamic])
    dynamic = [next(sizes) if n is None else np.asarray(n) for n in mapping.grid]
    prefetch = [p for p in known[mapping.num_dynamic :] if p is not None]
    return Values(
        grid=tuple(None if n is None else max(int(n), 0) for n in dynamic),
        prefetch=tuple(prefetch) if len(prefetch) == mapping.num_prefetch else None,
    )


def _concrete(x: Any) -> np.ndarray | None:
    """A copy of an operand's value, or None when it has none here (a tracer, an array of other processes)."""
    if isinstance(x, jaxlink.Tracer):
        return None
    try:
        return np.array(x)
    except RuntimeError:  # deleted, or not addressable from here: the call itself will say so
        return None


def _batch(operands: tuple) -> tuple[int, ...]:
    """Sizes of the vmap axes around a call, outermost first."""
    sizes: list[tuple[int, ...]] = [()]
    for x in operands:
        found = []
        while isinstance(x, jaxlink.batching.BatchTracer):
            if isinstance(x.batch_dim, int):
                found.append(x.val.shape[x.batch_dim])
            x = x.val
        sizes.append(tuple(reversed(found)))
    return max(sizes, key=len)


def _key(params: dict) -> Any:
    """Equal for calls that a table need not tell apart, though their traces are different objects."""
    mapping: GridMapping = params["grid_mapping"]

    def blocks(m: BlockMapping):
        kind = (m.array.shape, str(m.array.dtype), m.memory_space, m.pipeline_mode)
        return m.origin, m.block_shape, kind, m.map_location, str(m.index_map)

    body = params["jaxpr"]
    return (
        params["name"],
        mapping.grid,
        tuple(blocks(m) for m in (*mapping.prefetch_mappings, *mapping.block_mappings)),
        params["input_output_aliases"],
        params["compiler_params"],
        (body.function.__code__ if hasattr(body.function, "__code__") else id(body.function), body.refs)
        if isinstance(body, EagerKernel)
        else (body.debug_info.func_src_info, str(body)),
    )


def short_type(array: Any) -> str:
    """An array type as jaxprs print it: f32[8,128]."""
    if jaxlink.is_opaque(array.dtype):
        return f"{array.dtype}[{','.join(map(str, array.shape))}]"
    dtype = jax.numpy.dtype(array.dtype)
    return jaxlink.ShapedArray(tuple(array.shape), dtype).str_short(short_dtypes=True)
