"""The fuser: array operations around a kernel become part of the kernel (namespace `palladion.fuser`)."""
