"""Trace mode: exact counters of kernels that can be counted by hand, each kind of finding, and no false alarms."""

import dataclasses
import json

import numpy as np
import pytest

from common import cpu

# One source, one compilation for each kernel used. Lines are found by the comment at their end.
SOURCE = r"""
#line 1 "kernels.cu"
#define KERNEL extern "C" __global__ void

KERNEL counters(const float *a, float *out, int n)
{
    __shared__ float column[32][32], padded[32][33];
    __shared__ double wide[32];
    __shared__ float4 vectors[64];
    int t = threadIdx.x;
    float s = a[t];                                         // coalesced
    s += a[32 * t];                                         // strided
    float4 v = reinterpret_cast<const float4 *>(a)[t];      // vector
    s += a[t + 1];                                          // shifted
    s += a[n];                                              // uniform
    if (t < 16) s += a[t + 64];                             // half
    column[t][0] = s;                                       // column store
    padded[t][0] = s;                                       // padded store
    wide[t] = s;                                            // double store
    vectors[t] = v;                                         // vector store
    vectors[t + 32] = v;
    __syncthreads();
    s += column[t][0];                                      // column load
    s += padded[t][0];                                      // padded load
    s += padded[0][0];                                      // broadcast
    s += (float)wide[t];                                    // double load
    v = vectors[2 * t];                                     // vector stride 2
    atomicAdd(&out[32], s);                                 // atomic
    out[t] = s + v.x;                                       // out
}

KERNEL no_barrier(float *out)
{
    __shared__ float x[64];
    x[threadIdx.x] = 1;                                     // first
    out[threadIdx.x] = x[(threadIdx.x + 1) % 64];           // second
}

KERNEL write_after_read(float *out)
{
    __shared__ float x[64];
    x[threadIdx.x] = 1;
    __syncthreads();
    float s = 0;
    for (int i = 0; i < 64; ++i) s += x[i];                 // first
    x[threadIdx.x] = s;                                     // second
    out[threadIdx.x] = s;
}

KERNEL no_syncwarp(float *out)
{
    __shared__ float x[32];
    x[threadIdx.x] = 1;                                     // first
    out[threadIdx.x] = x[threadIdx.x ^ 1];                  // second
}

KERNEL two_blocks(float *out)
{
    out[threadIdx.x] = blockIdx.x;                          // first
}

KERNEL blocks_read_and_write(float *out)
{
    if (blockIdx.x == 0) out[100 + threadIdx.x] = out[threadIdx.x];      // first
    if (blockIdx.x == 1) out[threadIdx.x] = 1;              // second
}

KERNEL global_out_of_bounds(const float *a, float *out)
{
    out[threadIdx.x] = a[threadIdx.x + 8];                  // first
}

KERNEL far_out_of_bounds(const float *a, float *out)
{
    out[threadIdx.x] = a[1ll << 40];                        // first
}

KERNEL shared_out_of_bounds(float *out)
{
    __shared__ float x[32], y[32];
    for (int i = 0; i <= 32; ++i) x[i] = 0;                 // first
    y[0] = 1;
    out[0] = x[threadIdx.x] + y[0];
}

KERNEL uninitialised(float *out)
{
    __shared__ float x[33];
    x[threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x + 1];                  // first
}

KERNEL misaligned(float *out)
{
    float4 v = *reinterpret_cast<float4 *>(out + threadIdx.x + 1);      // first
    out[0] = v.x;
}

KERNEL divergent(float *out)
{
    if (threadIdx.x < 32)
        __syncthreads();                                    // second
    else
        __syncthreads();                                    // first
}

KERNEL early_return(float *out)
{
    if (threadIdx.x > 40) return;
    __syncthreads();                                        // first
}

KERNEL deadlock(float *out)
{
    if (threadIdx.x == 0) __syncwarp();                     // first
    __syncthreads();                                        // second
}

KERNEL endless(float *out)
{
    while (out[threadIdx.x] >= 0) out[0] = 1;               // first
}

KERNEL clean(const float *a, float *out, int *count)
{
    __shared__ float x[64];
    __shared__ int votes;
    extern __shared__ float scratch[];
    int t = threadIdx.x, lane = t % 32, warp = t / 32;
    float s = a[t];
    for (int o = 16; o; o /= 2) s += __shfl_xor_sync(0xffffffff, s, o);
    x[t] = s;
    __syncwarp();
    s += x[t ^ 1];                                          // ordered by the first __syncwarp
    __syncwarp();
    x[t] = s;
    if (t == 0) votes = 0;
    __syncthreads();
    for (int i = 0; i < 64; ++i) s += x[i];
    atomicAdd(&votes, 1);
    scratch[t] = s;
    __syncthreads();
    if (lane == 0) out[2 * blockIdx.x + warp] = scratch[32 * warp] + votes;
    if (lane == 0) atomicAdd(count, 1);
}

KERNEL last_block(const float *a, float *partial, int *count, float *out)
{
    __shared__ bool last;
    partial[blockIdx.x] = a[blockIdx.x];
    __threadfence();
    last = atomicAdd(count, 1) == gridDim.x - 1;
    __syncthreads();
    if (last) {
        float s = 0;
        for (int i = 0; i < gridDim.x; ++i) s += partial[i];
        *out = s;
    }
}

KERNEL bytes(const signed char *a, signed char *out)
{
    __shared__ signed char x[64];
    x[threadIdx.x] = a[threadIdx.x];                        // load
    __syncthreads();
    out[threadIdx.x] = x[63 - threadIdx.x];                 // store
}
"""


def line_of(kernel, comment):
    """The line in `kernel` that ends with `// comment`."""
    rows = SOURCE[SOURCE.index('.cu"\n') + 5 :].split("\n")
    start = next(i for i, row in enumerate(rows) if row.startswith(f"KERNEL {kernel}("))
    return next(i + 1 for i in range(start, len(rows)) if rows[i].rstrip().endswith("// " + comment))


def trace(kernel, args, grid=1, block=32, **options):
    return cpu.compile(SOURCE, name=kernel, mode="trace")((grid,), (block,), args, **options)


def floats(n):
    return np.zeros(n, np.float32)


# -- counters --

@pytest.fixture(scope="module")
def counted():
    a = np.arange(1024, dtype=np.float32)
    out = floats(33)
    result = trace("counters", [a, out, np.int32(7)])
    assert result.findings == () and result.completed
    assert np.isfinite(out).all()
    return result


@pytest.mark.parametrize(
    "comment, space, op, size, cost, ideal",
    [
        ("coalesced", "global", "load", 4, 4, 4),
        ("strided", "global", "load", 4, 32, 4),
        ("vector", "global", "load", 16, 16, 16),
        ("shifted", "global", "load", 4, 5, 4),
        ("uniform", "global", "load", 4, 1, 1),
        ("half", "global", "load", 4, 2, 2),
        ("out", "global", "store", 4, 4, 4),
        ("atomic", "global", "atomic", 4, 1, 1),
        ("column store", "shared", "store", 4, 32, 1),
        ("padded store", "shared", "store", 4, 1, 1),
        ("double store", "shared", "store", 8, 2, 2),
        ("vector store", "shared", "store", 16, 4, 4),
        ("column load", "shared", "load", 4, 32, 1),
        ("padded load", "shared", "load", 4, 1, 1),
        ("broadcast", "shared", "load", 4, 1, 1),
        ("double load", "shared", "load", 8, 2, 2),
        ("vector stride 2", "shared", "load", 16, 8, 4),
    ],
)
def test_counters_are_exact(counted, comment, space, op, size, cost, ideal):
    (c,) = counted.at(line_of("counters", comment), space, op)
    lanes = 16 if comment == "half" else 32
    assert (c.requests, c.size, c.bytes, c.cost, c.ideal) == (1, size, lanes * size, cost, ideal)
    assert c.conflicts == (cost - ideal if space == "shared" else 0)


def test_totals_and_shared_bytes(counted):
    assert counted.global_load_bytes == 4 * (32 * 4 + 16) + 512 + 128       # the atomic reads and writes
    assert counted.global_store_bytes == 128 + 128
    assert counted.static_shared_bytes == counted.shared_bytes == 4096 + 4224 + 256 + 1024
    assert counted.arrays["a"] == 4096 and counted.arrays["padded"] == 4224


def test_an_example_names_the_address_of_each_lane(counted):
    (c,) = counted.at(line_of("counters", "strided"))
    assert c.arrays == ("a",)
    assert c.examples[0].lanes == tuple(("a", 128 * lane) for lane in range(32))
    (c,) = counted.at(line_of("counters", "half"))
    assert c.examples[0].lanes[15:17] == (("a", 4 * 79), None)


def test_a_trace_is_plain_data(counted):
    data = json.loads(json.dumps(counted.to_json()))
    assert len(data["lines"]) == len(counted.lines) and data["shared_bytes"] == counted.shared_bytes


# -- findings --

@pytest.mark.parametrize(
    "kernel, kind, array, index, has_second",
    [
        ("no_barrier", "race", "x", None, True),
        ("write_after_read", "race", "x", None, True),
        ("no_syncwarp", "race", "x", None, True),
        ("two_blocks", "race between blocks", "out", 0, False),
        ("blocks_read_and_write", "race between blocks", "out", None, True),
        ("shared_out_of_bounds", "out of bounds", "x", 32, False),
        ("uninitialised", "uninitialised shared read", "x", 32, False),
        ("misaligned", "misaligned", "out", 1, False),
        ("divergent", "divergent barrier", None, None, True),
        ("early_return", "early return before a barrier", None, None, False),
        ("deadlock", "deadlock", None, None, True),
    ],
)
def test_each_kind_is_found_with_its_line(kernel, kind, array, index, has_second):
    block = 32 if kernel in ("no_syncwarp", "uninitialised") else 64
    result = trace(kernel, [floats(256)], grid=2 if "blocks" in kernel else 1, block=block)
    assert [f.kind for f in result.findings] == [kind]
    (f,) = result.findings
    wanted = {line_of(kernel, "first")} | ({line_of(kernel, "second")} if has_second else set())
    assert {f.line, f.other_line or f.line} == wanted
    assert f.message.startswith(f"kernels.cu:{f.line}: ")
    assert f.array == array and (index is None or f.index == index)
    assert json.loads(json.dumps(dataclasses.asdict(f)))["kind"] == kind


def test_out_of_bounds_stops_before_the_access():
    out = floats(32)
    result = trace("global_out_of_bounds", [floats(32), out])
    (f,) = result.findings
    assert (f.kind, f.array, f.index, f.thread) == ("out of bounds", "a", 32, 24)
    assert f.line == line_of("global_out_of_bounds", "first")
    assert "a has 32 elements" in f.message and not result.completed


def test_an_address_far_from_every_array_is_out_of_bounds():
    (f,) = trace("far_out_of_bounds", [floats(32), floats(32)]).findings
    assert (f.kind, f.line) == ("out of bounds", line_of("far_out_of_bounds", "first"))


def test_a_kernel_that_never_ends_says_where_it_stands():
    result = trace("endless", [floats(32)], time_limit=0.2)
    (f,) = result.findings
    assert (f.kind, f.line, result.completed) == ("time limit", line_of("endless", "first"), False)


def test_duplicates_are_merged_and_counted():
    (f,) = trace("no_barrier", [floats(64)], block=64).findings
    assert f.count > 1


# -- no false alarms --

def test_shuffles_warp_barriers_atomics_and_dynamic_shared_memory_are_clean():
    a, out, count = np.ones(64, np.float32), floats(8), np.zeros(1, np.int32)
    result = trace("clean", [a, out, count], grid=4, block=64, shared_mem=256)
    assert result.findings == () and result.completed
    assert count[0] == 8 and (out == out[0]).all()
    assert result.dynamic_shared_bytes == 256 and result.static_shared_bytes == 260
    assert any("scratch" in c.arrays for c in result.lines)


def test_the_last_block_may_read_what_the_others_published():
    a, out = np.arange(8, dtype=np.float32), floats(1)
    result = trace("last_block", [a, floats(8), np.zeros(1, np.int32), out], grid=8, block=1)
    assert result.findings == () and out[0] == a.sum()


def test_neighbouring_bytes_are_different_places():
    a = np.arange(64, dtype=np.int8)
    out = np.zeros_like(a)
    result = trace("bytes", [a, out], block=64)
    assert result.findings == () and (out == a[::-1]).all()
    (c,) = result.at(line_of("bytes", "load"), "global")
    assert (c.requests, c.size, c.sectors) == (2, 1, 2)
