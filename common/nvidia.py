"""NVIDIA's own tools on our kernels: compute-sanitizer and Nsight Compute, beside what the trace says.

Both watch a Python process, so this module is also that process: `python -m common.nvidia JOBS.json` launches each job
once, with CuPy's memory pool off (a sanitizer sees nothing inside a pool), and prints a marker before each.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from common import bench, device, watch
from common.problem import Problem
from stages import ROOT, STAGES

MARK = "@@ job"
TOOLS = {
    "memcheck": "stray and misaligned accesses",
    "racecheck": "races in shared memory",
    "initcheck": "global memory that is read before it is written",
    "synccheck": "barriers that not all threads reach",
}
PADDING = {"memcheck": ("--padding", "1024")}  # else one array's end is the next one's start, and memcheck sees nothing
# What the trace counts, and Nsight Compute's name for it: {ld,st} is filled in.
COUNTERS = {
    "global requests": "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum",
    "global sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum",
    "shared wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum",
    "shared conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum",
}
RECORDS = ROOT / "stages" / "timings" / "counters"


# -- the watched process --


def _launch(path: Path) -> None:
    import cupy

    from common import launch

    cupy.cuda.set_allocator(None)
    for number, job in enumerate(json.loads(path.read_text())):
        print(f"\n{MARK} {number}", flush=True)
        stage, problem = STAGES[job["stage"]], Problem(**job["problem"])
        if job["source"]:
            stage = stage.patched(job["source"], tiles={problem.d: job["tiles"]})
        try:
            arrays = [cupy.asarray(array) for array in problem.inputs()]
            launch.attention(stage, *arrays, causal=problem.causal, on="gpu")
            cupy.cuda.runtime.deviceSynchronize()
        except Exception as error:  # a planted bug may well end its launch
            print(f"launch failed: {str(error).splitlines()[0]}", flush=True)


def _watched(command, jobs, timeout=300):
    """Runs a tool over the watched process; returns the tool's whole output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUPY_CACHE_DIR": folder}
        run = subprocess.run(
            [*command, sys.executable, "-m", "common.nvidia", str(path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        )
    return run.stdout


def job(stage, problem) -> dict:
    return dict(stage=stage.number, problem=asdict(problem), source=stage.source, tiles=stage.tiles[problem.d])


# -- compute-sanitizer --


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") if device.gpu() else None


def examine(jobs, tool) -> list[list[str]]:
    """Runs one of TOOLS over all jobs in one process: the sentences that it printed for each job, without repeats."""
    command = [sanitizer(), "--tool", tool, "--destroy-on-device-error", "kernel", "--print-limit", "200", "--show-backtrace", "no"]
    command += PADDING.get(tool, ())
    output = _watched(command, jobs)
    parts = re.split(rf"^{MARK} (\d+)$", output, flags=re.M)
    found = [[] for _ in jobs]
    if len(parts) < 2 * len(jobs) + 1:
        raise RuntimeError(f"compute-sanitizer --tool {tool} did not reach all kernels: {output.strip()[-500:]}")
    for number, text in zip(parts[1::2], parts[2::2]):
        text = text.partition("========= ERROR SUMMARY")[0].partition("========= RACECHECK SUMMARY")[0]
        for block in re.split(r"^=========\s*$", text, flags=re.M):
            lines = [line.removeprefix("=========").strip() for line in block.splitlines() if line.startswith("=========")]
            sentence = re.sub(r"\+0x[0-9a-f]+|0x[0-9a-f]+", "", "; ".join(lines[:3])) if lines else ""
            if sentence and "COMPUTE-SANITIZER" not in sentence and sentence not in found[int(number)]:
                found[int(number)].append(sentence)
    return found


def sanitize(stage, problem, as_json=False) -> int:
    """`make sanitize-4`: what each of the four tools saw; the trace where there is no GPU. 1 if anything was seen."""
    if not sanitizer():
        why = device.why_no_gpu() or "compute-sanitizer is not on the PATH."
        print(f"{why} The CPU executor watches the launch instead:\n", file=sys.stderr)
        return watch.main(stage, problem, as_json=as_json)
    seen = {tool: examine([job(stage, problem)], tool)[0] for tool in TOOLS}
    if as_json:
        print(json.dumps(seen, indent=1))
        return 1 if any(seen.values()) else 0
    print(f"{stage.file}   {problem}   on the {device.gpu().name}, memory pools off\n")
    for tool, what in TOOLS.items():
        print(f"{tool:<10} {what}: {'nothing' if not seen[tool] else ''}")
        for sentence in seen[tool][:10]:
            print(f"           {sentence}")
    return 1 if any(seen.values()) else 0


# -- Nsight Compute --


def counted(jobs) -> list[dict]:
    """What the GPU's own counters say of each job: {"global sectors ld": 2048, …}; None for one it does not give."""
    names = {f"{what} {op}": metric.format(op) for what, metric in COUNTERS.items() for op in ("ld", "st")}
    command = [shutil.which("ncu") or "ncu", "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name", "attention",
               "--metrics", ",".join(names.values())]
    output = _watched(command, jobs)
    start = output.find('"ID"')
    if start < 0:
        raise RuntimeError(f"Nsight Compute gave no counters: {output.strip()[-500:]}")
    table = [line for line in output[start:].splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(table) if row["ID"].strip()]  # the row of units has no ID
    if len(rows) != len(jobs):
        raise RuntimeError(f"Nsight Compute saw {len(rows)} kernels, not {len(jobs)}")
    return [{name: _number(row.get(metric)) for name, metric in names.items()} for row in rows]


def _number(text):
    try:
        return round(float(text.replace(",", "")))
    except (AttributeError, ValueError):
        return None


def traced(stage, problem) -> dict:
    """The same counters from the trace."""
    seen = watch.trace(stage, problem)
    counts = {}
    for op, kind in (("ld", "load"), ("st", "store")):
        lines = [c for c in seen.lines if c.op == kind]
        counts[f"global requests {op}"] = sum(c.requests for c in lines if c.space == "global")
        counts[f"global sectors {op}"] = sum(c.sectors for c in lines)
        counts[f"shared wavefronts {op}"] = sum(c.wavefronts for c in lines)
        counts[f"shared conflicts {op}"] = sum(c.conflicts for c in lines)
    return counts


def compare(cases) -> list[dict]:
    """[(stage, problem)] -> the GPU's counters and the trace's, for each."""
    on_gpu = counted([job(*case) for case in cases])
    return [dict(stage=s.number, N=p.N, d=p.d, causal=p.causal, gpu=g, trace=traced(s, p)) for (s, p), g in zip(cases, on_gpu)]


def profile(stage, problem, as_json=False, save=None, commit=None) -> int:
    """`make profile-4`: one stage. `python -m stages profile`: every CUDA stage at four shapes, and every planted race and
    stray access under compute-sanitizer, kept as a record."""
    if not device.gpu() or not shutil.which("ncu"):
        raise RuntimeError(device.why_no_gpu() or "ncu (Nsight Compute) is not on the PATH: it comes with the CUDA toolkit")
    if stage:
        rows = compare([(stage, problem)])
        print(json.dumps(rows, indent=1) if as_json else markdown(rows))
        return 0
    cuda = [s for s in STAGES.values() if s.is_cuda]
    rows = compare([(s, Problem(N=N, d=d)) for s in cuda for N in (256, 1024) for d in (64, 128)])
    commit, refusal = bench.provenance(commit or os.environ.get("COMMIT"))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = dict(facts=device.facts(), commit=commit, date=date, rows=rows, bugs=sanitized())
    print(json.dumps(record, indent=1) if as_json else markdown(rows) + "\n\n" + bugs_markdown(record["bugs"]))
    if refusal:
        print(f"Not saved: {refusal}.", file=sys.stderr)
        return 0
    path = save or RECORDS / bench.file_of(device.gpu().name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def sanitized() -> list[dict]:
    """Every planted race and stray access under the four tools: {"stage", "bug", "expected", "seen": {tool: sentences}}."""
    from stages.bugs import BUGS, LENGTHS

    bugs = [bug for bug in BUGS if bug.nvidia]
    jobs = [job(bug.planted(), Problem(1, 2, LENGTHS[0], bug.d)) for bug in bugs]
    seen = {tool: examine(jobs, tool) for tool in TOOLS}
    return [
        dict(stage=bug.stage, bug=bug.name, expected=bug.nvidia,
             seen={tool: found[i][:3] for tool, found in seen.items() if found[i]})
        for i, bug in enumerate(bugs)
    ]


def bugs_markdown(rows) -> str:
    """A table: the bug, which tool saw it and in what words, or why none could."""
    lines = ["| stage | planted bug | compute-sanitizer |", "|--:|:--|:--|"]
    for row in rows:
        words = "; ".join(f"{tool}: {sentences[0]}" for tool, sentences in row["seen"].items())
        lines.append(f"| {row['stage']} | {row['bug']} | {words or row['expected']} |")
    return "\n".join(lines)


def markdown(rows) -> str:
    """A table of both counts: one number where they agree, "GPU / trace" where they do not."""
    names = [f"{what} {op}" for what in COUNTERS for op in ("ld", "st")]
    lines = ["| stage | N | d | " + " | ".join(names) + " |", "|--:|--:|--:|" + "--:|" * len(names)]
    for row in rows:
        cells = []
        for name in names:
            gpu, trace = row["gpu"][name], row["trace"][name]
            cells.append(f"{trace:,}" if gpu == trace else f"{'n/a' if gpu is None else f'{gpu:,}'} / {trace:,}")
        lines.append(f"| {row['stage']} | {row['N']} | {row['d']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def readme() -> None:
    """The tables of common/cpu/README.md, called through cog."""
    import cog

    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        gpu = record["facts"]["gpu"]
        cog.outl(f"{gpu['name']}, driver {gpu['driver']}, commit {record['commit'][:12]}, {record['date'][:10]}:\n")
        cog.outl(f"{markdown(record['rows'])}\n\n{bugs_markdown(record['bugs'])}")


if __name__ == "__main__":
    _launch(Path(sys.argv[1]))
