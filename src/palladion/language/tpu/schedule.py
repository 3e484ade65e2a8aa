"""The schedule of a software pipeline: what is copied, awaited and run in each step. `pipeline.py` is what users call.

The pipeline is kernel-level code: a `fori_loop` over the grid's steps around asynchronous copies. In step t

    fetch   an input with n slots starts the copy of the block of step t + n - 1, if that is another one than the step
            before has; the blocks of steps 0 to n - 2 are started before the loop. With `use_lookahead` it goes on to
            later steps as long as a slot is free
    wait    for the copies of this step's blocks, where it enters a new one; an output waits until the slot that it is
            about to use has been written back
    body    gets a Ref of the block of each operand
    write   an output whose next step has another block, or none, starts the copy back

so that a block is fetched once for a run of steps that use it, and an output accumulates over such a run. After the
loop the last writes are awaited. Every copy that is started is awaited once. An operand of one block is fetched before
the loop and written back after it; of one that is already in the block's memory the body gets a view.

The state that a step hands to the next is the grid indices of the steps in sight, the blocks of each operand from the
step before to the farthest in sight, and counters of copies: no block number is computed twice.

Source: tutorial 4.1; the public documentation "TPU Pipelining" and "Software Pipelining" of Pallas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import frames, ops
from palladion.language.tpu.block_copies import BlockCopies, BlockWindow, Index, all_of, any_of, differs, is_known
from palladion.language.tpu.buffered import BufferedRef, advanced, modulo

__all__ = ["Operand", "PipelineStep", "Schedule"]


@dataclasses.dataclass(frozen=True)
class PipelineStep:
    """Where a pipeline is.

    Attributes:
      index: the grid indices, int32 scalars.
      local_index: the number of the step, counted by each core for itself.
    """

    index: tuple[Any, ...]
    local_index: Any


jax.tree_util.register_dataclass(PipelineStep, ["index", "local_index"], [])


# --- the operands -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a running pipeline.

    Attributes:
      ref: of the array.
      buffered: its buffers; nothing is copied where it has none.
      window: how the array is cut into blocks.
    """

    ref: Any
    buffered: BufferedRef
    window: BlockWindow

    @property
    def is_copied(self) -> bool:
        return self.buffered.has_allocated_buffer

    @property
    def reads(self) -> bool:
        return self.is_copied and self.buffered.is_input

    @property
    def writes(self) -> bool:
        return self.is_copied and self.buffered.is_output

    @property
    def looks_ahead(self) -> bool:
        """Whether blocks are fetched as soon as a slot is free, however many steps before their use."""
        return self.reads and not self.writes and self.buffered.use_lookahead

    @property
    def ahead(self) -> int:
        """How many steps before its use a block is fetched."""
        return self.buffered.in_buffer_count - 1 if self.reads and not self.looks_ahead else 0

    @property
    def horizon(self) -> int:
        """The farthest step whose block must be known."""
        return max(self.ahead, int(self.writes))

    def fetch(self, index: Index, number: Any) -> Any:
        """The copies of a block into the slot of the fetch of that number."""
        return self.buffered.fetch(self.window, self.ref, index, modulo(number, self.buffered.buffer_count))

    def write_back(self, index: Index, number: Any) -> Any:
        """The copies of the slot of the write of that number to a block."""
        return self.buffered.write_back(self.window, self.ref, index, modulo(number, self.buffered.buffer_count))


class _State(NamedTuple):
    """What a step leaves to the next, for an operand whose blocks change.

    Attributes:
      blocks: of the step before, of this step, and so on to the one before the horizon.
      written: the blocks of the last writes, oldest first, as many as slots for writing; () where all are of one size.
      fetches, waits, writes: how many fetches have been started and awaited, how many writes started.
      scout: for an operand that looks ahead, the first step not looked at yet: (its number, its grid point, the block
        before it).
    """

    blocks: tuple[Index, ...]
    written: tuple[Index, ...]
    fetches: Any
    waits: Any
    writes: Any
    scout: tuple[Any, ...] = ()


# --- the steps --------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline on its operands; `run` traces it.

    Attributes:
      body: the user's function.
      operands, scratches: what it works on.
      whole_grid: the sizes of the grid, np.int32 or run-time scalars.
      grid: the part of it that this core runs.
      offsets: where that part begins.
      trace_scopes, no_pipelining, explicit_indices: as `emit_pipeline`.
    """

    body: Callable[..., None]
    operands: list[Operand]
    scratches: tuple[Any, ...]
    whole_grid: tuple[Any, ...]
    grid: tuple[Any, ...]
    offsets: tuple[Any, ...]
    trace_scopes: bool
    no_pipelining: bool
    explicit_indices: bool

    @functools.cached_property
    def steps(self) -> Any:
        """How many steps there are: np.int32, or known at run time."""
        return functools.reduce(lambda a, b: a * b, self.grid, np.int32(1))

    @functools.cached_property
    def moving(self) -> list[Operand]:
        """The operands whose blocks are copied in the loop; others are copied once, or not at all."""
        return [o for o in self.operands if o.is_copied and not o.window.is_all]

    def run(self) -> None:
        """Trace the pipeline into the kernel."""
        if is_known(self.steps) and self.steps == 0:
            return
        some = True if is_known(self.steps) else self.steps > np.int32(0)
        once = [o for o in self.operands if o.is_copied and o.window.is_all]
        first, *later = self._points(1 + max([0, *(o.horizon for o in self.moving)]))
        with self._scope("prologue"):
            self._copy_once([o for o in once if o.reads], some, "fetch")
            states = tuple(self._prologue(o, [first, *later]) for o in self.moving)
        depths = sorted({0, *(o.horizon for o in self.moving)})
        points = tuple([first, *later][d] for d in depths)
        step = functools.partial(self._step, depths)
        if is_known(self.steps) and self.steps == 1:
            _, states = step(np.int32(0), (points, states))
        else:
            _, states = lax.fori_loop(np.int32(0), self.steps, step, (points, states))
        with self._scope("epilogue"):
            for operand, state in zip(self.moving, states):
                self._epilogue(operand, state)
            self._copy_once([o for o in once if o.writes], some, "write_back")

    def prefetch(self) -> None:
        """Trace the first fetches of the operands, as many of each as its buffers are said to hold, and no waits."""

        def fetch(operand, index, number, condition):
            ops.when(_plain(condition))(lambda: operand.fetch(index, number).start())

        point = (np.int32(0),) * len(self.grid)
        for operand in self.operands:
            if operand.is_copied and (count := operand.buffered.prefetched_count):
                index = self._index(operand, point)
                if operand.window.is_all or count == 1:
                    fetch(operand, index, 0, np.int32(0) < self.steps)
                else:
                    self._scout(operand, (np.int32(0), point, index), np.int32(0), np.int32(count), fetch)

    def _scope(self, name: str) -> Any:
        return jax.named_scope(f"pipeline_{name}") if self.trace_scopes else contextlib.nullcontext()

    # --- the grid -----------------------------------------------------------------------------------------------------
    def _points(self, count: int) -> list[tuple[Any, ...]]:
        """The grid points of the first steps."""
        points = [(np.int32(0),) * len(self.grid)]
        while len(points) < count:
            points.append(self._next(points[-1]))
        return points

    def _next(self, point: Sequence[Any]) -> tuple[Any, ...]:
        """The grid point after another; after the last comes the first."""
        result, carry = [], True
        for i, size in reversed(list(zip(point, self.grid))):
            if is_known(size) and size == 1:
                result.append(np.int32(0))
                continue
            i = advanced(i, carry)
            carry = all_of(carry, i == size)
            result.append(_select(carry, np.int32(0), i))
        return tuple(reversed(result))

    def _at(self, point: Sequence[Any]) -> tuple[Any, ...]:
        """A point of this core's part of the grid as one of the grid."""
        return tuple(i if is_known(o) and o == 0 else i + o for i, o in zip(point, self.offsets))

    @contextlib.contextmanager
    def _inside(self, point: Sequence[Any]):
        """A block in which program ids are those of a step of the pipeline."""
        outer = frames.required("A pipeline (pltpu.emit_pipeline)")
        sizes = tuple(int(n) if is_known(n) else None for n in self.whole_grid)
        program = self._at(point), tuple(int(n) if is_known(n) else n for n in self.whole_grid)
        with frames.kernel(dataclasses.replace(outer, grid=sizes, name=f"a pipeline in {outer.name}", program=program)):
            yield

    def _index(self, operand: Operand, point: Sequence[Any]) -> Index:
        with self._inside(point):
            return operand.window.index(self._at(point))

    # --- before the loop ----------------------------------------------------------------------------------------------
    def _copy_once(self, operands: Sequence[Operand], some: Any, which: str) -> None:
        """Copy the only block of operands, one way or the other."""

        def copy():
            zero = (np.int32(0),) * len(self.grid)
            copies = [getattr(o, which)(self._index(o, zero), 0) for o in operands]
            for c, o in zip(copies, operands):
                if which == "write_back" or not o.buffered.prefetched_count:
                    c.start()
            for c, o in zip(copies, operands):
                if which == "write_back" or not o.buffered.prefetched_count or o.buffered.await_prefetch:
                    c.wait()

        if operands:
            ops.when(some)(copy)

    def _prologue(self, operand: Operand, points: Sequence[tuple[Any, ...]]) -> _State:
        """Start the first fetches; what the first step finds."""
        known = [self._index(operand, p) for p in points[: max(operand.horizon, 1)]]
        fetches = np.int32(0)
        for step in range(operand.ahead):
            new = step == 0 or differs(known[step - 1], known[step])
            new = all_of(new, np.int32(step) < self.steps)
            self._fetch(operand, known[step], fetches, new)
            fetches = advanced(fetches, new)
        kept = operand.buffered.out_buffer_count if operand.writes and operand.window.may_be_partial else 0
        zero = np.int32(0)
        scout = (zero, points[0], known[0]) if operand.looks_ahead else ()
        return _State((known[0], *known[: operand.horizon]), (known[0],) * kept, fetches, zero, zero, scout)

    # --- a step -------------------------------------------------------------------------------------------------------
    def _step(self, depths: Sequence[int], t: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        points, states = carry
        at = dict(zip(depths, points))
        t = t if is_known(t) else lax.convert_element_type(t, np.int32)  # fori_loop's own has a weak type
        first, last = t == np.int32(0), t == self.steps - np.int32(1)
        entered, sights = [], []
        for operand, state in zip(self.moving, states):
            new = self._index(operand, at[operand.horizon])
            sight = [tuple(n if is_known(n) else b for b, n in zip(block, new)) for block in state.blocks] + [new]
            sights.append(sight)
            entered.append(any_of(first, differs(sight[0], sight[1])))

        with self._scope("fetch"):
            for n, (operand, sight) in enumerate(zip(self.moving, sights)):
                if operand.reads and operand.writes:  # the slot to be fetched into may have to be written back first
                    self._await_write(operand, states[n], sight, entered[n])
                if operand.looks_ahead:
                    states = _replaced(states, n, **self._look_ahead(operand, states[n], entered[n]))
                elif operand.reads:
                    ahead = operand.ahead
                    new = any_of(differs(sight[ahead], sight[ahead + 1]), first if ahead == 0 else False)
                    new = all_of(new, t + np.int32(ahead) < self.steps)
                    self._fetch(operand, sight[ahead + 1], states[n].fetches, new)
                    states = _replaced(states, n, fetches=advanced(states[n].fetches, new))
        with self._scope("wait"):
            for n, (operand, sight) in enumerate(zip(self.moving, sights)):
                if operand.writes and not operand.reads:
                    self._await_write(operand, states[n], sight, entered[n])
                if operand.reads:
                    self._await_fetch(operand, sight[1], states[n].waits, entered[n])
                    states = _replaced(states, n, waits=advanced(states[n].waits, entered[n]))
        with self._scope("body"):
            self._body(t, at[0], states)
        with self._scope("write"):
            for n, (operand, sight) in enumerate(zip(self.moving, sights)):
                if operand.writes:
                    leaves = any_of(last, differs(sight[1], sight[2]))
                    states = _replaced(states, n, **self._write(operand, states[n], sight[1], leaves))
        states = tuple(s._replace(blocks=tuple(sight[1:])) for s, sight in zip(states, sights))
        return tuple(self._next(at[d]) for d in depths), jax.tree.map(_as_int32, states)

    def _fetch(self, operand: Operand, index: Index, number: Any, condition: Any) -> None:
        there = operand.buffered.prefetched_count
        condition = all_of(condition, number >= np.int32(there)) if there else condition
        ops.when(_plain(condition))(lambda: self._start(operand.fetch(index, number)))

    def _look_ahead(self, operand: Operand, state: _State, entered: Any) -> dict[str, Any]:
        """Fetch the blocks of later steps while slots are free; what changes of the state."""
        limit = advanced(state.waits, entered) - np.int32(1) + np.int32(operand.buffered.buffer_count)
        scout, fetches = self._scout(operand, state.scout, state.fetches, limit, self._fetch)
        return {"scout": scout, "fetches": fetches}

    def _scout(self, operand: Operand, scout: Any, fetches: Any, limit: Any, fetch: Callable[..., None]) -> Any:
        """Look at further steps until `limit` blocks have been fetched, or the grid ends."""

        def goes_on(carry):
            (step, _, _), fetches = carry
            return (step < self.steps) & (fetches < limit)

        def look(carry):
            (step, point, before), fetches = carry
            index = self._index(operand, point)
            new = any_of(step == np.int32(0), differs(before, index))
            fetch(operand, index, fetches, new)
            return (step + np.int32(1), self._next(point), jax.tree.map(_as_int32, index)), advanced(fetches, new)

        return lax.while_loop(goes_on, look, (scout, fetches))

    def _start(self, copies: BlockCopies) -> None:
        copies.start()
        if self.no_pipelining:
            copies.wait()

    def _await_fetch(self, operand: Operand, index: Index, number: Any, condition: Any) -> None:
        there, awaits_them = operand.buffered.prefetched_count, operand.buffered.await_prefetch
        if self.no_pipelining:  # the others were awaited when they were started
            condition = awaits_them and all_of(condition, number < np.int32(there))
        elif there and not awaits_them:
            condition = all_of(condition, number >= np.int32(there))
        ops.when(_plain(condition))(lambda: operand.fetch(index, number).wait())

    def _await_write(self, operand: Operand, state: _State, sight: Sequence[Index], condition: Any) -> None:
        """Before a new block is entered: the write that used its slot last is done."""
        if self.no_pipelining:
            return
        slots = np.int32(operand.buffered.out_buffer_count)
        index = state.written[0] if state.written else sight[1]
        condition = all_of(condition, state.writes >= slots)
        ops.when(_plain(condition))(lambda: operand.write_back(index, state.writes - slots).wait())

    def _write(self, operand: Operand, state: _State, index: Index, condition: Any) -> dict[str, Any]:
        """Write a block that is left back; what changes of the state."""
        ops.when(_plain(condition))(lambda: self._start(operand.write_back(index, state.writes)))
        written = (*state.written[1:], index)[: len(state.written)]
        written = tuple(
            tuple(_select(condition, n, o) for n, o in zip(new, old)) for new, old in zip(written, state.written)
        )
        return {"written": written, "writes": advanced(state.writes, condition)}

    def _body(self, t: Any, point: Sequence[Any], states: Sequence[_State]) -> None:
        counters = dict(zip(map(id, self.moving), states))
        blocks = []
        for operand in self.operands:
            if not operand.is_copied:
                whole = operand.window.is_all
                slices = () if whole else operand.window.slices(self._index(operand, point))
                blocks.append(operand.ref if whole else operand.ref.at[slices])
                continue
            slot = 0
            if (state := counters.get(id(operand))) is not None:
                number = state.writes if operand.writes else state.waits - np.int32(1)
                slot = modulo(number, operand.buffered.buffer_count)
            blocks.append(operand.buffered.window_ref.at[slot])
        step = (PipelineStep(self._at(point), t),) if self.explicit_indices else ()
        args = (*step, *blocks, *self.scratches)
        frames.check_arity(
            self.body,
            len(args),
            lambda takes: explain(
                f"The body of a pipeline takes {takes}, but it gets {count_of(len(args), 'argument')}.",
                where=locations.defined_at(self.body),
                hint="it has a parameter for the block of each input, of each output, and for each scratch Ref",
            ),
        )
        # Jitted helpers that read program ids must not be reused with those of another step.
        with self._inside(point), jaxlink.axis_in_trace_key(("pipeline", object())):
            result = self.body(*args)
        if result is not None:
            raise mistake(
                ValueError,
                f"The body of a pipeline returns {kind_of(result)}; it must return nothing.",
                where=locations.defined_at(self.body),
                hint="store the value in the block of an output: o_ref[...] = …",
            )

    # --- after the loop -----------------------------------------------------------------------------------------------
    def _epilogue(self, operand: Operand, state: _State) -> None:
        """Wait for the writes that are still going on."""
        if not operand.writes or self.no_pipelining:
            return
        slots = operand.buffered.out_buffer_count
        for n in range(slots):
            number = state.writes - np.int32(slots - n)
            index = state.written[n] if state.written else state.blocks[0]
            at_least_one = is_known(self.steps) and n == slots - 1
            ops.when(at_least_one or _plain(number >= np.int32(0)))(
                lambda i=index, k=number: operand.write_back(i, k).wait()
            )


def _replaced(states: Sequence[_State], n: int, **changes: Any) -> tuple[_State, ...]:
    return (*states[:n], states[n]._replace(**changes), *states[n + 1 :])


def _select(condition: Any, yes: Any, no: Any) -> Any:
    if is_known(condition):
        return yes if condition else no
    return lax.select(condition, _as_int32(yes), _as_int32(no))


def _as_int32(x: Any) -> Any:
    return np.int32(x) if is_known(x) else x


def _plain(condition: Any) -> Any:
    """A condition for `pl.when`, which decides at once for a bool."""
    return bool(condition) if is_known(condition) else condition
