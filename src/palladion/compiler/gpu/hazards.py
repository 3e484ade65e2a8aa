"""When the CUDA threads of a Pallas thread must meet between ordinary accesses to memory.

To the user a Pallas thread is one thread: what it stores, it then reads. Here 128 CUDA threads each do their part, so
that an element that another one of them stored is there only after both have met. They meet before an access that
another one since the last meeting conflicts with: to the same bytes, at least one a store, and not each thread to its
own elements only. The last meeting is looked for in the lines written so far; one before a loop that is still open
does not count, since the loop's end may come between.

Not optimal: parts of one buffer are not told apart, and an access in a loop always has a meeting in the same loop,
unless nothing in the kernel can conflict with it.
"""

from __future__ import annotations

import re
from typing import Any

_KEY = "accesses"
_MEETING = re.compile(r"^\s*(__syncthreads\(\);|sync_warpgroup\(|__syncwarp\(\);)")


def before(unit: Any, ref: Any, *, writes: bool, pattern: Any) -> None:
    """Meet if needed, and note an access that comes next.

    Arguments:
      unit: the unit. ref: the buffer. writes: whether it stores.
      pattern: the same for accesses in which each CUDA thread has the same elements, nobody else's; None: unknown.
    """
    facts = ref.facts
    harmless = not facts.stores if not writes else facts.stores == 1 and not facts.loads and pattern is not None
    seen = unit.tables.more.get(_KEY, ())
    start = 0 if harmless else last_meeting(unit.writer.lines)
    if start is None or any(
        line >= start and (writes or other_writes) and _overlap(ref, other) and (pattern is None or pattern != theirs)
        for line, other, other_writes, theirs in ([] if harmless else seen)
    ):
        unit.sync()
    unit.tables.more[_KEY] = (*seen, (len(unit.writer.lines), ref, writes, pattern))


def last_meeting(lines: list[str]) -> int | None:
    """The number of the last line at which all have met on the way to here; 0: the start; None: not in this loop."""
    depth = 0
    for k in range(len(lines) - 1, -1, -1):
        line = lines[k].strip()
        if line.startswith("}"):
            depth += 1
        if line.endswith("{"):
            if depth == 0 and line.startswith(("for ", "while ", "do ")):
                return None
            depth = max(depth - 1, 0) if depth else 0
        elif depth == 0 and _MEETING.match(lines[k]):
            return k
    return 0


_NEUTRAL = re.compile(  # copies, what leads to them, and names for numbers
    r"^\s*(//.*|const .*=.*;|char\* const .*=.*;|\}|if \((t == 0|lane == 0|warp == 0|elected).*\{"
    r"|for \(int k\d.*\{|barrier_expect.*;|copy_in_.*;|gather_in.*;|commit_copies\(\);)?\s*$"
)


def met_just_now(lines: list[str]) -> bool:
    """Whether nothing but copies has come since all have met."""
    for line in reversed(lines):
        if _MEETING.match(line):
            return True
        if not _NEUTRAL.match(line):
            return False
    return True


def _overlap(a: Any, b: Any) -> bool:
    if a.in_smem != b.in_smem:
        return False
    if not a.in_smem:
        return a.operand == b.operand
    return a.at < b.at + b.size and b.at < a.at + a.size
