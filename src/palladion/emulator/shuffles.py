"""Exchange within a warp: shuffles, votes, matches, elections, reductions, `bar.warp.sync`.

All lanes that the member mask names take part, wherever they come from. With the full mask, known when the code is
translated, that is what blocks that gather their warp are for (`flow.py`). With another mask the lanes wait until
those it names have come to this instruction, or have exited.
Source: PTX ISA manual, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync", "bar.warp.sync"; facts
file 9.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from palladion.emulator.ptx import Immediate, Instruction, Pair
from palladion.emulator.registry import Wait, operation

Array = np.ndarray
LANES = np.arange(32)
_BITS = np.uint64(1) << np.arange(32, dtype=np.uint64)
_FULL = 0xFFFFFFFF


# --- who takes part -----------------------------------------------------------------------------------------
def _partial(instr: Instruction) -> bool:
    """Whether some lanes of the warp may be left out: the member mask is not known to be full."""
    mask = instr.operands[-1]
    return not (isinstance(mask, Immediate) and int(mask.value) & _FULL == _FULL)


def _gathers(instr: Instruction) -> str | None:
    return None if _partial(instr) else "warp"


def _exchange(*keys: str, out: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operation whose last operand is the member mask; it is run once the members are here."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, instr: Instruction, *values: Any) -> Any:
            if _partial(instr):
                _wait_for_members(group, instr, values[-1])
            return function(group, instr, *values)

        return operation(*keys, out=out, parks=_partial, collective=_gathers)(run)

    return register


def _wait_for_members(group: Any, instr: Instruction, mask: Any) -> None:
    """Wait until the lanes that the masks name have come; a lane that its own mask leaves out is a fault."""
    wanted = np.asarray(group.array(mask)).astype(np.uint32).reshape(-1, 32)
    named = (wanted >> LANES.astype(np.uint32) & np.uint32(1)).astype(bool).reshape(-1)
    outside = group.active & ~named
    if outside.any():
        group.fault(
            "collective-mismatch",
            f"{instr.name}: a lane executes it that its member mask does not name",
            lane=int(outside.argmax()),
        )
    here = group.active.reshape(-1, 32)
    masks = np.where(here, wanted, 0)
    needed = np.bitwise_or.reduce(masks, 1).astype(np.uint64)
    cta, threads = group.cta, group.threads.reshape(-1, 32)

    def missing() -> Array:
        """(warps, 32): lanes that are named, live, and not here."""
        named = (needed[:, None] & _BITS) != 0
        return named & cta.live[threads] & ~here

    absent = missing()
    if not absent.any():
        return
    # different masks may meet in one warp: lanes whose members are all here go on
    lacking = np.bitwise_or.reduce(np.where(absent, _BITS, np.uint64(0)), 1)
    ready = (here & ((masks.astype(np.uint64) & lacking[:, None]) == 0)).reshape(-1)
    raise Wait(
        lambda: not missing().any(),
        f"{instr.name}: waits for the other lanes that its member mask names",
        ready=ready if ready.any() else None,
        merge=True,
    )


def rows(group: Any, x: Any, dtype: Any = None) -> Array:
    """A lane array as (warps, 32)."""
    return np.asarray(group.array(x, dtype)).reshape(-1, 32)


def bits_of(p: Array) -> Array:
    """(warps, 32) predicates as the bits of one number a warp, in each lane."""
    return np.repeat(p.astype(np.uint64) @ _BITS, 32).astype(np.uint32)


def _members(group: Any, mask: Any) -> Array:
    """(warps, 32, 32): [w, i, j] whether lane j takes part in what lane i does; None: all active lanes."""
    wanted = np.asarray(group.array(mask)).astype(np.uint32).reshape(-1, 32).astype(np.uint64)
    return ((wanted[:, :, None] & _BITS) != 0) & group.active.reshape(-1, 1, 32)


def _alike(group: Any, instr: Instruction, mask: Any) -> bool:
    """Whether all lanes of a warp have the same members, so that what they get is one value a warp."""
    if not _partial(instr):
        return True
    wanted = np.asarray(group.array(mask)).reshape(-1, 32)
    here = group.active.reshape(-1, 32)
    first = wanted[np.arange(len(wanted)), here.argmax(1)]
    return bool(((wanted == first[:, None]) | ~here).all())


# --- the instructions ---------------------------------------------------------------------------------------
@_exchange("shfl.sync")
def _shfl(group: Any, instr: Instruction, a: Any, b: Any, c: Any, mask: Any) -> Any:
    value = rows(group, a)
    if isinstance(b, int) and isinstance(c, int):
        source, valid = _fixed_sources(instr.parts[2], b, c)
        found, valid = value[:, source].reshape(-1), np.tile(valid, len(value))
    else:
        by, limits = rows(group, b).astype(np.int64), rows(group, c).astype(np.int64)
        source, valid = _sources(instr.parts[2], by, limits)
        found, valid = np.take_along_axis(value, source, 1).reshape(-1), valid.reshape(-1)
    return (found, valid) if isinstance(instr.operands[0], Pair) else found


@cache
def _fixed_sources(mode: str, b: int, c: int) -> tuple[Array, Array]:
    return _sources(mode, np.full(32, b), np.full(32, c))


def _sources(mode: str, by: Array, limits: Array) -> tuple[Array, Array]:
    """Which lane each lane reads, (…, 32), and whether there is one in its segment; else it reads itself."""
    by = by & 31
    clamp, segment = limits & 31, limits >> 8 & 31
    top, least = (LANES & segment) | (clamp & ~segment), LANES & segment
    if mode == "up":
        source = LANES - by
        valid = source >= top
    else:
        if mode == "down":
            source = LANES + by
        elif mode == "bfly":
            source = LANES ^ by
        else:
            source = least | (by & ~segment)
        valid = source <= top
    return np.where(valid, source, LANES), valid


@_exchange("vote.sync")
def _vote(group: Any, instr: Instruction, p: Any, mask: Any) -> Any:
    yes = np.asarray(group.array(p, bool)).reshape(-1, 32)
    on = group.active.reshape(-1, 32)
    if not _alike(group, instr, mask):
        members = _members(group, mask)
        yes, on = members & yes[:, None, :], members
        if instr.has("ballot"):
            return (yes.astype(np.uint64) @ _BITS).astype(np.uint32).reshape(-1)
        return _voted(instr, yes, on, 2).reshape(-1)
    yes = yes & on
    return bits_of(yes) if instr.has("ballot") else np.repeat(_voted(instr, yes, on, 1), 32)


def _voted(instr: Instruction, yes: Array, on: Array, axis: int) -> Array:
    every, some = (yes | ~on).all(axis), (yes & on).any(axis)
    if instr.has("any"):
        return some
    return every if instr.has("all") else every | ~some  # uni


@_exchange("elect.sync")
def _elect(group: Any, instr: Instruction, mask: Any) -> Any:
    """The lowest lane of those that are here."""
    on = group.active.reshape(-1, 32)
    first = np.argmax(on, 1).astype(np.uint32)
    chosen = (LANES == first[:, None]) & on
    return np.repeat(first, 32), chosen.reshape(-1)


@_exchange("match.any.sync", "match.all.sync")
def _match(group: Any, instr: Instruction, a: Any, mask: Any) -> Any:
    value, members = rows(group, a), _members(group, mask)
    same = (value[:, :, None] == value[:, None, :]) & members
    if instr.has("any"):
        return (same.astype(np.uint64) @ _BITS).astype(np.uint32).reshape(-1)
    equal = (same | ~members).all(2)
    everyone = members.astype(np.uint64) @ _BITS
    found = np.where(equal, everyone, 0).astype(np.uint32).reshape(-1)
    return (found, equal.reshape(-1)) if isinstance(instr.operands[0], Pair) else found


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@_exchange("redux.sync")
def _redux(group: Any, instr: Instruction, a: Any, mask: Any) -> Any:
    kind = instr.type()
    name = next(p for p in instr.parts if p in _REDUCE)
    dtype = {"s32": np.int32, "f32": np.float32}.get(kind, np.uint32)
    value = np.ascontiguousarray(rows(group, a)).view(dtype)
    if kind == "f32":
        if instr.has("abs"):
            value = np.abs(value)
        function = (
            {"min": np.minimum, "max": np.maximum}[name] if instr.has("NaN") else {"min": np.fmin, "max": np.fmax}[name]
        )
        neutral: Any = np.float32(np.nan) if not instr.has("NaN") else np.float32(np.inf if name == "min" else -np.inf)
    else:
        function = _REDUCE[name]
        info = np.iinfo(dtype)
        neutral = {"min": info.max, "max": info.min, "and": dtype(-1) if dtype is np.int32 else info.max}.get(name, 0)
    if _alike(group, instr, mask):
        found = function.reduce(np.where(group.active.reshape(-1, 32), value, dtype(neutral)), axis=1, dtype=dtype)
        return np.repeat(found.view(np.uint32), 32)
    members = _members(group, mask)
    found = function.reduce(np.where(members, value[:, None, :], dtype(neutral)), axis=2, dtype=dtype)
    return found.view(np.uint32).reshape(-1)


@_exchange("bar.warp.sync", out=0)
def _bar_warp(group: Any, instr: Instruction, mask: Any) -> None:
    """The lanes have met; what they wrote is known among them."""
    if group.cta.unfenced is not None:
        group.cta.unfenced.passed_on(group.threads[group.active])
