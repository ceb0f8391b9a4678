"""Right or wrong, and by how much.

The measure is stage 1 in float64. A stage may be off by four times what the same maths loses in the stage's own
precision on the same input (stage 1 in float32), plus 1e-6 of the largest |V|. Anything else, NaN included, is wrong.
A fixed tolerance cannot do this: at N = 4096 the right output is so small that zeros pass with 1e-2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from common import launch
from common.problem import FAMILIES, Problem
from stages import STAGES

SAMPLE = 512  # rows whose rounding errors make a fair estimate of the largest
LOOP = 2**27  # products up to which a plain loop in NumPy is quick


@dataclass(frozen=True)
class Verdict:
    """error    largest |O - exact|, NaN if any element is NaN
    allowed  the largest error that passes
    where    of a wrong output: which elements are wrong, in words; None if all are right
    """

    error: float
    allowed: float
    where: str | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self):
        return f"error {self.error:.1e} of {self.allowed:.1e} allowed" + (f": {self.where}" if self.where else "")


class Reference:
    """The right answer to one problem, and the error that it allows. Computed head by head, on the arrays' device.

    Q, K, V  (B, H, N, d), NumPy or CuPy
    """

    def __init__(self, Q, K, V, *, causal=False, scale=None):
        self.exact = _stage1(Q, K, V, "float64", causal, scale)
        self.allowed = 4 * max(self._rounding(Q, K, V, causal, scale)) + 1e-6 * largest(V)

    def _rounding(self, Q, K, V, causal, scale):
        """The errors of stage 1 in the inputs' own precision: as the library multiplies, and, where that is not too
        slow, as a plain loop does, which is the order of the kernels and a little worse. A few rows can be lucky: they
        are summed in several orders."""
        B, H, N, d = Q.shape
        dtype = str(Q.dtype)
        yield largest(_stage1(Q, K, V, dtype, causal, scale) - self.exact)
        if B * H * N * N * d <= LOOP:
            Q, K, V, exact = (host(array) for array in (Q, K, V, self.exact))  # small: a GPU would wait for Python
            order = np.random.default_rng(0)
            for turn in range(max(1, min(64, SAMPLE // max(B * H * N, 1)))):
                x = order.permutation(d) if turn else slice(None)
                yield largest(_stage1(Q[..., x], K[..., x], V, dtype, causal, scale, in_order) - exact)

    def verdict(self, O) -> Verdict:
        """Judges an output of the same shape and library."""
        if O.shape != self.exact.shape:
            raise ValueError(f"O has the shape {O.shape}, but Q has {self.exact.shape}")
        off = abs(O - self.exact)  # float64: O is promoted
        error = largest(off)
        return Verdict(error, self.allowed, None if error <= self.allowed else _describe(off, O, self.allowed))


def largest(array) -> float:
    """The largest magnitude, NaN if any element is NaN, 0 of nothing."""
    return float(abs(array).max()) if array.size else 0.0


def host(array) -> np.ndarray:
    """A NumPy or CuPy array as NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def in_order(Q, K):
    """Q K^T of (N, d) arrays, every sum taken in the order of the features, as a loop over them takes it."""
    S = Q[:, :1] * K[:, 0]
    for x in range(1, Q.shape[1]):
        S += Q[:, x : x + 1] * K[:, x]
    return S


def _stage1(Q, K, V, dtype, causal, scale, product=None):
    """Stage 1 in a type, head by head; product stands in for its Q K^T."""
    out = np.empty_like(Q, dtype="float64")
    for b in range(Q.shape[0]):
        for h in range(Q.shape[1]):
            q, k, v = (array[b, h].astype(dtype) for array in (Q, K, V))
            out[b, h] = _attention1(product)(q, k, v, causal=causal, scale=scale)
    return out


@functools.cache
def _attention1(product):
    stage = STAGES[1].changed(("Q @ K.swapaxes(-1, -2)", "product(Q, K)")) if product else STAGES[1]
    return launch.load(stage, product=product)


def _describe(off, O, allowed):
    """Which elements of a wrong output are wrong, in words."""
    off, O = host(off), host(O)
    bad = ~(off <= allowed)
    rows = bad.any(-1)
    heads = rows.any(-1)
    b, h, row = (int(i[0]) for i in rows.nonzero())
    wrong = [int(r) for r in rows[b, h].nonzero()[0]]
    columns = [int(x) for x in bad[b, h].any(0).nonzero()[0]]
    words = [
        f"{int(rows.sum())} of {rows.size} rows wrong",
        f"in {int(heads.sum())} of {heads.size} heads" if heads.size > 1 else "",
        f"first batch {b}, head {h}, row {row}" + (f" (rows {wrong[0]} to {wrong[-1]})" if len(wrong) > 1 else ""),
        f"features {columns[0]} to {columns[-1]} only" if len(columns) < O.shape[-1] else "",
        f"{int(np.isnan(O).sum())} elements NaN or never written" if np.isnan(O).any() else "",
    ]
    return ", ".join(word for word in words if word)


def check(stage, problem: Problem, *, on=None) -> Verdict:
    """Runs a stage on a problem, with O poisoned, and judges what it wrote."""
    Q, K, V = problem.inputs(launch.library(launch.place(stage, on)))
    reference = Reference(Q, K, V, causal=problem.causal)
    return reference.verdict(launch.attention(stage, Q, K, V, causal=problem.causal, on=on, poison=True))


def first_wrong(stage, problem: Problem, *, on=None) -> tuple[Problem, str] | None:
    """The first of a problem's relatives that a stage gets wrong, and what is wrong in words; None if it is right."""
    for relative in relatives(problem):
        verdict = check(stage, relative, on=on)
        if not verdict.ok:
            return relative, f"{relative.family} inputs, {relative}: {verdict}"
    return None


def relatives(problem: Problem):
    """The problem and its small ragged relatives: every family, and shapes at which wrong kernels are found out."""
    for family in FAMILIES:
        yield replace(problem, family=family)
    for N in (1, 100, 257):
        yield replace(problem, batch=1, heads=2, N=N, family="cliff")
        yield replace(problem, batch=1, heads=2, N=N, causal=not problem.causal)
