// Scores leave shared memory for registers, and tiles arrive four floats at a time.
//
// grid   tiles x heads   (one dimension: the others end at 65,535)
// block  Br threads, a row each
// shared Qs, Ks, Vs: 4 (Br (d + 4) + 2 Bc d) bytes
//
// Why both at once: with a tile's scores in registers, the loop over features can go outside the loop over keys. One read
// of q then serves Bc keys, and Bc sums no longer wait for each other. What is left to pay for is reads of shared
// memory, and a float4 read feeds four products.
//
// The trap: float s[Bc] is in registers only if every loop over it is unrolled. One that is not, and the
// compiler puts the whole array in local memory, which is global memory under another name.
extern "C" __global__
void attention(const float *Q, const float *K, const float *V, float *O, int N, float scale)
{
    __shared__ float4 Qs[Br][d / 4 + 1];  // + 1: 8 lanes at a time read a column, 8 rows in 32 different banks
    __shared__ float4 Ks[Bc][d / 4];      // a warp reads one element at a time, which is broadcast
    __shared__ float4 Vs[Bc][d / 4];

    // -- who am I --
    const int tiles = (N + Br - 1) / Br;
    const int row0 = blockIdx.x % tiles * Br;
    const int i = threadIdx.x;
    const int row = row0 + i;
    const size_t head = blockIdx.x / tiles * (size_t)N * d;  // 64 bits: B*H*N*d passes 2^31
    Q += head; K += head; V += head; O += head;              // (N, d) each

    // -- load --
    const float4 zero = {0, 0, 0, 0};
    for (int t = i; t < Br * d / 4; t += Br)  // neighbours load neighbours, whole rows at a time
        Qs[t / (d / 4)][t % (d / 4)] = row0 + t / (d / 4) < N ? ((const float4 *)(Q + (size_t)row0 * d))[t] : zero;
    float4 o[d / 4];
    #pragma unroll  // all loops over o and s: only constant indices keep an array in registers
    for (int x = 0; x < d / 4; x++)
        o[x] = zero;
    float m = -INFINITY, l = 0;

    const int keys = causal ? min(row0 + Br, N) : N;
    for (int j0 = 0; j0 < keys; j0 += Bc) {
        // -- load --
        __syncthreads();  // all threads are done with the last tile
        for (int t = i; t < Bc * d / 4; t += Br) {
            const bool inside = j0 + t / (d / 4) < N;
            Ks[t / (d / 4)][t % (d / 4)] = inside ? ((const float4 *)(K + (size_t)j0 * d))[t] : zero;
            Vs[t / (d / 4)][t % (d / 4)] = inside ? ((const float4 *)(V + (size_t)j0 * d))[t] : zero;
        }
        __syncthreads();  // all of this tile is there

        // -- score --
        float s[Bc];
        #pragma unroll
        for (int j = 0; j < Bc; j++)
            s[j] = 0;
        #pragma unroll 2  // not s: unrolled whole, the loop outgrows the instruction cache
        for (int x = 0; x < d / 4; x++) {  // x outside j: one read of q serves Bc keys
            const float4 q = Qs[i][x];
            #pragma unroll
            for (int j = 0; j < Bc; j++) {
                const float4 k = Ks[j][x];
                s[j] += q.x * k.x;
                s[j] += q.y * k.y;
                s[j] += q.z * k.z;
                s[j] += q.w * k.w;
            }
        }
        float m_new = m;
        #pragma unroll
        for (int j = 0; j < Bc; j++) {
            s[j] = j0 + j < N && (!causal || j0 + j <= row) ? s[j] * scale : -INFINITY;
            m_new = fmaxf(m_new, s[j]);
        }

        // -- softmax --
        const float alpha = expf(m - m_new);  // 0 for the first tile, where m is -INFINITY
        l *= alpha;
        m = m_new;
        #pragma unroll
        for (int x = 0; x < d / 4; x++) {
            o[x].x *= alpha;
            o[x].y *= alpha;
            o[x].z *= alpha;
            o[x].w *= alpha;
        }

        // -- output --
        #pragma unroll
        for (int j = 0; j < Bc; j++) {
            const float p = expf(s[j] - m);
            l += p;
            #pragma unroll
            for (int x = 0; x < d / 4; x++) {
                const float4 v = Vs[j][x];
                o[x].x += p * v.x;
                o[x].y += p * v.y;
                o[x].z += p * v.z;
                o[x].w += p * v.w;
            }
        }
    }

    // -- output --
    if (row < N)  // not earlier: a thread without a row still loads tiles and meets barriers
        #pragma unroll
        for (int x = 0; x < d / 4; x++)
            ((float4 *)(O + (size_t)row * d))[x] = {o[x].x / l, o[x].y / l, o[x].z / l, o[x].w / l};
}
