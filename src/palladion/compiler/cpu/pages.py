"""Large pages for large results.

XLA takes a fresh buffer for every result, and above 32 MiB glibc takes it fresh from the system: the kernel then spends
more time on 16,384 page faults than on 64 MiB of results. Asking for transparent huge pages (madvise, as NumPy
does for its own arrays) makes one fault of 512. It is advice: where the system has none, or the memory has been touched
before, nothing happens. Source: madvise(2).
"""

from __future__ import annotations

from typing import Any

from palladion.compiler.cpu.builder import call_extern, const, i32, i64, ptr

LARGE = 4 << 20  # bytes; smaller results come from memory that the process already has
_PAGE = 4096
_MADV_HUGEPAGE = 14


def advise(b: Any, address: Any, nbytes: int) -> None:
    """Emit the advice that `nbytes` from an address on should lie in large pages.

    Arguments: address: a `ptr` value.
    """
    first = b.ptrtoint(address, i64)
    start = b.and_(b.add(first, const(_PAGE - 1)), const(-_PAGE))
    end = b.and_(b.add(first, const(nbytes)), const(-_PAGE))
    call_extern(b, i32, "madvise", b.inttoptr(start, ptr), b.sub(end, start), const(_MADV_HUGEPAGE, i32))
