"""All rules of the TPU compiler, by being imported: one module for each kind of operation."""

from palladion.compiler.tpu import rules_casts as rules_casts
from palladion.compiler.tpu import rules_control as rules_control
from palladion.compiler.tpu import rules_conv as rules_conv
from palladion.compiler.tpu import rules_dma as rules_dma
from palladion.compiler.tpu import rules_dot as rules_dot
from palladion.compiler.tpu import rules_elementwise as rules_elementwise
from palladion.compiler.tpu import rules_functions as rules_functions
from palladion.compiler.tpu import rules_gather as rules_gather
from palladion.compiler.tpu import rules_kernel as rules_kernel
from palladion.compiler.tpu import rules_random as rules_random
from palladion.compiler.tpu import rules_reduce as rules_reduce
from palladion.compiler.tpu import rules_refs as rules_refs
from palladion.compiler.tpu import rules_shapes as rules_shapes
from palladion.compiler.tpu import rules_sort as rules_sort
