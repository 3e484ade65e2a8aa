"""Mutants of kernels of the Mosaic GPU dialect are reported, or harmless for a reason that is checked.

`python tests/simulator/gpu/mutation_run.py` runs all of them and prints the numbers that docs/gpu_mutations.md states.
"""

import collections
import dataclasses
import random

import pytest

from simulator.gpu.mutation_calls import calls_of
from simulator.gpu.mutation_kernel import Kernel
from simulator.gpu.mutation_programs import programs
from simulator.gpu.mutation_reasons import BY_HAND, REASONS, reason_of
from simulator.gpu.mutation_run import judge, table, verdicts
from simulator.gpu.mutations import SYNCHRONISATION, mutants, walk

PROGRAMS = {p.name: p for p in programs("sample", "corpus", "fragments")}
SMALL = [
    "producer_that_computes", "store_commit_load", "copies_in_groups", "collective_smem_reuse", "hopper_simple",
    "exchange_shards_by_stores", "all_but_the_last_are_complete", "hopper_ping_pong", "all_gather_2_devices",
    "hopper_warp_specialised",
]  # fmt: skip


def calls(name):
    p = PROGRAMS[name]
    return calls_of(p.name, p.run, p.arch, **p.options)


def test_a_sample_of_mutants():
    """Of a few kernels of every kind; which mutants is drawn, always the same."""
    drawn, rng = [], random.Random(0)
    for name in SMALL:
        (call, *_) = calls(name)
        base, kernel, all_of_them = call.run(), [], mutants(call.jaxpr)
        assert not base.found
        drawn += [judge(call, kernel, base, m) for m in rng.sample(all_of_them, min(6, len(all_of_them)))]
    assert [str(v.mutant) for v in drawn if v.how in ("hole", "different")] == []
    counts = collections.Counter(v.how for v in drawn)
    assert counts["reported"] >= 0.6 * len(drawn) and len(drawn) >= 40, counts
    assert f"| all | | {len(drawn)} |" in table(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_mutants(name):
    assert [(v.how, str(v.mutant)) for v in verdicts(calls(name)) if v.how in ("hole", "different")] == []


# --- the tool itself --------------------------------------------------------------------------------------------------
def primitives(jaxpr):
    return [str(e.primitive) for _, j in walk(jaxpr) for e in j.eqns]


def test_removals_and_moves_change_just_that():
    (call,) = calls("producer_that_computes")
    names = primitives(call.jaxpr)
    for m in mutants(call.jaxpr):
        new = primitives(m.apply(call.jaxpr))
        if m.how == "removed":
            assert len(new) == len(names) - 1 and new.count(m.what) == names.count(m.what) - 1
        elif m.how.startswith("moved"):
            assert sorted(new) == sorted(names) and m.what in SYNCHRONISATION
    assert primitives(call.jaxpr) == names


@pytest.mark.parametrize(
    ("program", "what", "how", "detail", "kind"),
    [
        ("producer_that_computes", "barrier_wait", "removed", "", "race"),
        ("producer_that_computes", "barrier_arrive", "removed", "", "deadlock"),
        ("producer_that_computes", "Barrier", "wrong count", "num_arrivals=2", "deadlock"),
        ("hopper_simple", "wait_smem_to_gmem", "wrong count", "n=1", "missing-wait"),
        ("hopper_simple", "commit_smem", "removed", "", "missing-fence"),
        ("store_commit_load", "commit_tmem", "removed", "", "tmem-in-flight"),
        ("exchange_shards_by_stores", "semaphore_signal", "moved earlier", "past swap", "race"),
        ("all_gather_2_devices", "wait_smem_to_gmem", "weaker", "wait_read_only", "race"),
        ("copies_from_a_peer", "semaphore_wait", "removed", "", "race"),
        ("copies_from_a_peer", "semaphore_signal", "removed", "", "deadlock"),
        ("blackwell_collective", "copy_gmem_to_smem", "weaker", "not collective", "refused"),
    ],
)
def test_what_mutants_are_reported_as(program, what, how, detail, kind):
    (call, *_) = calls(program)
    found = [
        call.mutated(m).kinds
        for m in mutants(call.jaxpr)
        if (m.what, m.how) == (what, how) and detail in (m.detail, "")
    ]
    assert any(kind in kinds for kinds in found), found


def test_results_are_compared():
    (call,) = calls("producer_that_computes")
    base = call.run()
    other = dataclasses.replace(base, results=tuple(x + 1 for x in base.results))
    (first, *_) = mutants(call.jaxpr)
    silent = dataclasses.replace(call)
    object.__setattr__(silent, "mutated", lambda mutant, **how: other)
    assert judge(silent, [], base, first).how == "different"


def test_no_reason_without_a_rule():
    """A mutant that is not harmless, judged as if nothing had been found, is a hole."""
    (call,) = calls("hopper_simple")
    kernel = Kernel(call)
    assert kernel.base.found == () and len(kernel.executed) > 3
    (removed,) = [m for m in kernel.mutants if m.what == "commit_smem" and m.how == "removed"]
    assert reason_of(kernel, removed) is None


def test_reasons_are_written():
    from simulator.gpu import mutation_reasons

    assert set(mutation_reasons._RULES) == set(REASONS)
    assert all(reason.endswith(".") for reason in [*REASONS.values(), *BY_HAND.values()])
