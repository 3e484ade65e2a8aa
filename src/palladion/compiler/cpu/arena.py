"""Where temporaries live: offsets in one worker's arena, with memory reused once its contents are dead.

Lifetimes are taken from the order of the top-level statements: a buffer lives from the first that mentions it to the
last. Buffers are placed, the largest first, at the lowest offset where they overlap no other live one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from palladion.compiler.cpu import ir

ALIGN = 64


@dataclasses.dataclass
class _Life:
    nbytes: int
    first: int
    last: int
    offset: int = 0


def _round(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def place(block: Sequence[ir.Stmt], base: int) -> tuple[dict[Any, int], int]:
    """Offsets of the temporaries of a block, from `base` on.

    Returns:
      memory token -> byte offset, and the end of the arena.
    """
    lives: dict[Any, _Life] = {}
    for k, s in enumerate(block):
        for buf in (*ir.reads([s]), *ir.writes([s])):
            if buf.kind != "temp":
                continue
            nbytes = _round(math.prod(buf.shape) * buf.dtype.itemsize)
            life = lives.setdefault(buf.memory, _Life(nbytes, k, k))
            life.last, life.nbytes = k, max(life.nbytes, nbytes)
    placed: list[_Life] = []
    for life in sorted(lives.values(), key=lambda v: -v.nbytes):
        offset = base
        for other in sorted(placed, key=lambda v: v.offset):
            apart = other.last < life.first or life.last < other.first
            if not apart and other.offset < offset + life.nbytes and offset < other.offset + other.nbytes:
                offset = other.offset + other.nbytes
        life.offset = offset
        placed.append(life)
    end = max((v.offset + v.nbytes for v in placed), default=base)
    return {token: v.offset for token, v in lives.items()}, end
