"""The emulated device: memory, modules and launches, with the methods of a CUDA driver.

`EmulatedDriver` stands where a real driver would: programs allocate, copy, load PTX and launch. Everything is done when
a call returns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palladion.emulator import spaces
from palladion.emulator.faults import EmulationFault, Note
from palladion.emulator.loaded import Loaded
from palladion.emulator.machine import Launch, Machine
from palladion.emulator.ptx import Instruction, Module
from palladion.emulator.registry import import_operations

_COMMENT = re.compile(r"//\s*(\S+\.py:\d+.*?)\s*$")


@dataclass(frozen=True)
class Kernel:
    """A kernel of a loaded module."""

    loaded: Loaded
    name: str


class EmulatedDriver:
    """A device that is not there.

    Arguments:
      arch: "sm_90a", "sm_100a", …: what it is.
      order: when asynchronous operations are performed: "lazy", as late as somebody waits for them; "eager", at once;
        an integer, at random times drawn with this seed.
      source: text of the CUDA program, for reports with the user's lines.
      resident: clusters that run at the same time.
      strict: whether findings that are no faults of the machine raise, too.
      detect_uninitialized: whether reads of shared memory that nobody has written are findings.
      limit: basic blocks after which a kernel is taken for one that never ends.
      patience: rounds of polling with nothing under way before that is a deadlock.
      sms: multiprocessors that programs are told the device has.
      output: where printf goes, a function of text; None: standard output.
    """

    def __init__(
        self,
        arch: str = "sm_90a",
        order: str | int = "lazy",
        source: str | None = None,
        resident: int = 132,
        strict: bool = False,
        detect_uninitialized: bool = False,
        limit: int = 50_000_000,
        patience: int = 1000,
        output: Any = None,
        sms: int = 132,
    ) -> None:
        if order not in ("lazy", "eager") and not isinstance(order, int):
            raise ValueError(f"The order of asynchronous operations is 'lazy', 'eager' or a seed, not {order!r}.")
        import_operations()
        self.arch, self.order, self.source, self.resident, self.strict = arch, order, source, resident, strict
        self.detect_uninitialized, self.limit, self.patience = detect_uninitialized, limit, patience
        self.output = output
        self.sms = sms
        self.memory = spaces.Global()
        self.findings: list[Note] = []

    def write(self, text: str) -> None:
        """What device printf prints."""
        if self.output is None:
            sys.stdout.write(text)
        else:
            self.output(text)

    # --- memory ---------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int:
        """Address of new global memory, zeroed."""
        return self.memory.alloc(nbytes)

    def free(self, address: int) -> None:
        """Give memory back."""
        self.memory.free(address)

    def copy_in(self, address: int, data: Any) -> None:
        """Copy an array or bytes to the device."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        else:
            data = np.frombuffer(data, np.uint8)
        self._bytes(address, len(data))[:] = data

    def copy_out(self, address: int, nbytes: int) -> np.ndarray:
        """Copy from the device: uint8, shape (nbytes,)."""
        return self._bytes(address, nbytes).copy()

    def _bytes(self, address: int, nbytes: int) -> np.ndarray:
        start, end = self.memory.bounds(address - spaces.GLOBAL_BASE)
        offset = address - spaces.GLOBAL_BASE
        if nbytes and not start <= offset <= offset + nbytes <= end:
            raise ValueError(f"{nbytes} bytes at {address:#x} are not an allocation of this device.")
        return self.memory.bytes[offset : offset + nbytes]

    # --- modules --------------------------------------------------------------------------------------------
    def load_module(self, text: str | bytes) -> Loaded:
        """Load PTX.

        Raises: PtxError: it is not PTX.
        """
        return Loaded(self, text.decode() if isinstance(text, bytes) else text)

    def function(self, module: Loaded, name: str) -> Kernel:
        """A kernel of a module."""
        function = module.module.functions.get(name)
        if function is None or not function.entry:
            kernels = [f.name for f in module.module.functions.values() if f.entry]
            raise ValueError(f"The module has no kernel {name!r}; it has {', '.join(kernels) or 'none'}.")
        return Kernel(module, name)

    def variable(self, module: Loaded, name: str) -> tuple[int, int]:
        """Address and size of a global or constant variable."""
        address = module.address(name)
        if address is None or name not in module.module.variables:
            raise ValueError(f"The module has no variable {name!r}.")
        return address, module.module.variables[name].size

    def encode_tensor_map(self, *args: Any, **options: Any) -> bytes:
        """The 128 bytes of a tensor map; arguments and errors: `tensor_map.encode_tiled`."""
        from palladion.emulator.map_bytes import pack
        from palladion.emulator.tensor_map import encode_tiled

        arch = int("".join(c for c in self.arch if c.isdigit()))
        return pack(encode_tiled(*args, arch=arch, **options))

    # --- launching ------------------------------------------------------------------------------------------
    def launch(
        self,
        function: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[bytes],
        cluster: Sequence[int] = (1, 1, 1),
        smem: int = 0,
        stream: Any = None,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> Machine:
        """Run a kernel to its end.

        Arguments:
          grid, block, cluster: in x, y, z.
          args: the bytes of each parameter.
          smem: bytes of dynamic shared memory.

        Returns: the machine after the run.
        Raises: EmulationFault: what the program did wrong. ValueError: the launch itself.
        """
        del stream
        entry = function.loaded.module.functions[function.name]
        sizes = _three(grid, "grid"), _three(block, "block")
        clusters = _three(cluster, "cluster")
        declared = entry.directives.get("reqnctapercluster")
        explicit = "explicitcluster" in entry.directives or declared is not None or clusters != (1, 1, 1)
        if declared is not None:
            needed = _three(declared, "cluster")
            if clusters not in ((1, 1, 1), needed):
                raise ValueError(f"The kernel was compiled for clusters of {needed}, not {clusters}.")
            clusters = needed
        self._check(entry, *sizes, clusters, smem, args)
        params = bytearray()
        for value, p in zip(args, entry.params, strict=True):
            params.extend(bytes(-len(params) % p.align))
            params.extend(bytes(value))
        launch = Launch(*sizes, clusters, smem, pdl, cooperative, bytes(params), explicit)
        machine = Machine(self, function.loaded, function.name, launch)
        address = self.memory.alloc(max(len(params), 1), 256)
        machine.params = self.memory.bytes[address - spaces.GLOBAL_BASE :][: len(params)]
        machine.params[:] = np.frombuffer(bytes(params), np.uint8)
        machine.params_address = address
        try:
            if 0 not in sizes[0]:
                machine.execute()
        finally:
            self.memory.free(address)
        return machine

    def _check(self, entry: Any, grid: Any, block: Any, cluster: Any, smem: int, args: Sequence[bytes]) -> None:
        threads = block[0] * block[1] * block[2]
        required = entry.directives.get("reqntid")
        most = entry.directives.get("maxntid")
        if not 1 <= threads <= 1024:
            raise ValueError(f"A CTA has 1 to 1024 threads, not {threads}.")
        if required is not None and _three(required, "block") != block:
            raise ValueError(f"The kernel was compiled for blocks of {required}, not {block}.")
        if most is not None and threads > int(np.prod(most)):
            raise ValueError(f"The kernel was compiled for at most {int(np.prod(most))} threads, not {threads}.")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ValueError(f"A grid of {grid} is no whole number of clusters of {cluster}.")
        if int(np.prod(cluster)) > 16:
            raise ValueError(f"A cluster has at most 16 CTAs, not {int(np.prod(cluster))}.")
        if len(args) != len(entry.params):
            raise ValueError(f"{entry.name} has {len(entry.params)} parameters, and {len(args)} are given.")
        for value, p in zip(args, entry.params, strict=True):
            if len(bytes(value)) != p.size:
                raise ValueError(f"Parameter {p.name} has {p.size} bytes, and {len(bytes(value))} are given.")
        if smem < 0 or smem > 232448:
            raise ValueError(f"A CTA has at most 232448 bytes of shared memory, not {smem}.")

    def synchronize(self) -> None:
        """Launches are finished when they return."""

    def source_line(self, module: Module, instr: Instruction) -> str | None:
        """Where an instruction comes from: the CUDA line, and the user's line of the nearest comment above it."""
        where = module.source_line(instr)
        if where is None or self.source is None or instr.loc is None:
            return where
        lines = self.source.split("\n")[: instr.loc[-1]]
        for line in reversed(lines):
            match = _COMMENT.search(line)
            if match:
                return f"{where} from {match[1]}"
        return where


def _three(values: Sequence[int], what: str) -> tuple[int, int, int]:
    found = [*(int(v) for v in values), 1, 1, 1][:3]
    if len(values) > 3 or any(v < 0 for v in found):
        raise ValueError(f"A {what} has up to three sizes, not {tuple(values)}.")
    return found[0], found[1], found[2]


__all__ = ["EmulatedDriver", "EmulationFault", "Kernel"]
