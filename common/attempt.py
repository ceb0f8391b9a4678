"""A reader's own kernel against a stage's contract: `python -m stages try my_kernel.cu --like 5`.

First it is traced at small shapes, since a race or a stray access explains more than wrong numbers do and is not safe to
run elsewhere; then checked; then timed beside the stage.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from common import bench, check, device, launch, watch
from common.problem import Problem
from stages import STAGES

UNWRITTEN = np.uint32(0x7FC0DEAD).view(np.float32)  # a NaN that no arithmetic makes
TIME_LIMIT = 10  # seconds that one traced block may take


@dataclass
class Attempt:
    """right     did it pass everything
    stopped   what ended the examination, "" if nothing: compile, launch, trace or check
    words     what is wrong, a sentence each
    ms        {name: milliseconds} of the kernel and of the stage it is like, where both were timed
    traced    False where there is no C++ compiler to trace with
    """

    file: str
    like: int
    right: bool
    stopped: str
    words: list[str]
    findings: list[dict]
    on: str = ""
    ms: dict | None = None
    traced: bool = True


def attempt(path: Path, like: int, problem: Problem, on=None, tell=lambda words: None) -> Attempt:
    """Examines a .cu file. OSError if it cannot be read."""
    stage = STAGES[like].patched(path.read_text(encoding="utf-8"), str(path))
    on = on or ("gpu" if launch.has_gpu() else "cpu")
    traced = on == "cpu" or bool(device.compiler())  # a GPU's owner may have no C++ compiler

    def stop(why, words, findings=()):
        return Attempt(str(path), like, False, why, words, [asdict(f) for f in findings], on)

    try:
        tell("tracing")
        for N in (100, 64) if traced else ():
            small = Problem(1, 2, N, problem.d, problem.causal)
            seen = watch.trace(stage, small, time_limit=TIME_LIMIT)
            if seen.findings:
                return stop("trace", [f"traced at {small}:", *watch.sentences(seen)], seen.findings)
        tell("checking")
        if wrong := check.first_wrong(stage, problem, on=on):
            relative, words = wrong
            return stop("check", [words, *explain(stage, relative, on)])
    except launch.CompileError as error:
        return stop("compile", [str(error)])
    except launch.LaunchError as error:
        return stop("launch", [str(error)])
    tell("timing")
    both = {path.name: stage, f"stage {like}": STAGES[like]}
    times = bench.time_stages(both, problem, on, least=5)
    return Attempt(str(path), like, True, "", [], [], on, {name: t.ms for name, t in times.items()}, traced)


def explain(stage, problem, on) -> list[str]:
    """What more can be said of wrong numbers: rows never written, and the sequence length from which on it is wrong."""
    words = []
    O = _run(stage, problem, on)
    untouched = (O.view(np.uint32) == UNWRITTEN.view(np.uint32)).all(-1)
    if untouched.any():
        b, h, row = (int(i[0]) for i in untouched.nonzero())
        words.append(f"{int(untouched.sum())} of {untouched.size} rows were never written, the first in batch {b}, head {h}: row {row}")
    Bc = stage.tiles[problem.d].get("Bc", 1)
    edges = range(Bc, problem.N + Bc, Bc)
    right = 0
    for N in sorted({n for edge in edges for n in (edge - 1, edge, edge + 1) if 0 < n <= problem.N}):
        if not check.check(stage, replace(problem, N=N), on=on).ok:
            tiles = -(-N // Bc)
            ragged = f", whose last tile holds {N % Bc} of {Bc} keys" if N % Bc else ""
            before = f"right up to N = {right}, " if right else ""
            words.append(f"{before}wrong from N = {N} on: with {tiles} tile{'s' if tiles > 1 else ''} of keys{ragged}")
            break
        right = N
    return words


def _run(stage, problem, on):
    """The output, in which what was not written is UNWRITTEN."""
    Q, K, V = problem.inputs()
    run = launch.bind(stage, Q, K, V, causal=problem.causal, on=on, poison=UNWRITTEN)
    return np.ascontiguousarray(run())


def main(path, like, problem, on=None, as_json=False) -> int:
    """0 if the kernel is right, 1 if it is wrong."""
    from common import terminal

    console = terminal.console(as_json)
    with console.status("") as status:
        found = attempt(path, like, problem, on, tell=lambda words: status.update(f"{path.name}: {words}"))
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    if found.right:
        seen = "no races, no stray accesses, and" if found.traced else "(not traced: no C++ compiler)"
        console.print(f"[bold green]right[/]   {path}, like stage {like}: {seen} the numbers of stage 1")
        (mine, a), (stage, b) = found.ms.items()
        console.print(f"   {mine} {a:.3f} ms, {stage} {b:.3f} ms at {problem}: {b / a:.2f} times as fast")
        if found.on == "cpu":
            console.print("   both on this CPU, thread by thread: these times say nothing about a GPU")
    else:
        console.print(f"[bold red]WRONG[/]   {path}, like stage {like}, stopped at: {found.stopped}")
        for line in found.words:
            console.print(f"   {line}", soft_wrap=True, markup=False)
    return 0 if found.right else 1
