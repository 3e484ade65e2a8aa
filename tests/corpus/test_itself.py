"""The corpus itself: its tags cover the vocabulary, and its comparison notices a wrong result."""

import jax
import numpy as np
import pytest

from corpus import CASES, VOCABULARY, Case, arguments, compare, expected
from corpus.case import is_float


def test_every_word_has_a_case() -> None:
    words = {f"{group}:{word}" if group else word for group, words in VOCABULARY.items() for word in words}
    used = {tag for case in CASES.values() for tag in case.tags}
    assert used == words


def test_inputs_are_repeatable() -> None:
    for case in CASES.values():
        jax.tree.map(np.testing.assert_array_equal, arguments(case, 3), arguments(case, 3))


def _rounded(case: Case, leaf: np.ndarray) -> np.ndarray:
    leaf = np.asarray(leaf)
    with np.errstate(all="ignore"):
        return leaf.astype(jax.numpy.dtype(case.out)) if leaf.dtype == np.float64 else leaf.copy()


def _spoil(leaf: np.ndarray) -> np.ndarray:
    """The leaf with its last element changed, in integers by a bit."""
    leaf = leaf.copy()
    last = leaf.reshape(-1)[-1:]
    if is_float(leaf.dtype):
        value = np.nan_to_num(last.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        last[...] = (value * 1.5 + 0.3).astype(leaf.dtype)
    elif leaf.dtype == bool:
        last[...] = ~last
    else:
        last[...] = (last.astype(np.int64) ^ 1).astype(leaf.dtype)
    return leaf


@pytest.mark.parametrize("name", CASES)
def test_wrong_results_are_noticed(name: str) -> None:
    case = CASES[name]
    want = expected(case, arguments(case))
    leaves, tree = jax.tree.flatten(want)
    right = [_rounded(case, leaf) for leaf in leaves]
    compare(case, jax.tree.unflatten(tree, right), want)
    for k, leaf in enumerate(right):
        if leaf.size == 0:
            continue
        wrong = [*right[:k], _spoil(leaf), *right[k + 1 :]]
        with pytest.raises(AssertionError, match="differs in 1 of"):
            compare(case, jax.tree.unflatten(tree, wrong), want)
        with pytest.raises(AssertionError, match="has shape"):
            compare(case, jax.tree.unflatten(tree, [*right[:k], leaf[None], *right[k + 1 :]]), want)
        with pytest.raises(AssertionError, match="has dtype"):
            wide = leaf.astype(np.float64 if leaf.dtype != np.float64 else np.float32)
            compare(case, jax.tree.unflatten(tree, [*right[:k], wide, *right[k + 1 :]]), want)
