"""The notebooks run without a GPU, hold no kernel text and no typed times, and their exercises can be solved."""

import re

import pytest

pytest.importorskip("nbclient", reason="nbclient runs the notebooks, and is not installed")
pytest.importorskip("nbformat", reason="nbformat reads the notebooks, and is not installed")
pytest.importorskip("ipykernel", reason="ipykernel runs the notebooks, and is not installed")

import nbformat

from common import notebooks, show
from common.problem import Problem
from notebooks import lessons
from stages import STAGES

PATHS = notebooks.notebooks()
each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
exercises = pytest.mark.parametrize("exercise", lessons.EXERCISES, ids=lambda e: e.name)


def read(path):
    return nbformat.read(path, 4)


def test_the_set_is_complete():
    names = [path.stem for path in PATHS]
    assert names[0] == "00_start_here" and names[-1] == "99_timings"
    assert names[1:-1] == [f"{stage.number:02d}_{stage.name}" for stage in STAGES.values()]


@each
def test_runs_without_a_gpu(path, tmp_path):
    notebooks.execute(path, tmp_path / path.name)
    after = read(tmp_path / path.name)
    assert "This ran" in str(after.cells[1].outputs), "the first output names the machine"
    assert (tmp_path / path.name).stat().st_size < notebooks.SIZE_LIMIT
    empty = [cell.id for cell in after.cells if cell.cell_type == "code" and not cell.outputs]
    assert not empty, f"cells that show nothing: {empty}"


@each
def test_form(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert all(re.fullmatch(rf"c{path.name[:2]}-\d\d", cell.id) for cell in notebook.cells)
    assert path.stat().st_size < notebooks.SIZE_LIMIT


@each
def test_first_cells_are_generated(path):
    first, second = read(path).cells[:2]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert notebooks.badge(path.name) in first.source, "python -m common.notebooks --badges writes the address anew"
    assert second.source == notebooks.set_up()


@each
def test_links_lead_somewhere(path):
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([\w.]+\.ipynb)\)", cell.source):
                assert (path.parent / link).exists(), link


def squeezed(text):
    return re.sub(r"\s+", "", text)


KERNEL_LINES = {
    squeezed(line.split("//")[0])
    for stage in STAGES.values()
    for line in stage.text.split('"""')[-1].splitlines()
    if len(squeezed(line.split("//")[0])) > 14 and not line.lstrip().startswith(("#", "import"))
}
MEASURED = re.compile(r"(?<![\w{.])\d[\d.,]*\s*(ms|µs|microseconds|milliseconds|TFLOP/s|GFLOP/s|GB/s|TB/s)\b")


@each
def test_no_kernel_text_and_no_typed_times(path):
    for cell in read(path).cells:
        text = squeezed(cell.source)
        assert not [line for line in KERNEL_LINES if line in text], cell.id
        assert not MEASURED.search(cell.source), f"{cell.id}: {MEASURED.search(cell.source)[0]}"


def test_the_rules_can_be_broken():
    assert MEASURED.search("it takes 3.45 ms") and MEASURED.search("at 4,266 GB/s")
    assert not MEASURED.search("{ms:.3f} ms")
    assert any(line in squeezed("    l = l * alpha + p;\n const float m_new = fmaxf(m, s);") for line in KERNEL_LINES)


@each
def test_outputs_are_as_new_as_the_code(path):
    notebook = read(path)
    if not notebooks.has_outputs(notebook):
        pytest.skip(f"{path.name} has no outputs yet: `make notebooks` on a machine with a GPU makes them")
    old, now = notebook.metadata.get("outputs_of", {}), notebooks.fingerprint(path, notebook)
    stale = [name for name in now if old.get(name) != now[name]]
    assert not stale, f"outputs are older than {', '.join(stale)}: run `make notebooks` on a machine with a GPU"
    errors = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert not errors


def test_stale_outputs_are_seen(monkeypatch):
    path, notebook = PATHS[3], read(PATHS[3])
    before = notebooks.fingerprint(path, notebook)
    monkeypatch.setitem(STAGES, 3, STAGES[3].patched(STAGES[3].text + "\n"))
    assert changed(notebooks.fingerprint(path, notebook), before) == [STAGES[3].file]
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += " "
    assert changed(notebooks.fingerprint(path, notebook), before) == [STAGES[3].file, "cells"]


def changed(now, before):
    return [name for name in now if now[name] != before[name]]


def test_a_failing_cell_is_named(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="c42-00")])
    nbformat.write(notebook, tmp_path / "42_wrong.ipynb")
    with pytest.raises(notebooks.Failed, match=r"42_wrong.ipynb, code cell 1 \(c42-00\)(.|\n)*ZeroDivisionError"):
        notebooks.execute(tmp_path / "42_wrong.ipynb", tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


# -- exercises --


def test_every_stage_has_two_exercises():
    assert [e.stage for e in lessons.EXERCISES] == sorted([*STAGES, *STAGES])
    for path in PATHS:
        wanted = [e.name for e in lessons.EXERCISES if e.stage == int(path.name[:2])]
        text = "".join(cell.source for cell in read(path).cells)
        assert re.findall(r'exercise\("([\d.]+)"\)\.check', text) == wanted


@exercises
def test_the_solution_passes(exercise):
    assert squeezed(exercise.answer) in squeezed(show.source(STAGES[exercise.stage], exercise.section, exercise.nth))
    outcome = exercise.check(exercise.answer)
    assert outcome.ok and " ms" in outcome.words, outcome


@exercises
def test_the_gap_does_not_pass(exercise):
    assert not exercise.check(lessons.BLANK).ok
    assert lessons.BLANK in show.source(exercise.filled(lessons.BLANK), exercise.section, exercise.nth)
    fault = None
    try:
        fault = exercise._fault(exercise.filled(lessons.BLANK))
    except Exception as error:
        fault = error
    assert fault, "the gap itself must not be a right kernel"


@exercises
def test_wrong_answers_do_not_pass(exercise):
    assert exercise.wrong
    for answer in exercise.wrong:
        outcome = exercise.check(answer)
        assert not outcome.ok, answer
        assert len(outcome.words) > 10


# -- bugs, experiments, predictions --


def test_experiments_still_fit():
    for name in lessons.EXPERIMENTS:
        assert lessons.experiment(name).text != STAGES[lessons.EXPERIMENTS[name][0]].text
        assert lessons.compare(name)


def test_bugs_of_the_first_stage_are_caught():
    for bug in lessons.FIRST:
        assert "caught by **check**" in lessons.bug(1, bug.name)


def test_the_walk_ends_at_the_right_answer():
    s, m, l, o, right = lessons.walk()
    assert m[-1] == s.max() and abs(o[-1] / l[-1] - right) < 1e-12


def test_counted_predictions_hold():
    assert "exactly 537,395,200 bytes" in lessons.predict(3)  # 4 (2 N N d + 2 N d)
    for number in (3, 4, 5):
        counted = lessons.hold(number).splitlines()[2]
        assert counted.endswith(" yes |"), counted


def test_a_prediction_can_fail():
    said = dict(what="", unit="", why="", measure=lambda: 3.0)
    cases = {
        ("exactly", 3.0): "yes",
        ("exactly", 3.1): "**no**",
        ("about", 2.5): "yes",
        ("about", 2.0): "**no**",
        ("at most", 2.9): "**no**",
        ("at least", 2.9): "yes",
        ("at least", 3.1): "**no**",
        ("between", (2, 4)): "yes",
        ("between", (1, 2)): "**no**",
    }
    for (holds, value), held in cases.items():
        assert lessons.Prediction(holds=holds, value=value, **said).verdict()[1] == held


def test_memory_of_stage_2_grows_with_n():
    assert lessons.peak(STAGES[1], 1024) > 3.5 * lessons.peak(STAGES[1], 512)
    assert lessons.peak(STAGES[2], 1024) < 2.5 * lessons.peak(STAGES[2], 512)
    assert show.least_bytes(Problem(N=512)) == 4 * 512 * 64 * 4
