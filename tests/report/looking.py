"""What the tests of `palladion check` share: one kernel call, recorded and looked at without being run."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import palladion as pl
from palladion.errors import Finding
from palladion.language import primitive
from palladion.report.analysis import CallReport, analyse
from palladion.report.calls import Recorder
from palladion.report.findings import CHECKS


class _Seen(Exception):
    """Ends a call once it is recorded, so that nothing is compiled."""


def record(call: Callable[..., Any], *operands: Any) -> Recorder:
    """The recorder of one call that is not carried out."""
    recorder = Recorder()

    def observer(operands, params):
        recorder(operands, params)
        raise _Seen

    with primitive.observing(observer), contextlib.suppress(_Seen), warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.PalladionWarning)  # the findings say the same
        call(*operands)
    assert len(recorder.calls) == 1
    return recorder


def look(call: Callable[..., Any], *operands: Any) -> CallReport:
    """The report of one call that is not carried out."""
    (recorded,) = record(call, *operands).calls
    return analyse(recorded, CHECKS)


def found(report: CallReport, kind: str) -> list[Finding]:
    """The findings of a kind."""
    return [finding for finding in report.findings if finding.kind == kind]


def levels(report: CallReport) -> dict[str, str]:
    """kind -> level, for reports with at most one finding of a kind."""
    result = {finding.kind: finding.level for finding in report.findings}
    assert len(result) == len(report.findings), report.findings
    return result


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def copying(
    block: Any, grid: Any, in_map: Any, out_map: Any = None, *, shape: Any, out_shape: Any = None, **options: Any
) -> CallReport:
    """The report of a copy of a float32 array in blocks; the output's blocks are the input's but for their map."""
    call = pl.pallas_call(
        options.pop("kernel", copy_kernel),
        jax.ShapeDtypeStruct(out_shape or shape, options.get("dtype", jnp.float32)),
        grid=grid,
        in_specs=[pl.BlockSpec(block, in_map)],
        out_specs=pl.BlockSpec(block, out_map or in_map),
        **{key: value for key, value in options.items() if key != "dtype"},
    )
    return look(call, jnp.zeros(shape, options.get("dtype", jnp.float32)))
