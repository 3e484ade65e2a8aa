"""`plgpu.kernel`: a function that every thread of a GPU kernel runs, on whole arrays in GMEM.

It is `pl.kernel` on a `plgpu.Mesh` that it makes from its own arguments. The reference's spelling of two of them,
`out_shape` and `scratch_shapes`, is JAX's former one; `out_type` and `scratch_types` are the same.

Source: the Mosaic GPU reference, "Using core_map".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from palladion.errors import mistake, suggesting_keywords
from palladion.language import kernel as any_kernel
from palladion.language.cost import CostEstimate
from palladion.language.gpu.mesh import Mesh

__all__ = ["kernel"]

_later: Any = object()  # not given


@suggesting_keywords
def kernel(
    body: Any = _later,
    out_type: Any = _later,
    *,
    out_shape: Any = _later,
    scratch_types: Any = _later,
    scratch_shapes: Any = _later,
    compiler_params: Any = None,
    cost_estimate: CostEstimate | None = None,
    grid: Sequence[int] = (),
    grid_names: Sequence[str] = (),
    cluster: Sequence[int] = (),
    cluster_names: Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    interpret: Any = None,
    debug: bool = False,
    kernel_name: str | None = None,
    name: str | None = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Make a JAX function of a kernel for a GPU; also a decorator, `@plgpu.kernel(out_type=…)`.

        @functools.partial(plgpu.kernel, out_shape=x, grid=(2,), grid_names=("x",))
        def add_one(x_ref, y_ref):
            here = pl.ds(lax.axis_index("x") * 128, 128)
            y_ref[here] = x_ref[here] + 1

    Arguments:
      body: a function of Refs that returns None: of the operands, then the outputs, then the scratch buffers (a dict
        of scratch types is passed by keyword). Operands and outputs are whole, in GMEM, and the same for all blocks;
        scratch is a block's own, and shared by its threads.
      out_type, out_shape: a pytree of things with shape and dtype; None in it is no output, and the kernel gets None.
      scratch_types, scratch_shapes: buffer types, a list or tuple, or a dict; they may be nested. One of a plain shape
        and dtype is in SMEM.
      grid, grid_names, cluster, cluster_names, num_threads, thread_name, kernel_name: as in `plgpu.Mesh`.
      compiler_params, interpret, cost_estimate, debug, name, metadata: as in `pl.pallas_call`.

    Returns:
      a function of the operands: one array for each leaf of out_type, in its structure.

    Raises:
      ValueError, TypeError: an argument or the kernel is not as described.
    """
    out = _one_of("out_type", out_type, "out_shape", out_shape)
    scratch = _one_of("scratch_types", scratch_types, "scratch_shapes", scratch_shapes)
    mesh = Mesh(
        grid=grid, grid_names=grid_names, cluster=cluster, cluster_names=cluster_names, num_threads=num_threads,
        thread_name=thread_name, kernel_name=kernel_name,
    )  # fmt: skip
    make = functools.partial(
        any_kernel.make_kernel, function="plgpu.kernel", out_type=out, mesh=mesh, scratch_types=scratch,
        compiler_params=compiler_params, interpret=interpret, cost_estimate=cost_estimate, debug=debug,
        name=name or kernel_name, metadata=metadata,
    )  # fmt: skip
    return make if body is _later else make(body)


def _one_of(name: str, value: Any, older: str, older_value: Any) -> Any:
    """The one of two spellings that is given; () if neither is."""
    if value is not _later and older_value is not _later:
        headline = f"plgpu.kernel got {name} and {older}, which are two names of one argument."
        raise mistake(TypeError, headline, hint=f"give {name} only")
    given = [v for v in (value, older_value) if v is not _later]
    return given[0] if given else ()
