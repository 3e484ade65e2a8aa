"""The progress bar of long simulated runs: on a terminal, after a while, and gone at the end."""

import io
import sys

import jax
import jax.numpy as jnp
import pytest

import palladion as pl
from palladion import tpu as pltpu
from palladion.simulator import progress


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def run():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    row = pl.BlockSpec((1, 8), lambda i: (i, 0))
    x = jnp.zeros((200, 8))
    pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(200,), in_specs=[row], out_specs=row,
        interpret=pltpu.InterpretParams(),
    )(x)  # fmt: skip


@pytest.mark.parametrize(
    ("is_terminal", "patience", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_when_it_is_shown(monkeypatch, is_terminal, patience, shown):
    screen = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    run()
    assert ("simulating kernel" in screen.getvalue()) is shown
