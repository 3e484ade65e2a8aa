"""`pltpu.BufferedRef`: the buffers of one operand of a software pipeline, and the copies between them and the array.

The buffers are one Ref of shape (slots, *block), with a DMA semaphore for each slot and direction. Four counters, which
only go up, say how many blocks have been fetched, awaited, written back and awaited again; a counter modulo the number
of slots is the slot. An input has as many slots as blocks in flight; an operand that is read and written needs one
block's slot for both, so `in + out - 1`.

A BufferedRef is a pytree whose leaves are buffer types, or Refs once they are allocated: it may stand in
`scratch_shapes` and `pl.run_scoped`. Its fields are those of JAX 0.12.

Source: the public documentation of `jax.experimental.pallas.tpu.BufferedRef` and of `pl.Buffered`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.errors import mistake
from palladion.language.blocks import BlockSpec, Buffered, Squeezed, as_block_dim, block_size
from palladion.language.refs import MemorySpace as AnySpace
from palladion.language.refs import memory_ref
from palladion.language.tpu.block_copies import BlockCopies, BlockWindow, Index, is_known
from palladion.language.tpu.dma import make_async_copy
from palladion.language.tpu.memory import HBM, VMEM
from palladion.language.tpu.params import Tiling
from palladion.language.tpu.semaphores import SemaphoreType

__all__ = ["BufferType", "BufferedRef"]


class BufferType(enum.Enum):
    """What a pipeline does with an operand: read its blocks, write them, or both.

    `MANUAL`: neither; the body copies for itself.
    """

    INPUT = 1
    OUTPUT = 2
    INPUT_OUTPUT = 3
    MANUAL = 4

    @property
    def is_input(self) -> bool:
        return self in (BufferType.INPUT, BufferType.INPUT_OUTPUT)

    @property
    def is_output(self) -> bool:
        return self in (BufferType.OUTPUT, BufferType.INPUT_OUTPUT)


_LEAVES = (
    "window_ref",
    "copy_in_slot",
    "wait_in_slot",
    "copy_out_slot",
    "wait_out_slot",
    "next_fetch",
    "sem_recvs",
    "sem_sends",
)


class _Static:
    """The fields of a BufferedRef that are no leaves; BlockSpecs cannot be hashed, so it hashes by identity of that."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash((self.fields["_buffer_type"], self.fields["_in_buffer_count"], self.fields["_out_buffer_count"]))


@dataclasses.dataclass(frozen=True)
class BufferedRef:
    """The buffers of one operand of a pipeline. Make one with `input`, `output` or `input_output`.

    Attributes:
      window_ref: the buffers, (slots, *block); None where the body works on the operand itself.
      copy_in_slot, wait_in_slot, copy_out_slot, wait_out_slot: how many blocks have been fetched, awaited, written back
        and awaited; None before `initialize_slots`.
      next_fetch: grid indices of the next block to fetch, for a pipeline that looks further ahead than one step.
      sem_recvs, sem_sends: a DMA semaphore for each slot, of fetches and of writes back.
      tiling: the layout of the buffers.
      is_trivial_windowing: whether there is one block, the array.
      has_allocated_buffer: whether the block has buffers of its own.
      prefetched_count: blocks that are in their slots, or on their way, before the pipeline starts.
      await_prefetch: whether those must be waited for.
      output_wait_read_only: whether to wait for writes back only until the slot may be used again. This
        implementation always waits until they are done.
    """

    _spec: BlockSpec
    _buffer_type: BufferType
    _in_buffer_count: int
    _out_buffer_count: int
    _grid_rank: int | None
    window_ref: Any
    copy_in_slot: Any
    wait_in_slot: Any
    copy_out_slot: Any
    wait_out_slot: Any
    next_fetch: Sequence[Any] | None
    sem_recvs: Any
    sem_sends: Any
    tiling: Tiling | None
    is_trivial_windowing: bool = False
    has_allocated_buffer: bool = False
    prefetched_count: int = 0
    await_prefetch: bool = False
    output_wait_read_only: bool = False

    # --- making them --------------------------------------------------------------------------------------------------
    @classmethod
    def create(
        cls,
        spec: BlockSpec,
        dtype_or_type: Any,
        buffer_type: BufferType,
        buffer_count: int | tuple[int, int] | None = None,
        grid_rank: int | None = None,
        use_lookahead: bool = False,
        source_memory_space: Any = AnySpace.ANY,
        tiling: Tiling | None = None,
        is_trivial_windowing: bool = False,
        prefetched_count: int = 0,
    ) -> BufferedRef:
        """The buffers of an operand.

        Arguments:
          spec: its BlockSpec, with a block shape.
          dtype_or_type: the dtype of its elements, or something that has one.
          buffer_type: what the pipeline does with it.
          buffer_count: slots; for `INPUT_OUTPUT` (fetched ahead, written back), where n means (n, 1).
          grid_rank: axes of the pipeline's grid.
          use_lookahead: fetch blocks of later steps as soon as a slot is free.
          source_memory_space: where the operand is. Nothing is allocated where that is the block's memory, too.
          tiling: the layout of the buffers.
          is_trivial_windowing: there is one block, the array.
          prefetched_count: blocks that are there before the pipeline starts.

        Raises:
          ValueError: the spec has no block shape, or the buffer type has no slots.
        """
        if buffer_type is BufferType.MANUAL:
            hint = "pl.run_scoped, or scratch_shapes, gives a body that copies for itself its buffers"
            raise mistake(
                ValueError, "BufferType.MANUAL has no buffer count, so there is nothing to create.", hint=hint
            )
        if not isinstance(spec, BlockSpec) or spec.block_shape is None:
            hint = "pltpu.BufferedRef.input(pl.BlockSpec((8, 128), index_map), jnp.float32)"
            raise mistake(ValueError, f"A BufferedRef needs a BlockSpec with a block shape, not {spec!r}.", hint=hint)
        if use_lookahead:
            mode = spec.pipeline_mode or Buffered(2)
            spec = dataclasses.replace(spec, pipeline_mode=dataclasses.replace(mode, use_lookahead=True))
        count = buffer_count if isinstance(buffer_count, tuple) else (2 if buffer_count is None else buffer_count, None)
        ins = count[0] if buffer_type.is_input else 0
        outs = 0
        if buffer_type.is_output:
            outs = (count[1] or 1) if buffer_type.is_input else count[0]
        dims = [as_block_dim(b) for b in spec.block_shape or ()]
        shape = tuple(block_size(b) for b in dims if not isinstance(b, Squeezed))
        space = spec.memory_space or VMEM
        slots = ins + outs - (ins > 0 and outs > 0)
        allocates = space not in (HBM, AnySpace.ANY) and space != source_memory_space
        sems = SemaphoreType.DMA((slots,))
        return cls(
            _spec=spec,
            _buffer_type=buffer_type,
            _in_buffer_count=ins,
            _out_buffer_count=outs,
            _grid_rank=grid_rank,
            window_ref=memory_ref(space, (slots, *shape), jnp.dtype(getattr(dtype_or_type, "dtype", dtype_or_type)))
            if allocates
            else None,
            **dict.fromkeys(("copy_in_slot", "wait_in_slot", "copy_out_slot", "wait_out_slot", "next_fetch")),
            sem_recvs=sems if allocates and ins else None,
            sem_sends=sems if allocates and outs else None,
            tiling=tiling,
            is_trivial_windowing=is_trivial_windowing,
            has_allocated_buffer=allocates,
            prefetched_count=prefetched_count,
        )

    @classmethod
    def input(cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: int = 2, **kwargs: Any) -> BufferedRef:
        """Buffers of an operand that the pipeline reads; arguments as `create`."""
        return cls.create(spec, dtype_or_type, BufferType.INPUT, buffer_count, **kwargs)

    @classmethod
    def output(cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: int = 2, **kwargs: Any) -> BufferedRef:
        """Buffers of an operand that the pipeline writes; arguments as `create`."""
        return cls.create(spec, dtype_or_type, BufferType.OUTPUT, buffer_count, **kwargs)

    @classmethod
    def input_output(
        cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: int | tuple[int, int] = (2, 1), **kwargs: Any
    ) -> BufferedRef:
        """Buffers of an operand whose blocks are fetched, changed and written back; arguments as `create`."""
        return cls.create(spec, dtype_or_type, BufferType.INPUT_OUTPUT, buffer_count, **kwargs)

    # --- what it is ---------------------------------------------------------------------------------------------------
    @property
    def spec(self) -> BlockSpec:
        return self._spec

    @property
    def buffer_type(self) -> BufferType:
        return self._buffer_type

    @property
    def is_input(self) -> bool:
        return self._buffer_type.is_input

    @property
    def is_output(self) -> bool:
        return self._buffer_type.is_output

    @property
    def is_input_output(self) -> bool:
        return self._buffer_type is BufferType.INPUT_OUTPUT

    @property
    def is_manual(self) -> bool:
        return self._buffer_type is BufferType.MANUAL

    @property
    def in_buffer_count(self) -> int:
        """Slots that blocks are fetched into ahead of their use, the one in use included."""
        return self._in_buffer_count

    @property
    def out_buffer_count(self) -> int:
        """Slots that blocks are written back from, the one in use included."""
        return self._out_buffer_count

    @property
    def buffer_count(self) -> int:
        """Slots."""
        return self._in_buffer_count + self._out_buffer_count - self.is_input_output

    @property
    def use_lookahead(self) -> bool:
        """Whether blocks of later steps are fetched as soon as a slot is free."""
        return self._spec.pipeline_mode is not None and self._spec.pipeline_mode.use_lookahead

    @property
    def is_buffered(self) -> bool:
        return self.window_ref is not None

    @property
    def block_shape(self) -> Sequence[Any] | None:
        return self._spec.block_shape

    @property
    def compute_index(self) -> Callable[..., Any] | None:
        """The index map: grid indices to a block."""
        return self._spec.index_map

    # --- counters and slots -------------------------------------------------------------------------------------------
    def initialize_slots(self) -> BufferedRef:
        """All counters at 0."""
        return self.with_slot_index(0, 0, 0, 0)

    def with_slot_index(
        self, copy_in_slot: Any = None, copy_out_slot: Any = None, wait_in_slot: Any = None, wait_out_slot: Any = None
    ) -> BufferedRef:
        """With other counters; those that are None stay."""
        new = dict(
            copy_in_slot=copy_in_slot,
            copy_out_slot=copy_out_slot,
            wait_in_slot=wait_in_slot,
            wait_out_slot=wait_out_slot,
        )
        return dataclasses.replace(self, **{k: v for k, v in new.items() if v is not None})

    def with_spec(self, spec: BlockSpec) -> BufferedRef:
        """With another BlockSpec, of the same block shape."""
        return dataclasses.replace(self, _spec=spec)

    def with_window_ref(self, window_ref: Any) -> BufferedRef:
        """With other buffers."""
        return dataclasses.replace(self, window_ref=window_ref)

    def with_next_fetch(self, next_fetch: Sequence[Any] | None = None) -> BufferedRef:
        """With other grid indices of the next fetch."""
        return dataclasses.replace(self, next_fetch=next_fetch)

    def unbind_refs(self) -> BufferedRef:
        """Without the operand's own Ref, where the body works on that."""
        return self if self.has_allocated_buffer else self.with_window_ref(None)

    def _advanced(self, counter: str, predicate: Any) -> BufferedRef:
        return dataclasses.replace(self, **{counter: advanced(getattr(self, counter), predicate)})

    def advance_copy_in_slot(self, predicate: Any = True) -> BufferedRef:
        """One more block is fetched, if the predicate holds."""
        return self._advanced("copy_in_slot", predicate)

    def advance_wait_in_slot(self, predicate: Any = True) -> BufferedRef:
        """One more fetch is awaited, if the predicate holds: its block is in use."""
        return self._advanced("wait_in_slot", predicate)

    def advance_copy_out_slot(self, predicate: Any = True) -> BufferedRef:
        """One more block is written back, if the predicate holds."""
        return self._advanced("copy_out_slot", predicate)

    def advance_wait_out_slot(self, predicate: Any = True) -> BufferedRef:
        """One more write back is awaited, if the predicate holds."""
        return self._advanced("wait_out_slot", predicate)

    @property
    def cumulative_copy_in(self) -> Any:
        """How many blocks have been fetched."""
        return self.copy_in_slot

    @property
    def cumulative_wait_in(self) -> Any:
        """How many fetches have been awaited."""
        return self.wait_in_slot

    @property
    def cumulative_copy_out(self) -> Any:
        """How many blocks have been written back."""
        return self.copy_out_slot

    @property
    def cumulative_wait_out(self) -> Any:
        """How many writes back have been awaited."""
        return self.wait_out_slot

    @property
    def current_copy_in_slot(self) -> Any:
        """The slot that the next block is fetched into."""
        return modulo(self.copy_in_slot, self.buffer_count)

    @property
    def current_wait_in_slot(self) -> Any:
        """The slot of the next fetch to be awaited."""
        return modulo(self.wait_in_slot, self.buffer_count)

    @property
    def current_copy_out_slot(self) -> Any:
        """The slot of the next block to be written back: the one in use."""
        return modulo(self.copy_out_slot, self.buffer_count)

    @property
    def current_wait_out_slot(self) -> Any:
        """The slot of the next write back to be awaited."""
        return modulo(self.wait_out_slot, self.buffer_count)

    @property
    def current_ref(self) -> Any:
        """The block in use: of an input, the one awaited last; of an output, the one to be written back next."""
        if not self.has_allocated_buffer:
            return self.window_ref
        used = self.copy_out_slot if self.is_output else self.wait_in_slot - np.int32(1)
        return self.window_ref.at[modulo(used, self.buffer_count)]

    # --- copies -------------------------------------------------------------------------------------------------------
    def window(self, ref: Any, label: str = "an operand") -> BlockWindow:
        """How an operand is cut into this one's blocks."""
        return BlockWindow.make(self._spec, ref.shape, label)

    def compute_slice(self, grid_indices: Sequence[Any]) -> tuple[Any, ...]:
        """The block at a grid point as `pl.ds` for each dimension, a number for a squeezed one."""
        window = BlockWindow.make(
            self._spec, [block_size(as_block_dim(b)) for b in self.block_shape or ()], "an operand"
        )
        return window.slices(window.index(grid_indices))

    def fetch(self, window: BlockWindow, ref: Any, index: Index, slot: Any) -> BlockCopies:
        """The copies of a block of `ref` into a slot."""
        sem, buffer = self.sem_recvs.at[slot], self.window_ref.at[slot]
        return BlockCopies(window, index, ref, buffer, lambda far, near: make_async_copy(far, near, sem))

    def write_back(self, window: BlockWindow, ref: Any, index: Index, slot: Any) -> BlockCopies:
        """The copies of a slot to a block of `ref`."""
        sem, buffer = self.sem_sends.at[slot], self.window_ref.at[slot]
        return BlockCopies(window, index, ref, buffer, lambda far, near: make_async_copy(near, far, sem))

    def copy_in(self, src_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Start to fetch the block at a grid point into the current slot."""
        window = self.window(src_ref)
        self.fetch(window, src_ref, window.index(grid_indices), self.current_copy_in_slot).start()

    def wait_in(self, src_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Wait for the fetch of the block at a grid point."""
        window = self.window(src_ref)
        self.fetch(window, src_ref, window.index(grid_indices), self.current_wait_in_slot).wait()

    def copy_out(self, dst_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Start to write the current slot back to the block at a grid point."""
        window = self.window(dst_ref)
        self.write_back(window, dst_ref, window.index(grid_indices), self.current_copy_out_slot).start()

    def wait_out(self, dst_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Wait until the block at a grid point is written back."""
        window = self.window(dst_ref)
        self.write_back(window, dst_ref, window.index(grid_indices), self.current_wait_out_slot).wait()

    def bind_existing_ref(self, window_ref: Any, indices: Sequence[Any]) -> BufferedRef:
        """With the block at a grid point of an operand that is already where blocks should be, as it is there."""
        if self.has_allocated_buffer:
            return self
        window = self.window(window_ref)
        return self.with_window_ref(window_ref.at[window.slices(window.index(indices))])


def advanced(counter: Any, predicate: Any) -> Any:
    """A counter one higher, if the predicate holds."""
    if is_known(predicate):
        return counter + np.int32(bool(predicate))
    return counter + lax.convert_element_type(predicate, np.int32)


def modulo(counter: Any, count: int) -> Any:
    """The slot of a counter."""
    if count == 1:
        return 0
    return int(counter) % count if is_known(counter) else lax.rem(counter, np.int32(count))


def _flatten(buffered: BufferedRef) -> tuple[list[Any], _Static]:
    fields = {f.name: getattr(buffered, f.name) for f in dataclasses.fields(buffered)}
    return [fields.pop(name) for name in _LEAVES], _Static(fields)


jax.tree_util.register_pytree_node(
    BufferedRef, _flatten, lambda static, leaves: BufferedRef(**static.fields, **dict(zip(_LEAVES, leaves)))
)
