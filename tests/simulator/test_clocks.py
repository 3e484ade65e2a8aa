"""Vector clocks stay as wide as there are components, however often they are joined."""

from palladion.simulator.clocks import Clock


def test_two_that_join_in_turn_do_not_grow():
    a, b = Clock(3, 4), Clock(3, 5)
    b.known[1, 4] = 7
    for _ in range(50):
        a.join(b)
        b.join(a)
    assert a.known.shape == b.known.shape == (3, 5)
    assert a.known[1, 4] == 7
