"""Which part of a pipeline's grid each core runs.

One parallel axis is cut into as many runs of consecutive indices as there are cores, as equal as can be. It is the
longest one that the cores divide, or else the longest; the sizes are then run-time values.

Source: the public documentation of `emit_pipeline`'s `core_axis`, `core_axis_name` and `dimension_semantics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.errors import count_of, mistake
from palladion.language import frames, ops
from palladion.language.tpu.params import GridDimensionSemantics


def split_over_cores(
    grid: Sequence[Any], core_axis: Any, core_axis_name: Any, semantics: Sequence[Any] | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """This core's part of a grid.

    Arguments:
      grid: sizes, np.int32 or run-time int32 scalars.
      core_axis: an axis of the kernel's grid, or several, along which the cores are; or None.
      core_axis_name: an axis of the kernel's core mesh, or several; or None.
      semantics: for each axis of the grid what its programs may do; None: none of them is parallel.

    Returns:
      the sizes of the part, and where it begins in the grid.

    Raises:
      ValueError: both axes are given, or there is no such axis. NotImplementedError: no axis is parallel.
    """
    whole = tuple(grid), (np.int32(0),) * len(grid)
    if core_axis is not None and core_axis_name is not None:
        headline = "A pipeline is split along core_axis or along core_axis_name, not along both."
        raise mistake(ValueError, headline, hint="core_axis for a grid of the kernel, core_axis_name for a core mesh")
    if core_axis is None and core_axis_name is None:
        return whole
    cores, core = _cores(core_axis, core_axis_name)
    if isinstance(cores, int) and cores == 1:
        return whole
    axis = _axis_to_split(grid, cores, semantics)
    sizes, offsets = list(grid), [np.int32(0)] * len(grid)
    size, cores = sizes[axis], np.int32(cores) if isinstance(cores, int) else cores
    if not isinstance(size, jaxlink.Tracer) and not isinstance(cores, jaxlink.Tracer) and size % cores == 0:
        sizes[axis] = np.int32(size // cores)
        offsets[axis] = core * sizes[axis]
    else:
        share, rest = lax.div(_array(size), _array(cores)), lax.rem(_array(size), _array(cores))
        sizes[axis] = share + lax.convert_element_type(core < rest, np.int32)
        offsets[axis] = core * share + lax.min(_array(core), _array(rest))
    return tuple(sizes), tuple(offsets)


def _array(x: Any) -> Any:
    return x if isinstance(x, jaxlink.Tracer) else np.int32(x)


def _cores(core_axis: Any, core_axis_name: Any) -> tuple[Any, Any]:
    """How many cores there are (an int where that is known), and which this is."""
    number = np.int32(0)
    if core_axis is not None:
        axes = core_axis if isinstance(core_axis, (tuple, list)) else (core_axis,)
        places = [(ops.num_programs(a), ops.program_id(a)) for a in axes]
    else:
        names = core_axis_name if isinstance(core_axis_name, (tuple, list)) else (core_axis_name,)
        mesh = frames.required("A pipeline (pltpu.emit_pipeline)").cores
        for name in names:
            if name not in mesh:
                raise mistake(
                    ValueError,
                    f"A pipeline cannot be split along {name!r}: it is not an axis of the kernel's core mesh.",
                    axes=", ".join(map(repr, mesh)) or "none: the kernel runs on a grid",
                    hint="pl.kernel(…, mesh=pltpu.TensorCoreMesh(axis_name='core')) has the axis 'core'",
                )
        places = [(mesh[name], lax.axis_index(name)) for name in names]
    count: Any = 1
    for size, place in places:
        count, number = count * size, number * size + place
    return count, number


def _axis_to_split(grid: Sequence[Any], cores: Any, semantics: Sequence[Any] | None) -> int:
    kinds = [None] * len(grid) if semantics is None else [GridDimensionSemantics(s) for s in semantics]
    if len(kinds) != len(grid):
        raise mistake(
            ValueError,
            f"dimension_semantics has {count_of(len(kinds), 'entry', 'entries')}, but the pipeline's grid has "
            f"{count_of(len(grid), 'axis', 'axes')}.",
            hint="give pltpu.PARALLEL or pltpu.ARBITRARY for each axis",
        )
    parallel = [a for a, kind in enumerate(kinds) if kind not in (None, GridDimensionSemantics.ARBITRARY)]
    if not parallel:
        raise mistake(
            NotImplementedError,
            "A pipeline can be split over cores only along a parallel axis, and it has none.",
            dimension_semantics=semantics,
            hint="dimension_semantics=(pltpu.PARALLEL, …) names the axes whose programs are independent",
        )

    def merit(axis):
        size = grid[axis]
        if isinstance(size, jaxlink.Tracer):
            return False, 0
        return isinstance(cores, int) and int(size) % cores == 0, int(size)

    return max(parallel, key=merit)
