"""Each rule of the Mosaic GPU reference: a program that breaks it is found out, its near twin is silent and right."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

import palladion
from palladion.errors import KernelFinding, PalladionWarning
from simulator.gpu.calls import SCHEDULES, quiet
from simulator.gpu.rules import RULES

BAD = [pytest.param(r, w, id=f"{r.name}-{w}") for r in RULES.values() for w in r.bad]
GOOD = [pytest.param(r, w, id=f"{r.name}-{w}") for r in RULES.values() for w in r.good]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rule, way", BAD)
def test_broken(rule, way, schedule):
    if rule.warns:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            rule.make(way).call(schedule)
        assert any(issubclass(w.category, PalladionWarning) for w in seen)
        (found,) = palladion.last_report().findings
        assert found.level == "warning"
        text = str(KernelFinding(found))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PalladionWarning)
            with pytest.raises(Exception) as caught:
                rule.make(way).call(schedule)
        text = str(caught.value)
        if rule.error is not None:
            assert isinstance(caught.value, rule.error), text
            assert re.search(rule.words, text), text
            return
        findings = palladion.last_report().findings
        assert findings, repr(caught.value)
        found = findings[-1]
        assert found.kind in text
    assert found.kind in rule.kinds, text
    assert re.search(rule.words, text), text
    assert found.hint and found.message.strip().endswith((".", "it"))
    places = set(re.findall(r"(\w+\.py:\d+)", found.where or ""))
    assert len(places) >= rule.lines, text


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rule, way", GOOD)
def test_kept(rule, way, schedule):
    program = rule.make(way)
    results = quiet(lambda: program.call(schedule))
    assert program.expected is not None
    for got, expected in zip(results, program.expected, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_table_of_the_docs_names_what_there_is():
    """Each test that `docs/gpu_findings.md` names exists, and each rule is in it."""
    here = Path(__file__).parent
    text = (here.parents[2] / "docs" / "gpu_findings.md").read_text()
    cells = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ") and " | `" in line]
    named = {name for cell in cells for name in re.findall(r"`([\w/.]+(?:::\w+)?)`", cell)}
    for name in named - set(RULES):
        file, _, test = name.partition("::")
        where = here.parents[1] / "language" / "gpu" if file.startswith("language/") else here
        assert f"\ndef {test}(" in (where / file.removeprefix("language/")).read_text(), name
    assert set(RULES) <= named, sorted(set(RULES) - named)
    assert len(named) > 100
