"""The Triton dialect: its parameters and GPU figures. `palladion.triton` re-exports it."""
