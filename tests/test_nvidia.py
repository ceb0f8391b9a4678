"""The trace beside NVIDIA's own counters and sanitizer."""

import json

import pytest

from common import launch, nvidia, pictures
from common.problem import Problem
from stages import ROOT, STAGES

# Which element of a shared float2 or float4 array lane l loads, in C and in Python with // for /.
PATTERNS = {
    "uniform": "0", "lane": "l", "l/2": "l/2", "l/4": "l/4", "l/8": "l/8", "l/16": "l/16",
    "l%2": "l%2", "l%4": "l%4", "l%8": "l%8", "l%16": "l%16", "2l": "2*l", "4l": "4*l", "8l": "8*l",
    "rows2": "(l%2)*16+l/2", "rows4": "(l%4)*17", "rows4b": "(l%4)*16", "8rows2": "(l/4)*17", "8rows_unp": "(l/4)*16",
    "rev": "31-l", "xor": "l^1", "xor5": "l^5", "swap8": "(l%8)*4+l/8", "half": "l/16*8", "half1": "l/16*9",
    "qconf": "l/8*8", "pair8": "(l/8%2)*8", "l%2*8": "l%2*8", "l%4*8": "l%4*8", "t2q": "(l%2)*17", "t8": "(l%8)*17", "t8b": "(l%8)*9",
}  # fmt: skip
MEASURED = json.loads((ROOT / "tests" / "data" / "wavefronts.json").read_text())["patterns"]
WIDE = [(vector, name) for vector in ("float4", "float2") for name in PATTERNS]
SOURCE = """// One warp, one shared load.
extern "C" __global__ void attention(const float *Q, const float *K, const float *V, float *O, int N, float scale)
{{
    __shared__ {vector} A[512];
    const int l = threadIdx.x;
    for (int t = l; t < 512; t += 32) A[t] = make_{vector}({four});
    __syncthreads();
    {vector} a = A[({index}) + (int)scale];
    O[l] = a.x + a.y{more};
}}
"""


def one_load(vector, index):
    wide = vector == "float4"
    text = SOURCE.format(vector=vector, index=index, four=", ".join(["Q[t]"] * (4 if wide else 2)), more=" + a.z + a.w" if wide else "")
    return STAGES[3].patched(text, tiles={64: dict(Br=32)}), Problem(N=32, d=64)


@pytest.mark.parametrize("vector, name", WIDE)
def test_wide_shared_loads_cost_what_they_cost_on_an_h200(vector, name):
    stage, problem = one_load(vector, "(int)Q[1024 + l]")  # one source for all patterns: it compiles once
    Q, K, V = problem.inputs()
    Q.reshape(-1)[1024:1056] = [eval(PATTERNS[name].replace("/", "//"), {"l": l}) for l in range(32)]
    (line,) = launch.trace(stage, Q, K, V, scale=0)[1].at(8, "shared", "load")
    assert [line.wavefronts, line.conflicts] == MEASURED[f"{vector} {name}"]
    assert drawn_wavefronts(line.examples[0]) == line.wavefronts


def drawn_wavefronts(example):
    """The same by the grouping that pictures use: the pictures must not say otherwise than the counts."""
    words = {}
    for lane, (_, offset) in enumerate(example.lanes):
        for word in range(offset // 4, (offset + example.size) // 4):
            words.setdefault(lane // pictures._together(example), {}).setdefault(word % 32, set()).add(word)
    return sum(max(map(len, banks.values())) for banks in words.values())


@pytest.mark.gpu
def test_the_gpu_still_counts_the_same():
    counts = nvidia.counted([nvidia.job(*one_load(vector, PATTERNS[name])) for vector, name in WIDE])
    now = {" ".join(p): [c["shared wavefronts ld"], c["shared conflicts ld"]] for p, c in zip(WIDE, counts)}
    assert now == MEASURED


@pytest.mark.gpu
@pytest.mark.skipif(not nvidia.sanitizer(), reason="there is no compute-sanitizer")
def test_compute_sanitizer_agrees_with_the_trace():
    for row in nvidia.sanitized():
        if row["expected"].startswith("none"):
            assert not row["seen"], row
        else:
            assert row["expected"] in row["seen"], row
    for stage in STAGES.values():
        if stage.is_cuda:
            jobs = [nvidia.job(stage, Problem(1, 2, 100, 64))]
            assert not any(nvidia.examine(jobs, tool)[0] for tool in nvidia.TOOLS)
