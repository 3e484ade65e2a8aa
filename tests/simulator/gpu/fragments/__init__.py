"""Every fragment of code in the Mosaic GPU reference, and prose that states a behaviour, as complete programs."""

from . import blackwell, copies, hopper, memory, sync, threads
from .spelling import FRAGMENTS, SPELLINGS, Fragment, Spelling

__all__ = [
    "FRAGMENTS",
    "SPELLINGS",
    "Fragment",
    "Spelling",
    "blackwell",
    "copies",
    "hopper",
    "memory",
    "sync",
    "threads",
]
