"""The engine under both simulators: clocks with views, counters, schedules, deadlocks."""

import numpy as np
import pytest

from palladion.simulator.clocks import Registry, component_of, epoch_of, site_of, stamp
from palladion.simulator.engine import Counter, Deadlock, Engine
from palladion.simulator.memory import WHOLE, Buffer, Region

GENERIC, ASYNC = 0, 1


def test_a_stamp_holds_who_when_and_where():
    s = stamp(component=9, epoch=123_456, site=77)
    assert (component_of(s), epoch_of(s), site_of(s)) == (9, 123_456, 77)
    many = np.full(3, s)
    assert (component_of(many) == 9).all() and (epoch_of(many) == 123_456).all() and (site_of(many) == 77).all()


def buffer():
    return Buffer(np.zeros(8), "memory", tracked=True)


def test_what_is_published_is_known_and_what_comes_after_is_not():
    registry = Registry()
    a, b = registry.actor("a"), registry.actor("b")
    memory = buffer()
    assert memory.written_by(a, Region([("index", (slice(0, 4),))]), 1) is None
    clock = a.publish()
    assert memory.written_by(a, Region([("index", (slice(4, 8),))]), 2) is None
    b.clock.join(clock)
    assert memory.read_by(b, Region([("index", (slice(0, 4),))]), 3) is None
    verb, who = memory.read_by(b, WHOLE, 4)
    assert (verb, component_of(who), site_of(who)) == ("wrote", a.component, 2)


def test_every_reader_is_remembered():
    registry = Registry()
    readers = [registry.actor(f"reader {k}") for k in range(3)]
    writer = registry.actor("writer")
    memory = buffer()
    for k, reader in enumerate(readers):
        assert memory.read_by(reader, WHOLE, k) is None
    for reader in readers[:2]:
        writer.clock.join(reader.publish())
    verb, who = memory.written_by(writer, WHOLE, 9)
    assert (verb, component_of(who)) == ("read", readers[2].component)


def test_a_fence_lets_one_view_see_what_another_sees():
    """A thread writes through the generic proxy; a copy by the async proxy must not read it before the fence."""
    registry = Registry(views=2)
    thread = registry.actor("thread", home=GENERIC)
    memory = buffer()
    memory.written_by(thread, WHOLE, 1, GENERIC)
    early = registry.operation("copy", thread, home=ASYNC)
    assert memory.read_by(early, WHOLE, 2, ASYNC)[0] == "wrote"
    thread.fence(GENERIC, ASYNC)
    late = registry.operation("copy", thread, home=ASYNC)
    assert memory.read_by(late, WHOLE, 3, ASYNC) is None
    # The thread may overwrite what the copy read only when it has waited for it.
    assert memory.written_by(thread, WHOLE, 4, GENERIC)[0] == "read"
    thread.clock.join(early.complete())
    thread.clock.join(late.complete())
    assert memory.written_by(thread, WHOLE, 5, GENERIC) is None
    # Written after the fence: not there for the next copy.
    again = registry.operation("copy", thread, home=ASYNC)
    assert memory.read_by(again, WHOLE, 6, ASYNC)[0] == "wrote"


def test_components_are_taken_again_only_by_who_knows_that_they_are_free():
    registry = Registry()
    a, b = registry.actor("a"), registry.actor("b")
    first = registry.operation("copy", a)
    done = first.complete()
    registry.finish(first)
    assert registry.operation("copy", b).component != first.component  # b knows nothing of it
    a.clock.join(done)
    assert registry.operation("copy", a).component == first.component


def test_only_what_is_certain_is_learned_from_a_counter():
    """Of two that raised it, either may be the one whose token was taken; when all is taken, both are known."""
    registry = Registry()
    a, b, c = (registry.actor(name) for name in "abc")
    counter = Counter("full")
    counter.add(1, a.publish(), 1.0)
    counter.add(1, b.publish(), 5.0)
    assert counter.take(1, c) == 1.0
    assert not c.clock.known[0, a.component] and not c.clock.known[0, b.component]
    assert counter.take(1, c) == 5.0
    assert c.clock.known[0, a.component] and c.clock.known[0, b.component]
    assert counter.value == 0


def relay(engine, log, number, others):
    def run(agent):
        mine, next_ = others[number], others[(number + 1) % len(others)]
        for round_ in range(3):
            engine.wait(agent, lambda: mine.value > 0, (mine,), lambda: mine.label)
            mine.take(1, None)
            log.append((round_, number))
            engine.pause(agent)
            next_.add(1, None)

    return run


@pytest.mark.parametrize("schedule", ["lazy", "eager", 0, 1, 2])
def test_agents_that_wait_for_each_other_take_turns(schedule):
    engine, log = Engine(schedule), []
    counters = [Counter(f"turn {k}") for k in range(3)]
    for k in range(3):
        engine.agent(f"agent {k}", None, relay(engine, log, k, counters))
    counters[0].add(1, None)
    engine.run()
    assert log == [(r, k) for r in range(3) for k in range(3)]


def orders(seed):
    engine, log = Engine(seed), []

    def run(name):
        def steps(agent):
            for k in range(4):
                log.append((name, k))
                engine.pause(agent)

        return steps

    for name in "abc":
        engine.agent(name, None, run(name))
    engine.run()
    return tuple(log)


def test_a_seed_repeats_and_seeds_differ():
    assert orders(5) == orders(5)
    assert len({orders(seed) for seed in range(20)}) > 10


def test_a_deadlock_names_who_waits_for_what():
    engine = Engine()
    full, empty = Counter("full"), Counter("empty")

    def waits_for(counter):
        return lambda agent: engine.wait(agent, lambda: counter.value > 0, (counter,), lambda: f"{counter.label} > 0")

    engine.agent("producer", None, waits_for(empty))
    engine.agent("consumer", None, waits_for(full))
    with pytest.raises(Deadlock, match="producer waits for empty > 0; consumer waits for full > 0"):
        engine.run()


def test_an_exception_ends_all_agents_and_comes_out_as_it_is():
    engine, ended = Engine(), []
    never = Counter("never")

    def waiting(agent):
        try:
            engine.wait(agent, lambda: False, (never,), lambda: "never")
        finally:
            ended.append(agent.name)

    def failing(agent):
        raise KeyError("mine")

    engine.agent("waiting", None, waiting)
    engine.agent("failing", None, failing)
    with pytest.raises(KeyError, match="mine"):
        engine.run()
    assert ended == ["waiting"]
