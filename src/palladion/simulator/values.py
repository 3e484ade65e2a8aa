"""What array primitives mean in NumPy: all that the simulated machines compute with.

`array_function(eqn)` is the function of an equation, `ARRAYS` the table of rules; the families of rules register
themselves on import. See `values_table.py` for what a rule is and how values are held.
"""

from palladion.simulator import (  # noqa: F401 - they register their rules
    values_casts,
    values_elementwise,
    values_indexing,
    values_math,
    values_products,
    values_random,
    values_reduce,
    values_scatter,
    values_shapes,
    values_sort,
    values_windows,
)
from palladion.simulator.values_table import ARRAYS, array_function, straight_line

__all__ = ["ARRAYS", "array_function", "straight_line"]
