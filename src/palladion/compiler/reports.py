"""What a compiler says of the kernel calls that it compiled: one class of report for every target.

A target's module (`entry.TARGETS`) turns a call into a `CompiledCall`: facts (numbers, one row of a table each),
remarks (what became of a loop or a grid axis, and why, with the user's line), or the reason why it was refused. The
code of each stage is kept as a function, since assembling text is work that few ask for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from palladion.errors import count_of, mistake


@dataclasses.dataclass(frozen=True)
class Fact:
    """One number of a compiled call.

    Attributes:
      key: its name in JSON, with the unit ("code_bytes").
      label: its name in tables; targets that share a label share a row.
      value: a number or a string.
      text: the value as people read it.
    """

    key: str
    label: str
    value: Any
    text: str


@dataclasses.dataclass(frozen=True)
class Remark:
    """What became of a part of a kernel.

    Attributes:
      subject: "loop", "reduction", "product" (of matrices) or "axis"; "warning", what a vendor's compiler says itself.
      size: rounds of a loop, multiplications of a product, programs along an axis; None where only run time knows.
      index: which axis; None for loops.
      good: whether it runs in vectors, or in parallel.
      kind: the reason in one word ("strided", "same-block"); of a product its sizes, m×n×k; who warns.
      why: the reason as part of a sentence.
      where: the user's lines, `file:line (function)`.
    """

    subject: str
    size: int | None
    index: int | None
    good: bool
    kind: str
    why: str
    where: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """`axis 0 (8 programs)`, `loop of 512`."""
        if self.subject == "axis":
            return f"axis {self.index}" + (f" ({count_of(self.size, 'program')})" if self.size is not None else "")
        if self.subject == "product":
            return f"product {self.kind}"
        if self.subject == "warning":
            return self.kind
        return f"{self.subject} of {'?' if self.size is None else f'{self.size:,}'}"

    @property
    def verdict(self) -> str:
        """How it runs, in words."""
        if self.subject == "axis":
            return "in parallel" if self.good else "in order"
        if self.subject == "product":
            return "by a packed kernel, in vectors"
        if self.subject == "warning":
            return "warns"
        return "in vectors" if self.good else "one element at a time"

    @property
    def place(self) -> str:
        """The lines, short: `a.py:3,7` for two of one file, `a.py:3 b.py:7` for one of each of two."""
        files: dict[str, list[str]] = {}
        for where in self.where:
            file, _, line = where.partition(" (")[0].rpartition(":")
            files.setdefault(file, []).append(line)
        return " ".join(f"{file}:{','.join(dict.fromkeys(lines))}" for file, lines in files.items())


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a call does not compile: the exception's type, its message (first line first), and the user's line."""

    type: str
    message: str
    where: str | None = None


@dataclasses.dataclass(frozen=True)
class CompiledCall:
    """One kernel call, compiled for one target.

    Attributes:
      target: such as "cpu".
      name: of the kernel.
      kernel: `file:line` of the kernel function, or None.
      called_at: `file:line (function)` of the call, or None.
      facts: the numbers, in the order in which tables show them.
      remarks: on loops and grid axes.
      refusal: why it does not compile, or None; then there are no facts.
    """

    target: str
    name: str
    kernel: str | None = None
    called_at: str | None = None
    facts: tuple[Fact, ...] = ()
    remarks: tuple[Remark, ...] = ()
    refusal: Refusal | None = None
    _stages: Mapping[str, Callable[[], str]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether it compiles."""
        return self.refusal is None

    def fact(self, key: str) -> Any:
        """The value of the fact with that key; None where the target has no such number."""
        return next((f.value for f in self.facts if f.key == key), None)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that `text` knows."""
        return tuple(self._stages)

    def text(self, stage: str) -> str:
        """The code of a stage.

        Arguments: stage: one of `stages`; on the CPU "jaxpr", "nests", "llvm" and "asm".
        Raises: ValueError: there is no such stage, or the call does not compile.
        """
        if self.refusal is not None:
            raise mistake(ValueError, f"{self.name} did not compile for {self.target}: {self.refusal.message}")
        if stage not in self._stages:
            hint = f"the stages are {', '.join(self._stages)}"
            raise mistake(ValueError, f"The compiler for {self.target} has no stage {stage!r}.", hint=hint)
        return self._stages[stage]()

    def as_dict(self) -> dict[str, Any]:
        """The call as plain values, for JSON."""

        def remark(r: Remark) -> dict[str, Any]:
            own = {"axis": "parallel"}.get(r.subject, "vectorised")
            index = {"index": r.index} if r.index is not None else {}
            return {"subject": r.subject, **index, "size": r.size, own: r.good, "reason": r.kind, "why": r.why,
                    "where": list(r.where)}  # fmt: skip

        return {
            "target": self.target,
            "name": self.name,
            "kernel": self.kernel,
            "called_at": self.called_at,
            "refusal": None if self.refusal is None else dataclasses.asdict(self.refusal),
            "facts": {f.key: f.value for f in self.facts},
            "axes": [remark(r) for r in self.remarks if r.subject == "axis"],
            "loops": [remark(r) for r in self.remarks if r.subject not in ("axis", "warning")],
            "stages": list(self._stages),
        }


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What `palladion.compile` returns; `print(report)` shows it.

    Attributes:
      function: the name of the function that was compiled.
      target: what for.
      calls: one for each kernel call in the function, in its order.
    """

    function: str
    target: str
    calls: tuple[CompiledCall, ...]

    @property
    def ok(self) -> bool:
        """Whether every call compiles."""
        return all(call.ok for call in self.calls)

    def text(self, stage: str) -> str:
        """The code of a stage, of all calls one after the other.

        Arguments: stage: "jaxpr", "nests", "llvm" or "asm" on the CPU.
        Raises: ValueError: there is no such stage, or a call does not compile.
        """
        return "\n".join(call.text(stage) for call in self.calls)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "schema": 1,
            "function": self.function,
            "target": self.target,
            "ok": self.ok,
            "calls": [call.as_dict() for call in self.calls],
        }

    def json(self) -> str:
        """The report as a JSON document (docs/check.md describes its keys)."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        lines = [line for call in self.calls for line in (*_lines(call), "")]
        refused = sum(not call.ok for call in self.calls)
        said = f"{count_of(len(self.calls), 'kernel call')} in {self.function}"
        return "\n".join([*lines, said + (f", {refused} refused by {self.target}" if refused else "")])


def _lines(call: CompiledCall) -> list[str]:
    """A call as text: heading, facts, remarks."""
    lines = [" ".join(filter(None, [call.name, call.kernel and f"at {call.kernel}"]))]
    if call.called_at:
        lines.append(f"called at {call.called_at}")
    if call.refusal is not None:
        return [*lines, *(f"  {line}" for line in f"{call.refusal.type}: {call.refusal.message}".splitlines())]
    width = max((len(fact.label) for fact in call.facts), default=0)
    lines += [f"  {fact.label:{width}}  {fact.text}" for fact in call.facts]
    for r in call.remarks:
        lines.append(f"  {r.what} {r.verdict}" + (f": {r.why}" if r.why else "") + (f" ({r.place})" if r.where else ""))
    return lines
