"""The plain meaning of a kernel: through XLA (`interpret=True`), or program by program in Python (`EagerParams`)."""

from palladion.reference import machine_rules as machine_rules
from palladion.reference import random_rules as random_rules
from palladion.reference import triton_rules as triton_rules  # adds its rules to both interpreters' tables
