"""Kernels for TPU: a kernel's jaxpr becomes a Mosaic TPU module, which libtpu compiles."""
