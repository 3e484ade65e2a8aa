"""The rule of `reshape`: dimensions that are split or merged, with blocks that stay contiguous.

A reshape falls into groups of dimensions, a few before for a few after, with equal products. A group of one for one
is left alone. A merge (several before, one after) or a split (one before, several after) keeps a block one run of
memory when, among the several, the block has one element in the outer dimensions, any size in one, and all of the
inner ones. Backwards and forwards are the same computation with the shapes exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from palladion.language.fuser.passes import Program
from palladion.language.fuser.rules import NotFusible, rule
from palladion.language.fuser.shapes import plain
from palladion.language.fuser.transforms import BlockIndexTransform, block, size_of

# What becomes of a group: the new block dimensions, and the new indices from the old ones.
Group = tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]


def groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[range, range]] | None:
    """The smallest runs of dimensions of two shapes with equal products; dimensions of one end a run."""
    found, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        first = (i, j)
        if i < len(a) and j < len(b) and a[i] != 1 and b[j] != 1:
            p, q, i, j = a[i], b[j], i + 1, j + 1
            while p != q:
                if p < q and i < len(a):
                    p, i = p * a[i], i + 1
                elif q < p and j < len(b):
                    q, j = q * b[j], j + 1
                else:
                    return None
        elif i < len(a) and a[i] == 1 and (j >= len(b) or b[j] != 1):
            i += 1
        elif j < len(b) and b[j] == 1 and (i >= len(a) or a[i] != 1):
            j += 1
        else:
            i, j = i + 1, j + 1
        found.append((range(first[0], i), range(first[1], j)))
    return found


def merged(sizes: Sequence[int], dims: Sequence[Any]) -> Group | None:
    """The block of one dimension that stands for several.

    Arguments:
      sizes, dims: of the several.
    """
    extents = [size_of(d) for d in dims]
    if not all(d is None or isinstance(d, int) for d in dims):
        return None
    k = next((n for n, e in enumerate(extents) if e != 1), len(dims) - 1)  # the first that is not one element
    if extents[k + 1 :] != list(sizes[k + 1 :]):
        return None  # an inner dimension is cut
    outer = math.prod(sizes[:k])
    if outer > 1 and sizes[k] % extents[k]:
        return None  # the last block of each run is not full
    count = -(-sizes[k] // extents[k])

    def number(indices):
        n = 0
        for size, i in zip([*sizes[:k], count], indices):
            n = i if isinstance(n, int) and n == 0 else n * size + i
        return [n]

    return [math.prod(extents)], number


def split(sizes: Sequence[int], dim: Any) -> Group | None:
    """The block of several dimensions that one stands for.

    Arguments:
      sizes: of the several.
      dim: of the one.
    """
    if dim is not None and not isinstance(dim, int):
        return None
    n, inner = size_of(dim), 1
    for k in reversed(range(len(sizes))):
        outer = math.prod(sizes[:k])
        if n <= inner * sizes[k] or k == 0 or outer == 1:
            break
        inner *= sizes[k]
    if n % inner or (outer > 1 and sizes[k] % (n // inner)):
        return None
    part = n // inner
    count = -(-sizes[k] // part)
    squeezed = dim is None
    dims = (
        [None if squeezed else 1] * k + [None if squeezed else part] + [None if squeezed else s for s in sizes[k + 1 :]]
    )

    def numbers(indices):
        left, found = indices[0], []
        for size in reversed([*sizes[:k], count][1:]):
            found.append(0 if size == 1 else left % size)
            left = left if size == 1 else left // size
        return [left, *reversed(found), *[0] * (len(sizes) - k - 1)]

    return dims, numbers


def _group(a: Sequence[int], b: Sequence[int], dims: Sequence[Any]) -> Group | None:
    """The block of dimensions `b` that hold the elements of dimensions `a`, whose block is `dims`."""
    if len(a) == len(b) == 1:
        return list(dims), lambda i: list(i)
    if not b:
        return ([], lambda i: []) if all(size_of(d) == 1 for d in dims) else None
    if not a:
        return [1] * len(b), lambda i: [0] * len(b)
    if all(d == n or (d is None and n == 1) for d, n in zip(dims, a)):
        return list(b), lambda i: [0] * len(b)
    if len(b) == 1:
        return merged(a, dims)
    return split(b, dims[0]) if len(a) == 1 else None


def reshaped_block(eqn: Any, found: BlockIndexTransform, a: Sequence[int], b: Sequence[int]) -> BlockIndexTransform:
    """The block, in an array of shape `b`, of the elements in a block of the same array in shape `a`."""
    parts = groups(a, b) if math.prod(a) else None
    dims, moves = [], []
    own = plain(eqn, found)
    for run_a, run_b in parts or ():
        group = _group([a[d] for d in run_a], [b[d] for d in run_b], [own[d] for d in run_a])
        if group is None:
            parts = None
            break
        dims += group[0]
        moves.append((run_a, group[1]))
    if parts is None:
        raise NotFusible(
            eqn,
            f"A reshape between {tuple(a)} and {tuple(b)} tears blocks of {own} apart.",
            "choose blocks that cover the inner dimensions of what is split or merged, or reshape outside",
        )
    return block(found, dims, lambda i, _: [x for run_a, move in moves for x in move([i[d] for d in run_a])])


def _pull(ctx: Any, eqn: Any, outs: list[Any]) -> list[Any]:
    found = reshaped_block(eqn, outs[0], eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape)
    return [found, *[None] * (len(eqn.invars) - 1)]


def _push(ctx: Any, eqn: Any, ins: list[Any]) -> list[Any]:
    return [reshaped_block(eqn, ins[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)]


def _run(ctx: Program, eqn: Any, values: list[Any]) -> list[Any]:
    return [ctx.fit(eqn.outvars[0], values[0])]


rule(lax.reshape_p, pull=_pull, push=_push, run=_run)
