"""The corpus knows which of its calls clamp, revisit and leave outputs unwritten; a check must agree on every one."""

import io
import json

import pytest
from rich.console import Console

from corpus import CASES, arguments, scope
from palladion.report.documents import document
from palladion.report.tables import print_report
from report.looking import look

# The tag `uninit` of these is about scratch, which a check does not follow.
UNWRITTEN_SCRATCH = {"scratch_tuple", "scoped_value"}
TAGS = {"out-of-bounds": "clamp", "revisited-block": "revisit", "uninitialized-read": "uninit"}


@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_that_the_corpus_names(name):
    case = CASES[name]
    with scope(case):
        report = look(case.make(interpret=True), *arguments(case))
    errors = {finding.kind for finding in report.findings if finding.level == "error"}
    expected = {kind for kind, tag in TAGS.items() if tag in case.tags}
    if name in UNWRITTEN_SCRATCH:
        expected.discard("uninitialized-read")
    # What a TPU refuses is an error in calls that use pltpu; most of the corpus has small blocks.
    assert errors - {"illegal-shape"} == expected, report.findings

    screen = io.StringIO()
    print_report(Console(file=screen, width=80), report)
    assert report.call.name in screen.getvalue()
    assert json.loads(json.dumps(document("x.py", [], [report], 0, 0, None)))["calls"][0]["name"] == report.call.name
