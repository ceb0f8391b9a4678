"""How long attention takes, beside what libraries need for the same: the timings behind README's table."""

import json
import math
import os
import re
import subprocess
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from common import check, device, launch
from common.problem import ARTICLE, FULL_64, FULL_128, Problem
from stages import ROOT

RECORDS = ROOT / "stages" / "timings"

SHAPES = {
    "article": ARTICLE,
    "full_64": FULL_64,
    "full_64_causal": replace(FULL_64, causal=True),
    "full_128": FULL_128,
}


# -- what is kept --


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: median, 20th and 80th percentile; the number of calls behind them."""

    ms: float
    p20: float
    p80: float
    runs: int

    @staticmethod
    def of(samples) -> "Times":
        p20, ms, p80 = np.quantile(samples, [0.2, 0.5, 0.8]).tolist()
        return Times(ms, p20, p80, len(samples))


@dataclass
class Row:
    """One line of a table; a wrong answer has `ok` False and no times.

    kind   what it is, one of table.ORDER      error, allowed      of the check; error None: NaN
    shape  a key of SHAPES                     ms, p20, p80, runs  as in Times
    flops  of one call                         registers, local, shared  of a thread, bytes of a thread, of a block
    """

    label: str
    kind: str
    shape: str
    flops: float
    stage: int | None = None
    ok: bool = True
    error: float | None = None
    allowed: float | None = None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    runs: int | None = None
    registers: int | None = None
    shared: int | None = None
    local: int | None = None

    @property
    def tflops(self) -> float | None:
        return self.flops / self.ms / 1e9 if self.ms else None


# As printed in "How Did I Write My First FlashAttention Kernel in CUDA?" (Towards AI); not measured here.
PUBLISHED = [
    Row(f"RTX 4050 laptop as published: {name}", "published", "article", ARTICLE.flops, ms=ms)
    for name, ms in [("CPU", 143.81), ("naive", 7.63), ("tiled", 3.45)]
]


@dataclass
class Record:
    """One run of `timings` on one machine: what stages/timings/<gpu>.json holds."""

    machine: dict  # device.facts()
    date: str  # UTC
    commit: str | None = None
    clocks: dict = field(default_factory=dict)  # {"before": {"sm": MHz, "memory": MHz}, "after": …}
    shapes: dict = field(default_factory=dict)
    ceilings: dict = field(default_factory=dict)  # see ceilings()
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gpu(self) -> str | None:
        return self.machine["gpu"] and self.machine["gpu"]["name"]

    @property
    def file(self) -> str:
        return file_of(self.gpu)

    def percent(self, row: Row) -> float | None:
        """Percent of this GPU's fp32 ceiling; None for what did not run on it."""
        on_gpu = row.kind in ("stage", "eager", "sdpa") and row.ms and self.ceilings
        return 100 * row.tflops / self.ceilings["tflops"] if on_gpu else None

    def speedup(self, row: Row) -> float | None:
        """Times faster than one CPU core at the same shape; a published row against the published CPU."""
        core = [r for r in self.rows if r.kind == "core" and r.shape == row.shape]
        core = PUBLISHED if row.kind == "published" else core
        return core[0].ms / row.ms if core and core[0].ms and row.ms else None

    def dump(self) -> str:
        """JSON. What follows from a row's milliseconds stands beside them for readers; load() computes it anew."""
        derived = ({"tflops": r.tflops, "percent": self.percent(r), "speedup": self.speedup(r)} for r in self.rows)
        rows = [asdict(row) | more for row, more in zip(self.rows, derived, strict=True)]
        return json.dumps(asdict(self) | {"rows": rows}, indent=1) + "\n"

    @staticmethod
    def load(text: str) -> "Record":
        data, kept = json.loads(text), [f.name for f in fields(Row)]
        return Record(**data | {"rows": [Row(**{name: row[name] for name in kept}) for row in data["rows"]]})

    def save(self, path: Path) -> None:
        """Written beside `path`, then renamed: an interrupted run leaves the old file as it was."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            (Path(folder) / path.name).write_text(self.dump())
            os.replace(Path(folder) / path.name, path)


def file_of(gpu: str | None) -> str:
    """The name of a GPU's record: "NVIDIA H200" -> "nvidia-h200.json"."""
    return re.sub("[^a-z0-9]+", "-", (gpu or "cpu").lower()) + ".json"


def records() -> list[Record]:
    return [Record.load(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]


# -- the clocks --


def time_cpu(functions: dict, **limits) -> dict[str, Times]:
    """{name: function of no arguments} -> {name: Times}, by the wall clock. `limits`: see _rounds."""

    def sample(function, runs):
        function()
        marks = [time.perf_counter()]
        for _ in range(runs):
            function()
            marks.append(time.perf_counter())
        return np.diff(marks) * 1e3

    return _rounds(functions, sample, **limits)


# Keeps the GPU busy for `ns` nanoseconds.
SPIN = r"""
__device__ long long now() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
extern "C" __global__ void spin(long long ns) { for (long long start = now(); now() - start < ns;) { } }
"""


def time_gpu(functions: dict, **limits) -> dict[str, Times]:
    """{name: function that queues work on the default stream} -> {name: Times}, by CUDA events. `limits`: see _rounds.

    Before each run the L2 cache is overwritten, and the GPU waits until the host has queued the run: neither cached
    inputs nor Python's own time stand in the figure. (triton.testing.do_bench does the first but not the second, and so
    times the launcher where that takes longer than the kernel.)
    """
    import cupy

    stream = cupy.cuda.Stream.null  # torch's default stream too
    spin = cupy.RawKernel(SPIN, "spin")
    cache = cupy.empty(256 << 20, dtype=np.int8)  # more than any L2 holds

    def sample(function, runs):
        start = time.perf_counter()
        function()
        host_ns = (time.perf_counter() - start) * 1e9
        stream.synchronize()
        head_start = np.int64(min(50_000 + 2 * host_ns, 5_000_000))
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(runs)]
        for before, after in events:
            cache.data.memset_async(0, cache.nbytes, stream)
            spin((1,), (1,), (head_start,))
            before.record(stream)
            function()
            after.record(stream)
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(before, after) for before, after in events]

    with stream:
        spin((1,), (1,), (np.int64(100_000_000),))  # an idle GPU needs a while to raise its clocks
        return _rounds(functions, sample, **limits)


def time_stages(stages: dict, problem: Problem, on: str, **limits) -> dict[str, Times]:
    """{name: Stage} -> {name: Times} of a problem, all on "gpu" or all on "cpu". `limits`: see _rounds."""
    inputs = problem.inputs(launch.library(on))
    runs = {name: launch.bind(stage, *inputs, causal=problem.causal, on=on) for name, stage in stages.items()}
    return (time_gpu if on == "gpu" else time_cpu)(runs, **limits)


def _rounds(functions, sample, *, least=50, target_ms=100, budget_ms=2000, rounds=5, tell=lambda share: None):
    """Times all functions in alternating rounds, so that a drifting clock touches each alike.

    sample(function, runs) -> milliseconds of each run, after one that does not count. Each function runs `least` times
    and for `target_ms` (but 500 times at most), in slow cases until `budget_ms` is spent, always once a round.
    tell(share of the work just done).
    """
    runs, samples = {}, {name: [] for name in functions}
    for name, function in functions.items():
        once = sample(function, 1)[0]
        wanted = min(max(least, target_ms / once), max(least, 500), budget_ms / once)
        runs[name] = max(1, math.ceil(wanted / rounds))
    for turn in range(rounds):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            samples[name].extend(sample(functions[name], runs[name]))
        tell(1 / rounds)
    return {name: Times.of(found) for name, found in samples.items()}


# -- what is timed: {label: (kind, stage or None, make)}, where make(poison) returns a function that returns O --


def cpu_candidates(problem: Problem, Q, K, V, stages: dict) -> dict:
    """One core running stage 3's own source, the NumPy stages, torch; without a GPU also every .cu on all cores."""
    import torch
    import torch.nn.functional as F

    bind = partial(launch.bind, Q=Q, K=K, V=V, causal=problem.causal, on="cpu")
    found = {"one CPU core, stage 3's source": ("core", stages[3], partial(bind, stages[3], workers=1))}
    for stage in stages.values():
        if not stage.is_cuda:
            found[f"stage {stage.number} {stage.name}, NumPy"] = "numpy", stage, partial(bind, stage)
        elif not launch.has_gpu():
            found[f"stage {stage.number} {stage.name}, executor"] = "executor", stage, partial(bind, stage)
    sdpa = partial(F.scaled_dot_product_attention, *map(torch.from_numpy, (Q, K, V)), is_causal=problem.causal)
    found[f"torch SDPA, {torch.get_num_threads()} CPU cores"] = "torch_cpu", None, lambda poison: sdpa
    return found


def gpu_candidates(problem: Problem, Q, K, V, stages: dict) -> dict:
    """Every CUDA stage, torch's separate calls, and each SDPA backend by name; Q, K, V are CuPy arrays."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.cuda.empty_cache()  # the scores of the last shape
    q, k, v = map(torch.from_dlpack, (Q, K, V))
    hidden = torch.ones(problem.N, problem.N, dtype=torch.bool, device=q.device).triu(1)

    def eager():
        S = (q @ k.mT).mul_(problem.scale)
        if problem.causal:
            S.masked_fill_(hidden, -torch.inf)
        return torch.softmax(S, dim=-1) @ v

    def sdpa(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

    bind = partial(launch.bind, Q=Q, K=K, V=V, causal=problem.causal, on="gpu")
    found = {f"stage {s.number} {s.name}": ("stage", s, partial(bind, s)) for s in stages.values() if s.is_cuda}
    found["torch eager"] = "eager", None, lambda poison: eager
    for name in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        forced = partial(sdpa, getattr(SDPBackend, name))
        found[f"torch SDPA {name}"] = "sdpa", None, lambda poison, forced=forced: forced
    return found


def ceilings(**limits) -> dict:
    """What this GPU reaches: {"tflops": fp32 product of 8192 x 8192, "copy_gbs": device copy, read and written}."""
    import torch

    A, B, C = (torch.randn(8192, 8192, device="cuda") for _ in range(3))
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    here, there = (torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for _ in range(2))
    found = time_gpu({"product": lambda: torch.mm(A, B, out=C), "copy": lambda: there.copy_(here)}, **limits)
    return {"tflops": 2 * 8192**3 / found["product"].ms / 1e9, "copy_gbs": 2 * size / found["copy"].ms / 1e6}


# -- the run --


def measure(stages: dict, *, quick=False, tell=lambda text, share: None) -> Record:
    """Checks and times everything this machine can run.

    quick: the article's shape only, and fewer runs. tell(what is being done, share just done of one of phases(quick)).
    """
    import torch

    torch.set_float32_matmul_precision("highest")  # no TF32
    limits = {"least": 10, "budget_ms": 300} if quick else {}
    record = Record(device.facts(), datetime.now(UTC).isoformat(timespec="seconds"))
    record.shapes = {name: asdict(SHAPES[name]) for name in SHAPES if name in phases(quick)}
    inputs = ARTICLE.inputs()
    _add(record, "article", inputs, cpu_candidates(ARTICLE, *inputs, stages), np, time_cpu, tell, limits)
    if not launch.has_gpu() or not torch.cuda.is_available():
        why = device.why_no_gpu() or "This torch was built without CUDA."
        record.notes.append(f"Everything that needs a GPU was left out: {why}")
        return record

    import cupy

    tell("ceilings", 0)
    record.clocks["before"] = device.clocks()
    record.ceilings = ceilings(**limits)
    tell("ceilings", 1)
    for name in record.shapes:
        inputs = SHAPES[name].inputs(cupy)
        _add(record, name, inputs, gpu_candidates(SHAPES[name], *inputs, stages), cupy, time_gpu, tell, limits)
    record.clocks["after"] = device.clocks()
    return record


def phases(quick=False) -> list[str]:
    """What measure() does on this machine, in order."""
    return ["article"] + (["ceilings", *SHAPES][: 2 if quick else None] if launch.has_gpu() else [])


def _add(record, name, inputs, candidates, xp, clock, tell, limits) -> None:
    """Checks every candidate at the shape `name`, times those that are right, and appends a row for each.

    A stage that cannot run on the GPU is a wrong row; anything else that cannot run is left out with a note. A library
    is timed whatever it answers; a note says so where a stage would not pass with that.
    """
    problem, functions, rows = SHAPES[name], {}, {}
    reference = check.Reference(*inputs, causal=problem.causal)
    for label, (kind, stage, make) in candidates.items():
        tell(f"{name}: {label}", 0.5 / len(candidates))
        row = Row(label, kind, name, problem.flops, stage and stage.number)
        try:
            with warnings.catch_warnings(action="ignore"):  # an SDPA backend that refuses a type warns, then raises
                verdict = reference.verdict(xp.from_dlpack(make(poison=True)()))
            row.ok, row.allowed = verdict.ok, verdict.allowed
            row.error = verdict.error if math.isfinite(verdict.error) else None  # JSON knows no NaN
            if kind == "stage":
                k = launch.gpu_kernel(stage, problem.d, problem.causal)
                row.registers, row.shared, row.local = k.num_regs, k.shared_size_bytes, k.local_size_bytes
        except Exception as error:
            note = f"{label} cannot run here: {_first_sentence(error)}"
            record.notes += [note] if note not in record.notes else []
            if kind != "stage":
                continue
            row.ok = False
        record.rows.append(row)
        if not row.ok and stage is None:
            off = f"{label} ({name}) is off by {verdict.error:.1e}, where a stage may be off by {verdict.allowed:.1e}"
            record.notes.append(off)
        if row.ok or stage is None:
            functions[label], rows[label] = make(poison=False), row
    for label, times in clock(functions, tell=lambda share: tell(f"{name}: timing", share / 2), **limits).items():
        vars(rows[label]).update(asdict(times))


def provenance(commit: str | None) -> tuple[str | None, str]:
    """(the commit that a record may carry, "") or (None, why it may carry none)."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        head = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--", ".", ":!stages/timings", ":!README.md"]).stdout
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        if re.fullmatch("[0-9a-f]{7,40}", commit or ""):
            return commit, ""
        return None, "git does not know this tree, and no COMMIT=<hash> says which commit it is"
    if changed:
        return None, f"the tree has changes that are not committed ({changed.splitlines()[0].strip()})"
    if commit and not head.startswith(commit):
        return None, f"the tree is at {head[:12]}, not at {commit}"
    return head, ""


def timings(save: Path | None = None, commit: str | None = None, quick=False, as_json=False) -> int:
    """Measures, prints the tables (or the record as JSON), saves the record, regenerates README's table.

    The record of a GPU goes to stages/timings/<gpu>.json; one without a GPU, or a quick one, only where `save` says.
    Returns 1 if anything was wrong, 130 after Ctrl-C, else 0.
    """
    from rich.console import Console
    from rich.progress import Progress

    from common import table
    from stages import STAGES

    console = Console(stderr=as_json, width=max(Console().width, 132), highlight=False)  # no figure is cut off
    commit, refusal = provenance(commit or os.environ.get("COMMIT"))
    if refusal and (save or launch.has_gpu() and not quick):
        console.print(f"This run will not be saved: {refusal}.")
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            advance = partial(bar.update, bar.add_task("", total=len(phases(quick))))
            record = measure(STAGES, quick=quick, tell=lambda text, share: advance(description=text, advance=share))
        record.commit = commit
        if as_json:
            print(record.dump(), end="")
        else:
            for grid in table.grids(record):
                console.print(grid.rich(), "")
            console.print(table.footnote(record))
        path = save or (RECORDS / record.file if record.gpu and not quick else None)
        if path is None:
            console.print("Not saved: only a full run on a GPU is, or what --save PATH names.")
        elif refusal:
            console.print(f"Not saved: {refusal}.")
        else:
            record.save(path)
            console.print(f"Saved to {path}.", table.update_readme() if path.resolve().parent == RECORDS else "")
    except KeyboardInterrupt:
        console.print("Stopped. No file was changed.")
        return 130
    return 0 if all(row.ok for row in record.rows if row.stage) else 1


def _first_sentence(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
