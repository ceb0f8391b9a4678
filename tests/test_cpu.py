"""The CPU executor in fast mode: the language, the errors, the cache."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from common import cpu
from common.cpu import abi, rewrite
from common.cpu.trace import MESSAGES

ROOT = Path(__file__).resolve().parent.parent

SOURCE = r"""
#define KERNEL extern "C" __global__ void
constexpr int d = 8;
constexpr float INFINITY = __builtin_inff();
#line 1 "kernels.cu"

KERNEL indices(int *out)
{
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
}

KERNEL shared_forms(float *out)
{
    __shared__ float a[d][d], b[d];             // several in a line, a comment with __shared__ in it
    __shared__ __align__(64) float4 c[4];
    alignas(128) __shared__ unsigned char e[3];
    __shared__ struct { int x; float y; } f;
    __shared__ volatile int g;
    __shared__
        float h[d]
               [d];
    extern __shared__ __align__(16) unsigned char dynamic[];
    float *last = reinterpret_cast<float *>(dynamic);
    int t = threadIdx.x;
    a[0][t] = t, b[t] = t, h[0][t] = t, last[t] = t;
    if (t == 0) c[3] = make_float4(1, 2, 3, 4), e[2] = 5, f.y = 6, g = 7;
    __syncthreads();
    int u = d - 1 - t;
    out[t] = a[0][u] + b[u] + h[0][u] + last[u] + c[3].w + e[2] + f.y + g;
    if (t == 0) out[d] = (size_t)c % 64 + (size_t)e % 128 + (size_t)dynamic % 16;
}

template <int n, class T> __device__ T tree_sum(T v)
{
#pragma unroll
    for (int o = n / 2; o; o /= 2) v += __shfl_down_sync(0xffffffff, v, o);
    return v;
}

KERNEL warps(const float *x, float *out)
{
    float s = tree_sum<32>(x[threadIdx.x]);
    if (threadIdx.x == 0) out[0] = s;
}

template <int n, bool twice> __global__ void instance(float *out) { out[threadIdx.x] = n * (twice ? 2 : 1); }

KERNEL warp_operations(const float *x, int *out)
{
    int t = threadIdx.x, v = t + 1;
    const unsigned all = 0xffffffff;
    int r[] = {
        __shfl_sync(all, v, 5), __shfl_sync(all, v, 5, 8), __shfl_up_sync(all, v, 1), __shfl_down_sync(all, v, 1),
        __shfl_xor_sync(all, v, 3), (int)__ballot_sync(all, t % 2), __any_sync(all, t == 3), __all_sync(all, t == 3),
        __reduce_add_sync(all, v), __reduce_max_sync(all, v),
        __syncthreads_count(t < 7), __syncthreads_or(t == 9), __syncthreads_and(t == 9),
    };
    for (int i = 0; i < 13; ++i) out[i * 32 + t] = r[i];
    if (t < 16) out[13 * 32 + t] = __shfl_xor_sync(0x0000ffff, v, 1);
    else out[13 * 32 + t] = __shfl_xor_sync(0xffff0000, v, 2);
}

KERNEL atomics(float *sum, int *count, unsigned *most)
{
    atomicAdd(sum, 1);
    atomicSub(count, 1);
    atomicMax(most, blockIdx.x * blockDim.x + threadIdx.x);
    atomicCAS(count + 1, 0, 5);
}

KERNEL arithmetic(float *out)
{
    out[0] = fmaxf(NAN, 2.0f);
    out[1] = max(1, 2) + min(1.5f, 2);
    out[2] = __expf(1.0f) - expf(1.0f);
    out[3] = __fdividef(1.0f, 4.0f) + rsqrtf(4.0f) + __int_as_float(0x40000000);
    out[4] = -INFINITY;
    out[5] = __ldg(out + 4);
    out[6] = __popc(255) + __clz(1) + __ffs(8);
    float4 v = {1, 2}, w = v;
    out[7] = w.y + w.z;
}

KERNEL unwritten(float *out)
{
    __shared__ float a[32];
    if (blockIdx.x == 0) a[threadIdx.x] = 1;                                 // and never in block 1
    out[blockIdx.x * 32 + threadIdx.x] = a[threadIdx.x];
}

KERNEL early_return(float *out, int n)
{
    if (threadIdx.x >= n) return;
    __syncthreads();                                                         // early_return
    out[threadIdx.x] = 1;
}

KERNEL divergent(float *out)
{
    if (threadIdx.x % 2)
        __syncthreads();                                                     // odd
    else
        __syncthreads();                                                     // even
}

KERNEL deadlock(float *out)
{
    if (threadIdx.x < 20) __syncwarp();                                      // in the warp
    else __syncthreads();                                                    // in the block
}

KERNEL endless(volatile float *out)
{
    if (threadIdx.x == 3)
        while (out[0] == 0) out[1] = 1;                                      // endless
    __syncthreads();                                                         // after endless
}

KERNEL endless_barrier(volatile float *out)
{
    while (out[0] == 0)
        __syncthreads();                                                     // endless_barrier
}

__device__ float deep(float *x, int n)
{
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i % 2] + n;
    return n > 1000000 ? a[n % 64] : deep(a, n + 1) + a[n % 7];              // recursion
}
KERNEL recursion(float *out) { out[0] = deep(out, 0); }
KERNEL fault(float *out)
{
    out[1ll << 40] = 1;                                                      // fault
}
KERNEL division(int *out, int zero)
{
    out[0] = out[1] / zero;                                                    // division
}
KERNEL asserts(float *out)
{
    assert(out[0] > 5);                                                      // asserts
}
KERNEL past_the_end(float *out)
{
    __shared__ float a[32];
    a[threadIdx.x + 1] = out[threadIdx.x];
    out[threadIdx.x] = a[threadIdx.x];
}
KERNEL dot(const float *x, float *out, int n)
{
    float s = 0;
    for (int i = 0; i < n; ++i) s += x[i] * x[(i * 7 + blockIdx.x) % n];
    out[blockIdx.x] = s;
}
"""


def line_of(comment):
    rows = SOURCE[SOURCE.index('.cu"\n') + 5 :].split("\n")
    return next(i + 1 for i, row in enumerate(rows) if row.rstrip().endswith("// " + comment))


def run(kernel, *args, grid=1, block=32, **options):
    grid, block = ((x,) if isinstance(x, int) else x for x in (grid, block))
    cpu.compile(SOURCE, name=kernel)(grid, block, args, **options)


def floats(*shape):
    return np.zeros(shape or 64, np.float32)


# -- the language --

def test_indices_in_three_dimensions():
    out = np.full(4 * 24, -1, np.int32)
    run("indices", out, grid=(2, 1, 2), block=(2, 3, 4))
    assert (out == [1000 * b + t for b in range(4) for t in range(24)]).all()


def test_forms_of_shared_declarations():
    out = floats(9)
    run("shared_forms", out, block=8, shared_mem=32)
    assert (out[:8] == 4 * np.arange(8)[::-1] + 4 + 5 + 6 + 7).all() and out[8] == 0
    assert cpu.compile(SOURCE, name="shared_forms").shared_size_bytes == 256 + 32 + 32 + 64 + 3 + 1 + 8 + 4 + 256


def test_templates():
    out = floats()
    run("warps", np.arange(32, dtype=np.float32), out)
    assert out[0] == 496
    run("instance<7, true>", out)
    assert (out[:32] == 14).all()


def test_warp_operations():
    out = np.zeros((14, 32), np.int32)
    run("warp_operations", floats(), out)
    t = np.arange(32)
    expected = [6, t // 8 * 8 + 6, np.maximum(t, 1), np.minimum(t + 2, 32), (t ^ 3) + 1, -0x55555556, 1, 0,
                528, 32, 7, 1, 0, np.where(t < 16, t ^ 1, t ^ 2) + 1]
    for i, row in enumerate(expected):
        assert (out[i] == row).all(), i


def test_atomics_across_workers():
    total, count, most = floats(1), np.zeros(2, np.int32), np.zeros(1, np.uint32)
    run("atomics", total, count, most, grid=100, workers=4)
    assert total[0] == 3200 and list(count) == [-3200, 5] and most[0] == 3199


def test_arithmetic():
    out = floats(8)
    run("arithmetic", out, block=1)
    assert out[0] == 2 and out[1] == 3.5 and abs(out[2]) < 1e-6 and out[3] == 2.75
    assert out[4] == out[5] == -np.inf and out[6] == 8 + 31 + 4 and out[7] == 2


def test_shared_memory_is_nan_until_written_in_every_block():
    out = floats(64)
    run("unwritten", out, grid=2, workers=1)
    assert (out[:32] == 1).all() and np.isnan(out[32:]).all()


def test_any_number_of_workers_gives_identical_bits():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    results = []
    for workers in (1, 2, 5):
        out = floats(37)
        run("dot", x, out, np.int32(1000), grid=37, block=1, workers=workers)
        results.append(out.tobytes())
    assert results[0] == results[1] == results[2]


# -- a launch that cannot end well --

@pytest.mark.parametrize(
    "kernel, args, comments, words",
    [
        ("early_return", (floats(), np.int32(20)), ("early_return",), "thread 20 has already returned"),
        ("divergent", (floats(),), ("odd", "even"), "reached this barrier while thread 0 waits at another one"),
        ("deadlock", (floats(),), ("in the warp", "in the block"), "threads 0-19 waited in the warp operation"),
        ("endless", (floats(),), ("endless", "after endless"), "no block ended within 0.2 s"),
        ("endless_barrier", (floats(),), ("endless_barrier",), "no block ended within 0.2 s"),
        ("recursion", (floats(),), (), "256 KB of stack"),
        ("fault", (floats(),), ("fault",), "not its own"),
        ("division", (np.zeros(4, np.int32), np.int32(0)), ("division",), "divided an integer by zero"),
        ("asserts", (floats(),), ("asserts",), "assert(out[0] > 5)"),
        ("past_the_end", (floats(),), (), "past the end of the shared array a"),
    ],
)
def test_mistakes_end_in_a_launch_error_that_names_the_line(kernel, args, comments, words):
    begin = time.monotonic()
    with pytest.raises(cpu.LaunchError) as error:
        run(kernel, *args, time_limit=0.2)
    for comment in comments:
        nearby = (0, -1) if "endless" in kernel else (0,)           # a loop may be caught at its head or in its body
        assert any(f"kernels.cu:{line_of(comment) + i}" in str(error.value) for i in nearby)
    assert words in str(error.value)
    assert time.monotonic() - begin < 10
    out = floats(9)
    run("arithmetic", out, block=1)                    # the executor is as good as new
    assert out[0] == 2


@pytest.mark.parametrize(
    "args, words",
    [
        ((floats(), floats()), "takes 3 arguments (x, out, n); got 2"),
        ((floats(), floats(), 5), "argument 3 (n) of kernel dot is a 4-byte integer: pass a NumPy scalar"),
        ((floats(), floats(), np.int64(5)), "got int64"),
        ((floats(), floats(), np.float32(5)), "got float32"),
        ((np.zeros(64), floats(), np.int32(5)), "argument 1 (x) of kernel dot points to 4-byte floats; got"),
        ((np.zeros(64, np.complex64), floats(), np.int32(5)), "got an array of complex64"),
        ((floats(64)[::2], floats(), np.int32(5)), "contiguous"),
        (([1.0], floats(), np.int32(5)), "pass a NumPy array, not list"),
    ],
)
def test_arguments_are_checked_before_the_launch(args, words):
    with pytest.raises(cpu.LaunchError) as error:
        run("dot", *args)
    assert words in str(error.value)


def test_a_read_only_array_is_refused_where_it_might_be_written():
    x = floats()
    x.flags.writeable = False
    run("dot", x, floats(), np.int32(5))
    with pytest.raises(cpu.LaunchError, match="read-only"):
        run("dot", floats(), x, np.int32(5))


@pytest.mark.parametrize(
    "grid, block, shared_mem",
    [(0, 32, 0), (1, 0, 0), (1, 1025, 0), ((1, 70000), 1, 0), (1, (32, 32, 2), 0), (1, 32, 300_000)],
)
def test_geometry_outside_cudas_limits(grid, block, shared_mem):
    with pytest.raises(cpu.LaunchError):
        run("unwritten", floats(), grid=grid, block=block, shared_mem=shared_mem)


def test_ctrl_c_stops_a_launch():
    code = (f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
            "import test_cpu as t; print('running', flush=True); t.run('endless', t.floats())")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    threading.Timer(0.5, process.send_signal, [2]).start()
    _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr


# -- a source that does not compile --

def source(body, before=""):
    return f'{before}\n#line 1 "stages/mine.cu"\nextern "C" __global__ void attention(float *x)\n{{\n{body}\n}}\n'


@pytest.mark.parametrize(
    "text, start",
    [
        (source("    x[0] = unknown;"), "stages/mine.cu:3: "),
        (source("    int i;\n    asm(\"mov.u32 %0, %%laneid;\" : \"=r\"(i));\n    x[0] = i;"), "stages/mine.cu:4: "),
        (source("    atomicAdd(x, \"text\");"), "stages/mine.cu:3: "),
        (source("    __shared__ float (*p)[3];"), "stages/mine.cu:3: cannot parse this __shared__"),
        (source("    __shared__ float a[3] = {};"), "stages/mine.cu:3: cannot parse this __shared__"),
        (source("    if (x) { __shared__ float }"), "stages/mine.cu:3: cannot parse this __shared__"),
        (source("", "__shared__ int flag;"), "kernel.cu:1: cannot parse this __shared__"),
        (source("    SHARED float a[3];", "#define SHARED __shared__"), "kernel.cu:1: cannot parse this __shared__"),
        (source("    extern __shared__ float a[], b[];"), "stages/mine.cu:3: cannot parse this __shared__"),
        (source("    __shared__ float a[96][64];\n    __shared__ float b[97][64];\n    x[0] = a[0][0] + b[0][0];"),
         "stages/mine.cu:4: with b, kernel attention uses 49,408 bytes of static __shared__ memory; the limit is"),
        ("__global__ void other(float *x) {}", "no __global__ function named attention in this source (there is o"),
    ],
)
def test_compile_errors_start_with_the_place(text, start):
    with pytest.raises(cpu.CompileError) as error:
        cpu.compile(text)
    assert str(error.value).startswith(start)


def test_exactly_48_kb_is_allowed_and_other_kernels_do_not_count():
    text = source("    __shared__ float a[192][64]; x[0] = a[0][0];")
    text += "__global__ void other(float *x) { __shared__ float a[64]; x[0] = a[0]; }"
    assert cpu.compile(text).shared_size_bytes == 49152


def test_no_compiler_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(cpu.CompileError, match="sudo apt install g\\+\\+"):
        cpu.compile(source("    x[0] = 1;"))


def test_includes_of_the_cuda_headers_are_harmless():
    cpu.compile(source("    x[0] = 1;", "#include <cuda_runtime.h>"))


def test_python_and_cpp_agree_on_the_kinds():
    enum = re.search(r"enum Kind : int \{(.*?)\}", (ROOT / "common/cpu/runtime.h").read_text(), re.S)[1]
    names = re.findall(r"[A-Z_]+", enum)
    assert len(names) == len(MESSAGES)
    for name in ("STACK_OVERFLOW", "FAULT", "DIVISION", "PAST_THE_END", "OUT_OF_BOUNDS"):
        assert names[getattr(abi, name)] == name


def test_the_rewrite_keeps_every_line():
    text, arrays = rewrite.shared(SOURCE)
    assert text.count("\n") == SOURCE.count("\n")
    assert [a.name for a in arrays if a.function == "shared_forms"] == list("abcefgh") + ["dynamic"]


# -- the cache --

def test_compiled_once_in_a_folder_with_spaces_and_accents(tmp_path):
    text = source("    x[0] = 3;")
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "import numpy as np\nfrom common import cpu\nx = np.zeros(1, np.float32)\n"
            f"cpu.compile({text!r})((1,), (1,), [x])\nassert x[0] == 3")
    cache = tmp_path / "é è ü folder"
    env = {**os.environ, "CPU_CACHE": str(cache)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]      # at the same time
    assert [p.wait() for p in both] == [0, 0]
    files = {p.name: p.stat().st_mtime_ns for p in cache.iterdir()}
    assert sorted(name.rpartition(".")[2] for name in files) == ["o", "so"]
    subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    assert {p.name: p.stat().st_mtime_ns for p in cache.iterdir()} == files


def test_an_edited_source_is_compiled_again():
    x = floats(1)
    for value in (1, 2, 1):
        cpu.compile(source(f"    x[0] = {value};"))((1,), (1,), [x])
        assert x[0] == value
