"""`pltpu.PrefetchScalarGridSpec`: a grid whose index maps read scalars known before the kernel starts.

The first operands of the call are copied to SMEM ahead of everything else. Index maps get them as Refs after
the grid indices, the kernel as its first parameters, so that which block comes next may depend on data
(block-sparse and grouped matrix products, paged attention). Source: the public Pallas TPU documentation on
scalar prefetch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from palladion.language.blocks import GridSpec, no_block_spec
from palladion.language.fields import check_fields, integer

__all__ = ["PrefetchScalarGridSpec"]


@dataclasses.dataclass(init=False)
class PrefetchScalarGridSpec(GridSpec):
    """A `pl.GridSpec` with scalar-prefetch operands, for `pallas_call(grid_spec=...)`.

    Arguments:
      num_scalar_prefetch: how many of the call's first operands are prefetched; they have no BlockSpec.
      grid, in_specs, out_specs, scratch_shapes: as in `pl.GridSpec`.

    Raises:
      TypeError, ValueError: `num_scalar_prefetch` is not a non-negative integer.
    """

    num_scalar_prefetch: int

    def __init__(
        self,
        num_scalar_prefetch: int,
        grid: Any = (),
        in_specs: Any = no_block_spec,
        out_specs: Any = no_block_spec,
        scratch_shapes: Any = (),
    ) -> None:
        super().__init__(grid, in_specs, out_specs, scratch_shapes)
        self.num_scalar_prefetch = num_scalar_prefetch
        check_fields(self, "pltpu.PrefetchScalarGridSpec", {"num_scalar_prefetch": integer(0, "number of operands")})
