"""`pltpu.einshape`: reshapes and transposes, written as names of dimensions.

"a(bc)->abc" splits the second dimension, "abc->(ba)c" transposes and merges the first two. Each name is one letter;
a group in parentheses is one dimension of the array. It is a reshape to the left names, a transpose to the order of the
right ones, and a reshape to the right groups.

On a TPU such a change is free when it moves whole (8, 128) tiles; `assert_is_tile_preserving` checks that, by following
every tile.

Source: the public documentation of `jax.experimental.pallas.tpu.einshape`; Google DeepMind's einshape, whose notation
it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from palladion.errors import mistake
from palladion.language import frames

__all__ = ["einshape"]

_TILE = (8, 128)
_FORM = (
    'pltpu.einshape("a(bc)->abc", x, b=4): one letter for each dimension, parentheses for one that is split or merged'
)


def einshape(equation: str, x: jax.Array, assert_is_tile_preserving: bool = False, **sizes: int) -> jax.Array:
    """Reshape and transpose an array as an equation says.

        einshape("a(bc)->abc", x, b=4)       # (10, 20) -> (10, 4, 5)
        einshape("abc->(ba)c", y)            # (10, 4, 5) -> (40, 5)

    Arguments:
      equation: names of the dimensions before and after "->"; (…) on the left is a dimension to be split, on the right
        one that is merged.
      x: an array.
      assert_is_tile_preserving: in a kernel, refuse a change that takes (8, 128) tiles apart.
      **sizes: sizes of names in groups on the left; of each group one may be left out.

    Raises:
      ValueError: the equation is not one, or does not fit the array. NotImplementedError: a name on the left is missing
        on the right.
    """
    x = jnp.asarray(x)
    before, after = _parse(equation)
    size = _sizes(equation, before, x.shape, sizes)
    names = [n for group in before for n in group]
    wanted = [n for group in after for n in group]
    for name in wanted:
        if name not in size:
            raise _wrong(equation, f"{name!r} stands on the right only")
    if len(set(wanted)) != len(wanted):
        raise _wrong(equation, f"{next(n for n in wanted if wanted.count(n) > 1)!r} stands twice on the right")
    if missing := [n for n in names if n not in wanted]:
        headline = f"pltpu.einshape {equation!r}: {missing[0]!r} is missing on the right."
        hint = "einshape only reorders, splits and merges; reduce with jnp.sum, index a dimension of size 1 away"
        raise mistake(NotImplementedError, headline, hint=hint)

    def change(array):
        array = array.reshape([size[n] for n in names]).transpose([names.index(n) for n in wanted])
        return array.reshape([math.prod(size[n] for n in group) for group in after])

    if assert_is_tile_preserving and frames.current() is not None:
        places = np.arange(x.size).reshape(x.shape)
        if not _tiles(change(places)) <= _tiles(places):
            raise mistake(
                ValueError,
                f"pltpu.einshape {equation!r} of shape {x.shape} takes (8, 128) tiles apart.",
                hint="leave the last 8 rows and 128 columns of every tile together, or drop assert_is_tile_preserving",
            )
    return change(x)


def _wrong(equation: str, what: str) -> Exception:
    return mistake(ValueError, f"pltpu.einshape {equation!r}: {what}.", hint=_FORM)


def _parse(equation: str) -> tuple[list[list[str]], list[list[str]]]:
    """The groups of names on the left and on the right."""
    sides = equation.replace(" ", "").split("->")
    if len(sides) != 2:
        raise _wrong(equation, "there must be one '->'")
    return _groups(equation, sides[0]), _groups(equation, sides[1])


def _groups(equation: str, side: str) -> list[list[str]]:
    groups: list[list[str]] = []
    inside = False
    for letter in side:
        if letter == "(" and not inside:
            groups.append([])
        elif letter.isalpha():
            groups[-1].append(letter) if inside else groups.append([letter])
        elif not (letter == ")" and inside):
            raise _wrong(equation, f"{letter!r} is not expected there")
        inside = letter == "(" or (inside and letter != ")")
    if inside:
        raise _wrong(equation, "a parenthesis is not closed")
    return groups


def _sizes(
    equation: str, groups: Sequence[Sequence[str]], shape: tuple[int, ...], given: Mapping[str, int]
) -> dict[str, int]:
    """The size of each name on the left."""
    if len(groups) != len(shape):
        raise _wrong(equation, f"the left side has {len(groups)} dimensions, but the array has {len(shape)}, {shape}")
    sizes: dict[str, int] = {}
    for group, extent in zip(groups, shape):
        for name in group:
            if name in sizes:
                raise _wrong(equation, f"{name!r} stands twice on the left")
            sizes[name] = given.get(name, 0 if len(group) > 1 else extent)  # 0: not known yet
        unknown = [n for n in group if not sizes[n]] if extent else []
        known = math.prod(sizes[n] for n in group if sizes[n])
        if len(unknown) > 1:
            raise _wrong(equation, f"the sizes of {' and '.join(unknown)} are not given, of which one at most can be")
        if unknown and extent % known == 0:
            sizes[unknown[0]] = extent // known
        elif unknown or known != extent:
            raise _wrong(equation, f"({''.join(group)}) cannot be {known} long: the array has {extent} there")
    return sizes


def _tiles(places: np.ndarray) -> set[bytes]:
    """The (8, 128) tiles over the last two dimensions, each as the places its elements came from, -1 past the edge."""
    if places.ndim < 2:  # a vector is laid out row by row
        places = np.pad(places.ravel(), (0, -places.size % _TILE[1]), constant_values=-1).reshape(-1, _TILE[1])
    *outer, rows, columns = places.shape
    padding = [(0, 0)] * len(outer) + [(0, -rows % _TILE[0]), (0, -columns % _TILE[1])]
    places = np.pad(places, padding, constant_values=-1)
    rows, columns = places.shape[-2] // _TILE[0], places.shape[-1] // _TILE[1]
    cut = places.reshape(-1, rows, _TILE[0], columns, _TILE[1]).swapaxes(2, 3).reshape(-1, math.prod(_TILE))
    return {tile.tobytes() for tile in cut}
