"""Arguments: the right answer, or one clear sentence before any launch."""

import numpy as np
import pytest
import torch

from common import launch
from common.problem import Problem
from stages import STAGES

STAGE = STAGES[3]


@pytest.fixture
def inputs():
    return Problem(2, 3, 70, 32).inputs()


def test_error_names_the_argument(inputs):
    Q, K, V = inputs
    call = STAGE.attention
    for wrong, error, words in [
        (lambda: call([1], K, V), TypeError, "Q must be a NumPy, CuPy or torch array, not list"),
        (lambda: call(Q, torch.from_numpy(K), V), TypeError, "K is a torch array, but Q is a numpy array"),
        (lambda: call(Q[0], K[0], V[0]), ValueError, r"Q must have the shape \(B, H, N, d\), not \(3, 70, 32\)"),
        (lambda: call(Q, K[:, :, :69], V), ValueError, r"K has the shape \(2, 3, 69, 32\), but Q has \(2, 3, 70, 32\)"),
        (lambda: call(Q, K, V[:1]), ValueError, r"V has the shape \(1, 3, 70, 32\)"),
        (lambda: call(Q, K, V.astype("f8")), TypeError, "V is float64, but Q is float32"),
        (lambda: call(*(a.astype("f8") for a in inputs)), TypeError, "Q is float64, but stage 3 takes float32"),
        (lambda: call(*(a.astype("i4") for a in inputs)), TypeError, "Q is int32, but stage 3 takes float32"),
        (lambda: call(*(a.astype("c8") for a in inputs)), TypeError, "Q is complex64"),
        (lambda: STAGES[1].attention(*(a.astype("i4") for a in inputs)), TypeError, "Q is int32, but stage 1 takes float16"),
        (lambda: call(*(a[..., :30] for a in inputs)), ValueError, "d = 30, but stage 3 takes 32, 64, 128"),
        (lambda: STAGES[1].attention(*(a[..., :0] for a in inputs)), ValueError, "d = 0"),
        (lambda: call(Q, K, V, causal="yes"), TypeError, "causal must be True or False, not 'yes'"),
        (lambda: call(Q, K, V, scale="1"), TypeError, "scale must be a number or None, not '1'"),
        (lambda: call(Q, K, V, scale=np.nan), ValueError, "scale must be finite"),
        (lambda: call(Q, K, V, on="tpu"), ValueError, "on must be one of gpu, cpu, trace, not 'tpu'"),
        (lambda: call(torch.from_numpy(Q).requires_grad_(), *map(torch.from_numpy, (K, V))), ValueError, "Q requires a gradient"),
        (lambda: launch.trace(STAGES[1], Q, K, V), ValueError, "stage 1 is not a CUDA source"),
    ]:
        with pytest.raises(error, match=words):
            wrong()


def test_gpu_asked_for_where_there_is_none(inputs):
    if launch.has_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match='on="gpu": .'):
        STAGE.attention(*inputs, on="gpu")


def test_a_grid_too_large_is_refused():
    with pytest.raises(ValueError, match="more than the 2\\^31 - 1"):
        launch.geometry(STAGE, 32, 64, 2**31)


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
@pytest.mark.parametrize("shape", [(0, 2, 5, 32), (2, 0, 5, 32), (2, 2, 0, 32)])
def test_nothing_in_nothing_out(stage, shape, inputs):
    for array in (np.empty(shape, np.float32), torch.empty(shape)):
        O = stage.attention(array, array, array)
        assert type(O) is type(array) and tuple(O.shape) == shape
    assert np.isfinite(stage.attention(*inputs, on="cpu")).all()  # the next call is fine


def strided(array, how):
    """An equal array with other strides."""
    if how == "sliced":
        return np.repeat(array, 2, 2)[:, :, ::2]
    if how == "transposed":
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if how == "reversed":
        return np.ascontiguousarray(array[:, ::-1])[:, ::-1]
    if how == "split from one QKV":
        return np.concatenate([array, array, array], -1)[..., 32:64]
    if how == "misaligned":
        raw = np.empty(array.nbytes + 4, np.uint8)[4:].view(np.float32).reshape(array.shape)
        raw[...] = array
        return raw
    raise ValueError(how)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("how", ["sliced", "transposed", "reversed", "split from one QKV", "misaligned"])
def test_strides_and_alignment(how, which, inputs):
    odd = list(inputs)
    odd[which] = strided(inputs[which], how)
    for stage in STAGES.values():
        np.testing.assert_array_equal(stage.attention(*odd, on="cpu"), stage.attention(*inputs, on="cpu"))
    if how != "reversed":  # torch has no negative strides
        O = STAGES[5].attention(*(torch.from_numpy(a) for a in odd), on="cpu")
        np.testing.assert_array_equal(O.numpy(), STAGES[5].attention(*inputs, on="cpu"))


def test_expanded_heads(inputs):
    Q, K, V = map(torch.from_numpy, inputs)
    wide = K[:, :1].expand(-1, 3, -1, -1)
    assert torch.equal(STAGE.attention(Q, wide, V, on="cpu"), STAGE.attention(Q, wide.contiguous(), V, on="cpu"))


def test_inputs_are_left_alone(inputs):
    before = [a.copy() for a in inputs]
    for stage in STAGES.values():
        stage.attention(*inputs, causal=True, on="cpu")
    for a, b in zip(inputs, before):
        np.testing.assert_array_equal(a, b)


def test_numpy_stages_keep_the_type(inputs):
    for dtype in ("float16", "float32", "float64"):
        assert STAGES[2].attention(*(a.astype(dtype) for a in inputs)).dtype == dtype


def test_a_missing_constant_is_a_compile_error_that_names_the_line():
    text = STAGE.text.replace("(N + Br - 1)", "(N + Brr - 1)")
    with pytest.raises(launch.CompileError, match=r"stages/stage3_naive.cu:\d+: .*Brr"):
        launch.cpu_kernel(STAGE.patched(text), 64, False)


def test_trace_raises_what_it_finds(inputs):
    text = STAGE.text.replace("if (row >= N) return;", "")
    with pytest.raises(launch.LaunchError, match="stages/stage3_naive.cu:"):
        STAGE.patched(text).attention(*inputs, on="trace")


# -- on a GPU --


@pytest.mark.gpu
def test_kinds_on_the_gpu(inputs):
    import cupy

    for stage in (STAGES[1], STAGES[2], STAGES[3], STAGES[5]):
        expected = stage.attention(*inputs, on="gpu")
        assert isinstance(expected, np.ndarray)
        O = stage.attention(*map(cupy.asarray, inputs), on="gpu")
        assert isinstance(O, cupy.ndarray) and (O.get() == expected).all()
        O = stage.attention(*(torch.from_numpy(a).cuda() for a in inputs), on="gpu")
        assert O.is_cuda and (O.cpu().numpy() == expected).all()
        O = stage.attention(*map(torch.from_numpy, inputs), on="gpu")
        assert not O.is_cuda and (O.numpy() == expected).all()
        O = stage.attention(*(torch.from_numpy(a).cuda() for a in inputs), on="cpu")
        assert O.is_cuda and torch.isfinite(O).all()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["sliced", "transposed", "split from one QKV", "misaligned"])
def test_strides_on_the_gpu(how, inputs):
    import cupy

    expected = STAGES[5].attention(*inputs, on="gpu")
    make = {
        "sliced": lambda w: w.repeat_interleave(2, 2)[:, :, ::2],
        "transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
        "split from one QKV": lambda w: torch.cat([w, w, w], -1)[..., 32:64],
        "misaligned": lambda w: torch.empty(w.numel() + 1, device="cuda")[1:].view(w.shape).copy_(w),
    }[how]
    odd = [make(torch.from_numpy(a).cuda()) for a in inputs]
    assert (STAGES[5].attention(*odd).cpu().numpy() == expected).all()
    assert (STAGES[5].attention(*map(cupy.from_dlpack, odd)).get() == expected).all()


@pytest.mark.gpu
def test_the_current_stream_is_used(inputs):
    import cupy

    big = [torch.from_numpy(a).cuda() for a in Problem(1, 8, 2048, 64).inputs()]
    expected = STAGES[5].attention(*big)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # the inputs arrive late, on this stream
        late = [a.clone() for a in big]
        O = STAGES[5].attention(*late)
    side.synchronize()
    assert torch.equal(O, expected)
    arrays = [cupy.from_dlpack(a) for a in big]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        O = STAGES[5].attention(*(a.copy() for a in arrays))
        stream.synchronize()
    assert (O == cupy.from_dlpack(expected)).all()


@pytest.mark.gpu
def test_a_launch_that_fails_raises(inputs):
    from dataclasses import replace

    stage = replace(STAGE, tiles={32: dict(Br=64, threads=2048)})
    with pytest.raises(ValueError, match="wants blocks of 2048 threads"):
        stage.attention(*inputs, on="gpu")


@pytest.mark.gpu
def test_the_gpu_compiler_names_file_and_line():
    text = STAGE.text.replace("(N + Br - 1)", "(N + Brr - 1)")
    with pytest.raises(launch.CompileError, match=r"stages/stage3_naive.cu\(\d+\).*Brr"):
        launch.gpu_kernel(STAGE.patched(text), 64, False)
