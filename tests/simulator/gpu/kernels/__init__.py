"""Mosaic GPU kernels written afresh, right by the strictest reading of the reference: `CORPUS`, cases by name."""

from .attention import ATTENTION
from .blackwell import BLACKWELL_MATMULS
from .common import Case, off_by
from .devices import DEVICES
from .hopper import HOPPER_MATMULS
from .hopper_threads import THREADED_MATMULS
from .irregular import IRREGULAR
from .shared_work import SHARED_WORK

CORPUS: dict[str, Case] = {
    **HOPPER_MATMULS,
    **THREADED_MATMULS,
    **BLACKWELL_MATMULS,
    **ATTENTION,
    **IRREGULAR,
    **SHARED_WORK,
    **DEVICES,
}

__all__ = ["CORPUS", "Case", "off_by"]
