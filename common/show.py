"""What the notebooks call, and `make diff-N`: source text by name, differences, tables, times, pictures.

Nothing here is typed that can be computed. What is counted is in counted.py, what is drawn in pictures.py; both are
reached from here.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import dataclass, field
from html import escape

from common import bench, device
from common.counted import (
    CARDS,
    H200,
    arrays,
    card,
    cards,
    ceilings,
    constants,
    counts,
    least_bytes,
    limits,
    record,
    registers,
    resident,
    same,
    shape_words,
    shared_bytes,
    trace,
)
from common.pictures import (
    attention,
    banks,
    budget,
    grid,
    homes,
    ladder,
    memory,
    requests,
    roofline,
    running,
    tiles,
    traffic,
)
from common.problem import ARTICLE, Problem
from stages import STAGES

__all__ = [
    "CARDS",
    "H200",
    "Text",
    "Times",
    "arrays",
    "attention",
    "banks",
    "budget",
    "card",
    "cards",
    "cards_table",
    "ceilings",
    "constants",
    "counts",
    "diff",
    "grid",
    "homes",
    "judge",
    "ladder",
    "least_bytes",
    "limits",
    "limits_table",
    "machine",
    "memory",
    "record",
    "registers",
    "requests",
    "resident",
    "resources_table",
    "roofline",
    "running",
    "sections",
    "shape_words",
    "shared_bytes",
    "source",
    "table",
    "tiles",
    "times",
    "trace",
    "traffic",
]

# -- text --

RED, GREEN, CYAN, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[36m", "\033[1m", "\033[0m"


class Text(str):
    """A string that a notebook shows highlighted, under a caption, and everything else as it is.

    language  "cpp", "python", or one of them after "diff "; "" for text that is Markdown already
    """

    language: str
    caption: str

    def __new__(cls, text, language="", caption=""):
        made = super().__new__(cls, text)
        made.language, made.caption = language, caption
        return made

    def __repr__(self):
        return str(self)

    def _repr_markdown_(self):
        body = highlighted(self, self.language) if self.language else str(self)
        return f"*{self.caption}*\n\n{body}" if self.caption else body


BLOCK = "background:#f7f7f7; color:#222222; padding:6px 10px; font-family:monospace; line-height:1.35; overflow-x:auto"
IN, OUT = "#dcebf9", "#fdebd3"  # blue and orange, not green and red: the colour-blind see these apart


def highlighted(text, language) -> str:
    """Source, or a diff of source, as HTML that carries its own colours; Markdown may hold it."""
    try:
        from pygments import highlight, lexers
        from pygments.formatters import HtmlFormatter
    except ImportError:
        return f'<pre style="{BLOCK}">{escape(text)}</pre>'
    lexer = lexers.get_lexer_by_name(language.removeprefix("diff "), stripnl=False, ensurenl=False)

    def colored(line):
        return highlight(line, lexer, HtmlFormatter(nowrap=True, noclasses=True, style="friendly")).rstrip("\n")

    if not language.startswith("diff "):
        return f'<pre style="{BLOCK}">{colored(text)}</pre>'
    lines = []
    for line in text.splitlines():
        if line.startswith(("---", "+++", "@@")):
            lines.append(f'<span style="color:#707070">{escape(line)}</span>')
        else:
            tint = {"+": IN, "-": OUT}.get(line[:1])
            html = escape(line[:1]) + colored(line[1:])
            lines.append(f'<span style="background:{tint}">{html}</span>' if tint else html)
    return f'<pre style="{BLOCK}">' + "\n".join(lines) + "</pre>"


@dataclass(frozen=True)
class Section:
    """Lines first to last (from 1) of a source, which follow a section comment; the part above all of them is "top"."""

    name: str
    first: int
    last: int


def sections(stage) -> list[Section]:
    """The parts of a stage's source, in order. A name may occur twice (load, output)."""
    lines = stage.text.splitlines()
    marks = [(i, m[1]) for i, line in enumerate(lines, 1) if (m := re.match(r"\s*(?://|#) -- (.+) --\s*$", line))]
    found = [Section("top", 1, marks[0][0] - 1)] if marks else []
    for (first, name), (after, _) in zip(marks, [*marks[1:], (len(lines) + 1, "")], strict=True):
        indent = _indent(lines[first - 1])
        last = after - 1
        while last > first and (not lines[last - 1].strip() or _indent(lines[last - 1]) < indent):
            last -= 1  # blank lines, and the braces of what encloses the section
        found.append(Section(name, first, last))
    return found


def _indent(line):
    return len(line) - len(line.lstrip())


def source(stage, section=None, nth=None) -> Text:
    """A stage's source text, or its part under a section comment (`// -- score --`; "top" is what stands above all).

    nth  which one, from 0, of a section that occurs twice; None: all of them
    ValueError if there is no such section.
    """
    language = "cpp" if stage.is_cuda else "python"
    if section is None:
        return Text(stage.text.rstrip(), language, f"{stage.file}")
    parts = [s for s in sections(stage) if s.name == section]
    if nth is not None:
        parts = parts[nth : nth + 1]
    if not parts:
        names = ", ".join(dict.fromkeys(s.name for s in sections(stage)))
        raise ValueError(f"{stage.file} has no section {section!r}{'' if nth is None else f' number {nth}'}; it has {names}")
    lines = stage.text.splitlines()
    texts = [textwrap.dedent("\n".join(lines[s.first - 1 : s.last])) for s in parts]
    where = " and ".join(f"{s.first}–{s.last}" for s in parts)
    return Text("\n\n".join(texts), language, f"{stage.file}, lines {where}")


def diff(stage, before, section=None, *, color=False, context=3) -> Text:
    """What a stage changes in another: a unified diff whose hunks are named after their sections.

    section  only the parts of this name
    color    ANSI colours, for a terminal
    context  unchanged lines around a change
    """
    old, new = (s.text if section is None else str(source(s, section)) for s in (before, stage))
    names = [before.file, stage.file] if before.file != stage.file else [before.file, f"{stage.file} (changed)"]
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="", n=context))
    if section is None:
        lines = [_named(line, stage) for line in lines]
    if color:
        paint = {"---": BOLD, "+++": BOLD, "@": CYAN, "-": RED, "+": GREEN}
        lines = [next((f"{c}{line}{PLAIN}" for mark, c in paint.items() if line.startswith(mark)), line) for line in lines]
        return Text("\n".join(lines))
    changed = [sum(line.startswith(m) and not line.startswith(m * 3) for line in lines) for m in "-+"]
    what = f"{stage.file}" if section is None else f"{stage.file}, {section}"
    return Text(
        "\n".join(lines),
        f"diff {'cpp' if stage.is_cuda else 'python'}",
        f"{what}: {changed[0]} lines out, {changed[1]} in",
    )


def _named(line, stage):
    hunk = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@$", line)
    if not hunk:
        return line
    first = int(hunk[1])
    names = [s.name for s in sections(stage) if s.first <= first + int(hunk[2] or 1) - 1 and s.last >= first]
    return f"{line} {', '.join(dict.fromkeys(names))}".rstrip()


def table(header, rows, left=1) -> Text:
    """A Markdown table; the first `left` columns are left-aligned, the others right."""
    rows = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = [":" + "-" * (w - 1) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    cells = [[f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    return Text("\n".join("| " + " | ".join(row) + " |" for row in [cells[0], rule, *cells[1:]]))


def torch_on_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def cards_table() -> Text:
    """What each card computes and fetches, and the one divided by the other."""
    header = ["card", "multiprocessors", "32-bit TFLOP/s", "HBM, GB/s", "operations for each byte from HBM"]
    rows = [(c.name, c.sms, f"{c.tflops:.1f}", f"{c.bandwidth:,.0f}", f"{c.tflops * 1e3 / c.bandwidth:.0f}") for c in cards()]
    return table(header, rows)


def machine() -> Text:
    """One sentence: where this notebook runs."""
    facts = device.facts()
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items() if v)
    cpu = f"{facts['cpu']}, {facts['cores']} cores; Python {facts['python']}, {versions}"
    if not facts["gpu"]:
        return Text(f"This ran **without a GPU** on {cpu}. {device.why_no_gpu()} CUDA files run on the CPU, thread by thread.")
    gpu = facts["gpu"]
    return Text(
        f"This ran on an **{gpu['name']}** ({gpu['multiprocessors']} multiprocessors, compute capability "
        f"{'.'.join(map(str, gpu['capability']))}, driver {gpu['driver']}, CUDA {gpu['cuda']}), and on {cpu}."
    )


def limits_table(*stages, problem=ARTICLE, measured=None) -> Text:
    """The limits of stages in milliseconds beside their times (Times of those numbers), for a card."""
    rows = []
    for s in stages:
        found = limits(s, problem)
        ms = measured.ms.get(s.number) if measured else None
        rows.append(
            [
                f"stage {s.number} {s.name}",
                *(f"{v:.3g}" for v in found.values()),
                f"{ms:.3g}" if ms else "–",
                f"{ms / max(found.values()):.1f}" if ms else "–",
            ]
        )
    header = ["at least, in ms", *found, "measured", "× its largest limit"]
    return Text(f"By the data sheet of the {card().name}; {shape_words(problem)}.\n\n" + table(header, rows))


def resources_table(*stages, d=64) -> Text:
    """Registers of a thread, shared memory of a block, and how many blocks a multiprocessor of the card holds."""
    header = [
        f"d = {d}",
        "registers of a thread",
        "shared memory of a block",
        f"blocks on a multiprocessor of the {card().name}",
    ]
    rows = [(f"stage {s.number} {s.name}", registers(s, d), f"{shared_bytes(s, d):,}", resident(s, d)) for s in stages]
    return table(header, rows)


@dataclass
class Times:
    """Milliseconds by stage number, and a table of them; `where` says on what, and whether here or recorded."""

    where: str
    problem: Problem
    rows: list = field(default_factory=list)  # (label, bench.Times)
    ms: dict = field(default_factory=dict)

    def chart(self) -> list:
        """The rows of `ladder`: under what the article printed, if the shape is the article's."""
        published = [(row.label, row.ms, row.kind) for row in bench.PUBLISHED if same(self.problem, ARTICLE)]
        kinds = ("stage" if STAGES[number].is_cuda else "numpy" for number in self.ms)
        return published + [(label, t.ms, kind) for kind, (label, t) in zip(kinds, self.rows, strict=True)]

    def __repr__(self):
        return str(self._repr_markdown_())

    def _repr_markdown_(self):
        if not self.rows:
            return self.where
        cells, before = [], None
        for label, t in self.rows:
            ratio = f"{before / t.ms:.2f}" if before else ""
            cells.append([label, f"{t.ms:.3g}", f"{t.p20:.3g} – {t.p80:.3g}", ratio, f"{self.problem.flops / t.ms / 1e9:.3g}"])
            before = t.ms
        return f"{self.where}\n\n" + table(["", "ms", "p20 – p80", "× before", "TFLOP/s"], cells)


def times(*stages, problem=ARTICLE) -> Times:
    """How long stages take: CUDA stages measured on the GPU where there is one, else from the record of a card."""
    p = problem
    python, cuda = ([s for s in stages if s.is_cuda == wanted] for wanted in (False, True))
    found, where = {}, []
    if python:
        found |= bench.time_stages({s: s for s in python}, p, "cpu", least=5, budget_ms=500)
        where.append(f"NumPy measured here, on {device.cores()} cores ({device.facts()['cpu']}).")
    if cuda and device.gpu():
        found |= bench.time_stages({s: s for s in cuda}, p, "gpu", least=20, budget_ms=1000)
        where.append(f"CUDA measured here, on the {device.gpu().name}.")
    elif cuda and record():
        name = next((name for name, known in record().shapes.items() if same(Problem(**known), p)), None)
        rows = {r.stage: r for r in record().rows if r.kind == "stage" and r.shape == name and r.ms}
        found |= {s: bench.Times(r.ms, r.p20, r.p80, r.runs) for s in cuda if s.source is None and (r := rows.get(s.number))}
        where.append(f"No GPU here: the CUDA stages are as recorded on an {record().gpu} on {record().date[:10]}.")
    elif cuda:
        where.append("There is no GPU here, and no record of one yet: `make timings` on a machine with a GPU writes it.")
    order = [s for s in stages if s in found]
    where.append(f"One call; {shape_words(p)}.")
    return Times(
        " ".join(where),
        p,
        [(f"stage {s.number} {s.name}", found[s]) for s in order],
        {s.number: found[s].ms for s in order},
    )


def judge(stage, problem=ARTICLE) -> Text:
    """The check of a stage on a problem and its ragged relatives, and its distance to the stage before it."""
    from common import climb

    run = climb.Climb(problem)
    if before := STAGES.get(stage.number - 1):
        run.step(before)
    step = run.step(stage)
    word = "right" if step.verdict.ok else "WRONG"
    text = f"stage {stage.number} {stage.name} is **{word}** on {len(run.cases)} problems; the worst: {step.verdict}."
    if step.distance is not None:
        text += f" Largest difference to stage {before.number}: {step.distance:.1e}."
    return Text(text)
