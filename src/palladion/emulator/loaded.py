"""A module on the device: its variables in memory, its functions translated when they are first called."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from palladion.emulator import spaces
from palladion.emulator.parse import parse
from palladion.emulator.ptx import Function, Instruction, Module, Variable
from palladion.emulator.translate import Code, translate

_FUNCTIONS = 1 << 44
"""Where the addresses of functions begin: nothing can be loaded from there."""


@lru_cache(maxsize=128)
def _program(text: str) -> tuple[Module, dict[str, Code]]:
    """A module and its translated functions: they are the same on every device."""
    return parse(text), {}


class Loaded:
    """A module that a driver has loaded."""

    def __init__(self, driver: Any, text: str) -> None:
        self.driver = driver
        self.module, self._code = _program(text)
        self._addresses: dict[str, int] = {}
        variables = [v for v in self.module.variables.values() if v.space in ("global", "const") and not v.extern]
        for v in variables:
            self._addresses[v.name] = driver.memory.alloc(max(v.size, 1), max(v.align, 16))
        self._functions = list(self.module.functions)
        for v in variables:
            self._fill(v)
        bodies = [f.body or [] for f in self.module.functions.values()]
        self.opcodes = {i.opcode for body in bodies for i in body if isinstance(i, Instruction)}

    def _fill(self, v: Variable) -> None:
        """Write a variable's initial value."""
        data = np.frombuffer(v.data, np.uint8).copy()
        for at, name, addend, _, size in v.links:
            address = (self.address(name) or 0) + addend
            if size < 0:  # one byte of the address
                data[at] = address >> (-size - 1) & 0xFF
            else:
                data[at : at + size] = np.frombuffer((address & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
        start = self._addresses[v.name] - spaces.GLOBAL_BASE
        self.driver.memory.bytes[start : start + len(data)] = data

    def address(self, name: str) -> int | None:
        """The address of a variable or function."""
        if name in self._addresses:
            return self._addresses[name]
        if name in self.module.functions:
            return _FUNCTIONS + 16 * self._functions.index(name)
        return None

    def function_at(self, address: int) -> str | None:
        """The function with an address."""
        k, rest = divmod(address - _FUNCTIONS, 16)
        return self._functions[k] if rest == 0 and 0 <= k < len(self._functions) else None

    def code(self, name: str) -> Code:
        """A function, translated."""
        if name not in self._code:
            self._code[name] = translate(self.module, self.module.functions[name])
        return self._code[name]

    def param_offsets(self, function: Function) -> list[tuple[str, int]]:
        """Byte of each parameter of a kernel."""
        found, at = [], 0
        for p in function.params:
            at = -(-at // p.align) * p.align
            found.append((p.name, at))
            at += p.size
        return found

    def shared_layout(self, name: str, dynamic: int) -> tuple[dict[str, int], int]:
        """Offset of each shared variable in a CTA's window, and the window's size, dynamic memory included.

        Static variables come first, those of the kernel and of all device functions; dynamic memory follows, aligned
        as its declarations say.
        """
        functions = [f for f in self.module.functions.values() if not f.entry or f.name == name]
        variables = [v for v in self.module.variables.values() if v.space == "shared"]
        variables += [v for f in functions for v in f.variables if v.space == "shared"]
        layout, at = {}, spaces.RESERVED
        for v in variables:
            if v.size:
                at = -(-at // v.align) * v.align
                layout[v.name] = at
                at += v.size
        unsized = [v for v in variables if not v.size]
        start = -(-at // max([16, *(v.align for v in unsized)])) * max([16, *(v.align for v in unsized)])
        for v in unsized:
            layout[v.name] = start
        size = start + dynamic if dynamic or unsized else at
        return layout, -(-size // 16) * 16  # whole units of what descriptors address

    def wants_fences(self, machine: Any) -> bool:
        """Whether the module has asynchronous operations that read shared memory through another proxy."""
        from palladion.emulator import proxies

        del machine
        return bool(proxies.wanted(self.opcodes))

    def unfenced(self, machine: Any) -> Any:
        """A CTA's account of stores without a fence, if the module needs it."""
        from palladion.emulator import proxies

        return proxies.UnfencedWrites(machine.window_stride) if self.wants_fences(machine) else None
