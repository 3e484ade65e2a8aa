"""From lines of PTX to lines of the CUDA source, and from those to the user's, by what each text says of the other.

PTX: `.loc FILE LINE COLUMN` holds for the instructions below it; in code that was inlined it names the called
function's line, and where it was called: `.loc 1 8 3, function_name $info, inlined_at 1 42 5`, which again may be a
place in inlined code. CUDA: the code generator writes `// user.py:12  the line` above what a line became.
"""

from __future__ import annotations

import functools
import re

_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)(?:.*?inlined_at (\d+) (\d+) (\d+))?")
_COMMENT = re.compile(r"//\s*(?P<where>\S+?:\d+)(?P<function> \([^()\s]+\))?(?=\s|$)")


def user_line(source: str, line: int | None) -> str | None:
    """The user's `file:line` of a line of the CUDA source: that of the nearest comment above it, or beside it.

    Arguments: source: CUDA C++. line: from 1; None: of nothing.
    """
    if line is None:
        return None
    lines = _user_lines(source)
    return lines[min(line, len(lines)) - 1] if lines and line > 0 else None


@functools.lru_cache(8)
def _user_lines(source: str) -> tuple[str | None, ...]:
    found, last = [], None
    for text in source.splitlines():
        match = _COMMENT.search(text)
        if match:
            last = match["where"] + (match["function"] or "")
        found.append(last)
    return tuple(found)


def cuda_line(ptx: str, line: int) -> int | None:
    """The CUDA line of a line of PTX (from 1), in the kernel that it was inlined into; None where nothing tells."""
    at: tuple[str, ...] | None = None
    called: dict[tuple[str, ...], tuple[str, ...]] = {}
    for text in ptx.splitlines()[:line]:
        match = _LOC.match(text)
        if match is not None:
            at, caller = match.groups()[:3], match.groups()[3:]
            if caller[0] is not None:
                called[at] = caller
            else:
                called.pop(at, None)
        elif text.startswith((".visible .entry", ".entry", ".func", ".visible .func")):
            at = None
    for _ in range(64):  # a chain of calls; recursion is not inlined
        if at is None or at not in called:
            break
        at = called[at]
    return None if at is None or at[1] == "0" else int(at[1])
