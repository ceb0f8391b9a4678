"""Runs a CUDA kernel's own source on the CPU, thread by thread.

    kernel = compile(source, name="attention")             # about a second; then from the cache on disk
    kernel(grid, block, args, shared_mem=0)                # as cupy.RawKernel is called

`mode="fast"` is for right and wrong; `mode="trace"` watches every access to memory and returns a Trace (trace.py).
How: rewrite.py makes `__shared__` valid C++, shim.h is the rest of the language, runtime.cpp runs the threads as fibers
and trace.cpp is the detector. Needs g++ or clang++ ($CXX is heeded). Compiled kernels lie in `.cache/cpu` of the
repository, or in $CPU_CACHE; the name of each is a hash of everything that went into it.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from common.device import compilers

from . import abi
from .rewrite import CompileError, blank, kernels, parameters, place, reached, shared
from .trace import KINDS, Example, Finding, LaunchError, LineCounts, Trace, Watched, counts_of, findings_of

__all__ = ["compile", "compiler", "Kernel", "CompileError", "LaunchError",
           "Trace", "Finding", "LineCounts", "Example", "KINDS"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

STATIC_LIMIT = 48 * 1024                  # nvcc refuses more static shared memory
SHARED_LIMIT = 227 * 1024                 # static and dynamic together, on the largest GPUs
ZONE = 256                                # bytes between shared arrays, as in runtime.h
GAP = 1 << 20                             # bytes between global arrays in trace mode
BLOCK_LIMITS, GRID_LIMITS = (1024, 1024, 64), (2**31 - 1, 65535, 65535)


# -- the compiler --

def compiler() -> list[str]:
    """The C++ compiler as a command; raises CompileError with what to install when there is none."""
    for command in compilers():
        if shutil.which(command[0]):
            return command
    missing = f"CXX={os.environ['CXX']} was not found" if os.environ.get("CXX", "").strip() else "no C++ compiler was found"
    raise CompileError(f"{missing}: running .cu files on the CPU needs one (Debian, Ubuntu: sudo apt install g++; "
                       "Fedora: sudo dnf install gcc-c++; macOS: xcode-select --install)")


@functools.lru_cache
def _version(command: tuple) -> str:
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if run.returncode:
        raise CompileError(f"the C++ compiler does not run: {shlex.join(command)} --version: {run.stderr.strip()}")
    return run.stdout


@functools.lru_cache
def _processor() -> str:
    """The CPU's identity, since -march=native compiles for this one."""
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.exists() else []
    identity = sorted({row for row in rows if re.match("(model name|flags|Features)", row)})
    return platform.machine() + platform.processor() + "".join(identity)


def _flags(version: str, mode: str) -> list[str]:
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-w", "-gdwarf-4",
             "-ffp-contract=fast", "-fno-math-errno",         # as nvcc: a * b + c is one operation
             "-fno-strict-aliasing",                          # kernels read float arrays as float4
             "-fno-finite-loops"]                             # an endless loop is to be found, not optimised away
    flags += {"x86_64": ["-march=native"], "aarch64": ["-mcpu=native"]}.get(platform.machine(), [])
    if sys.platform.startswith("linux"):
        flags += ["-fstack-clash-protection"]                 # a large frame touches the guard below the stack
    if mode == "fast":
        return [*flags, "-g1"]
    # One callback for each access that the source makes: nothing vectorised, merged or turned into memset.
    flags += ["-g", "-DCPU_TRACE", "-fno-optimize-sibling-calls"]
    if "clang" in version:
        return [*flags, "-fno-vectorize", "-fno-slp-vectorize", "-fno-builtin",
                "-mllvm", "-tsan-compound-read-before-write=1", "-mllvm", "-tsan-instrument-func-entry-exit=0"]
    return [*flags, "-fno-tree-vectorize", "-fno-store-merging", "-fno-tree-loop-distribute-patterns",
            "--param=tsan-instrument-func-entry-exit=0"]


def _cache() -> Path:
    folder = Path(os.environ.get("CPU_CACHE") or ROOT / ".cache" / "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _included(source: str) -> str:
    """The text of the repository's files that a source includes, since they go into the hash."""
    text = ""
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', source, flags=re.M):
        for folder in (ROOT, HERE):
            if (folder / name).is_file():
                inner = (folder / name).read_text()
                text += inner + _included(inner)
                break
    return text


def _hash(*parts) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _build(target: Path, text: str, steps) -> Path:
    """Builds `target` unless it is there: in a folder of its own, then renamed, so that two at a time do not clash."""
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            (Path(folder) / "kernel.cpp").write_text(text)
            for step in steps:
                if "-c" in step:
                    step = [*step, f"-fdebug-prefix-map={os.path.realpath(folder)}=/kernel"]
                run = subprocess.run(step, cwd=folder, capture_output=True, text=True, errors="replace",
                                     env={**os.environ, "LC_ALL": "C"})
                if run.returncode:
                    raise CompileError(_complaint(run.stderr, text))
            os.replace(Path(folder) / "out", target)
    return target


def _complaint(stderr: str, text: str) -> str:
    """The compiler's first error, its place first, and the rest below."""
    if "Assembler messages" in stderr and (asm := re.search(r"\b(__)?asm\b", blank(text))):
        return "{}:{}: inline assembly is GPU code; the CPU cannot run it".format(*place(text, asm.start()))
    first = re.search(r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", stderr, flags=re.M)
    # An error inside the shim (a wrong argument to a template, say) is the fault of the line that led there.
    if first and first[1].endswith(("shim.h", "kernel.cpp")):
        called = re.search(r"^(.+?):(\d+):(?:\d+:)?\s+required from here", stderr, flags=re.M)
        if called:
            return f"{called[1]}:{called[2]}: {first[3]}\n{stderr.strip()}"
    return f"{first[1]}:{first[2]}: {first[3]}\n{stderr.strip()}" if first else stderr.strip()


# -- from source to kernel --

_loaded: dict[tuple, "Kernel"] = {}


def compile(source: str, *, name: str = "attention", mode: str = "fast") -> "Kernel":
    """Compiles the `__global__` function `name` of a CUDA source (a template instance as `name="kernel<64, true>"`).

    A `#line 1 "stages/stage4_tiled.cu"` in the source makes messages name that file. Raises CompileError.
    """
    if mode not in ("fast", "trace"):
        raise ValueError(f'mode is "fast" or "trace", not {mode!r}')
    plain, names = _plain(name), [f.name for f in kernels(source)]
    if plain not in names:
        there = f" (there is {', '.join(names)})" if names else ""
        raise CompileError(f"no __global__ function named {plain} in this source{there}")
    text, arrays = shared(source)
    # What these declare is in shim.h.
    text = re.sub(r"^\s*#\s*include\s*<(cuda|cuda_runtime|device_launch_parameters)\.h>", "", text, flags=re.M)
    # math.h has INFINITY as a macro; a prelude that declares it needs the name free.
    free = "#undef INFINITY\n" if re.search(r"#\s*define\s+INFINITY\b|\bINFINITY\s*=", source) else ""
    # One library serves all the kernels of a source that can be named without knowing more of it.
    entries = [f.name for f in kernels(source) if f.extern]
    entries += [name] if name not in entries else []
    text = f'#include "shim.h"\n{free}#line 1 "kernel.cu"\n{text}\n#line 1 "entry"\n'
    text += "".join(f"CPU_ENTRY({i}, {entry})\n" for i, entry in enumerate(entries))
    runtime = '#include "runtime.cpp"\n' + ('#include "trace.cpp"\n' if mode == "trace" else "")

    command = compiler()
    version = _version(tuple(command))
    flags = _flags(version, mode)
    own = "".join((HERE / f).read_text() for f in ("shim.h", "runtime.h", "runtime.cpp", "trace.cpp"))
    base = _hash(own, *command, version, *flags, _processor())
    key = _hash(base, text, _included(source))
    if (key, name) not in _loaded:
        cache, link = _cache(), ["-ldl"] if sys.platform.startswith("linux") else []
        build = [*command, *flags, f"-I{HERE}", f"-I{ROOT}", "-c", "kernel.cpp", "-o"]
        watch = ["-fsanitize=thread"] if mode == "trace" else []      # for its calls; its library is not linked
        launcher = _build(cache / f"runtime-{base}.o", runtime, [[*build, "out"]]).resolve()
        library = _build(cache / f"{key}.so", text,
                         [[*build, "kernel.o", *watch],
                          [*command, "-shared", "-pthread", "kernel.o", str(launcher), "-o", "out", *link]])
        _loaded[key, name] = Kernel(library, entries.index(name), name, mode, parameters(source, plain), arrays,
                                    reached(source, plain))
    return _loaded[key, name]


def _plain(name: str) -> str:
    """The function's name without template arguments."""
    return re.match(r"\w*", name)[0]


class Kernel:
    """A compiled kernel. Called, it runs and returns None, or a Trace in trace mode.

    name: str; mode: "fast" or "trace"; shared_size_bytes: static shared memory in bytes, as `ptxas -v` counts it;
    signature: list of (parameter name, type as shim.h spells it).
    """

    def __init__(self, library: Path, entry: int, name: str, mode: str, names: list, arrays: list, reached: set):
        self.name, self.mode, self.library, self.arrays = name, mode, library, arrays
        self._c = ctypes.CDLL(str(library))
        self._c.cpu_wait.argtypes = [ctypes.c_double]
        self._c.cpu_done.restype = ctypes.c_int64
        self._c.cpu_base.restype = ctypes.c_void_p
        self._c.cpu_place.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._entry = ctypes.cast(self._c[f"cpu_entry_{entry}"], ctypes.c_void_p)
        spelled = ctypes.create_string_buffer(4096)
        self._c[f"cpu_signature_{entry}"](spelled)
        self.signature = list(zip(names, spelled.value.decode().split(), strict=True))
        self._lay_out(reached)

    def _lay_out(self, reached):
        """Gives each shared array of this kernel its place in the arena, and adds up the bytes as nvcc would."""
        slots, number, size, element, align = [], ctypes.c_int(), ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
        while self._c.cpu_shared(len(slots), *map(ctypes.byref, (number, size, element, align))):
            slots.append((number.value, len(slots), size.value, element.value, align.value))
        self.shared_size_bytes, end = 0, ZONE
        self.layout = {}                          # array's number -> (name, offset, bytes, bytes of an element)
        self._places = [0] * len(slots)           # offset of each slot, 0 where another kernel owns it
        for number, slot, size, element, align in sorted(slots):
            array = self.arrays[number]
            if array.function not in reached:
                continue
            self.shared_size_bytes = -(-self.shared_size_bytes // align) * align + size
            if self.shared_size_bytes > STATIC_LIMIT:
                raise CompileError(f"{array.file}:{array.line}: with {array.name}, kernel {self.name} uses "
                                   f"{self.shared_size_bytes:,} bytes of static __shared__ memory; "
                                   f"the limit is {STATIC_LIMIT:,} (48 KB), in nvcc too")
            end = -(-end // max(align, 256)) * max(align, 256)
            self._places[slot] = end
            self.layout[number] = (array.name, end, size, element)
            end += size + ZONE
        self._dynamic_offset = -(-end // 1024) * 1024

    def __call__(self, grid, block, args, shared_mem=0, workers=None, time_limit=None):
        """Runs grid x block threads; returns when all have ended.

        grid, block: up to three ints each. args: NumPy arrays (C order, written in place) and NumPy scalars, as
        cupy.RawKernel takes them. shared_mem: bytes of dynamic shared memory. workers: OS threads (default: all cores;
        tracing uses one). time_limit: seconds that may pass without a block ending (default 60).

        Raises LaunchError: wrong number, type or size of arguments; a barrier not reached by all; deadlock; time limit;
        stack overflow; a fault. In trace mode what happens during the run is in the Trace instead.
        """
        grid, block = (tuple(int(n) for n in (*x, 1, 1)[:3]) for x in (grid, block))
        for what, shape, limits in (("grid", grid, GRID_LIMITS), ("block", block, BLOCK_LIMITS)):
            if any(not 1 <= n <= limit for n, limit in zip(shape, limits)):
                raise LaunchError(f"{what} {shape} is outside CUDA's limits 1 .. {limits}")
        if np.prod(block) > 1024:
            raise LaunchError(f"block {block} has {np.prod(block)} threads; CUDA allows 1,024")
        if (total := self.shared_size_bytes + shared_mem) > SHARED_LIMIT:
            raise LaunchError(f"{total:,} bytes of shared memory; no GPU has more than {SHARED_LIMIT:,} for a block")
        values = self._check(args)
        with _one_launch:
            if self.mode == "trace":
                return self._trace(grid, block, args, values, shared_mem, time_limit)
            late, _ = self._launch(grid, block, values, shared_mem, workers or os.cpu_count(), time_limit)
            if findings := findings_of(self, late):
                raise LaunchError(findings[0].message)
            if self._c.cpu_done() < np.prod(grid, dtype=object):
                raise LaunchError(f"kernel {self.name}: the system gave no memory or no threads to run it")

    def _check(self, args):
        """The arguments as C values; raises LaunchError where they do not fit the signature."""
        if len(args) != len(self.signature):
            raise LaunchError(f"kernel {self.name} takes {len(self.signature)} arguments "
                              f"({', '.join(n for n, _ in self.signature)}); got {len(args)}")
        values = []
        for i, (value, (name, kind)) in enumerate(zip(args, self.signature)):
            what = f"argument {i + 1} ({name}) of kernel {self.name}"
            pointer, const, letter, size = re.match(r"(\*?)(c?)([fivx])(\d+)", kind).groups()
            wanted = {"f": "float", "i": "integer", "v": "void", "x": "struct"}[letter]
            given = getattr(value, "dtype", None)
            fits = letter in "vx" or given is not None and {"f": "f", "i": "iub"}[letter].find(given.kind) >= 0
            if pointer and value is None:
                values.append(ctypes.c_void_p(0))
            elif pointer:
                if not isinstance(value, np.ndarray):
                    raise LaunchError(f"{what} is a pointer to {wanted}: pass a NumPy array, "
                                      f"not {type(value).__name__}")
                if not fits or letter in "fi" and given.itemsize != int(size):
                    raise LaunchError(f"{what} points to {size}-byte {wanted}s; got an array of {given}")
                if not value.flags.c_contiguous:
                    raise LaunchError(f"{what} must be a contiguous array: a kernel sees no strides")
                if not const and not value.flags.writeable:
                    raise LaunchError(f"{what} may be written by the kernel, but the array is read-only")
                values.append(ctypes.c_void_p(value.ctypes.data))
            else:
                if not isinstance(value, np.generic):
                    raise LaunchError(f"{what} is a {size}-byte {wanted}: pass a NumPy scalar such as np.int32(…), "
                                      f"not {type(value).__name__}")
                if not fits or given.itemsize != int(size):
                    raise LaunchError(f"{what} is a {size}-byte {wanted}; got {given}")
                values.append(ctypes.create_string_buffer(value.tobytes(), value.itemsize))
        return values

    def _launch(self, grid, block, values, shared_mem, workers, time_limit):
        """Runs to the end, whatever it is; returns (the time limit if that was passed, else None; seconds)."""
        c, limit = self._c, 60 if time_limit is None else time_limit
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        launch = abi.Launch(self._entry, grid, block, ctypes.cast(pointers, ctypes.c_void_p),
                            self._dynamic_offset + shared_mem + ZONE, self._dynamic_offset, shared_mem)
        for slot, offset in enumerate(self._places):
            c.cpu_place(slot, offset)
        begin = since = time.monotonic()
        done, late, ended = 0, False, False
        try:
            c.cpu_start(ctypes.byref(launch), min(workers, int(np.prod(grid, dtype=object))))
            while not (ended := c.cpu_wait(0.05)):
                if c.cpu_done() != done:
                    done, since = c.cpu_done(), time.monotonic()
                elif not late and time.monotonic() - since > limit:
                    late = True
                    c.cpu_stop()
        finally:
            while not ended:                      # Ctrl-C: the threads use our arrays, so they must end first
                c.cpu_stop()
                ended = c.cpu_wait(0.05)
        return limit if late else None, time.monotonic() - begin

    def _trace(self, grid, block, args, values, shared_mem, time_limit):
        """Runs on copies of the arrays, laid out with gaps, so that every stray address can be told from a good one."""
        buffers, start = {}, GAP
        for (name, kind), value in zip(self.signature, args):
            if isinstance(value, np.ndarray) and value.size:
                key, const = (value.ctypes.data, value.nbytes), kind.startswith("*c")
                if key in buffers:                                     # one array given twice is one array
                    buffers[key].writable |= not const
                else:
                    buffers[key] = Watched(name, "global", start, value.nbytes, value.itemsize, not const, value)
                    start += -(-value.nbytes // 256) * 256 + GAP
        watched = [*buffers.values(), *(Watched(name, "shared", *rest, True) for name, *rest in self.layout.values())]
        if shared_mem:
            name = next((a.name for a in self.arrays if a.dynamic), "dynamic shared memory")
            watched.append(Watched(name, "shared", self._dynamic_offset, shared_mem, 0, True))
        if start >= 2**32:
            raise LaunchError(f"trace mode takes up to 4 GB of arrays; these are {start:,} bytes")

        heap = np.frombuffer(mmap.mmap(-1, start), np.uint8)
        base = heap.ctypes.data
        for value, arg in zip(values, args):
            if isinstance(arg, np.ndarray):
                value.value = base + (buffers[arg.ctypes.data, arg.nbytes].base if arg.size else 0)
        rows = (abi.Watched * len(watched))(*(
            (w.space == "shared", w.writable, w.base + (base if w.space == "global" else 0), w.size) for w in watched))
        granule = 2                                                    # cells of 4 bytes; again with finer if need be
        while granule >= 0:
            for w in buffers.values():
                heap[w.base : w.base + w.size] = w.array.reshape(-1).view(np.uint8)
            self._c.cpu_watch(rows, len(rows), ctypes.c_void_p(base), ctypes.c_size_t(start), granule)
            late, seconds = self._launch(grid, block, values, shared_mem, 1, time_limit)
            granule = self._c.cpu_finer()
        for w in buffers.values():
            if w.writable:
                w.array.reshape(-1).view(np.uint8)[:] = heap[w.base : w.base + w.size]
        completed = not late and self._c.cpu_done() == np.prod(grid, dtype=object)
        return Trace(self.name, grid, block, tuple(findings_of(self, late, watched)), tuple(counts_of(self, watched)),
                     completed, self.shared_size_bytes, shared_mem, {w.name: w.size for w in watched}, seconds)


_one_launch = threading.Lock()                    # a launch uses all cores and owns the process's signal handlers
