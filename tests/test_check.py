"""A check must be seen to fail: answers that are wrong in ways that a loose tolerance lets through."""

import numpy as np
import pytest

from common.bench import SHAPES
from common.check import Reference, check, relatives
from common.problem import FAMILIES, Problem
from stages import STAGES

WHERE = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def bad_answers(O, Q, K, V):
    """name -> a wrong answer like the right answer O, for arrays of two heads or more."""
    yield "zeros", O * 0
    yield "the mean of V", V.mean(-2, keepdims=True) + 0 * O
    yield "swapped heads", O[:, ::-1]
    yield "one row of NaN", _with(O, float("nan"))
    yield "one element off by 1 %", _with(O, O[0, 1, -1, 3] * 1.01, slice(3, 4))
    yield "times 0.95", O * np.float32(0.95)
    yield "a skipped tile", _skip(Q, K, V)
    yield "a stale tile", _stale(Q, K, V)


def _with(O, value, x=slice(None)):
    O = O.copy()
    O[0, 1, -1, x] = value
    return O


def _stage1(Q, K, V):
    from common.check import _stage1

    return _stage1(Q, K, V, "float32", False, Q.shape[-1] ** -0.5).astype(Q.dtype)


def _skip(Q, K, V):
    """As if the last 64 keys had not been there: they score as low as can be."""
    V, K = V.copy(), K.copy()
    K[:, :, -64:] = K[:, :, :64]
    V[:, :, -64:] = V[:, :, :64]
    return _stage1(Q, K, V)


def _stale(Q, K, V):
    K = K.copy()
    K[:, :, 128:192] = K[:, :, 64:128]
    return _stage1(Q, K, V)


@pytest.mark.parametrize("name", [n for n, p in SHAPES.items() if not p.causal])
@pytest.mark.parametrize("on", WHERE)
def test_wrong_answers_fail_at_every_timed_size(name, on):
    shape = SHAPES[name]
    xp = pytest.importorskip("cupy") if on == "gpu" else np
    heads = max(2, shape.heads) if on == "gpu" else 2  # the error of one element does not depend on how many heads there are
    Q, K, V = Problem(1, heads, shape.N, shape.d).inputs(xp)
    reference = Reference(Q, K, V)
    right = reference.exact.astype("float32")
    assert reference.verdict(right).ok
    for what, O in bad_answers(right, Q, K, V):
        assert not reference.verdict(O.astype("float32")).ok, what


def test_the_allowance_is_not_loose():
    """float32 itself makes a quarter of what is allowed, or less; a sum in float16 makes far more."""
    Q, K, V = Problem(N=1024).inputs()
    reference = Reference(Q, K, V)
    assert reference.allowed < 1e-5
    half = STAGES[1].attention(*(a.astype("float16") for a in (Q, K, V))).astype("float32")
    assert not reference.verdict(half).ok


def test_a_verdict_says_what_is_wrong():
    Q, K, V = Problem(2, 3, 50, 32).inputs()
    reference = Reference(Q, K, V, causal=True)
    O = STAGES[2].attention(Q, K, V, causal=True)
    assert reference.verdict(O).where is None
    O[1, 2, 40:, 8:16] = np.nan
    words = reference.verdict(O).where
    assert "10 of 300 rows wrong, in 1 of 6 heads, first batch 1, head 2, row 40 (rows 40 to 49)" in words
    assert "features 8 to 15 only" in words and "80 elements NaN" in words
    with pytest.raises(ValueError, match="O has the shape"):
        reference.verdict(O[:1])


def test_an_unwritten_row_fails():
    stage = STAGES[3].patched(STAGES[3].text.replace("if (row >= N) return;", "if (row >= N - 1) return;"))
    assert "NaN or never written" in check(stage, Problem(N=64), on="cpu").where


def test_families_are_what_they_say():
    for family, low, high in (("normal", -8, 8), ("cliff", -130, 130), ("cold", -230, -170)):
        Q, K, _ = Problem(N=300, family=family).inputs()
        scores = Q[0, 0] @ K[0, 0].T / 8
        assert low < scores.min() and scores.max() < high
    Q, K, _ = Problem(N=300, family="cliff").inputs()
    scores = Q[0, 0] @ K[0, 0].T / 8
    assert np.all(np.abs(scores) > 70) and (scores[0] > 0).any() and (scores[0] < 0).any()
    assert {p.family for p in relatives(Problem())} == set(FAMILIES)
    with pytest.raises(ValueError, match="family must be one of"):
        Problem(family="hot").inputs()


def test_inputs_are_reproducible():
    a, b, c = Problem(seed=3).inputs(), Problem(seed=3).inputs(), Problem(seed=4).inputs()
    assert all((x == y).all() for x, y in zip(a, b)) and not (a[0] == c[0]).all()
