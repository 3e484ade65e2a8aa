"""Mistakes that users make, each with the first line of the error that it must give.

A case is a function that makes the mistake; a comment `# here` marks the line that the error must name as its place.
`check` runs it and looks at the parts of the message: the exception's class, the first line, `at:` with this test's own
file and line, and `fix:`. Where JAX raises the exception itself, place and fix come as a note below its own words.
"""

import dataclasses
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
      run: makes it.
      kind: the class of the exception, exactly.
      first_line: of its message; {here} stands for `file:line` of the line marked `# here`.
      noted: whether JAX raises it, so that place and fix are in a note.
      facts: further lines that the message must have, by name.
    """

    run: Callable[[], Any]
    kind: type[BaseException]
    first_line: str
    noted: bool
    facts: dict[str, str]


def collector() -> tuple[list[Any], Callable[..., Callable]]:
    """A list of cases for `pytest.mark.parametrize`, and the decorator that adds to it."""
    cases: list[Any] = []

    def mistake(kind: type[BaseException], first_line: str, *, noted: bool = False, **facts: str) -> Callable:
        def add(run: Callable[[], Any]) -> Callable[[], Any]:
            cases.append(pytest.param(Mistake(run, kind, first_line, noted, facts), id=run.__name__))
            return run

        return add

    return cases, mistake


def marked_line(function: Callable) -> str:
    """`file:line` of the line of a function that is marked `# here`."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + n for n, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{inspect.getsourcefile(function)}:{number}"


def check(case: Mistake) -> None:
    """Raises AssertionError unless the mistake gives the error that it must give."""
    with pytest.raises(case.kind) as caught:
        case.run()
    assert type(caught.value) is case.kind
    here = marked_line(case.run)
    lines = str(caught.value).splitlines()
    assert lines[0] == case.first_line.replace("{here}", here)
    if case.noted:
        lines = caught.value.__notes__[0].splitlines()
    parts = dict(re.findall(r"^  ([\w -]+):(.*)$", "\n".join(lines[1:]), re.MULTILINE))
    place = parts.get("at", "").split(" (")[0].strip() or lines[0]  # or in the first line, where the words are fixed
    assert here in place or os.path.abspath(place) == here, "\n".join(lines)
    if not case.noted or "fix" in case.facts:
        assert parts.get("fix", "").strip(), "no fix in:\n" + "\n".join(lines)
    for name, value in case.facts.items():
        assert parts.get(name.replace("_", " "), "").strip() == value
