"""Attention in three passes, with every score kept in memory.

The specification of all later stages: run in float64, this file decides what is right.

The trap: S and P have N x N entries a head, where Q, K, V and O have N x d.
"""

import numpy as np


def attention(Q, K, V, *, causal=False, scale=None):
    """softmax(scale Q K^T) V of arrays (..., N, d) of one float type, returned in that type."""
    # -- who am I --
    d = Q.shape[-1]
    scale = d**-0.5 if scale is None else scale

    # -- score --
    S = Q @ K.swapaxes(-1, -2) * scale
    if causal:  # query row sees keys 0..row
        S[np.triu(np.ones_like(S, bool), 1)] = -np.inf

    # -- softmax --
    P = np.exp(S - S.max(-1, keepdims=True))  # without the max, exp overflows float32 from s = 89 on
    P /= P.sum(-1, keepdims=True)

    # -- output --
    return P @ V
