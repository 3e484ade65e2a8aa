"""The Mosaic GPU dialect: its memories, parameters and block specs. `palladion.mosaic_gpu` re-exports it."""
