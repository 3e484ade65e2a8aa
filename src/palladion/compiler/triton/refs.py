"""Refs of a Triton kernel: pointers into whole arrays, and the arithmetic from a view's elements to their addresses.

A block is never copied: reading `x_ref[...]` computes a block of pointers, and a mask where the block may hang over the
array's edge (lanes outside read 0 and store nothing). Shapes and strides are constants, and what is the same for all
lanes is added to the base pointer as a scalar, so that Triton can prove contiguity and alignment and use wide loads.

Views are resolved backwards: an index of the last view becomes an index of the one before it, down to the array.
Indices known at run time are taken as they are: one that leaves its block is as undefined as in Triton itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

from palladion import jaxlink
from palladion.compiler.triton import emit
from palladion.compiler.triton.lowering import Lowering, fits, refusal, rounded_up


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension of an operand's array.

    Attributes:
      size, stride: of the array, in elements.
      start: where the block begins.
      kept: whether the kernel's Ref has this dimension.
      low, high: whether the block may begin before the array, or end past it.
      length: of a BoundedSlice the number of elements that exist, else None.
    """

    size: int
    stride: int
    start: Any
    kept: bool
    low: bool = False
    high: bool = False
    length: Any = None


@dataclasses.dataclass(frozen=True)
class Ref:
    """An operand's block.

    Attributes:
      label: how messages call it.
      shape, dtype: of the Ref that the kernel sees.
      pointer: to the array's first element.
      dims: of the array.
      memory: which array it is; Refs with equal `memory` may overlap.
    """

    label: str
    shape: tuple[int, ...]
    dtype: Any
    pointer: Any
    dims: tuple[Dim, ...]
    memory: Any

    @property
    def bits(self) -> int:
        """Of offsets: 64 where the array has too many elements for 32."""
        return 32 if math.prod(d.size for d in self.dims) < 1 << 31 else 64


@dataclasses.dataclass(frozen=True)
class Coord:
    """An index along one dimension for every lane: `base`, the same for all, plus `lanes` (None for 0)."""

    base: Any
    lanes: Any = None

    def total(self) -> Any:
        return self.base if self.lanes is None else emit.add(self.lanes, self.base)

    def times(self, n: int) -> Coord:
        return Coord(emit.mul(self.base, n), None if self.lanes is None else emit.mul(self.lanes, n))

    def plus(self, other: Coord) -> Coord:
        lanes = [c.lanes for c in (self, other) if c.lanes is not None]
        both = emit.add(lanes[0], lanes[1]) if len(lanes) == 2 else lanes[0] if lanes else None
        return Coord(emit.add(self.base, other.base), both)


def whole(shape: Sequence[int]) -> list[Coord]:
    """The index of each lane of a view along each of its dimensions."""
    rank = len(shape)
    return [Coord(0) if n == 1 else Coord(0, emit.arange(n, d, rank)) for d, n in enumerate(shape)]


def _number(x: Any) -> Any:
    """An index as a Python int or a signed value of 32 bits."""
    return int(x) if not isinstance(x, ir.Value) else emit.widen(x, 32)


def _wrapped(index: Any, size: int) -> Any:
    """A negative run-time index counts from the end."""
    if isinstance(index, int):
        return index + size if index < 0 else index
    return index


# --- views ------------------------------------------------------------------------------------------------------------
def indexed(indexer: Any) -> tuple[tuple[int, ...], list[Coord]]:
    """The shape that an indexer picks, and for each dimension of what it indexes the index of each lane."""
    slices = [d for d, i in enumerate(indexer.indices) if isinstance(i, jaxlink.Slice)]
    others = [d for d in range(len(indexer.indices)) if d not in slices]
    arrays = tuple(indexer.int_indexer_shape)
    # NumPy's rule: what index arrays pick stands where they stand, or in front if a slice stands between them.
    together = not others or others == list(range(others[0], others[-1] + 1))
    first = sum(d < others[0] for d in slices) if others and together else 0
    rank = len(slices) + len(arrays)
    shape = [0] * rank
    shape[first : first + len(arrays)] = arrays
    coords: list[Coord] = []
    for d, index in enumerate(indexer.indices):
        if d in slices:
            n = slices.index(d)
            place = n if n < first else n + len(arrays)
            shape[place] = index.size
            if index.size == 1:
                lanes = None
            else:
                lanes = emit.mul(emit.arange(_padded(index.size), place, rank), int(index.stride))
            coords.append(Coord(_number(index.start), lanes))
        else:
            index, size = _number(index), int(indexer.shape[d])
            if isinstance(index, int) or not emit.shape_of(index):
                coords.append(Coord(_wrapped(index, size)))
                continue
            after = rank - first - len(arrays)
            own = emit.shape_of(index)
            lanes = emit.reshape(index, (1,) * first + (1,) * (len(arrays) - len(own)) + own + (1,) * after)
            coords.append(Coord(0, lanes))
    return tuple(shape), coords


def _padded(n: int) -> int:
    """Ranges have sizes that are powers of two; a view that has others is refused where it is read."""
    return 1 << max(n - 1, 0).bit_length()


def _transposed(coords: Sequence[Coord], permutation: Sequence[int]) -> list[Coord]:
    result: list[Any] = [None] * len(coords)
    for out, axis in enumerate(permutation):
        result[axis] = coords[out]
    return result


def _reshaped(coords: Sequence[Coord], old: Sequence[int], new: Sequence[int]) -> list[Coord]:
    """Indices of a view of shape `new` as indices of what it reshapes; dimensions that stay are passed on."""
    result: list[Coord] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            result.append(coords[j])
            i, j = i + 1, j + 1
            continue
        olds, news = [], []
        while not olds or not news or math.prod(olds) != math.prod(news):
            if i < len(old) and (not olds or math.prod(olds) <= math.prod(news) or j >= len(new)):
                olds.append(old[i])
                i += 1
            elif j < len(new):
                news.append(new[j])
                j += 1
            else:
                break
        while i < len(old) and old[i] == 1 and (j >= len(new) or new[j] != 1):
            olds.append(old[i])
            i += 1
        flat = Coord(0)
        for c, stride in zip(coords[j - len(news) : j], _row_major(news)):
            flat = flat.plus(c.times(stride))
        strides = _row_major(olds)
        real = [d for d, n in enumerate(olds) if n != 1]
        if len(real) <= 1:
            result += [flat if d in real else Coord(0) for d in range(len(olds))]
            continue
        linear = flat.total()
        for d, (n, stride) in enumerate(zip(olds, strides)):
            at = emit.divide(linear, stride)
            at = emit.modulo(at, n) if d else at
            result.append(Coord(at) if isinstance(at, int) or not emit.shape_of(at) else Coord(0, at))
    return result


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


@dataclasses.dataclass(frozen=True)
class View:
    """What the lanes of a chain of views are in their Ref.

    Attributes:
      shape, dtype: of the view.
      coords: for each dimension of the Ref the index of each lane.
      covers: whether it is the whole Ref as it lies; box: whether it is a part without gaps, in order.
    """

    shape: tuple[int, ...]
    dtype: Any
    coords: list[Coord]
    covers: bool
    box: bool


def resolve(eqn: Any, ref: Any, transforms: Sequence[Any]) -> View:
    """A chain of views of a Ref (or a Cell), as indices of the Ref.

    Raises: NotImplementedError: a view that cannot be expressed; ValueError: sizes that are no powers of two.
    """
    shape, dtype = tuple(ref.shape), jnp.dtype(ref.dtype)
    shapes = []
    for t in transforms:
        shapes.append(shape)
        if isinstance(t, jaxlink.NDIndexer):
            shape = tuple(t.get_indexer_shape())
        elif isinstance(t, jaxlink.TransposeTransform):
            shape = tuple(shape[a] for a in t.permutation)
        elif isinstance(t, jaxlink.ReshapeTransform):
            shape = tuple(t.shape)
        elif isinstance(t, jaxlink.BitcastTransform) and emit.bits_of(t.dtype) == emit.bits_of(dtype):
            dtype = jnp.dtype(t.dtype)
        else:
            what = f"a bitcast from {dtype} to {t.dtype}" if isinstance(t, jaxlink.BitcastTransform) else f"{t}"
            headline = f"{ref.label} is seen through {what}, which has no meaning in a Triton kernel."
            raise refusal(NotImplementedError, headline, eqn, "read the Ref, then convert the value")
    _check_block(eqn, ref, shape, bool(transforms))
    coords = None
    for t, old in zip(reversed(transforms), reversed(shapes)):
        if isinstance(t, jaxlink.NDIndexer):
            _, inner = indexed(t)
            coords = inner if coords is None else _through(eqn, ref, t, coords)
        else:
            coords = whole(shape) if coords is None else coords
            if isinstance(t, jaxlink.TransposeTransform):
                coords = _transposed(coords, t.permutation)
            elif isinstance(t, jaxlink.ReshapeTransform):
                coords = _reshaped(coords, old, tuple(t.shape))
    box = all(isinstance(t, jaxlink.NDIndexer) and _is_box(t) for t in transforms)
    return View(shape, dtype, whole(shape) if coords is None else coords, not transforms, box)


def _is_box(indexer: Any) -> bool:
    return not indexer.int_indexer_shape and all(
        not isinstance(i, jaxlink.Slice) or int(i.stride) == 1 for i in indexer.indices
    )


def _through(eqn: Any, ref: Any, indexer: Any, coords: Sequence[Coord]) -> list[Coord]:
    """An index of a view `ref.at[…]` as an index of the Ref."""
    result, rest = [], iter(coords)
    if indexer.int_indexer_shape:
        headline = f"{ref.label} is indexed with an array, and then again, which the Triton compiler does not combine."
        raise refusal(NotImplementedError, headline, eqn, "index once, with arrays for all dimensions")
    for index, size in zip(indexer.indices, indexer.shape):
        if isinstance(index, jaxlink.Slice):
            c = next(rest).times(int(index.stride))
            result.append(Coord(emit.add(c.base, _number(index.start)), c.lanes))
        else:
            result.append(Coord(_wrapped(_number(index), int(size))))
    return result


def _check_block(eqn: Any, ref: Any, shape: Sequence[int], part: bool) -> None:
    if fits(shape):
        return
    what = f"a part of shape {tuple(shape)} of {ref.label}" if part else f"{ref.label}"
    raise refusal(
        ValueError,
        f"In Triton every size of a block is a power of two; {what}, a block of shape {tuple(ref.shape)}, is not.",
        eqn,
        f"take {rounded_up(shape)}: pltriton.load/store(ref.at[pl.ds(0, n)], mask=…) leave lanes out",
        operand=f"{ref.label}, block {tuple(ref.shape)}",
    )


# --- addresses --------------------------------------------------------------------------------------------------------
def addresses(ref: Ref, view: View) -> tuple[Any, Any]:
    """The pointers of a view's lanes, and the mask of those that exist (None for all)."""
    bits, coords = ref.bits, iter(view.coords)
    base: Any = 0
    lanes, mask = None, None
    for dim in ref.dims:
        c = next(coords) if dim.kept else Coord(0)
        own = Coord(emit.add(c.base, dim.start), c.lanes)
        if bits == 64:
            own = Coord(_wide(own.base), None if own.lanes is None else _wide(own.lanes))
        mask = _exists(dim, c, own, mask)
        scaled = own.times(dim.stride)
        base = emit.add(base, scaled.base)
        if scaled.lanes is not None:
            lanes = scaled.lanes if lanes is None else emit.add(lanes, scaled.lanes)
    pointer = ref.pointer
    if view.dtype != ref.dtype:
        pointer = tt.bitcast(tt.PointerType.get(emit.element_type(view.dtype, memory=True), 1), pointer)
    if not (isinstance(base, int) and base == 0):
        base = emit.full((), base, ir.IntegerType.get_signless(bits)) if isinstance(base, int) else base
        pointer = tt.addptr(pointer.type, pointer, base)
    if view.shape:
        pointer = emit.broadcast(pointer, view.shape)
        if lanes is not None:
            pointer = tt.addptr(pointer.type, pointer, emit.broadcast(lanes, view.shape))
        mask = None if mask is None else emit.broadcast(mask, view.shape)
    return pointer, mask


def _wide(x: Any) -> Any:
    return x if isinstance(x, int) else emit.widen(x, 64)


def _exists(dim: Dim, c: Coord, own: Coord, mask: Any) -> Any:
    if dim.length is not None:
        mask = emit.both(mask, _below(c, dim.length))
    if dim.high:
        mask = emit.both(mask, _below(own, dim.size))
    if dim.low:
        lowest = emit.sub(0, own.base)
        inside = emit.at_least(0, lowest) if own.lanes is None else emit.at_least(own.lanes, lowest)
        mask = emit.both(mask, inside)
    return mask


def _below(c: Coord, limit: Any) -> Any:
    """Whether c < limit, with what is the same for all lanes on the right."""
    if c.lanes is not None:
        return emit.less(c.lanes, emit.sub(limit, c.base))
    inside = emit.less(c.base, limit) if not isinstance(c.base, int) or not isinstance(limit, int) else None
    if inside is not None:
        return inside
    return emit.full((), c.base < limit, ir.IntegerType.get_signless(1))


# --- loads and stores -------------------------------------------------------------------------------------------------
def from_memory(v: Any, dtype: Any) -> Any:
    """A loaded value as it is held in registers."""
    if emit.bits_of(dtype) != 1:
        return v
    return arith.cmpi(arith.CmpIPredicate.ne, v, emit.like(v, 0))


def to_memory(v: Any, dtype: Any) -> Any:
    if emit.bits_of(dtype) != 1:
        return v
    return arith.extui(emit.typed(emit.shape_of(v), emit.element_type(dtype, memory=True)), v)


def before(ctx: Lowering, ref: Ref, doing: str) -> None:
    """Let the threads of a program meet where one may need what another has stored, or overwrite what it has not read.

    Which thread holds which element is Triton's choice and differs from operation to operation.
    """
    done = ctx.pending.get(ref.memory)
    if done == "written" or (done == "read" and doing == "written"):
        barrier(ctx)
    ctx.pending[ref.memory] = "written" if doing == "written" else ctx.pending.get(ref.memory, doing)


def barrier(ctx: Lowering) -> None:
    """All threads of a program wait for each other; what they stored is there for all."""
    from jaxlib.mlir.dialects import gpu

    gpu.barrier()
    ctx.pending.clear()


def load(ctx: Lowering, ref: Ref, view: View, *, mask: Any = None, other: Any = None, policy: Any = None, **k) -> Any:
    """The elements of a view; lanes outside the array, or where the mask is off, read `other` (0)."""
    before(ctx, ref, "read")
    pointers, exists = addresses(ref, view)
    on = exists if mask is None else emit.both(exists, mask)
    element = emit.element_type(view.dtype, memory=True)
    if on is not None:
        other = emit.full(view.shape, 0, element) if other is None else to_memory(other, view.dtype)
        other = emit.broadcast(other, view.shape)
    value = tt.load(pointers, mask=on, other=other if on is not None else None, cache_policy=policy, **k)
    return from_memory(value, view.dtype)


def store(ctx: Lowering, ref: Ref, view: View, value: Any, *, mask: Any = None, policy: Any = None) -> None:
    """Store in the lanes of a view that exist and where the mask is on."""
    before(ctx, ref, "written")
    pointers, exists = addresses(ref, view)
    on = exists if mask is None else emit.both(exists, mask)
    value = emit.broadcast(to_memory(value, view.dtype), view.shape)
    tt.store(pointers, value, mask=on, cache_policy=policy)
