"""Alternatives of a `plgpu.RefUnion` on the simulated GPU: buffers that lie in the same memory.

Each alternative begins where the union begins. Buffers of two alternatives that overlap are *rivals*: the use of one
makes what the other held unwritten, and hands over who accessed it, so that it must be over by then (`history`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from palladion.language.gpu.refs import storage_of
from palladion.language.gpu.union import unions_among
from palladion.simulator.gpu.history import Buffer


def allocate_all(memory: Any, avals: Sequence[Any], allocate: Callable[[int, Any], Any]) -> list[Any]:
    """Allocate what a scope or a kernel asks for, alternatives of unions in the same memory.

    Arguments:
      memory: a block's `SharedMemory`. avals: types. allocate: of one of them, by its number; gives (buffer, start), or
        None for what does not lie in the block's memory.

    Returns:
      what `allocate` gave.
    """
    members = {i: group for group in unions_among(avals) for i in group}
    made: list[Any] = []
    places: dict[int, tuple[int, int, int, int]] = {}
    for i, aval in enumerate(avals):
        group = members.get(i)
        if group is None:
            made.append(allocate(i, aval))
            continue
        alternative = _alternative(aval)
        if i == group[0]:
            base = most = memory.marks()
        elif alternative != _alternative(avals[i - 1]):
            memory.smem, memory.tmem = base
        before = memory.marks()
        made.append(allocate(i, aval))
        places[i] = (*before, *memory.marks())
        most = tuple(map(max, most, memory.marks()))
        if i == group[-1]:
            memory.smem, memory.tmem = most
            _make_rivals([(_alternative(avals[k]), places[k], made[k][0]) for k in group])
    return made


def _alternative(aval: Any) -> int:
    """Which alternative of its union a buffer is of."""
    union = storage_of(aval).union
    return -1 if union is None else union[1]


def _make_rivals(parts: Sequence[tuple[int, tuple[int, int, int, int], Any]]) -> None:
    for alternative, (smem, tmem, smem_end, tmem_end), buffer in parts:
        if isinstance(buffer, Buffer):
            buffer.rivals = [
                other
                for another, (s, t, s_end, t_end), other in parts
                if another != alternative and ((s < smem_end and smem < s_end) or (t < tmem_end and tmem < t_end))
            ]


def bytes_of(avals: Sequence[Any], size: Callable[[Any], int]) -> int:
    """Bytes that types take together, `size` giving those of one."""
    groups = unions_among(avals)
    shared = {i for group in groups for i in group}
    total = sum(size(a) for i, a in enumerate(avals) if i not in shared)
    for group in groups:
        sums: dict[int, int] = {}
        for i in group:
            alternative = _alternative(avals[i])
            sums[alternative] = sums.get(alternative, 0) + size(avals[i])
        total += max(sums.values())
    return total
