"""What goes wrong on the emulated machine, said with the instruction, its source line, and who executed it."""

from __future__ import annotations

from dataclasses import dataclass, field

from palladion.errors import explain


@dataclass
class Place:
    """Where something happened.

    Attributes:
      kernel: name of the kernel; line, text: of the PTX; source: `file:line` of what was compiled to it.
      cta: (x, y, z) of the CTA; warp: its warp; lane: a lane of that warp; thread: linear index in the CTA.
    """

    kernel: str = ""
    line: int = 0
    text: str = ""
    source: str | None = None
    cta: tuple[int, int, int] | None = None
    thread: int | None = None

    def __str__(self) -> str:
        parts = [f"PTX line {self.line}: {self.text}"] if self.line else []
        if self.source:
            parts.append(f"source {self.source}")
        if self.cta is not None:
            who = f"CTA ({', '.join(map(str, self.cta))})"
            if self.thread is not None:
                who += f", thread {self.thread} (warp {self.thread // 32}, lane {self.thread % 32})"
            parts.append(who)
        if self.kernel:
            parts.append(f"kernel {self.kernel}")
        return "; ".join(parts)


class EmulationFault(RuntimeError):
    """The emulated program did something that the machine forbids.

    Attributes:
      kind: "out-of-bounds", "misaligned", "deadlock", "illegal-shape", …: those of a finding.
      message: one line.
      place: where; filled in by the machine when it is not given.
      hint: how to mend it, if that can be said.
      details: more lines, such as what each group of lanes waits for.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        place: Place | None = None,
        hint: str | None = None,
        details: list[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.place, self.hint, self.details = kind, message, place, hint, details or []

    def __str__(self) -> str:
        where = str(self.place) if self.place else None
        text = explain(f"{self.kind}: {self.message}", where=where, hint=self.hint)
        return "\n".join([text, *self.details])


class UnknownInstruction(EmulationFault):
    """An instruction that the emulator does not have; raised only when it is reached."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__("unknown-instruction", message, place)


class PtxError(ValueError):
    """Text that is not PTX as the parser knows it; the message has the line."""


@dataclass
class Note:
    """Something that is not a fault but that the user should know: `kind` and `message` as in `EmulationFault`."""

    kind: str
    message: str
    place: Place = field(default_factory=Place)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} ({self.place})"
