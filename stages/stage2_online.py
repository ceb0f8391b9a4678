"""Online softmax: one pass over tiles of keys, with a running max and a running sum.

    m_new = max(m, max_j s_j)      alpha = exp(m - m_new)      p_j = exp(s_j - m_new)
    l     = alpha l + sum_j p_j    o     = alpha o + sum_j p_j v_j

Milakov and Gimelshein 2018 (arXiv:1805.02867) for m and l; Rabe and Staats 2021 (arXiv:2112.05682) carry o along.

The trap: l and o were summed against an older max. Both must be multiplied by alpha, or old keys count too much.
"""

import numpy as np

Br, Bc = 64, 64  # rows of a tile of queries, rows of a tile of keys


def attention(Q, K, V, *, causal=False, scale=None):
    """softmax(scale Q K^T) V of arrays (..., N, d) of one float type, returned in that type."""
    # -- who am I --
    N, d = Q.shape[-2:]
    scale = d**-0.5 if scale is None else scale
    O = np.empty_like(Q)

    for row0 in range(0, N, Br):
        # -- load --
        q = Q[..., row0 : row0 + Br, :]
        o = np.zeros_like(q)
        m = np.full_like(q[..., :1], -np.inf)
        l = np.zeros_like(m)

        # The last key that any row of this tile can see ends the pass.
        for j0 in range(0, min(row0 + Br, N) if causal else N, Bc):
            k = K[..., j0 : j0 + Bc, :]
            v = V[..., j0 : j0 + Bc, :]

            # -- score --
            s = q @ k.swapaxes(-1, -2) * scale
            if causal:  # key j0 + j is hidden from query row0 + i if j0 + j > row0 + i
                s[np.triu(np.ones_like(s, bool), row0 - j0 + 1)] = -np.inf

            # -- softmax --
            m_new = np.maximum(m, s.max(-1, keepdims=True))
            alpha = np.exp(m - m_new)  # 0 for the first tile, where m is -inf
            p = np.exp(s - m_new)
            l = alpha * l + p.sum(-1, keepdims=True)
            m = m_new

            # -- output --
            o = alpha * o + p @ v

        O[..., row0 : row0 + Br, :] = o / l
    return O
