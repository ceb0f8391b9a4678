"""What the compiler says of every kernel, without a GPU."""

import os
import sys
from dataclasses import replace

import pytest

from common import launch, resources
from stages import STAGES

# All seven take over a minute on two cores: on every CI run, and whenever `make resources` writes the page.
ARCHITECTURES = resources.ARCHITECTURES if "CI" in os.environ else ("sm_75", "sm_90", "sm_120")

pytestmark = pytest.mark.xdist_group("resources")  # one process compiles everything once


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        return resources.nvrtc_version()
    except resources.Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def table(nvrtc):
    return resources.table(ARCHITECTURES)


def test_page_is_up_to_date():
    try:
        changed = resources.check(ARCHITECTURES)
    except resources.Unavailable as why:
        pytest.skip(str(why))
    assert not changed, f"make resources writes it anew:\n{changed}"


def test_a_changed_page_is_noticed(monkeypatch, tmp_path):
    page = resources.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(resources, "PAGE", tmp_path / "resources.md")
    resources.PAGE.write_text(page.replace("| 168 |", "| 167 |"), encoding="utf-8")
    try:
        changed = resources.check(ARCHITECTURES)
    except resources.Unavailable as why:
        pytest.skip(str(why))
    assert "-| 3 naive | 64 | full | 0 | 167" in changed and "+| 3 naive | 64 | full | 0 | 168" in changed


def test_every_kernel_on_every_architecture(table):
    expected = [(n, d, causal) for n, s in STAGES.items() if s.is_cuda for d in s.tiles for causal in (False, True)]
    assert [(row.stage, row.d, row.causal) for row in table] == expected
    assert all(tuple(row.by_arch) == ARCHITECTURES for row in table)


def test_local_memory_only_where_known(table):
    """Arrays are in registers. At d = 128 a row of Q, or of O, beside the rest is more than the 255 there are."""
    assert {(row.stage, row.d) for row in table if any(r.stack for r in row.by_arch.values())} == {(3, 128), (4, 128)}


def test_a_block_fits_a_multiprocessor(table):
    for row in table:
        threads = launch.geometry(STAGES[row.stage], row.d, 1, 1)[1][0]
        for arch, found in row.by_arch.items():
            assert found.registers * threads <= 65536, (row, arch)
            assert 0 < found.registers <= 255 and found.shared <= 48 * 1024, (row, arch)


def test_64_kb_of_shared_memory_are_refused_in_the_compilers_words():
    source = 'extern "C" __global__ void f(int *p) { __shared__ int S[%d]; S[*p] = 1; __syncthreads(); *p = S[p[1]]; }'
    assert resources.compile(source % (48 * 256), "sm_90").shared == 48 * 1024
    with pytest.raises(resources.CompileError, match=r"uses too much shared data \(0x10000 bytes, 0xc000 max\)"):
        resources.compile(source % (64 * 256), "sm_90")


@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_the_articles_tiles_do_not_compile(arch):
    stage = replace(STAGES[4], tiles={64: dict(Br=64, Bc=64)})
    with pytest.raises(resources.CompileError, match="'attention' uses too much shared data"):
        resources.compile(launch.source(stage, 64, False), arch)


def test_an_array_out_of_registers_is_seen():
    source = """extern "C" __global__ void f(float *p, int n) {
        float s[64];
        for (int j = 0; j < 64; j++) s[j] = p[j * n];
        for (int j = 0; j < n; j++) p[j] = s[n * j & 63];  // an index that only the run knows
    }"""
    assert resources.compile(source, "sm_90").stack == 4 * 64


def test_an_error_names_file_and_line():
    stage = STAGES[4]
    broken = stage.text.replace("const int i = threadIdx.x;", "const int i = threadIdx.x")
    line = broken[: broken.index("const int i = threadIdx.x")].count("\n") + 2  # seen where the next line begins
    with pytest.raises(resources.CompileError, match=rf"stages/stage4_tiled\.cu\({line}\): error"):
        resources.compile(launch.source(stage.patched(broken), 64, False), "sm_80")


def test_a_missing_constant_is_an_error():
    stage = replace(STAGES[4], tiles={64: dict(Br=64)})
    with pytest.raises(resources.CompileError, match=r'stage4_tiled\.cu\(\d+\): error: identifier "Bc" is undefined'):
        resources.compile(launch.source(stage, 64, False), "sm_80")


def test_only_what_was_edited_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "CACHE", tmp_path)
    compiled = []
    monkeypatch.setattr(resources, "_compile", lambda source, arch: compiled.append(source) or "Used 8 registers")
    for source in ("a", "a", "b", "a"):
        assert resources.compile(source, "sm_80").registers == 8
    assert compiled == ["a", "b"]
    next(tmp_path.iterdir()).write_text("{")  # torn, as by a full disk
    resources.compile("a", "sm_80"), resources.compile("b", "sm_80")
    assert len(compiled) == 3


def test_without_nvrtc_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    resources.nvrtc_version.cache_clear()
    with pytest.raises(resources.Unavailable, match=r"^NVIDIA's compiler library \(NVRTC\) cannot be used here: .+$"):
        resources.table()
    resources.nvrtc_version.cache_clear()
