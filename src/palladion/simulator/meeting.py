"""Where the devices of a `shard_map` meet: the last one to come runs the simulation for all of them.

Each device's callback comes in a thread of its own, made by XLA. All leave together, with their results or with the
error, or the others would wait for ever. A round is one execution of the call; the next device to come after a round is
complete begins the next round.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import Finding, KernelFinding, mistake
from palladion.simulator.values_table import held_dtype, held_shape

PATIENCE = 60.0  # seconds that a device waits for the others


class _Round:
    def __init__(self) -> None:
        self.operands: dict[int, Sequence[np.ndarray]] = {}
        self.complete, self.done = threading.Event(), threading.Event()
        self.results: list[Any] = []
        self.error: BaseException | None = None


class Meeting:
    """Arguments: simulate, from every device's operands to every device's results; parties, how many devices."""

    def __init__(self, simulate: Callable[[list[Any]], list[Any]], parties: int) -> None:
        self.simulate, self.parties = simulate, parties
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}  # that not all have come to, by number
        self._calls: dict[int, int] = {}  # how often each device came

    def __call__(self, device: Any, *operands: np.ndarray) -> tuple[Any, ...]:
        """Called by each device: its results."""
        try:
            return self._meet(device, operands)
        except Exception:
            _clear_at_exit()
            raise

    def _meet(self, device: Any, operands: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
        if self.parties == 1:
            return tuple(self.simulate([operands])[0])
        me = int(device)
        with self._lock:
            number = self._calls[me] = self._calls.get(me, 0) + 1
            mine = self._rounds.setdefault(number, _Round())
            mine.operands[me] = operands
            last = len(mine.operands) == self.parties
            if last:
                del self._rounds[number]
                mine.complete.set()
        if last:
            try:
                mine.results = self.simulate([mine.operands[d] for d in range(self.parties)])
            except BaseException as error:  # raised on every device
                mine.error = error
            mine.done.set()
        elif mine.complete.wait(PATIENCE):
            mine.done.wait()
        else:
            with self._lock:  # whoever comes now, comes to a new execution
                self._rounds.clear()
                self._calls.clear()
            raise KernelFinding(_absent(sorted(mine.operands), self.parties))
        if mine.error is not None:
            raise mine.error
        return tuple(mine.results[me])

    def lower(self, ctx: Any, axes: Mapping[str, int], args: Sequence[Any]) -> Any:
        """Lower a call: a host callback with the device's logical id in front of its operands."""
        device = jaxlink.lower_as_value(ctx, lambda: lax.axis_index(tuple(axes)) if axes else np.int32(0))
        index = jaxlink.ShapedArray((), np.dtype(np.int32))
        avals_in, avals_out = (
            [jaxlink.ShapedArray(held_shape(a), held_dtype(a)) for a in avals]
            for avals in (ctx.avals_in, ctx.avals_out)
        )
        ctx = ctx.replace(avals_in=[index, *avals_in], avals_out=avals_out)
        return jaxlink.lower_host_call(ctx, self, [device, *args])


@functools.cache
def _clear_at_exit() -> None:
    """JAX prints a failed call once more when Python ends, with two tracebacks: see to it that it is cleared before."""
    atexit.register(_clear)


def _clear() -> None:
    try:
        jax.effects_barrier()
    except Exception as error:
        headline = next((line for line in str(error).splitlines() if "KernelFinding" in line), "see above")
        print(f"palladion: a call on a simulated machine had failed ({headline})", file=sys.stderr)


def _absent(here: Sequence[int], parties: int) -> Finding:
    missing = [d for d in range(parties) if d not in here]
    return Finding(
        "collective-mismatch",
        "error",
        f"Only devices {', '.join(map(str, here))} of {parties} came to the kernel call within {PATIENCE:.0f} s.",
        when=f"missing: {', '.join(map(str, missing))}",
        hint="every device of the shard_map has to make the call, the same number of times",
    )


def mesh_axes(ctx: Any) -> dict[str, int]:
    """The named axes, and their sizes, of the shard_map around a call that is being lowered, in the mesh's order."""
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", frozenset())
    automatic = [a for a in context.mesh.axis_names if a not in manual] if manual else []
    if automatic:
        raise mistake(
            NotImplementedError,
            "A kernel on a simulated machine is called in a shard_map that leaves axes of its mesh automatic: "
            f"{', '.join(map(repr, automatic))}.",
            hint="let jax.shard_map take all axes of the mesh: leave out axis_names",
        )
    return {a: context.mesh.shape[a] for a in context.mesh.axis_names if a in manual} if manual else {}
