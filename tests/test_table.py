"""Records to tables: order, slower and wrong rows, and README as generated."""

import re
from dataclasses import asdict, replace

import pytest

from common import bench, table
from common.bench import PUBLISHED, SHAPES, Record, Row
from stages import STAGES


@pytest.fixture
def record():
    """Rows in disorder: stage 5 slower than stage 4, a wrong stage 3, a backend that ran at one shape only."""

    def row(label, kind, shape="article", ms=None, stage=None, **more):
        return Row(label, kind, shape, SHAPES[shape].flops, stage, ms=ms, p20=ms, p80=ms, runs=ms and 50, **more)

    rows = [row("torch SDPA MATH", "sdpa", ms=0.05), row("torch eager", "eager", ms=0.033)]
    for shape in SHAPES:
        rows += [
            row("stage 5 registers", "stage", shape, 0.4, 5, registers=96, shared=16384, local=0),
            row("stage 4 tiled", "stage", shape, 0.2, 4, registers=64, shared=40960, local=0),
            row("stage 3 naive", "stage", shape, None, 3, ok=False, error=0.5, allowed=1e-6),
        ]
    rows += [
        row("torch SDPA, 16 CPU cores", "torch_cpu", ms=2.0),
        row("one CPU core, stage 3's source", "core", ms=80.0),
    ]
    return Record(
        machine={
            "gpu": {"name": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"},
            "cpu": "a CPU",
            "cores": 16,
            "versions": {"torch": "2.11.0", "cupy": "14.2.0", "triton": None},
        },
        date="2026-01-01T00:00:00+00:00",
        commit="0123456789abcdef",
        clocks={"before": {"sm": 345, "memory": 3201}, "after": {"sm": 1980, "memory": 3201}},
        shapes={name: asdict(problem) for name, problem in SHAPES.items()},
        ceilings={"tflops": 51.2, "copy_gbs": 4301.0},
        rows=rows,
        notes=["torch SDPA FLASH_ATTENTION cannot run here: No available kernel."],
    )


def labels(grid):
    return [row[0] for row in grid.rows]


def test_order_is_the_ladder_between_its_yardsticks(record):
    assert labels(table.article(record)) == [
        *(row.label for row in PUBLISHED),
        "one CPU core, stage 3's source",
        "torch SDPA, 16 CPU cores",
        "stage 3 naive",
        "stage 4 tiled",
        "stage 5 registers",
        "torch eager",
        "torch SDPA MATH",
    ]
    assert labels(table.full(record)) == ["stage 3 naive", "stage 4 tiled", "stage 5 registers"]


def test_cells(record):
    rows = {row[0]: row[1:] for row in table.article(record).rows}
    assert rows["stage 4 tiled"] == ["0.200", "0.200 – 0.200", "400", "1.34", "2.6", "64", "40,960", "0"]
    assert rows["stage 5 registers"][0] == "0.400"  # slower than stage 4, and shown all the same
    assert rows["stage 3 naive"] == ["WRONG", *["–"] * 7]
    assert rows[PUBLISHED[2].label][:4] == ["3.45", "–", "41.7", "0.0778"]
    full = {row[0]: row[1:] for row in table.full(record).rows}
    assert full["stage 3 naive"] == ["WRONG", "–"] * 3
    assert full["stage 4 tiled"][0::2] == ["0.200"] * 3


def test_published_rows_are_named_as_such_and_as_printed():
    assert all("as published" in row.label for row in PUBLISHED)
    assert [table._ms(row) for row in PUBLISHED] == ["143.81", "7.63", "3.45"]


@pytest.mark.parametrize(
    "value, text",
    [(None, "–"), (0.03312, "0.0331"), (0.494, "0.494"), (1.0, "1.00"), (143.81, "144"), (4301.2, "4,301")],
)
def test_three_digits(value, text):
    assert table._number(value) == text


def test_the_terminal_shows_the_rows_of_the_markdown(record):
    from rich.console import Console

    for grid in table.grids(record):
        console = Console(width=200, record=True, file=open("/dev/null", "w"))
        console.print(grid.rich())
        drawn = [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()[2:]]
        written = [
            [cell.strip(" *") for cell in line.strip("|").split("|")] for line in grid.markdown().splitlines()[4:]
        ]
        assert drawn == written == grid.rows
        lengths = {len(line) for line in grid.markdown().splitlines()[2:]}
        assert len(lengths) == 1  # columns stand under one another in the source too


def test_footnote_names_the_machine(record):
    text = table.footnote(record)
    for part in (
        "NVIDIA H200",
        "driver 580.1",
        "CUDA 13.0",
        "torch 2.11.0",
        "cupy 14.2.0",
        "0123456789ab",
        "2026-01-01",
        "345 MHz before",
        "1980 MHz after",
        "51.2 TFLOP/s",
        "4,301 GB/s",
        "TF32 off",
        "No available kernel",
    ):
        assert part in text
    assert "None" not in text


def test_a_reader_s_record_stands_beside_ours(record):
    theirs = replace(record, machine=record.machine | {"gpu": record.machine["gpu"] | {"name": "NVIDIA T4"}})
    text = table.readme_table([record, theirs])
    assert text.index("NVIDIA H200") < text.index("NVIDIA T4")
    assert "make timings" in table.readme_table([])


def test_every_stage_of_the_ladder_is_in_every_record():
    cuda = [number for number, stage in STAGES.items() if stage.is_cuda]
    for found in bench.records():
        for shape in found.shapes:
            assert [row.stage for row in found.rows if row.kind == "stage" and row.shape == shape] == cuda


# -- README --

MARKERS = "before\n<!-- [[[cog from common.table import readme; readme() ]]] -->\n{}<!-- [[[end]]] -->\nafter\n"


@pytest.mark.parametrize("page, source", [("README.md", "common.table"), ("common/cpu/README.md", "common.nvidia")])
def test_readme_is_as_generated(page, source):
    cogapp = pytest.importorskip("cogapp", reason="cogapp is not installed")
    text = (bench.ROOT / page).read_text(encoding="utf-8")
    assert f"from {source} import readme" in text
    cog = cogapp.Cog()
    cog.options.include_path = [str(bench.ROOT)]
    assert cog.process_string(text) == text, f"{page} is not up to date: cog -r {page}"


def test_update_readme(tmp_path, record, monkeypatch):
    pytest.importorskip("cogapp", reason="cogapp is not installed")
    monkeypatch.setattr(bench, "records", lambda: [record])
    path = tmp_path / "README.md"
    path.write_text(MARKERS.format("old\n"), encoding="utf-8")
    assert "up to date" in table.update_readme(path)
    assert path.read_text(encoding="utf-8") == MARKERS.format(table.readme_table([record]) + "\n")
    assert "left alone" in table.update_readme(tmp_path / "none.md")


def test_update_readme_without_cog(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cogapp", None)
    path = tmp_path / "README.md"
    path.write_text(MARKERS.format(""))
    assert "cogapp is not installed" in table.update_readme(path)
    assert path.read_text() == MARKERS.format("")
