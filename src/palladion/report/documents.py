"""What a check found, as programs read it: one JSON document, described in docs/check.md.

Keys are only ever added; a change of meaning raises `schema`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from palladion import jaxlink
from palladion.compiler.reports import CompiledCall
from palladion.report.analysis import CallReport
from palladion.report.footprint import Buffer
from palladion.report.tables import count_levels

SCHEMA = 1


def document(
    program: str,
    arguments: Sequence[str],
    reports: Sequence[CallReport],
    symbolic: int,
    exit_status: int,
    failure: BaseException | None,
) -> dict[str, Any]:
    """The document of one check.

    Arguments:
      program, arguments: what was run.
      reports: of its calls.
      symbolic: how many calls were left out.
      exit_status: of the check.
      failure: what ended the program, if it failed.
    """
    return {
        "schema": SCHEMA,
        "program": program,
        "arguments": list(arguments),
        "exit_status": exit_status,
        "failure": None if failure is None else {"type": type(failure).__name__, "message": str(failure)},
        "counts": {f"{level}s": n for level, n in count_levels(reports).items()},
        "symbolic": symbolic,
        "calls": [_call(report) for report in reports],
    }


def _call(report: CallReport) -> dict[str, Any]:
    call, footprint = report.call, report.footprint
    known = None not in report.grid
    return {
        "name": call.name,
        "kernel": call.kernel_at,
        "called_at": call.called_at,
        "count": call.count,
        "traced": call.traced,
        "vmap": [list(batch) for batch in call.batches],
        "target": report.target.value,
        "grid": list(report.grid),
        "programs": math.prod(n or 0 for n in report.grid) if known else None,
        "buffers": [_buffer(row) for row in footprint.buffers],
        "sampled": footprint.sampled,
        "flops": footprint.flops,
        "transcendentals": footprint.transcendentals,
        "moved_bytes": footprint.moved_bytes,
        "intensity": footprint.intensity,
        "on_chip": {
            "bytes": footprint.vector_bytes,
            "tiled_bytes": footprint.vmem_bytes,
            "scalar_bytes": footprint.scalar_bytes,
            "limits": [
                {
                    "machine": limit.machine,
                    "names": list(limit.names),
                    "memory": limit.memory,
                    "capacity_bytes": limit.capacity,
                    "used_bytes": limit.used,
                    "fits": limit.fits,
                }
                for limit in footprint.limits
            ],
        },
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "compiled": [_compiled(call) for call in report.compiled],
    }


def _compiled(call: CompiledCall) -> dict[str, Any]:
    left_out = ("name", "kernel", "called_at", "stages")  # the call itself has them
    return {key: value for key, value in call.as_dict().items() if key not in left_out}


def _buffer(row: Buffer) -> dict[str, Any]:
    dtype = row.array.dtype
    return {
        "role": row.role,
        "name": row.name,
        "shape": list(row.array.shape),
        "dtype": str(dtype if jaxlink.is_opaque(dtype) else jnp.dtype(dtype).name),
        "block": None if row.block is None else list(row.block),
        "memory_space": row.memory_space,
        "block_bytes": row.block_bytes,
        "buffers": row.buffers,
        "copies": row.copies,
        "moved_bytes": row.moved_bytes,
        "index_map": row.index_map,
    }
