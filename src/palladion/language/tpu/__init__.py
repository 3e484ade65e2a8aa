"""The TPU dialect: memories, parameters, scalar prefetch, hardware figures. `palladion.tpu` re-exports it."""
