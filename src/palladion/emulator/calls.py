"""Calls of device functions, and the functions that every module may call: vprintf, assertions, device malloc.

A device function's parameters and results are variables of its frame in local memory: a call copies them there and
back, for the lanes that make it.
Source: CUDA programming guide, "Formatted output", "Assertion", "Dynamic global memory allocation"; PTX manual, "call".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from palladion.emulator.faults import UnknownInstruction
from palladion.emulator.group import Group
from palladion.emulator.printf import formatted
from palladion.emulator.spaces import LOCAL_WINDOW

BUILTINS: dict[str, Callable[..., Any]] = {}
DEPTH = 1024
"""Calls inside each other at most."""


def builtin(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the system: called with the group and one array (n, bytes) an argument, gives the result
    of each lane as (n, bytes), or None."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        BUILTINS[name] = function
        return function

    return register


class Calls:
    """What `call` does on a machine."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def call(
        self, group: Group, site: int, target: Any, returns: tuple[int, ...], arguments: tuple[int, ...], after: int
    ) -> int:
        """Enter a function; gives the next block, or -1."""
        name = target if isinstance(target, str) else self.indirect(group, target)
        function = self.machine.loaded.module.functions.get(name)
        if function is None or function.body is None:
            self.builtin(group, name, returns, arguments, function)
            return after
        frame = group.frame
        callee = frame.calls.get((site, name))
        if callee is None:
            if frame.depth >= DEPTH:
                group.fault("stack-overflow", f"{DEPTH} calls inside each other.")
            code = self.machine.loaded.code(name)
            callee = frame.calls[site, name] = group.cta.new_frame(code, frame)
            callee.order = (*frame.order, frame.code.blocks[site].position)
            callee.next = after
            callee.returns = tuple(
                (callee.base + code.locals[v.name], frame.base + offset, v.size)
                for v, offset in zip(function.returns, returns, strict=False)
            )
        rows = group.threads[group.mask]
        local = group.cta.local
        for v, offset in zip(function.params, arguments, strict=False):
            to, at = callee.base + callee.code.locals[v.name], frame.base + offset
            local[rows, to : to + v.size] = local[rows, at : at + v.size]
        group.settled()
        group.enter(callee)
        group.block = 0
        return -1

    def indirect(self, group: Group, target: Any) -> str:
        """The function at an address."""
        addresses = np.unique(target[group.mask])
        if len(addresses) > 1:
            raise UnknownInstruction("An indirect call of different functions by the threads of a warp.", group.place())
        name = self.machine.loaded.function_at(int(addresses[0]))
        if name is None:
            group.fault("out-of-bounds", f"There is no function at address {int(addresses[0]):#x}.")
        return name

    def builtin(self, group: Group, name: str, returns: Any, arguments: Any, function: Any) -> None:
        if name not in BUILTINS or function is None:
            raise UnknownInstruction(f"The emulator does not know the function {name}.", group.place())
        group.active = group.mask
        frame, local = group.frame, group.cta.local
        values = [
            local[group.threads, frame.base + at : frame.base + at + p.size]
            for p, at in zip(function.params, arguments, strict=False)
        ]
        result = BUILTINS[name](group, *values)
        if result is not None and returns:
            rows, at = group.threads[group.mask], frame.base + returns[0]
            local[rows, at : at + result.shape[1]] = result[group.mask]


def _numbers(values: Any) -> list[int]:
    return np.ascontiguousarray(values).view(np.uint64).reshape(-1).tolist()


def text_at(group: Group, address: int) -> str:
    """The string of bytes up to a zero."""
    found = bytearray()
    while len(found) < 1 << 16:
        byte = int(group.view("generic", address + len(found), 1)[0])
        if byte == 0:
            break
        found.append(byte)
    return found.decode("utf-8", "replace")


@builtin("vprintf")
def _vprintf(group: Group, formats: Any, buffers: Any) -> Any:
    texts, places = _numbers(formats), _numbers(buffers)
    counts = np.zeros((group.n, 1), np.int32)
    for lane in np.flatnonzero(group.mask).tolist():
        at = places[lane]

        def fetch(offset: int, size: int, at: int = at, lane: int = lane) -> bytes:
            if at >= LOCAL_WINDOW:
                row = group.cta.local[group.threads[lane]]
                start = at - LOCAL_WINDOW + offset
                return row[start : start + size].tobytes()
            return group.view("generic", at + offset, size).tobytes()

        text, counts[lane] = formatted(text_at(group, texts[lane]), fetch, lambda p: text_at(group, p))
        group.machine.driver.write(text)
    return counts.view(np.uint8)


@builtin("__assertfail")
def _assertfail(group: Group, message: Any, file: Any, line: Any, function: Any, size: Any) -> None:
    lane = group.first_active() or 0
    what, where = text_at(group, _numbers(message)[lane]), text_at(group, _numbers(file)[lane])
    number = int(np.ascontiguousarray(line).view(np.uint32).reshape(-1)[lane])
    name = text_at(group, _numbers(function)[lane])
    group.fault("assert", f"{where}:{number}: {name}: Assertion `{what}` failed.", lane)


@builtin("malloc")
def _malloc(group: Group, sizes: Any) -> Any:
    found = np.zeros((group.n, 1), np.uint64)
    for lane in np.flatnonzero(group.mask):
        found[lane] = group.machine.memory.alloc(_numbers(sizes)[lane], 16)
    return found.view(np.uint8)


@builtin("free")
def _free(group: Group, addresses: Any) -> None:
    for lane in np.flatnonzero(group.mask):
        address = _numbers(addresses)[lane]
        if address:
            group.machine.memory.free(address)
