"""`pl.fuser`: fuse array operations around a kernel into it, `from palladion import fuser`.

A kernel's author decorates the function that calls `pallas_call` with `fusible`; its user decorates a function that
calls it, with whatever array operations before and after, with `fuse`. Guide: docs/fuser.md.
"""

from palladion.language.fuser.block_specs import pull_block_spec, push_block_spec, push_pull_block_spec
from palladion.language.fuser.custom import custom_fusion
from palladion.language.fuser.fuse import evaluate, fuse
from palladion.language.fuser.fusible import Fusion, fusible
from palladion.language.fuser.transforms import BlockIndexTransform
from palladion.language.fuser.values import (
    block_spec_with_prefetch,
    filter_no_block_specs,
    get_fusion_values,
    get_stateful_input_fusion_values,
    get_stateful_output_fusion_values,
    make_scalar_prefetch_handler,
)

__all__ = [
    "BlockIndexTransform",
    "Fusion",
    "block_spec_with_prefetch",
    "custom_fusion",
    "evaluate",
    "filter_no_block_specs",
    "fuse",
    "fusible",
    "get_fusion_values",
    "get_stateful_input_fusion_values",
    "get_stateful_output_fusion_values",
    "make_scalar_prefetch_handler",
    "pull_block_spec",
    "push_block_spec",
    "push_pull_block_spec",
]
