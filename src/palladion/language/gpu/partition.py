"""`plgpu.CopyPartition`: who gets what of a collective copy that only the first block's barrier is told of.

Source: the Pallas Mosaic GPU reference, "Leader-tracked collective copies".
"""

from __future__ import annotations

import dataclasses
import operator
from typing import ClassVar

from palladion.errors import kind_of, mistake


class CopyPartition:
    """How a collective copy with `leader_tracked` is shared out.

    `CopyPartition.PARTITIONED(axis)`: each block gets its part of the source along `axis`, an int.
    `CopyPartition.REPLICATED`: each block gets all of it.
    """

    PARTITIONED: ClassVar[type[Partitioned]]
    REPLICATED: ClassVar[Replicated]


@dataclasses.dataclass(frozen=True)
class Partitioned(CopyPartition):
    """`CopyPartition.PARTITIONED(axis)`.

    Raises:
      TypeError: the axis is not an integer.
    """

    axis: int

    def __post_init__(self) -> None:
        try:
            if isinstance(self.axis, bool):
                raise TypeError
            object.__setattr__(self, "axis", operator.index(self.axis))
        except TypeError:
            headline = f"plgpu.CopyPartition.PARTITIONED takes an axis, an integer, not {kind_of(self.axis)}."
            raise mistake(TypeError, headline, hint="plgpu.CopyPartition.PARTITIONED(0)") from None

    def __repr__(self) -> str:
        return f"PARTITIONED({self.axis})"


@dataclasses.dataclass(frozen=True)
class Replicated(CopyPartition):
    """What `CopyPartition.REPLICATED` is."""

    def __repr__(self) -> str:
        return "REPLICATED"


CopyPartition.PARTITIONED = Partitioned
CopyPartition.REPLICATED = Replicated()
