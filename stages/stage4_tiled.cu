// A block shares tiles of Q, K, V and the scores in shared memory.
//
// grid   tiles x heads   (one dimension: the others end at 65,535)
// block  Br threads, a row each
// shared Qs, Ks, Vs, S: 4 (Br (d + 1) + 2 Bc d + Br (Bc + 1)) bytes
//
// The trap: at Br = Bc = d = 64 the four tiles are 64 KB, and a block may declare 48. (At d = 128 the compiler also
// keeps the thread's row of Qs in registers, beside o: they do not fit, and some spill.)
extern "C" __global__
void attention(const float *Q, const float *K, const float *V, float *O, int N, float scale)
{
    __shared__ float Qs[Br][d + 1];   // + 1: a warp reads a column, 32 rows in 32 different banks
    __shared__ float Ks[Bc][d];       // a warp reads one element at a time, which is broadcast
    __shared__ float Vs[Bc][d];
    __shared__ float S[Br][Bc + 1];

    // -- who am I --
    const int tiles = (N + Br - 1) / Br;
    const int row0 = blockIdx.x % tiles * Br;
    const int i = threadIdx.x;
    const int row = row0 + i;
    const size_t head = blockIdx.x / tiles * (size_t)N * d;  // 64 bits: B*H*N*d passes 2^31
    Q += head; K += head; V += head; O += head;              // (N, d) each

    // -- load --
    for (int t = i; t < Br * d; t += Br)  // neighbours load neighbours, whole rows at a time
        Qs[t / d][t % d] = row0 + t / d < N ? Q[(size_t)row0 * d + t] : 0;
    float o[d];
    #pragma unroll  // all loops over o: only constant indices keep an array in registers
    for (int x = 0; x < d; x++)
        o[x] = 0;
    float m = -INFINITY, l = 0;

    const int keys = causal ? min(row0 + Br, N) : N;
    for (int j0 = 0; j0 < keys; j0 += Bc) {
        // -- load --
        __syncthreads();  // all threads are done with the last tile
        for (int t = i; t < Bc * d; t += Br) {
            const bool inside = j0 + t / d < N;
            Ks[t / d][t % d] = inside ? K[(size_t)j0 * d + t] : 0;
            Vs[t / d][t % d] = inside ? V[(size_t)j0 * d + t] : 0;
        }
        __syncthreads();  // all of this tile is there

        // -- score --
        float m_new = m;
        for (int j = 0; j < Bc; j++) {
            float s = 0;
            #pragma unroll
            for (int x = 0; x < d; x++)
                s += Qs[i][x] * Ks[j][x];
            s = j0 + j < N && (!causal || j0 + j <= row) ? s * scale : -INFINITY;
            S[i][j] = s;
            m_new = fmaxf(m_new, s);
        }

        // -- softmax --
        const float alpha = expf(m - m_new);  // 0 for the first tile, where m is -INFINITY
        l *= alpha;
        m = m_new;
        #pragma unroll
        for (int x = 0; x < d; x++)
            o[x] *= alpha;

        // -- output --
        for (int j = 0; j < Bc; j++) {
            const float p = expf(S[i][j] - m);
            l += p;
            #pragma unroll
            for (int x = 0; x < d; x++)
                o[x] += p * Vs[j][x];
        }
    }

    // -- output --
    if (row < N)  // not earlier: a thread without a row still loads tiles and meets barriers
        #pragma unroll
        for (int x = 0; x < d; x++)
            O[(size_t)row * d + x] = o[x] / l;
}
