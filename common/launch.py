"""From arrays to a launch: the host code of every stage, once.

A stage's source is completed by a prelude of constants (`source`), compiled for the GPU by CuPy or for the CPU by
common.cpu, and launched on arrays that are contiguous, aligned and of the right type (`bind`). Everything that can
be wrong about the arguments is said before any launch, in one sentence that names the argument.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from types import SimpleNamespace

import numpy as np

from common import cpu
from common.cpu import CompileError, LaunchError

__all__ = ["CompileError", "LaunchError", "attention", "bind", "source", "trace"]

HEAD_SIZES = (32, 64, 128)
ON = ("gpu", "cpu", "trace")
OPTIONS = ("--std=c++17", "-lineinfo")


def source(stage, d, causal) -> str:
    """The complete CUDA source of a stage: its constants, then its text under its own name and line numbers."""
    constants = dict(d=d, **stage.tiles[d])
    return "\n".join(
        [
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"constexpr bool causal = {str(bool(causal)).lower()};",
            "#ifndef INFINITY  // NVRTC knows none",
            "#define INFINITY __int_as_float(0x7f800000)",
            "#endif",
            f'#line 1 "{stage.file}"',
            stage.text,
        ]
    )


def geometry(stage, d, N, heads):
    """Grid and block, three numbers each: one block for each tile of Br rows of each head, one thread a row."""
    Br = stage.tiles[d]["Br"]
    blocks = -(-N // Br) * heads
    if blocks >= 2**31:
        raise ValueError(f"Q has {heads} heads of N = {N}: {blocks} blocks, more than the 2^31 - 1 of one grid")
    return (blocks, 1, 1), (stage.tiles[d].get("threads", Br), 1, 1)


# -- kernels ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _cupy_kernel(text):
    import cupy

    kernel = cupy.RawKernel(text, "attention", options=OPTIONS)
    try:
        kernel.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(str(error)) from None
    return kernel


def gpu_kernel(stage, d, causal):
    """The stage as a cupy.RawKernel, whose num_regs, local_size_bytes and shared_size_bytes say what it takes."""
    return _cupy_kernel(source(stage, d, causal))


def cpu_kernel(stage, d, causal, mode="fast"):
    """The stage as a common.cpu.Kernel; mode "fast" or "trace"."""
    return cpu.compile(source(stage, d, causal), mode=mode)


# -- arguments --------------------------------------------------------------------------------------------------------


def has_gpu() -> bool:
    from common.device import gpu

    return gpu() is not None


def place(stage, on=None) -> str:
    """Where a stage runs: `on`, or by default a CUDA stage on the GPU where there is one, everything else on the CPU."""
    return on or ("gpu" if stage.is_cuda and has_gpu() else "cpu")


def library(on: str):
    """numpy, or cupy for what runs on the GPU."""
    if on == "gpu":
        import cupy

        return cupy
    return np


def _kind(name, array):
    kind = type(array).__module__.partition(".")[0]
    if kind not in ("numpy", "cupy", "torch") or not hasattr(array, "shape"):
        raise TypeError(f"{name} must be a NumPy, CuPy or torch array, not {type(array).__name__}")
    return kind


def _problem(stage, Q, K, V, causal, scale, on):
    """The arguments, each of them checked: kind, shape, type, causal, scale, on."""
    kind = _kind("Q", Q)
    dtype = str(Q.dtype).removeprefix("torch.")
    where = str(getattr(Q, "device", "cpu"))
    for name, array in dict(Q=Q, K=K, V=V).items():
        if _kind(name, array) != kind:
            raise TypeError(f"{name} is a {_kind(name, array)} array, but Q is a {kind} array: give all three one kind")
        if len(array.shape) != 4:
            raise ValueError(f"{name} must have the shape (B, H, N, d), not {tuple(array.shape)}")
        if tuple(array.shape) != tuple(Q.shape):
            raise ValueError(f"{name} has the shape {tuple(array.shape)}, but Q has {tuple(Q.shape)}: they must be equal")
        if (given := str(array.dtype).removeprefix("torch.")) != dtype:
            raise TypeError(f"{name} is {given}, but Q is {dtype}: give all three one type")
        if (given := str(getattr(array, "device", "cpu"))) != where:
            raise ValueError(f"{name} is on {given}, but Q is on {where}: give all three one device")
        if kind == "torch" and array.requires_grad and _grad_enabled():
            raise ValueError(f"{name} requires a gradient, and stage {stage.number} has no backward: use torch.no_grad()")
    if dtype not in (stage.dtypes or ("float16", "float32", "float64")):
        wanted = " or ".join(stage.dtypes) or "float16, float32 or float64"
        raise TypeError(f"Q is {dtype}, but stage {stage.number} takes {wanted}")
    d = Q.shape[-1]
    if stage.is_cuda and d not in stage.tiles:
        raise ValueError(f"Q has the head size d = {d}, but stage {stage.number} takes {', '.join(map(str, stage.tiles))}")
    if d == 0:
        raise ValueError("Q has the head size d = 0")
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be True or False, not {causal!r}")
    if scale is None:
        scale = d**-0.5
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number or None, not {scale!r}")
    if not np.isfinite(float(scale)):
        raise ValueError(f"scale must be finite, not {scale!r}")
    on = place(stage, on)
    if on not in ON:
        raise ValueError(f"on must be one of {', '.join(ON)}, not {on!r}")
    if on == "gpu" and not has_gpu():
        from common.device import why_no_gpu

        raise ValueError(f'on="gpu": {why_no_gpu()}')
    return SimpleNamespace(kind=kind, shape=tuple(Q.shape), causal=bool(causal), scale=float(scale), on=on)


def _grad_enabled():
    import torch

    return torch.is_grad_enabled()


# -- arrays -----------------------------------------------------------------------------------------------------------


def aligned(shape, dtype, fill=None):
    """An empty NumPy array at an address divisible by 256, as cudaMalloc gives (NumPy itself promises 16)."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    array = raw[start : start + size].view(dtype).reshape(shape)
    if fill is not None:
        array.fill(fill)
    return array


def _to_host(kind, array):
    """The array as NumPy: contiguous, aligned to 16 bytes, the caller's own memory if that is so already."""
    if kind == "torch":
        array = array.detach().cpu().numpy()
    elif kind == "cupy":
        array = array.get()
    array = np.ascontiguousarray(array)
    if array.ctypes.data % 16:
        copy = aligned(array.shape, array.dtype)
        copy[...] = array
        return copy
    return array


def _to_device(kind, array):
    """The array as CuPy: contiguous, aligned to 16 bytes, the caller's own memory if that is so already."""
    import cupy

    if kind == "torch":
        array = array.detach().contiguous()
        array = cupy.from_dlpack(array) if array.is_cuda else cupy.asarray(array.numpy())
    array = cupy.ascontiguousarray(cupy.asarray(array))
    return array.copy() if array.data.ptr % 16 else array


def _back(kind, O, like):
    """O as the kind of array, and on the device, of the argument `like`."""
    if kind == "torch":
        import torch

        return torch.from_dlpack(O).to(like.device)
    if kind == "cupy":
        import cupy

        return cupy.asarray(O)
    return O if isinstance(O, np.ndarray) else O.get()


class _stream:
    """Makes CuPy use the device and the current stream of the arguments."""

    def __init__(self, kind, array):
        import cupy

        if kind == "torch" and array.is_cuda:
            import torch

            self.contexts = [
                cupy.cuda.Device(array.device.index),
                cupy.cuda.Stream.from_external(torch.cuda.current_stream(array.device)),
            ]
        else:
            self.contexts = [array.device] if kind == "cupy" else []

    def __enter__(self):
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


# -- launches ---------------------------------------------------------------------------------------------------------


def bind(stage, Q, K, V, *, causal=False, scale=None, on=None, poison=False, workers=None):
    """Checks the arguments, moves them to where the stage runs, compiles it, and returns run() -> O.

    Each call of run launches once more on the same arrays and overwrites the same O (of Q's kind; a device array
    that is filled when its stream gets there): what a benchmark wants.

    Q, K, V  (B, H, N, d), one kind (NumPy, CuPy, torch), one type, one device, any strides
    scale    of the scores; default 1 / sqrt(d)
    on       "gpu" through CuPy, "cpu" by the executor, "trace" by the executor with every access watched;
             default: a CUDA stage on the GPU where there is one, else "cpu"
    poison   fill O with this number (True: NaN) before each launch, so that an element nobody wrote shows
    workers  threads of the operating system on the CPU; default: all cores

    TypeError or ValueError for a bad argument, CompileError if the source does not compile, LaunchError if a launch
    fails (on "trace" also: if a race, a stray access or another fault was seen).
    """
    problem = _problem(stage, Q, K, V, causal, scale, on)
    if 0 in problem.shape:
        empty = Q.clone() if problem.kind == "torch" else Q.copy()
        return lambda: empty
    on_gpu = problem.on == "gpu"
    with _stream(problem.kind, Q) if on_gpu else contextlib.nullcontext():
        q, k, v = ((_to_device if on_gpu else _to_host)(problem.kind, array) for array in (Q, K, V))
        run = (_bind_cuda if stage.is_cuda else _bind_python)(stage, problem, q, k, v, poison, workers)

    def again():
        with _stream(problem.kind, Q) if on_gpu else contextlib.nullcontext():
            return _back(problem.kind, run(), Q)

    return again


def load(stage, **names):
    """The function `attention` of a Python stage, whose source may use these names besides its own."""
    space = {"__name__": stage.file, **names}
    exec(compile(stage.text, stage.file, "exec"), space)
    return space["attention"]


def _bind_python(stage, problem, Q, K, V, poison, workers):
    attention = load(stage)
    return lambda: attention(Q, K, V, causal=problem.causal, scale=problem.scale)


def _place_cuda(stage, problem):
    """Grid, block, and the arguments that follow the four arrays."""
    B, H, N, d = problem.shape
    return *geometry(stage, d, N, B * H), (np.int32(N), np.float32(problem.scale))


def _bind_cuda(stage, problem, Q, K, V, poison, workers):
    d = problem.shape[-1]
    grid, block, scalars = _place_cuda(stage, problem)
    if problem.on == "gpu":
        import cupy

        kernel = gpu_kernel(stage, d, problem.causal)
        if block[0] > kernel.max_threads_per_block:
            raise ValueError(
                f"stage {stage.number} at d = {d} wants blocks of {block[0]} threads, but with {kernel.num_regs} registers "
                f"a thread this GPU takes {kernel.max_threads_per_block}"
            )
        O = cupy.empty(problem.shape, Q.dtype)

        def run():
            if poison is not False:
                O.fill(np.nan if poison is True else poison)
            kernel(grid, block, (Q, K, V, O, *scalars))
            return O

    else:
        kernel = cpu_kernel(stage, d, problem.causal, "trace" if problem.on == "trace" else "fast")
        O = aligned(problem.shape, Q.dtype)

        def run():
            if poison is not False:
                O.fill(np.nan if poison is True else poison)
            seen = kernel(grid, block, (Q, K, V, O, *scalars), workers=workers)
            if seen is not None and seen.findings:
                raise LaunchError(seen.findings[0].message)
            return O

    return run


def attention(stage, Q, K, V, *, causal=False, scale=None, on=None, poison=False):
    """softmax(scale Q K^T) V by a stage, in Q's shape, type and kind of array. Arguments and errors as of `bind`."""
    return bind(stage, Q, K, V, causal=causal, scale=scale, on=on, poison=poison)()


def trace(stage, Q, K, V, *, causal=False, scale=None, time_limit=None):
    """Runs a CUDA stage with every memory access watched: (O, common.cpu.Trace). Findings are returned, not raised.

    time_limit  seconds without a finished block after which the launch is stopped; default: the executor's
    """
    problem = _problem(stage, Q, K, V, causal, scale, "trace")
    if not stage.is_cuda:
        raise ValueError(f"stage {stage.number} is not a CUDA source: there is nothing to trace")
    grid, block, scalars = _place_cuda(stage, problem)
    q, k, v = (_to_host(problem.kind, array) for array in (Q, K, V))
    O = aligned(problem.shape, q.dtype, fill=np.nan)
    kernel = cpu_kernel(stage, problem.shape[-1], problem.causal, "trace")
    seen = kernel(grid, block, (q, k, v, O, *scalars), time_limit=time_limit)
    return _back(problem.kind, O, Q), seen
