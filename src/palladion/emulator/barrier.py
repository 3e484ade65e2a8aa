"""The state of one mbarrier and its arithmetic, with the mistakes that hardware leaves undefined made visible.

A barrier is a phase number, the arrivals each phase expects, the arrivals still pending in this phase and a
signed count of bytes still expected (tx-count). The phase ends, at once and atomically, when both counts are
zero after an arrival or a `complete_tx`. Facts file, section 1.

In shared memory the barrier is one 64-bit word (`word`), rewritten at each change: bytes that something else has
overwritten no longer hold it, which is how reuse without `mbarrier.inval` is noticed.
"""

from dataclasses import dataclass

LIMIT = (1 << 20) - 1
"""Largest arrival count, and largest number of bytes that a phase may have outstanding."""


class BarrierError(ValueError):
    """A misuse of one mbarrier; `kind` is the kind of fault."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass
class Barrier:
    """One initialised mbarrier. `offset`: bytes in the CTA's shared window; `by`: the thread that initialised it;
    `published`: whether another CTA may know of it (fence or cluster barrier since the initialisation);
    `arrived`, `received`: arrivals and bytes so far in this phase, for reports."""

    offset: int
    expected: int
    by: int = -1
    pending: int = 0
    phase: int = 0
    tx: int = 0
    published: bool = False
    arrived: int = 0
    received: int = 0

    def __post_init__(self):
        if not 1 <= self.expected <= LIMIT:
            raise BarrierError(
                "barrier-arrivals", f"mbarrier.init with a count of {self.expected}; it must be 1 to {LIMIT}"
            )
        self.pending = self.expected

    @property
    def word(self) -> int:
        """The 64 bits that shared memory holds for it. Opaque to programs; bit 63 is the phase's parity."""
        return (self.phase & 1) << 63 | 1 << 62 | (self.tx & 0x1FFFFF) << 40 | self.expected << 20 | self.pending

    @property
    def token(self) -> int:
        """What an arrival returns: the phase it arrives at and the arrivals pending before it."""
        return (self.phase & 0x7FFFFFFF) << 32 | self.pending

    def parity_done(self, parity: int) -> bool:
        """Whether the phase of that parity, this one or the one before, has ended."""
        return (self.phase & 1) != (parity & 1)

    def token_done(self, token: int) -> bool:
        """Whether the phase that a token belongs to has ended."""
        return ((self.phase & 0x7FFFFFFF) - (token >> 32)) & 0x7FFFFFFF != 0

    def expect(self, count: int) -> None:
        """`expect_tx`: the phase waits for `count` more bytes."""
        self._change_tx(count)

    def complete(self, count: int) -> bool:
        """`complete_tx`: `count` bytes have landed. Returns whether the phase has ended."""
        self.received += count
        self._change_tx(-count)
        return self._check()

    def arrive(self, count: int = 1, drop: bool = False, may_complete: bool = True) -> bool:
        """`arrive` or `arrive_drop` of `count`. Returns whether the phase has ended."""
        if not 1 <= count <= LIMIT:
            raise BarrierError("barrier-arrivals", f"an arrival count of {count}; it must be 1 to {LIMIT}")
        if count > self.pending:
            raise BarrierError(
                "barrier-arrivals",
                f"{count} arrival{'s' * (count > 1)} where {self.pending} of {self.expected} are still "
                f"pending: more arrivals than the phase expects ({self})",
            )
        if not may_complete and count == self.pending and self.tx == 0:
            raise BarrierError("barrier-arrivals", f"arrive.noComplete of {count} would end the phase ({self})")
        if drop:
            self.expected -= count
        self.pending -= count
        self.arrived += count
        return self._check()

    def pledge(self) -> None:
        """One more pending arrival in this phase: `cp.async.mbarrier.arrive` without `.noinc`."""
        if self.pending >= LIMIT:
            raise BarrierError("barrier-arrivals", f"more than {LIMIT} arrivals pending ({self})")
        self.pending += 1

    def _change_tx(self, change: int) -> None:
        self.tx += change
        if abs(self.tx) > LIMIT:
            raise BarrierError(
                "barrier-bytes", f"the bytes outstanding pass the limit of {LIMIT} of an mbarrier ({self})"
            )

    def _check(self) -> bool:
        if self.pending == 0 and self.tx < 0:
            raise BarrierError(
                "barrier-bytes",
                f"every arrival of the phase is in, and {-self.tx} bytes more than expected have landed ({self})",
            )
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.expected
        self.arrived = self.received = 0
        return True

    def __str__(self) -> str:
        return (
            f"mbarrier at shared byte {self.offset:#x}, phase {self.phase}: {self.arrived} arrived, "
            f"{self.pending} of {self.expected} arrivals pending, {self.received} bytes landed, "
            f"{self.tx} bytes still expected"
        )
