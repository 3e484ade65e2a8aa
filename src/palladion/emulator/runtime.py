"""What generated code calls: NumPy types by their codes, merging under masks, special registers.

Nothing here knows PTX text; `translate.py` writes calls of these names.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from palladion.emulator.faults import UnknownInstruction

DTYPES: dict[str, Any] = {
    "u1": np.uint8, "i1": np.int8, "u2": np.uint16, "i2": np.int16, "u4": np.uint32, "i4": np.int32, "u8": np.uint64,
    "i8": np.int64, "f2": np.float16, "bf": ml_dtypes.bfloat16, "f4": np.float32, "f8": np.float64, "p": np.bool_,
    "x": np.uint64,
}  # fmt: skip
"""NumPy type of each type code; "x", 128 bits, are two numbers of the second dimension."""


class Unreached(Exception):
    """A rule does not know the instruction; raised again when the program reaches it."""


def both(m: Any, p: Any) -> Any:
    """Lanes of a mask (None: all) for which the guard `p` holds."""
    return p if m is None else m & p


def keep(registers: list[Any], s: Any, m: Any, new: tuple[tuple[int, Any], ...]) -> None:
    """Store values of the lanes in `m` in the register file."""
    for slot, value in new:
        row = registers[slot]
        mask = m if row.ndim == 1 else m[:, None]
        if isinstance(s, slice):
            np.copyto(row[s], value, where=mask)
        else:
            row[s] = np.where(mask, value, row[s])


def full(n: int, value: Any) -> Any:
    """A number for each of n lanes."""
    return np.broadcast_to(value, (n,)) if np.ndim(value) == 0 else value


def taken(value: Any, dtype: Any, n: int) -> Any:
    """What an operation gave, as items of a register: the same bits if the size is the same, else the same number."""
    array = np.asarray(value)
    if dtype is X:
        return array
    if array.dtype != dtype:
        if array.dtype.itemsize == np.dtype(dtype).itemsize and dtype is not np.bool_ and array.dtype != np.bool_:
            if not isinstance(value, (int, float)):
                array = array.view(dtype)
        if array.dtype != dtype:
            array = array.astype(dtype)
    return np.broadcast_to(array, (n,)) if array.ndim == 0 or len(array) != n else array


def unknown(g: Any, m: Any, why: str = "") -> None:
    """Raises UnknownInstruction if any lane executes the present instruction."""
    if m is None or np.any(m):
        message = "The emulator does not know this instruction" + (f" ({why})." if why else ".")
        raise UnknownInstruction(message, g.place())


class X:
    """Stands for the type of 128-bit registers in generated code."""


NAMESPACE: dict[str, Any] = {code.upper(): dtype for code, dtype in DTYPES.items()}
NAMESPACE.update(X=X, np=np, where=np.where, both=both, keep=keep, full=full, taken=taken, unknown=unknown)

_UNIFORM = {
    "ntid": "g.machine.block", "ctaid": "g.cta.id", "nctaid": "g.machine.grid", "clusterid": "g.cta.cluster.id",
    "nclusterid": "g.machine.clusters", "cluster_ctaid": "g.cta.cluster_id", "cluster_nctaid": "g.machine.cluster",
}  # fmt: skip

SPECIALS: dict[str, tuple[str, str, bool]] = {
    "%laneid": ("u4", "g.shape.lanes", False),
    "%warpid": ("u4", "g.shape.warp", False),
    "%nwarpid": ("u4", "U4(g.cta.warps)", True),
    "%smid": ("u4", "U4(g.cta.sm)", True),
    "%nsmid": ("u4", "U4(g.machine.sms)", True),
    "%gridid": ("u8", "U8(1)", True),
    "%clock": ("u4", "U4(g.machine.clock() & 0xFFFFFFFF)", True),
    "%clock_hi": ("u4", "U4(g.machine.clock() >> 32)", True),
    "%clock64": ("u8", "U8(g.machine.clock())", True),
    "%globaltimer": ("u8", "U8(g.machine.clock())", True),
    "%globaltimer_lo": ("u4", "U4(g.machine.clock() & 0xFFFFFFFF)", True),
    "%globaltimer_hi": ("u4", "U4(g.machine.clock() >> 32)", True),
    "%dynamic_smem_size": ("u4", "U4(g.machine.smem)", True),
    "%total_smem_size": ("u4", "U4(g.machine.shared_size)", True),
    "%aggr_smem_size": ("u4", "U4(g.machine.shared_size)", True),
    "%reserved_smem_offset_begin": ("u4", "U4(0)", True),
    "%reserved_smem_offset_end": ("u4", "U4(1024)", True),
    "%cluster_ctarank": ("u4", "U4(g.cta.rank)", True),
    "%cluster_nctarank": ("u4", "U4(len(g.cta.cluster.ctas))", True),
    "%is_explicit_cluster": ("p", "P(g.machine.explicit_cluster)", True),
    "%lanemask_eq": ("u4", "U4(1) << g.shape.lanes", False),
    "%lanemask_lt": ("u4", "(U4(1) << g.shape.lanes) - U4(1)", False),
    "%lanemask_le": ("u4", "(U4(2) << g.shape.lanes) - U4(1)", False),
    "%lanemask_ge": ("u4", "~((U4(1) << g.shape.lanes) - U4(1))", False),
    "%lanemask_gt": ("u4", "~((U4(2) << g.shape.lanes) - U4(1))", False),
}
"""Of each special register: type code, expression, and whether all lanes of a CTA have the same."""
for _axis, _letter in enumerate("xyz"):
    SPECIALS[f"%tid.{_letter}"] = ("u4", f"g.shape.tid[{_axis}]", False)
    for _name, _text in _UNIFORM.items():
        SPECIALS[f"%{_name}.{_letter}"] = ("u4", f"U4({_text}[{_axis}])", True)
