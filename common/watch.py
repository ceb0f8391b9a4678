"""What a traced launch saw, printed: `make trace-4` and `make traffic`.

The counts are of the source as the C++ compiler sees it. nvcc may merge, hoist or drop accesses, so a GPU's own
counters can be lower (stages/timings has a comparison). Nothing here is a time, and bytes asked are not bytes from DRAM:
caches answer most of them.
"""

from __future__ import annotations

import json

from common import launch
from stages import ROOT, STAGES

CANNOT = (
    "What this cannot say: how long anything takes, what the caches answer, and what nvcc makes of the source (it may merge "
    "or drop accesses). One order of the threads was run; races are found by what orders two accesses, not by luck."
)


def trace(stage, problem, time_limit=None):
    """Runs a stage on a problem with every access watched: common.cpu.Trace."""
    Q, K, V = problem.inputs()
    return launch.trace(stage, Q, K, V, causal=problem.causal, time_limit=time_limit)[1]


def _count(number) -> str:
    return f"{number:,}"


def _bytes(number) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 10_000 or unit == "GiB":
            return f"{number:,.0f} {unit}"
        number /= 1024


def worse(counts) -> bool:
    """Does a request of this line cost more sectors or wavefronts than its bytes need?"""
    return counts.cost > counts.ideal


GUTTER = "{:>4} {:<13} {:>9} {:>9} {:>15} {:>6} {:1} "


def listing(stage, seen):
    """The source, line by line, as rich text: beside each line that touches memory, what it asked for."""
    from rich.text import Text

    yield Text(GUTTER.format("line", "memory", "requests", "bytes", "per request", "ideal", ""), style="dim")
    for number, text in enumerate(stage.text.splitlines(), 1):
        found = [c for c in seen.at(number) if c.file == stage.file]
        wrong = any(number in (f.line, f.other_line) for f in seen.findings)
        source = Text(text, style="bold red" if wrong else "" if found else "dim")
        if not found:
            yield Text(GUTTER.format(number, *[""] * 5, "✗" if wrong else ""), style="red" if wrong else "dim") + source
        for c in found:
            cost = f"{c.per_request:.1f} {'sectors' if c.space == 'global' else 'wavefronts'}"
            mark = "✗" if wrong else "◀" if worse(c) else ""
            cells = number, f"{c.space} {c.op}", _count(c.requests), _bytes(c.bytes), cost, f"{c.ideal_per_request:.1f}", mark
            yield Text(GUTTER.format(*cells), style="red" if wrong else "yellow" if mark else "") + source
            number, source = "", Text("")


def totals(seen, problem) -> list[str]:
    """What the launch asked for in all, in sentences."""
    asked, least = seen.global_load_bytes + seen.global_store_bytes, problem.least_bytes
    return [
        f"global memory: {_bytes(seen.global_load_bytes)} loaded, {_bytes(seen.global_store_bytes)} stored; "
        f"{problem.flops / asked:.2f} FLOP for each byte asked",
        f"the algorithm needs {_bytes(least)} at least (Q, K, V read once, O written once): {asked / least:.1f} times that was asked",
        f"shared memory: {_bytes(seen.shared_bytes)} a block; "
        f"{_bytes(seen.shared_load_bytes)} loaded, {_bytes(seen.shared_store_bytes)} stored",
    ]


def sentences(seen) -> list[str]:
    """The findings, or the one sentence that there are none."""
    if seen.findings:
        return [f.message + (f" ({f.count:,} times)" if f.count > 1 else "") for f in seen.findings]
    return ["no races, no stray accesses, no uninitialised reads"]


def main(stage, problem, picture=None, as_json=False) -> int:
    """`make trace-4`: 1 if anything was found, else 0."""
    from common import terminal

    console = terminal.console(as_json, 200)
    with console.status("tracing"):
        seen = trace(stage, problem)
    if as_json:
        print(json.dumps(seen.to_json() | {"flops": problem.flops, "least_bytes": problem.least_bytes}, indent=1))
    console.print(f"[bold]{stage.file}[/]   {problem}\n")
    for line in listing(stage, seen):  # on a narrow terminal the source is cut off, not the counts
        console.print(line, no_wrap=True, overflow="ellipsis")
    console.print()
    if not seen.completed:
        console.print("[red]The launch was stopped: the counts end there.[/]")
    for line in totals(seen, problem):
        console.print(line, soft_wrap=True)
    console.print()
    for line in sentences(seen):
        console.print(f"[{'red' if seen.findings else 'green'}]{line}[/]", soft_wrap=True)
    console.print(f"\n[dim]{CANNOT}[/]", soft_wrap=True)
    if picture:
        from common import show

        show.requests(seen, stage).savefig(picture, bbox_inches="tight")
        console.print(f"\n{picture} shows which addresses and banks the 32 lanes of a warp touch.")
    return 1 if seen.findings else 0


def traffic(problem, picture=None, as_json=False) -> int:
    """`make traffic`: the global bytes that each CUDA stage asks for, one table and one bar chart."""
    from common import terminal

    console = terminal.console(as_json)
    traces = {}
    for stage in STAGES.values():
        if stage.is_cuda:
            with console.status(f"tracing stage {stage.number}"):
                traces[stage.number] = trace(stage, problem)
    least = problem.least_bytes
    rows = [
        dict(stage=n, name=STAGES[n].name, global_loads=t.global_load_bytes, global_stores=t.global_store_bytes,
             times_least=(t.global_load_bytes + t.global_store_bytes) / least,
             flop_per_byte=problem.flops / (t.global_load_bytes + t.global_store_bytes),
             sectors=sum(c.sectors for c in t.lines), shared_loads=t.shared_load_bytes, shared_bytes=t.shared_bytes,
             conflicts=sum(c.conflicts for c in t.lines), findings=len(t.findings))
        for n, t in traces.items()
    ]
    if as_json:
        print(json.dumps(dict(problem=str(problem), least_bytes=least, rows=rows), indent=1))
    table = terminal.table(title=str(problem), title_justify="left")
    for name in ("stage", "", "global loads", "global stores", "× least", "FLOP/byte", "shared loads", "shared a block", "conflicts"):
        table.add_column(name, justify="left" if name in ("stage", "") else "right")
    for r in rows:
        table.add_row(str(r["stage"]), r["name"], _bytes(r["global_loads"]), _bytes(r["global_stores"]), f"{r['times_least']:.1f}",
                      f"{r['flop_per_byte']:.2f}", _bytes(r["shared_loads"]), _bytes(r["shared_bytes"]), _count(r["conflicts"]))
    console.print(table)
    console.print(f"\nThe algorithm needs {_bytes(least)} of global memory at least: Q, K, V read once, O written once.")
    console.print(f"[dim]{CANNOT}[/]", soft_wrap=True)
    if picture is None and not as_json:
        picture = ROOT / ".cache" / "traffic.png"
        picture.parent.mkdir(exist_ok=True)
    if picture:
        from common import show

        show.traffic(traces, problem).savefig(picture, bbox_inches="tight")
        console.print(f"\n{picture} is the bar chart.")
    return 1 if any(r["findings"] for r in rows) else 0
