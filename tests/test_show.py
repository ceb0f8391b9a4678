"""Source by name, differences, figures and pictures: from the real stages, registry and traces."""

from dataclasses import asdict

import pytest

from common import bench, counted, device, launch, show
from common.problem import ARTICLE, FULL_64, Problem
from notebooks import lessons
from stages import STAGES

CUDA = [stage for stage in STAGES.values() if stage.is_cuda]


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.name)
def test_sections_cover_the_source(stage):
    lines, parts = stage.text.splitlines(), show.sections(stage)
    assert parts[0].name == "top" and parts[0].first == 1
    assert {"who am I", "score", "softmax", "output"} <= {part.name for part in parts}
    covered = {n for part in parts for n in range(part.first, part.last + 1)}
    for n, line in enumerate(lines, 1):
        assert n in covered or line.strip() in ("", "}", "return O") or line.strip().startswith("O[..."), line
    for a, b in zip(parts, parts[1:], strict=False):
        assert a.last < b.first


def test_source_by_section():
    both = show.source(STAGES[4], "load")
    first, second = show.source(STAGES[4], "load", 0), show.source(STAGES[4], "load", 1)
    assert both == f"{first}\n\n{second}" and first != second
    assert second.startswith("// -- load --") and second.count("__syncthreads") == 2
    assert show.source(STAGES[4]) == STAGES[4].text.rstrip()
    first_line = int(second.caption.split("lines ")[1].split("–")[0])
    assert STAGES[4].text.splitlines()[first_line - 1].strip() == "// -- load --"


def test_source_without_such_a_section():
    with pytest.raises(ValueError, match="no section 'loda'; it has top, who am I, load"):
        show.source(STAGES[3], "loda")
    with pytest.raises(ValueError, match="number 2"):
        show.source(STAGES[4], "load", 2)


def test_diff_is_a_patch():
    """Applied to the old source, line by line, it gives the new one."""
    for before, after in zip(CUDA, CUDA[1:], strict=False):
        lines = show.diff(after, before, context=10_000).splitlines()[3:]
        assert "\n".join(line[1:] for line in lines if line[:1] != "-") == after.text.rstrip("\n")
        assert "\n".join(line[1:] for line in lines if line[:1] != "+") == before.text.rstrip("\n")


def test_diff_names_its_sections_and_colours_them():
    changed = STAGES[3].patched(STAGES[3].text.replace("s *= scale;", "s *= 2;"))
    assert "@@ score" in show.diff(changed, STAGES[3], context=0)
    colored = show.diff(changed, STAGES[3], color=True)
    assert f"{show.GREEN}+" in colored and f"{show.RED}-" in colored
    assert "\033" not in show.diff(changed, STAGES[3])
    assert show.diff(STAGES[3], STAGES[3]) == ""


def test_text_is_plain_to_print_and_coloured_to_show():
    text = show.source(STAGES[3], "score")
    assert repr(text) == str(text) == f"{text}" and "<" not in text.replace("<<", "").replace("x < d", "")
    assert "<span style=" in text._repr_markdown_() and "stage3_naive.cu, lines" in text._repr_markdown_()
    marked = show.diff(STAGES[4], STAGES[3], "score")._repr_markdown_()
    assert show.IN in marked and show.OUT in marked


def test_declared_arrays_are_what_the_compiler_counts():
    for stage in CUDA:
        for d in stage.tiles:
            kernel = launch.cpu_kernel(stage, d, False)
            assert show.shared_bytes(stage, d) == kernel.shared_size_bytes


def test_registers_come_from_the_page():
    assert show.registers(STAGES[3], 64, capability=(9, 0)) == show.registers(STAGES[3], 64, capability=(9, 1)) > 64


def test_blocks_on_a_multiprocessor():
    for stage in CUDA:
        held = show.resident(stage, 64, on=show.H200)
        assert 1 <= held <= 32
        assert held * show.shared_bytes(stage) <= show.H200.shared * 1024
        assert held * stage.tiles[64]["Br"] * show.registers(stage, capability=(9, 0)) <= 65536


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stage", CUDA, ids=lambda s: s.name)
def test_counts_at_a_size_that_was_not_traced(stage, causal):
    problem = Problem(heads=2, N=5 * stage.tiles[64]["Br"], causal=causal)
    one = counted._count(show.trace(stage, problem))
    assert show.counts(stage, problem) == pytest.approx(one, rel=1e-9)


def test_counts_of_stage_3_by_hand():
    N, d = ARTICLE.N, ARTICLE.d
    assert show.counts(STAGES[3], ARTICLE)["global_bytes"] == pytest.approx(4 * (2 * N * N * d + 2 * N * d))


def test_limits():
    found = show.limits(STAGES[5], FULL_64, show.H200)
    assert found["multiply-adds"] == pytest.approx(FULL_64.flops / show.H200.tflops / 1e9)
    assert found["HBM"] == pytest.approx(show.least_bytes(FULL_64) / 4800e6)
    assert show.limits(STAGES[5], ARTICLE, show.H200)["multiply-adds"] > ARTICLE.flops / show.H200.tflops / 1e9, "few warps"


def test_table():
    made = show.table(["a", "b"], [("x", 1), ("long", 22)])
    assert made.splitlines() == ["| a    |  b |", "| :--- | -: |", "| x    |  1 |", "| long | 22 |"]


# -- pictures --

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the pictures, and is not installed")


def drawn(figure):
    """The picture as bytes; it must hold more than white."""
    png = figure._repr_png_()
    assert png.startswith(b"\x89PNG") and 3_000 < len(png) < 150_000
    return png


def test_pictures_of_the_plan():
    Q, K, V = (a[0, 0] for a in Problem(N=12, d=4).inputs())
    drawn(show.attention(Q, K, V))
    drawn(show.attention(Q, K, V, causal=True))
    drawn(show.memory(*show.CARDS, measured={"L2": 5e12}))
    drawn(show.homes(*CUDA))
    drawn(show.budget(*CUDA))
    drawn(show.running(*lessons.walk()))
    for stage in list(STAGES.values())[1:]:
        drawn(show.tiles(stage, N=24 if stage.number == 3 else 200))


def test_tiles_are_those_of_the_registry():
    """Visited tiles of a causal pass, counted again from the constants."""
    axes = show.tiles(STAGES[4], N=256).axes
    Br, Bc = STAGES[4].tiles[64]["Br"], STAGES[4].tiles[64]["Bc"]
    visited = sum(-(-min(row0 + Br, 256) // Bc) for row0 in range(0, 256, Br))
    assert axes[1].get_title("left").startswith(f"causal: {visited} of {256 // Br * 256 // Bc} tiles of {Br} × {Bc}")


def test_grid_counts_blocks_and_multiprocessors():
    axes = show.grid(STAGES[4], ARTICLE, FULL_64, on=show.H200).axes
    assert "1 head × 16 tiles = 16 blocks, 32 warps\n16 of 132 multiprocessors busy" == axes[0].get_title("left")
    assert "4,096 blocks" in axes[1].get_title("left") and "132 of 132" in axes[1].get_title("left")


@pytest.mark.parametrize("stage", CUDA, ids=lambda s: s.name)
def test_requests(stage):
    figure = show.requests(show.trace(stage), stage)
    drawn(figure)
    titles = [ax.get_title("left") for ax in figure.axes if ax.get_visible()]
    assert any(title.startswith("O: store") for title in titles)
    assert any("one for all" in title for title in titles), "keys are read by all lanes at once"


def test_banks_show_the_conflict():
    traces = {"as it is": show.trace(STAGES[4]), "no padding": show.trace(lessons.experiment("no padding"))}
    figure = show.banks(traces, "Qs")
    drawn(figure)
    good, bad = (ax.get_title("left") for ax in figure.axes)
    assert "1 wavefront a read" in good and "32 wavefronts a read, 1 would do" in bad


def test_traffic():
    traces = {stage.number: show.trace(stage) for stage in CUDA}
    figure = show.traffic(traces)
    drawn(figure)
    texts = " ".join(text.get_text() for text in figure.axes[0].texts)
    least = show.least_bytes(Problem(N=256))
    for seen in traces.values():
        assert f"{(seen.global_load_bytes + seen.global_store_bytes) / least:,.1f} × the least" in texts


def test_ladder_and_roofline():
    rows = [("article", 143.81, "published"), ("stage 3", 2.0, "stage"), ("torch eager", 0.03, "eager")]
    drawn(show.ladder(rows, "a title"))
    drawn(show.ladder(show.times(STAGES[1], problem=Problem(N=64))))
    drawn(show.roofline({"stage 3": (0.5, 5), "stage 5": (30, 20)}, **show.ceilings()))


def test_times_of_numpy_stages_are_measured_here():
    found = show.times(STAGES[1], STAGES[2], problem=Problem(N=128))
    assert set(found.ms) == {1, 2} and all(ms > 0 for ms in found.ms.values())
    assert "measured here" in found.where and "| stage 2 online" in repr(found)


def test_judge():
    assert "stage 2 online is **right** on 9 problems" in show.judge(STAGES[2], Problem(N=70))
    broken = lessons.find_bug(2, "the sum is not rescaled").planted()
    assert "**WRONG**" in show.judge(broken, Problem(N=70))


# -- with the record of a GPU --


@pytest.fixture
def recorded(monkeypatch):
    rows = [
        bench.Row(
            f"stage {s.number} {s.name}",
            "stage",
            name,
            problem.flops,
            s.number,
            ms=8.0 / s.number,
            p20=1.0,
            p80=2.0,
            runs=9,
        )
        for s in CUDA
        for name, problem in (("article", ARTICLE), ("full_64", FULL_64))
    ]
    shapes = {name: asdict(bench.SHAPES[name]) for name in ("article", "full_64")}
    made = bench.Record(
        {"gpu": {"name": "NVIDIA H200"}},
        "2026-01-02T03:04",
        shapes=shapes,
        ceilings={"tflops": 50.0, "copy_gbs": 4000.0},
        rows=rows,
    )
    monkeypatch.setattr(bench, "records", lambda: [made])
    monkeypatch.setattr(device, "gpu", lambda: None)
    return made


def test_times_without_a_gpu_are_the_record_s(recorded):
    found = show.times(*CUDA, problem=FULL_64)
    assert found.ms == {s.number: 8.0 / s.number for s in CUDA}
    assert "as recorded on an NVIDIA H200 on 2026-01-02" in found.where
    assert show.times(*CUDA, problem=Problem(N=77)).ms == {}, "no such shape in the record"
    changed = STAGES[3].patched(STAGES[3].text + " ")
    assert show.times(changed).ms == {}, "a changed source was not recorded"


def test_figures_from_the_record(recorded):
    assert show.ceilings() == {"tflops": 50.0, "gbs": 4000.0, "title": "NVIDIA H200, ceilings measured on 2026-01-02"}
    drawn(show.ladder(show.times(*CUDA)))
    made = show.limits_table(*CUDA, problem=FULL_64, measured=show.times(*CUDA, problem=FULL_64))
    assert "By the data sheet of the H200" in made and "– |" not in made
    assert "– |" not in lessons.hold(5)
    assert "at most" in lessons.predict(6)
