// One thread computes one query row, reading every key and value from global memory.
//
// grid   tiles x heads   (one dimension: the others end at 65,535)
// block  Br threads, a row each
// shared none
//
// The trap: q and o want 2 d registers. At d = 128 that is one more than a thread can have, and some spill.
extern "C" __global__
void attention(const float *Q, const float *K, const float *V, float *O, int N, float scale)
{
    // -- who am I --
    const int tiles = (N + Br - 1) / Br;
    const int row = blockIdx.x % tiles * Br + threadIdx.x;
    const size_t head = blockIdx.x / tiles * (size_t)N * d;  // 64 bits: B*H*N*d passes 2^31
    Q += head; K += head; V += head; O += head;              // (N, d) each
    if (row >= N) return;

    // -- load --
    float q[d], o[d];
    #pragma unroll  // all loops over q and o: only constant indices keep an array in registers
    for (int x = 0; x < d; x++) {
        q[x] = Q[(size_t)row * d + x];
        o[x] = 0;
    }
    float m = -INFINITY, l = 0;

    const int keys = causal ? row + 1 : N;
    for (int j = 0; j < keys; j++) {
        // -- score --
        float s = 0;
        #pragma unroll
        for (int x = 0; x < d; x++)
            s += q[x] * K[(size_t)j * d + x];
        s *= scale;

        // -- softmax --
        const float m_new = fmaxf(m, s);
        const float alpha = expf(m - m_new);  // 0 for the first key, where m is -INFINITY
        const float p = expf(s - m_new);
        l = l * alpha + p;
        m = m_new;

        // -- output --
        #pragma unroll
        for (int x = 0; x < d; x++)
            o[x] = o[x] * alpha + p * V[(size_t)j * d + x];
    }

    // -- output --
    #pragma unroll
    for (int x = 0; x < d; x++)
        O[(size_t)row * d + x] = o[x] / l;
}
