"""Climb the ladder: each stage is checked, set beside the one before it, then timed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

from common import bench, check, device, launch
from stages import STAGES


@dataclass
class Step:
    """What one stage did with a problem. Times in milliseconds; distance is the largest |O - O of the stage before|."""

    number: int
    name: str
    idea: str
    on: str
    verdict: check.Verdict
    problem: object
    distance: float | None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None

    @property
    def tflops(self):
        return self.problem.flops / self.ms / 1e9 if self.ms else None


class Climb:
    """The problems that a run checks, their right answers (computed once), and the outputs of the last stage.

    on  as of launch.bind; None: CUDA stages on the GPU where there is one
    """

    def __init__(self, problem, on=None):
        self.problem, self.on = problem, on
        xp = launch.library(on or ("gpu" if launch.has_gpu() else "cpu"))
        self.cases = [(p, *self._prepare(p, xp)) for p in check.relatives(problem)]
        self.before = None

    @staticmethod
    def _prepare(problem, xp):
        inputs = problem.inputs(xp)
        return inputs, check.Reference(*inputs, causal=problem.causal)

    def step(self, stage) -> Step:
        """Checks the stage on every case; the worst verdict counts, where worst is the largest error / allowed."""
        verdicts, on = [], launch.place(stage, self.on)
        before, self.before, distance = self.before, None, None
        for problem, inputs, reference in self.cases:
            try:
                O = launch.attention(stage, *inputs, causal=problem.causal, on=on, poison=True)
            except (launch.CompileError, launch.LaunchError) as error:
                verdicts.append(check.Verdict(math.nan, reference.allowed, str(error)))
                break
            verdicts.append(_placed(reference.verdict(O), problem))
            if problem == self.problem:
                distance = None if before is None else check.largest(O - before)
                self.before = O
        worst = max(verdicts, key=lambda verdict: (not verdict.ok, verdict.error / verdict.allowed))
        return Step(stage.number, stage.name, stage.idea, on, worst, self.problem, distance)

    def time(self, steps):
        """Fills in the times of the right steps: all of one place in alternating rounds."""
        _, inputs, _ = self.cases[0]
        for clock, places in ((bench.time_gpu, ("gpu",)), (bench.time_cpu, ("cpu", "trace"))):
            right = [s for s in steps if s.verdict.ok and s.on in places]
            bound = {s.number: launch.bind(STAGES[s.number], *_move(inputs, s.on), causal=self.problem.causal, on=s.on) for s in right}
            if bound:
                times = clock(bound, least=5, target_ms=100, budget_ms=1000)
                for s in right:
                    s.ms, s.p20, s.p80 = times[s.number].ms, times[s.number].p20, times[s.number].p80


def _move(arrays, on):
    """NumPy for what runs on the CPU, so that no copy is timed."""
    return arrays if on == "gpu" else [check.host(a) for a in arrays]


def _placed(verdict, problem):
    """The verdict, its words led by the case that was wrong."""
    if verdict.ok:
        return verdict
    return replace(verdict, where=f"{problem.family} inputs, {problem}: {verdict.where}")


def climb(stages, problem, *, on=None, as_json=False, alone=False) -> int:
    """Prints what each stage does with the problem; 1 if one is wrong, else 0.

    alone  one stage was asked for: it is set beside the one before it
    """
    from common import terminal

    if alone and stages[0].number > 1:
        stages = [STAGES[stages[0].number - 1], *stages]
    console = terminal.console(as_json)
    with console.status("preparing inputs and the float64 reference"):
        run = Climb(problem, on)
    console.print(f"[bold]{problem}[/], float32, seed {problem.seed}\n")
    steps = []
    for stage in stages:
        if why := device.can_run(stage, "gpu" if launch.place(stage, on) == "gpu" else "cpu"):
            _print_head(console, stage)
            console.print(f"   left out: {why} `make doctor` says what would mend that.\n", soft_wrap=True)
            continue
        with console.status(f"stage {stage.number}: compiling and checking"):
            steps.append(run.step(stage))
        _print_step(console, steps[-1])
    with console.status("timing"):
        run.time(steps)
    if as_json:
        print(json.dumps([asdict(s) | {"ok": s.verdict.ok, "tflops": s.tflops} for s in steps], indent=1))
    else:
        _print_table(console, steps)
    return 0 if all(s.verdict.ok for s in steps) else 1


def _print_head(console, stage):
    console.print(f"[bold]stage {stage.number}  {stage.name}[/]   {stage.idea}")


def _print_step(console, step):
    _print_head(console, step)
    word = "[green]right[/]" if step.verdict.ok else "[bold red]WRONG[/]"
    distance = "" if step.distance is None else f"   distance to the stage before {step.distance:.1e}"
    console.print(f"   {word}   {step.verdict}{distance}\n", soft_wrap=True)


def _print_table(console, steps):
    from common import terminal

    table = terminal.table()
    for name, justify in (("stage", "left"), ("", "left"), ("on", "left"), ("", "left"), ("error / allowed", "right"),
                          ("ms", "right"), ("p20 – p80", "right"), ("× before", "right"), ("TFLOP/s", "right")):
        table.add_column(name, justify=justify)
    before = None
    for s in steps:
        ratio = f"{before / s.ms:.2f}" if before and s.ms else ""
        table.add_row(
            str(s.number), s.name, s.on.upper(), "[green]right[/]" if s.verdict.ok else "[red]WRONG[/]",
            f"{s.verdict.error / s.verdict.allowed:.2f}", *((f"{s.ms:.3f}", f"{s.p20:.3f} – {s.p80:.3f}") if s.ms else ("", "")),
            ratio, f"{s.tflops:.3f}" if s.ms else "",
        )
        before = s.ms
    console.print(table)
    places = {s.on for s in steps if STAGES[s.number].is_cuda}
    if "cpu" in places:
        why = "no NVIDIA GPU" if not launch.has_gpu() else "as asked"
        console.print(f"\n{why}: the .cu files ran on this CPU, thread by thread; these times say nothing about a GPU.")
    if "trace" in places:
        console.print("\ntraced: every memory access was watched; these times say nothing at all.")
    if "gpu" in places:
        console.print(f"\nThe .cu files ran on the {device.gpu().name}, the NumPy stages on the CPU.")
