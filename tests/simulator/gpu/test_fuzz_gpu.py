"""Random kernels that are right by construction give what NumPy gives and no finding; with a synchronisation left out
they are found out, or give the same values all the same."""

import random
import warnings

import numpy as np
import pytest

import palladion
from palladion.errors import KernelFinding, PalladionWarning
from simulator.gpu.calls import quiet
from simulator.gpu.pipelines import Kernel, draw

QUICK, ALL = range(40), range(40, 1000)


def check(seed, schedules):
    kernel = Kernel(draw(seed))
    for schedule in schedules:
        got = quiet(lambda s=schedule: kernel(schedule=s))
        np.testing.assert_array_equal(got, kernel.expected(), err_msg=f"{kernel.spec} {schedule}")


@pytest.mark.parametrize("seed", QUICK)
def test_right_kernels_are_found_right(seed):
    check(seed, ("lazy", "eager", 1, seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", ALL[::48])
def test_more_right_kernels_are_found_right(first):
    for seed in range(first, min(first + 48, ALL.stop)):
        check(seed, ("lazy", "eager", 1, seed))


def outcome(kernel, schedule):
    """What the simulator says of a kernel: kinds of findings, "equal", or "different"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PalladionWarning)
        try:
            got = kernel(schedule=schedule)
        except KernelFinding as error:
            return error.finding.kind
    if findings := palladion.last_report().findings:
        return findings[0].kind
    return "equal" if np.array_equal(got, kernel.expected()) else "different"


def judge(seed, how_many):
    """Outcomes of the kernel of a seed with one operation left out, by the operation's name."""
    whole = Kernel(draw(seed))
    assert outcome(whole, "lazy") == "equal"
    names = sorted(whole.names)
    random.Random(seed).shuffle(names)
    seen = {}
    for name in names[:how_many]:
        seen[name] = {outcome(Kernel(whole.spec, without=name), schedule) for schedule in ("lazy", 1)}
        assert "different" not in seen[name], (seed, name, whole.spec)
    return seen


def test_mutants_are_found_or_give_the_same():
    seen = [found for seed in range(12) for found in judge(seed, 3).values()]
    assert sum("equal" not in found for found in seen) >= len(seen) * 0.7  # most of them matter


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 300, 24))
def test_more_mutants_are_found_or_give_the_same(first):
    for seed in range(first, first + 24):
        judge(seed, 5)


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("commit after writing", {"missing-fence"}),
        ("commit after reading", {"missing-fence"}),
        ("arrive full", {"deadlock"}),
        ("wait full", {"missing-wait", "race", "uninitialized-read", "wgmma-in-flight", "barrier-partial-waits"}),
    ],
)
def test_what_a_missing_operation_is_found_as(word, kind):
    """On kernels whose slots are used again, so that each of them matters."""
    seen = 0
    for seed in range(200):
        spec = draw(seed)
        if spec.steps <= max(spec.slots) + 1 or spec.loop == "python":
            continue
        kernel = Kernel(spec)
        kernel()
        for name in sorted(n for n in kernel.names if word in n)[:1]:
            assert outcome(Kernel(spec, without=name), "lazy") in kind, (seed, name, spec)
            seen += 1
        if seen == 6:
            return
    raise AssertionError(f"only {seen} kernels with {word}")
