"""Masked loads and stores on the simulated TPU: lanes that are off touch nothing, wherever their index points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from palladion.errors import count_of
from palladion.language.masked import masked_load_p, masked_store_p
from palladion.simulator.code import Compiler, View, location, placeholders
from palladion.simulator.memory import Buffer, Region, read_outside
from palladion.simulator.tpu.rules import RULES, note_read, note_write, refuse_hbm


class _Lanes:
    """Where the lanes of a view lie in its buffer."""

    def __init__(self, eqn: Any, transforms: Any, access: str) -> None:
        self.eqn, self.view, self.access = eqn, View(transforms), access

    def plain(self, operands: Any) -> Region | None:
        """The region, if it lies inside and no element is in it twice."""
        if self.view.outside(operands) is not None:
            return None
        region = self.view.region(operands)
        arrays = any(isinstance(i, np.ndarray) for kind, how in region.views if kind == "index" for i in how)
        return None if arrays else region

    def elements(self, agent: Any, buffer: Buffer, operands: Any, mask: Any) -> np.ndarray:
        """For each lane the number of its element in the buffer, -1 where it lies outside.

        Raises:
          KernelFinding: a lane that is on lies outside.
        """
        numbers: Any = np.arange(buffer.data.size).reshape(buffer.shape)
        for kind, how in self.view.region(operands).views:
            numbers = read_outside(numbers, how, -1) if kind == "index" else Region([(kind, how)]).get(numbers)
        numbers = np.asarray(numbers)
        if (np.asarray(mask) & (numbers < 0)).any():
            core = agent.place
            core.machine.found(
                "out-of-bounds",
                f"Out of bounds {self.access}: a lane whose mask is on lies outside {buffer.label}, which has "
                f"{count_of(buffer.data.size, 'element')}.",
                where=location(self.eqn),
                when=core.when(),
                operand=buffer.label,
                hint="let the mask be off wherever the index leaves the Ref",
            )
        return numbers

    def switched_on(self, agent: Any, buffer: Buffer, operands: Any, region: Region, on: Any) -> Region:
        """Of a region, the elements whose lanes are on: those are accessed."""
        if buffer.writes is None or np.all(on) or any(kind == "bitcast" for kind, _ in region.views):
            return region
        numbers = self.elements(agent, buffer, operands, on)
        return Region([("reshape", (-1,)), ("index", (numbers[np.broadcast_to(on, numbers.shape)],))])


@RULES.rule(masked_load_p)
def _masked_load(compiler: Compiler, eqn: Any) -> Callable:
    refuse_hbm(eqn, "read")
    transforms, mask, other = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn, 1))
    lanes, (_, site_of) = _Lanes(eqn, transforms, "read"), compiler.machine
    site, dtype = site_of(eqn), eqn.outvars[0].aval.dtype

    def load(agent: Any, *operands: Any) -> Any:
        buffer = operands[0]
        on = np.bool_(True) if mask is None else operands[mask.k]
        off = agent.place.machine.fill(dtype) if other is None else operands[other.k]
        region = lanes.plain(operands)
        if region is not None:
            note_read(agent, eqn, site, buffer, lanes.switched_on(agent, buffer, operands, region, on))
            return np.where(on, region.get(buffer.data), off)
        numbers = lanes.elements(agent, buffer, operands, on)
        region = Region([("reshape", (-1,)), ("index", (numbers[np.broadcast_to(on, numbers.shape)],))])
        note_read(agent, eqn, site, buffer, region)
        found = buffer.data.reshape(-1)[np.maximum(numbers, 0)] if buffer.data.size else np.zeros(numbers.shape, dtype)
        return np.where(on & (numbers >= 0), found, off)

    return load


@RULES.rule(masked_store_p)
def _masked_store(compiler: Compiler, eqn: Any) -> Callable:
    refuse_hbm(eqn, "write")
    transforms, mask = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn, 2))
    lanes, (_, site_of) = _Lanes(eqn, transforms, "write"), compiler.machine
    site = site_of(eqn)

    def store(agent: Any, *operands: Any) -> list:
        buffer, new = operands[0], operands[1]
        on = np.bool_(True) if mask is None else operands[mask.k]
        region = lanes.plain(operands)
        if region is not None:
            note_write(agent, eqn, site, buffer, lanes.switched_on(agent, buffer, operands, region, on))
            region.put(buffer.data, new if mask is None else np.where(on, new, region.get(buffer.data)))
            return []
        numbers = lanes.elements(agent, buffer, operands, on)
        on = np.broadcast_to(on, numbers.shape)
        note_write(agent, eqn, site, buffer, Region([("reshape", (-1,)), ("index", (numbers[on],))]))
        buffer.data[np.unravel_index(numbers[on], buffer.shape)] = np.broadcast_to(new, numbers.shape)[on]
        return []

    return store
