"""The inputs: shapes, and the families of numbers that find mistakes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FAMILIES = ("normal", "cliff", "cold")


@dataclass(frozen=True)
class Problem:
    """One attention problem: Q, K, V of shape (batch, heads, N, d).

    family  "normal"  independent normal numbers
            "cliff"   runs of keys whose scores are near +100 or near -100, the other way round for half of the
                      rows: finds a max that is not carried along and sums that are not rescaled
            "cold"    all scores near -200: finds a max that starts at 0, and keys that were never there
            Normal numbers alone let wrong kernels through: their scores never leave [-6, 6].
    """

    batch: int = 1
    heads: int = 1
    N: int = 1024
    d: int = 64
    causal: bool = False
    dtype: str = "float32"
    family: str = "normal"
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.N, self.d

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"B = {self.batch}, H = {self.heads}, N = {self.N}, d = {self.d}, {mask}"

    @property
    def scale(self) -> float:
        return self.d**-0.5

    @property
    def flops(self) -> float:
        """Floating-point operations of the two matrix products, half of them if causal."""
        return 4 * self.batch * self.heads * self.N**2 * self.d / (2 if self.causal else 1)

    @property
    def least_bytes(self) -> int:
        """What any program must move: Q, K and V read once, O written once."""
        return 4 * self.batch * self.heads * self.N * self.d * np.dtype(self.dtype).itemsize

    def inputs(self, xp=np):
        """Q, K, V as arrays of xp (numpy or cupy), the same for the same seed and library."""
        rng = xp.random.default_rng(self.seed)
        Q, K, V = (rng.standard_normal(self.shape, dtype=xp.float32) for _ in range(3))
        if self.family == "normal":
            pass
        elif self.family == "cliff":
            runs = rng.integers(0, 2, self.N // 5 + 1).repeat(5)[: self.N]  # shorter than any tile, crossing its edges
            Q, K = _along(xp, Q, 100, rng.integers(0, 2, self.N)), _along(xp, K, 100, runs)
        elif self.family == "cold":
            zeros = xp.zeros(self.N, int)
            Q, K = _along(xp, Q, 200, zeros), _along(xp, K, 200, zeros + 1)
        else:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, not {self.family!r}")
        return tuple(array.astype(self.dtype) for array in (Q, K, V))


def _along(xp, noise, score, sign):
    """Rows along + or - one direction, so that q . k / sqrt(d) of two rows is + or - score, give or take about 1."""
    d = noise.shape[-1]
    length = (score * d**0.5) ** 0.5
    return noise * (d**0.5 / length) + ((1 - 2 * sign) * (length / d**0.5))[:, None].astype(noise.dtype)


ARTICLE = Problem(1, 1, 1024, 64)  # fills 16 of an H200's 132 multiprocessors with tiles of 64 rows
FULL_64 = Problem(1, 64, 4096, 64)
FULL_128 = Problem(1, 64, 4096, 128)
