"""Blocks of a cluster: their ranks, as C++.

A block's rank in its cluster is row-major over the cluster's axes, and so is `blockIdx.x` modulo the cluster's size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from palladion.compiler.gpu.values import Scalar


def size(unit: Any) -> int:
    """Blocks of a cluster; 1: there are no clusters."""
    return 1 if unit.mesh is None else math.prod(unit.mesh.cluster)


def strides(unit: Any) -> dict[Any, tuple[int, int]]:
    """{cluster axis: (its size, how far its step moves the rank)}."""
    names, sizes = unit.mesh.cluster_names, unit.mesh.cluster
    return {n: (s, math.prod(sizes[k + 1 :])) for k, (n, s) in enumerate(zip(names, sizes))}


def rank_of(unit: Any, block_id: Mapping[Any, Any]) -> str:
    """C++ of the rank of a block: the coordinates given (`Index`es), and one's own along other axes."""
    parts = []
    for name, (_, stride) in strides(unit).items():
        coordinate = block_id.get(name)
        value = unit.axes[name] if coordinate is None else coordinate.value
        if value.value is not None and int(value.value) == 0:
            continue
        text = value.text if value.text.isidentifier() or value.text.isdigit() else f"({value.text})"
        parts.append(text if stride == 1 else f"{text} * {stride}")
    return " + ".join(parts) or "0"


@dataclasses.dataclass(frozen=True)
class Partners:
    """Blocks that do something together: own coordinates but along some axes.

    Attributes:
      offsets: of their ranks from `base`, ascending. base: C++ of the rank of the first.
      number: C++ of this block's number among them.
    """

    offsets: tuple[int, ...]
    base: str
    number: Scalar

    @property
    def count(self) -> int:
        return len(self.offsets)

    def ranks(self) -> list[str]:
        """C++ of their ranks."""
        return [str(o) if self.base == "0" else self.base if not o else f"{self.base} + {o}" for o in self.offsets]

    def mask(self) -> str:
        """C++ of the set of their ranks as bits."""
        bits = sum(1 << o for o in self.offsets)
        return f"(u16){bits}" if self.base == "0" else f"(u16)({bits} << ({self.base}))"


def along(unit: Any, axes: Sequence[Any]) -> Partners:
    """The blocks along cluster axes (all of them at once), this one included."""
    names = {n for a in axes for n in (a if isinstance(a, tuple) else (a,))}
    steps = strides(unit)
    ranges = [[k * stride for k in range(n)] for name, (n, stride) in steps.items() if name in names]
    offsets = tuple(sorted(sum(c) for c in itertools.product(*ranges)))
    others = {name: None for name in steps if name not in names}
    base = _own(unit, others)
    own, below = [], math.prod(n for name, (n, _) in steps.items() if name in names)
    for name, (n, _) in steps.items():
        if name in names:
            below //= n
            text = unit.axes[name].text
            if unit.axes[name].value is None:
                own.append(text if below == 1 else f"{text} * {below}")
    return Partners(offsets, base, Scalar(" + ".join(own) or "0", "int32"))


def _own(unit: Any, names: Mapping[Any, Any]) -> str:
    parts = []
    for name, (_, stride) in strides(unit).items():
        if name in names and unit.axes[name].value is None:
            text = unit.axes[name].text
            parts.append(text if stride == 1 else f"{text} * {stride}")
    return " + ".join(parts) or "0"


@dataclasses.dataclass(frozen=True)
class Listed(Partners):
    """Partners whose ranks are each an expression."""

    texts: tuple[str, ...] = ()

    def ranks(self) -> list[str]:
        return list(self.texts)


def along_each(unit: Any, axes: Sequence[Any], own: Partners) -> Partners:
    """The blocks that differ from this one along one of several (groups of) axes only, itself once."""
    texts: dict[str, None] = {}
    me = rank_of(unit, {})
    texts[me] = None
    for group in axes:
        part = along(unit, group)
        total = part.count
        for step in range(1, total):  # the others, cyclically from one's own
            number = f"({part.number.text} + {step}) % {total}"
            texts[_rank_at(unit, group, number, part)] = None
    return Listed(tuple(range(len(texts))), own.base, own.number, tuple(texts))


def _rank_at(unit: Any, group: Any, number: str, part: Partners) -> str:
    names = group if isinstance(group, tuple) else (group,)
    steps, below, parts = strides(unit), part.count, []
    for name, (n, stride) in steps.items():
        if name in names:
            below //= n
            parts.append(f"({number}) / {below} % {n} * {stride}")
    return " + ".join([*([] if part.base == "0" else [part.base]), *parts])
