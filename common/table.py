"""Records to tables: the same rows for the terminal and, through cog, for README.md."""

import math
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from common import bench

README = bench.ROOT / "README.md"

# The kinds of rows, in the order in which every table has them; stages follow one another by number.
ORDER = ("published", "core", "numpy", "torch_cpu", "executor", "stage", "eager", "sdpa")
OURS = ("executor", "stage")  # in bold


@dataclass
class Grid:
    """A table before it is drawn: rows of strings, each as long as `header`; `bold`: which rows stand out."""

    title: str
    header: list[str]
    rows: list[list[str]]
    bold: set[int]

    def rich(self):
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", title_style="bold", box=None, header_style="dim")
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold" if number in self.bold else "")
        return table

    def markdown(self) -> str:
        """Padded, so that it can be read in the source of README.md too."""
        rows = [[f"**{row[0]}**", *row[1:]] if i in self.bold else row for i, row in enumerate(self.rows)]
        widths = [max(map(len, column)) for column in zip(self.header, *rows, strict=True)]

        def line(cells):
            first, *rest = zip(cells, widths, strict=True)
            return f"| {first[0]:<{first[1]}} | " + " | ".join(f"{cell:>{width}}" for cell, width in rest) + " |"

        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        return "\n".join([f"**{self.title}**", "", line(self.header), line(rule), *map(line, rows)])


def _number(value: float | None) -> str:
    """Three significant digits, four decimals at most; "–" for None."""
    return "–" if value is None else f"{value:,.{min(4, max(0, 2 - math.floor(math.log10(value))))}f}"


def _ms(row) -> str:
    if row.kind == "published":
        return f"{row.ms:g}"
    return _number(row.ms) if row.ms else "WRONG"


def _percent(record, row) -> str:
    value = record.percent(row)
    return "–" if value is None else f"{value:.{0 if value >= 10 else 1}f}"


def _sorted(rows) -> list:
    return sorted(rows, key=lambda row: (ORDER.index(row.kind), row.stage or 0))


def article(record) -> Grid:
    """One head, N = 1024, d = 64: what the article printed, then all that was measured here."""
    rows = _sorted([*bench.PUBLISHED, *(row for row in record.rows if row.shape == "article")])
    header = ["", "ms", "p20 – p80", "× one CPU core", "TFLOP/s", "% of ceiling", "registers", "shared", "local"]
    cells = [
        [
            row.label,
            _ms(row),
            "–" if row.p20 is None else f"{_number(row.p20)} – {_number(row.p80)}",
            _number(record.speedup(row)),
            _number(row.tflops),
            _percent(record, row),
            *("–" if number is None else f"{number:,}" for number in (row.registers, row.shared, row.local)),
        ]
        for row in rows
    ]
    bold = {number for number, row in enumerate(rows) if row.kind in OURS}
    shape = f"{bench.ARTICLE.heads} head, N = {bench.ARTICLE.N}, d = {bench.ARTICLE.d}"
    return Grid(f"The article's shape: {shape}; {_machine(record)}", header, cells, bold)


def full(record) -> Grid:
    """The shapes that fill a card, two columns for each."""
    shapes = {name: shape for name, shape in record.shapes.items() if name != "article"}
    lines = {}
    for row in _sorted(row for row in record.rows if row.shape in shapes):
        lines.setdefault(row.label, {})[row.shape] = row
    header = [""]
    for shape in shapes.values():
        header += [f"d = {shape['d']}{', causal' if shape['causal'] else ''}: ms", "TFLOP/s (%)"]
    cells, bold = [], set()
    for number, (label, found) in enumerate(lines.items()):
        cells.append([label])
        for row in map(found.get, shapes):
            rate = f"{_number(row.tflops)} ({_percent(record, row)})" if row and row.ms else "–"
            cells[-1] += [_ms(row) if row else "–", rate]
        if any(row.kind in OURS for row in found.values()):
            bold.add(number)
    return Grid(f"A full card: {shape['heads']} heads, N = {shape['N']}; {_machine(record)}", header, cells, bold)


def grids(record) -> list[Grid]:
    return [article(record)] + ([full(record)] if any(row.shape != "article" for row in record.rows) else [])


def _machine(record) -> str:
    return record.gpu or f"no GPU, {record.machine['cpu']}"


def footnote(record) -> str:
    """Where the figures come from, and what was left out."""
    machine, gpu = record.machine, record.machine["gpu"]
    parts = [f"Measured {record.date[:10]} at commit {(record.commit or 'unknown')[:12]}"]
    parts += [f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}"] if gpu else []
    parts += [f"{machine['cpu']}, {machine['cores']} cores"]
    parts += [", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)]
    if any(record.clocks.values()):
        clocks = (f"{clock['sm']} MHz {when}" for when, clock in record.clocks.items() if clock)
        parts.append(f"SM clock {', '.join(clocks)}")
    text = "; ".join(parts) + "."
    if record.ceilings:
        text += (
            f" Ceilings of the same run: fp32 matrix product {_number(record.ceilings['tflops'])} TFLOP/s, "
            f"device copy {_number(record.ceilings['copy_gbs'])} GB/s (read and written)."
        )
    text += (
        " Medians; the L2 cache is overwritten before every run on the GPU; float32 throughout, TF32 off; NumPy's "
        "matrix products on all cores. Registers and local bytes are those of a thread, shared bytes those of a block."
    )
    if any("EFFICIENT" in row.label for row in record.rows):
        text += (
            " From compute capability 8.0 on, torch's EFFICIENT_ATTENTION makes each fp32 product of three TF32 ones "
            "on the tensor cores (CUTLASS's OpMultiplyAddFastF32): the fp32 ceiling does not bind it."
        )
    if any(row.kind == "executor" for row in record.rows):
        text += " The .cu files ran on this CPU, thread by thread: these times say nothing about a GPU."
    return " ".join([text, *(f"{note.rstrip('.')}." for note in record.notes)])


def readme_table(records: list | None = None) -> str:
    """The Markdown of README's timings: every record under stages/timings, by file name."""
    records = bench.records() if records is None else records
    parts = [part for r in records for part in (*(grid.markdown() for grid in grids(r)), footnote(r))]
    return (
        "\n\n".join(parts) or "Nothing is recorded yet: `make timings` on a machine with an NVIDIA GPU fills this in."
    )


def readme() -> None:
    """What README.md calls through cog."""
    import cog  # exists only while cog runs

    cog.outl(readme_table())


def update_readme(path: Path = README) -> str:
    """Regenerates the table in README.md as `cog -r` does; returns a sentence that says what became of it."""
    try:
        from cogapp import Cog
    except ImportError:
        return f"{path.name} was left alone: cogapp is not installed (pip install cogapp)."
    if not path.exists():
        return f"{path.name} was left alone: there is none."
    with redirect_stdout(StringIO()):
        Cog().callable_main(["cog", "-r", "-I", str(bench.ROOT), str(path)])
    return f"The table of {path.name} is up to date."
