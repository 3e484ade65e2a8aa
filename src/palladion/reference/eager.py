"""The eager interpreter, `interpret=pl.EagerParams(…)`: the kernel's own Python runs, program by program.

Each program gets copies of its blocks as `EagerRef`s (`eager_refs.py`); what it stored goes back to the arrays when
it has ended. The meaning is that of the reference interpreter (order, clamped block indices, uninitialised values
outside the array, dropped stores, scratch that stays, aliases in one memory), with two differences: an index known
at run time that leaves its Ref raises (`EagerParams.out_of_range`), and a kernel may use arrays from outside, for
Python sees no difference between those and its own.

`jax.disable_jit` makes `cond`, `switch`, `fori_loop`, `while_loop`, `scan` and nested `jit` plain Python. Known limits,
all of that mode of JAX: a Python number given to a branch, a scan or a jitted function stays a Python number there,
a `lax.scan` of length zero is refused, and JAX still traces what `jax.checkpoint` wraps and, under `vmap`, a `cond`
or `while_loop` on a batched condition (such functions run, but do not see values).

Source: tutorial 2.2, 3; as reference/interpret.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink, locations
from palladion.errors import PalladionWarning, explain
from palladion.language import check, frames
from palladion.language.eager_params import EagerParams
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.index_maps import OutOfRange, evaluate, hint, reads_prefetch
from palladion.language.primitive import EagerKernel
from palladion.reference.eager_refs import EagerRef, EagerTrace, fresh, to_jax, to_numpy

_CHUNK = 1024  # programs whose windows are worked out together

# Element (start, size or None) for each dimension, clamped; the start of an Indirect dimension is a list of indices.
Starts = Sequence[tuple[Any, int | None]]


def run(
    *args: Any,
    jaxpr: EagerKernel,
    grid_mapping: GridMapping,
    input_output_aliases: Sequence[tuple[int, int]],
    interpret: EagerParams,
    **_: Any,
) -> list[jax.Array]:
    """Run a kernel call on concrete arrays.

    Arguments:
      *args: sizes of dynamic grid axes, scalar-prefetch operands, inputs.
      jaxpr: the kernel's Python function and its Refs.
      grid_mapping, input_output_aliases, interpret: as in the equation.

    Returns:
      the outputs.

    Raises:
      whatever the kernel raises, with a note that names the program. ValueError: `only` names a program outside the
      grid, the kernel returns a value, or it stores to an input. IndexError: an index leaves its Ref.
    """
    call = _Call.make(jaxpr, grid_mapping, input_output_aliases, interpret, args)
    try:
        for chunk in itertools.batched(call.points(), _CHUNK):
            tables = [call.table(m, chunk) for m in call.mappings]
            for n, ids in enumerate(chunk):
                call.run_program(ids, [t if t is None else t[n] for t in tables])
    except BaseException as error:
        error.__traceback__ = _trimmed(error.__traceback__)
        raise
    arrays = [call.arrays[h] for h in call.home[grid_mapping.num_inputs :]]
    return [to_jax(x, m.array.dtype) for x, m in zip(arrays, grid_mapping.outputs)]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One kernel call, ready to run program by program.

    Attributes:
      kernel, gm, params: the call's; sizes: its grid, with the sizes of dynamic axes.
      prefetch: the scalar-prefetch operands.
      arrays: the inputs, then the outputs, in NumPy; those of outputs are changed in place.
      home: for each of them, the number of the array that its blocks live in; an aliased output lives in its input's.
      refusals: for each prefetch operand, input and output: None, or a function that makes the exception for a store.
      scratch: the scratch buffers, which stay from program to program.
      warned: the operands whose index maps have been warned about.
    """

    kernel: EagerKernel
    gm: GridMapping
    params: EagerParams
    sizes: tuple[int, ...]
    prefetch: tuple[np.ndarray, ...]
    arrays: tuple[np.ndarray, ...]
    home: tuple[int, ...]
    refusals: tuple[Callable[[str | None], Exception] | None, ...]
    scratch: tuple[np.ndarray, ...]
    warned: set[str]

    @classmethod
    def make(cls, kernel: EagerKernel, gm: GridMapping, aliases, params: EagerParams, args) -> _Call:
        n_pre, n_in = gm.num_prefetch, gm.num_inputs
        dynamic = iter(args[: gm.num_dynamic])
        operands = [to_numpy(x) for x in args[gm.num_dynamic :]]
        inputs, prefetch = operands[n_pre:], operands[:n_pre]
        home = list(range(len(gm.block_mappings)))
        for i, o in aliases:
            home[n_in + o] = i - n_pre
            inputs[i - n_pre] = inputs[i - n_pre].copy()
        mode = params.uninitialized
        outputs = [fresh(m.array.shape, m.array.dtype, mode) for m in gm.outputs]
        aliased = {i for i, _ in aliases}
        refusals = [None if i in aliased else check.store_refusal(gm, i, kernel.name) for i in range(n_pre + n_in)]
        return cls(
            kernel=kernel,
            gm=gm,
            params=params,
            sizes=tuple(int(next(dynamic)) if n is None else n for n in gm.grid),
            prefetch=tuple(prefetch),
            arrays=(*inputs, *outputs),
            home=tuple(home),
            refusals=(*refusals, *(None for _ in outputs)),
            scratch=tuple(fresh(r.shape, r.dtype, mode) for r in kernel.refs[n_pre + len(home) :]),
            warned=set(),
        )

    @property
    def mappings(self) -> tuple[BlockMapping, ...]:
        """Of all operands and outputs, in the order of the kernel's Refs."""
        return (*self.gm.prefetch_mappings, *self.gm.block_mappings)

    def points(self) -> Iterator[tuple[int, ...]]:
        """The grid points to run, in lexicographic order."""
        only: Any = self.params.only
        if only is None:
            return itertools.product(*map(range, self.sizes))
        sizes = tuple(self.gm.kernel_ids(self.sizes))
        for point in only:
            if len(point) != len(sizes) or any(i >= n for i, n in zip(point, sizes)):
                raise ValueError(
                    explain(
                        f"pl.EagerParams(only={point}) names no program of {self.kernel.name}: its grid is {sizes}.",
                        hint="give one id for each axis of the grid, counting from 0",
                    )
                )
        batch = [range(self.sizes[axis]) for axis in sorted(self.gm.vmapped_dims)]
        return iter(sorted(self._place(b, p) for b in itertools.product(*batch) for p in only))

    def _place(self, batch: Sequence[int], point: Sequence[int]) -> tuple[int, ...]:
        """A full grid point from ids along the vmapped axes and along the kernel's own."""
        batched, own = iter(batch), iter(point)
        return tuple(next(batched if axis in self.gm.vmapped_dims else own) for axis in range(len(self.sizes)))

    def table(self, mapping: BlockMapping, points: Sequence[tuple[int, ...]]) -> Sequence[Starts] | None:
        """The window at each point, where the index map alone decides it."""
        if reads_prefetch(mapping):
            return None
        columns = np.array(points, np.int32).reshape(len(points), len(self.sizes)).T
        pairs = mapping.window(mapping.indices(evaluate(mapping, columns)), clip=np.clip)
        rows = [(s.tolist(), itertools.repeat(None) if n is None else n.tolist()) for s, n in pairs]
        return list(zip(*(zip(s, n) for s, n in rows))) if rows else [()] * len(points)

    def run_program(self, ids: tuple[int, ...], starts: list[Starts | None]) -> None:
        """One program: copy its blocks in, run the kernel, copy out what it stored."""
        gm, n_pre = self.gm, self.gm.num_prefetch
        trace = EagerTrace(gm.kernel_ids(ids), gm.kernel_ids(self.sizes), self.params)
        refs: list[EagerRef] = []
        try:
            for k, (mapping, aval) in enumerate(zip(self.mappings, self.kernel.refs)):
                here = starts[k]
                if here is None:
                    starts[k] = here = self._window_now(mapping, ids, refs[:n_pre], trace)
                array = self.prefetch[k] if k < n_pre else self.arrays[self.home[k - n_pre]]
                block = _load(array, mapping, here, self.params.uninitialized)
                refs.append(EagerRef(trace, aval, block, self.refusals[k]))
            scratch_avals = self.kernel.refs[len(refs) :]
            scratch = [EagerRef(trace, aval, x) for aval, x in zip(scratch_avals, self.scratch)]
            _call(self.kernel, [*refs, *scratch], trace, gm.kernel_grid)
        except BaseException as error:  # Ctrl-C and a debugger's quit too: where it was is worth knowing
            error.add_note(self._note(ids))
            raise
        finally:
            trace.invalidate()
        for k, ref in enumerate(refs[n_pre:], start=n_pre):
            if ref.written:
                _store(self.arrays[self.home[k - n_pre]], self.mappings[k], starts[k] or (), ref.buffer)

    def _window_now(self, mapping: BlockMapping, ids, prefetch: Sequence[EagerRef], trace: EagerTrace) -> Starts:
        """The window of an index map that reads scalar-prefetch values, by running it."""
        scalars = [np.int32(i) for i in ids]
        flat = [np.asarray(i) for i in trace.run_jaxpr(mapping.index_map, [*scalars, *prefetch])]
        indices = mapping.indices(flat)
        for d, ((index, _), (low, high)) in enumerate(zip(indices, mapping.extents)):
            outside = index[(index < low) | (index > high)]
            if outside.size and mapping.origin not in self.warned:
                self.warned.add(mapping.origin)
                point = tuple(self.gm.kernel_ids(ids))
                likely = hint(mapping, d, index, ())
                item = OutOfRange(mapping, d, int(outside[0]), (low, high), point, likely)
                text = explain(item.message(), where=mapping.map_location, hint=item.hint)
                warnings.warn(text, PalladionWarning, stacklevel=2)
        return [(s.tolist(), None if n is None else int(n)) for s, n in mapping.window(indices, clip=np.clip)]

    def _note(self, ids: Sequence[int]) -> str:
        point, sizes = tuple(self.gm.kernel_ids(ids)), tuple(self.gm.kernel_ids(self.sizes))
        batch = tuple(ids[axis] for axis in sorted(self.gm.vmapped_dims))
        where = f", program {point} of the grid {sizes}" if sizes else ""
        return f"In the kernel {self.kernel.name}{where}{f', batch element {batch}' if batch else ''}."


def _call(kernel: EagerKernel, refs: Sequence[EagerRef], trace: EagerTrace, grid: Any) -> None:
    args, kwargs = kernel.arguments(refs)
    frame = frames.Frame(grid, kernel.name, eager=trace)
    # Along an axis of vmap there is nothing to communicate with: programs run one after the other.
    with frames.kernel(frame), jax.disable_jit(), jaxlink.without_named_axes(), jaxlink.set_current_trace(trace):
        out = kernel.function(*args, **kwargs)
    check.refuse_result(kernel.function, out)


# --- blocks ---------------------------------------------------------------------------------------------------------
def _inside(array: np.ndarray, mapping: BlockMapping, starts: Starts) -> tuple[tuple[Any, ...], tuple[slice, ...]]:
    """The part of a window that lies in the array: where in the array, and where in the block."""
    where, within = [], []
    for (start, size), extent, n in zip(starts, mapping.sizes, array.shape):
        if isinstance(start, list):
            where.append(np.array(start, np.int64))
            within.append(slice(0, extent))
            continue
        low, high = max(start, 0), min(start + (extent if size is None else size), n)
        where.append(slice(low, max(low, high)))
        within.append(slice(low - start, max(low, high) - start))
    return tuple(where), tuple(within)


def _load(array: np.ndarray, mapping: BlockMapping, starts: Starts, mode: str) -> np.ndarray:
    """A copy of the kernel's view of a window: squeezed dimensions gone, uninitialised outside the array."""
    where, within = _inside(array, mapping, starts)
    block = array[where]
    if block.shape == mapping.sizes:
        return np.array(block).reshape(mapping.ref_shape)
    whole = fresh(mapping.sizes, array.dtype, mode)
    whole[within] = block
    return whole.reshape(mapping.ref_shape)


def _store(array: np.ndarray, mapping: BlockMapping, starts: Starts, block: np.ndarray) -> None:
    """Put a block back; the part outside the array is dropped."""
    where, within = _inside(array, mapping, starts)
    array[where] = block.reshape(mapping.sizes)[within]


# --- what the user sees ---------------------------------------------------------------------------------------------
def _trimmed(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback from our own frame straight into the user's; whole if JAX is told to filter none of its own."""
    if traceback is None or jax.config.jax_traceback_filtering == "off":
        return traceback
    entries, entry = [], traceback.tb_next
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    users = [e for e in entries if locations.is_user_file(e.tb_frame.f_code.co_filename)]
    last = None
    for e in reversed([traceback, *(users or entries)]):
        last = types.TracebackType(last, e.tb_frame, e.tb_lasti, e.tb_lineno)
    return last


def _with_arrays(body: Callable) -> Callable:
    """The body of a `fori_loop`, given arrays for the Python numbers that `jax.disable_jit` would hand it."""
    frame = frames.current()
    if frame is None or not frame.eager:
        return body
    return lambda carry, x: body(jax.tree.map(_as_array, carry), x)


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x


jaxlink.adapt_fori_bodies(_with_arrays)
