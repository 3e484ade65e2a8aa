"""plcpu: kernels as native code on the processor that runs this program.

    from palladion import cpu as plcpu
    pl.pallas_call(kernel, …, compiler_params=plcpu.CompilerParams())

`palladion.config.cpu = "native"` does the same for every kernel call of a program that has no `interpret`.
"""

from palladion.language.cpu.params import CompilerParams as CompilerParams

__all__ = ["CompilerParams"]
