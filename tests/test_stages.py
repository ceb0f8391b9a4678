"""Every stage, on every run: shapes, input families, and the situations in which kernels go wrong."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import launch
from common.check import Reference, check
from common.problem import FAMILIES, Problem
from stages import ROOT, STAGES

CUDA = [stage for stage in STAGES.values() if stage.is_cuda]
WHERE = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
cuda_stage = pytest.mark.parametrize("stage", CUDA, ids=lambda stage: stage.name)
anywhere = pytest.mark.parametrize("on", WHERE)


def lengths(stage, d):
    tiles = set(stage.tiles.get(d, {"Br": 64}).values())
    return sorted({1, 2, 7, 31, 63, 64, 65, 100, 257} | {n for t in tiles for n in (t - 1, t + 1, 3 * t - 1)} - {0})


def test_registry_equals_files():
    on_disk = {str(p.relative_to(ROOT)) for p in (ROOT / "stages").glob("stage[0-9]*")}
    assert {stage.file for stage in STAGES.values()} == on_disk
    for number, stage in STAGES.items():
        assert stage.number == number and re.fullmatch(rf"stages/stage{number}_\w+\.(cu|py)", stage.file)
        assert stage.idea.endswith(".") or stage.idea.endswith("sum")
        assert "-- " in stage.text


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", launch.HEAD_SIZES)
@anywhere
@every_stage
def test_right(stage, on, d, causal):
    for n, N in enumerate(lengths(stage, d)):
        for f, family in enumerate(FAMILIES):
            problem = Problem(1 + f % 2, 1 + (n + f) % 3, N, d, causal, family=family, seed=n)
            verdict = check(stage, problem, on=on)
            assert verdict.ok, f"{problem}: {verdict}"


@settings(max_examples=25)
@given(batch=st.integers(1, 3), heads=st.integers(1, 4), N=st.integers(1, 300), d=st.sampled_from(launch.HEAD_SIZES),
       causal=st.booleans(), family=st.sampled_from(FAMILIES), seed=st.integers(0, 2**32))
@every_stage
def test_right_at_random_shapes(stage, batch, heads, N, d, causal, family, seed):
    verdict = check(stage, Problem(batch, heads, N, d, causal, family=family, seed=seed), on="cpu")
    assert verdict.ok, str(verdict)


@anywhere
@every_stage
def test_one_phantom_key_would_show(stage, on):
    for N in (1, 7, 65):
        Q, K, V = (np.full((1, 1, N, 64), value, np.float32) for value in (2, -2, 1))  # all scores -32
        O = stage.attention(Q, K, V, scale=1 / 8, on=on)
        np.testing.assert_allclose(O, 1, rtol=1e-6)


@anywhere
@every_stage
def test_equal_cold_scores_give_the_mean_of_v(stage, on):
    V = Problem(N=100).inputs()[2]
    Q, K = np.full_like(V, 50), np.full_like(V, -50)  # all scores -20,000
    O = stage.attention(Q, K, V, on=on)
    np.testing.assert_allclose(O, np.broadcast_to(V.mean(-2, keepdims=True), V.shape), atol=1e-6)


@anywhere
@cuda_stage
def test_nan_in_one_query_row_stays_there(stage, on):
    Q, K, V = Problem(N=100).inputs()
    clean = stage.attention(Q, K, V, on=on)
    Q[0, 0, 37, 5] = np.nan
    O = stage.attention(Q, K, V, on=on)
    assert np.isnan(O[0, 0, 37]).all()
    others = np.arange(100) != 37
    np.testing.assert_array_equal(O[:, :, others], clean[:, :, others])


@pytest.mark.parametrize("outside", [np.nan, np.inf])
@anywhere
@cuda_stage
def test_numbers_around_the_inputs_do_not_matter(stage, on, outside):
    Q, K, V = Problem(heads=2, N=100).inputs()
    clean = stage.attention(Q, K, V, on=on)
    moat = [np.full((3, 4, 300, 64), outside, np.float32) for _ in range(3)]
    for whole, inner in zip(moat, (Q, K, V)):
        whole[1:2, 1:3, 100:200] = inner
    np.testing.assert_array_equal(stage.attention(*(whole[1:2, 1:3, 100:200] for whole in moat), on=on), clean)


@anywhere
@cuda_stage
def test_fifty_runs_are_bit_identical(stage, on):
    run = launch.bind(stage, *Problem(heads=2, N=130, causal=True).inputs(), causal=True, on=on)
    first = run().copy()
    for _ in range(49):
        assert (run() == first).all()


@anywhere
@cuda_stage
def test_more_heads_than_one_grid_axis_has(stage, on):
    V = np.arange(66_000, dtype=np.float32).reshape(1, -1, 1, 1).repeat(32, -1)
    O = stage.attention(np.zeros_like(V), np.zeros_like(V), V, on=on)  # with one key, O is V
    np.testing.assert_array_equal(O, V)


@pytest.mark.gpu
@cuda_stage
def test_more_elements_than_32_bits_count(stage):
    import cupy

    heads = 2**31 // (128 * 64) + 3
    if cupy.cuda.Device().mem_info[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    Q = cupy.zeros((1, heads, 64, 128), cupy.float32)
    V = cupy.arange(heads, dtype=cupy.float32)[None, :, None, None] + cupy.zeros_like(Q)
    O = stage.attention(Q, Q, V)  # equal scores: O is the mean of V, the head's own number
    assert float(abs(O / cupy.maximum(V, 1) - V / cupy.maximum(V, 1)).max()) < 1e-5


@cuda_stage
def test_torch_and_numpy_agree_to_the_bit(stage):
    import torch

    Q, K, V = Problem(heads=2, N=70).inputs()
    O = stage.attention(*map(torch.from_numpy, (Q, K, V)), on="cpu")
    np.testing.assert_array_equal(O.numpy(), stage.attention(Q, K, V, on="cpu"))


@every_stage
def test_scale(stage):
    Q, K, V = Problem(N=70).inputs()
    for scale in (0.3, np.float32(0.3), np.float64(0.3), 0, -1):
        O = stage.attention(Q, K, V, scale=scale, on="cpu")
        assert Reference(Q, K, V, scale=float(scale)).verdict(O).ok


def test_sixty_four_kilobytes_do_not_compile():
    from stages.bugs import BUGS

    bug = next(b for b in BUGS if b.caught_by == "compiler")
    with pytest.raises(launch.CompileError, match=r"stages/stage4_tiled.cu:\d+: .*49,152"):
        launch.cpu_kernel(bug.planted(), 64, False)
