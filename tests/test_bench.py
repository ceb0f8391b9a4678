"""The clocks, the arithmetic behind the tables, and when a record may be saved."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from common import bench
from common.bench import PUBLISHED, Record, Row, Times
from common.problem import ARTICLE, FULL_64
from stages import STAGES


def record(*rows, **more):
    machine = {
        "gpu": {"name": "NVIDIA H200", "driver": "1", "cuda": "13.0"},
        "cpu": "a CPU",
        "cores": 2,
        "versions": {},
    }
    return Record(
        machine, "2026-01-01T00:00:00+00:00", ceilings={"tflops": 50.0, "copy_gbs": 4000.0}, rows=[*rows], **more
    )


# -- arithmetic --


def test_quantiles():
    assert Times.of([5, 1, 3, 2, 4]) == Times(ms=3.0, p20=pytest.approx(1.8), p80=pytest.approx(4.2), runs=5)


def test_tflops_percent_and_speedup():
    core = Row("core", "core", "article", ARTICLE.flops, ms=40.0)
    stage = Row("stage 5", "stage", "article", ARTICLE.flops, stage=5, ms=0.1)
    made = record(core, stage)
    assert stage.tflops == pytest.approx(4 * 1024 * 1024 * 64 / 0.1e-3 / 1e12)
    assert made.percent(stage) == pytest.approx(100 * stage.tflops / 50)
    assert made.percent(core) is None  # the ceiling is the GPU's
    assert made.speedup(stage) == pytest.approx(400)
    assert made.speedup(Row("stage 5", "stage", "full_64", FULL_64.flops, ms=1.0)) is None  # no CPU core there
    assert [round(made.speedup(row), 1) for row in PUBLISHED] == [1.0, 18.8, 41.7]


def test_causal_counts_half():
    assert bench.SHAPES["full_64_causal"].flops == FULL_64.flops / 2 == 4 * 64 * 4096 * 4096 * 64 / 2


def test_saved_records_reproduce():
    for path in bench.RECORDS.glob("*.json"):
        found = Record.load(path.read_text())
        assert json.loads(found.dump()) == json.loads(path.read_text()), path.name
        assert found.file == path.name and found.commit


# -- clocks --


def test_cpu_clock_is_right_within_5_percent():
    def busy(seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    times = bench.time_cpu({"short": lambda: busy(0.001), "long": lambda: busy(0.004)}, least=20, target_ms=1)
    assert times["short"].p20 == pytest.approx(1, rel=0.05)  # the fast end: this machine may be busy
    assert times["long"].p20 == pytest.approx(4, rel=0.05)
    assert times["short"].p20 <= times["short"].ms <= times["short"].p80


@pytest.mark.parametrize(
    "once, runs",
    [(10.0, 50), (0.5, 200), (0.01, 500), (100.0, 20), (5000.0, 5)],
    ids=["50 runs", "100 ms", "500 runs at most", "2 s at most", "once a round at least"],
)
def test_how_often_a_function_runs(once, runs):
    times = bench._rounds({"f": None}, lambda function, n: [once] * n)
    assert times["f"] == Times(once, once, once, runs)


def test_a_drifting_clock_keeps_equals_equal():
    order = []

    def sample(function, runs):
        order.append(function)
        return [1 + 0.01 * len(order)] * runs

    times = bench._rounds({name: name for name in "ab"}, sample, rounds=10)
    assert order[2:8] == ["a", "b", "b", "a", "a", "b"]
    assert times["a"].ms == pytest.approx(times["b"].ms, rel=0.01)


class Card:
    """A stand-in for CuPy on one GPU: queued work starts when the host has queued it and the GPU is free."""

    def __init__(self):
        self.free_at, self.flushes = 0.0, 0
        self.cuda = SimpleNamespace(
            Stream=SimpleNamespace(null=self), Event=lambda: Event(self), get_elapsed_time=lambda a, b: b.at - a.at
        )

    def queue(self, ms):
        self.free_at = max(self.free_at, time.perf_counter() * 1e3) + ms

    def synchronize(self):
        time.sleep(max(0, self.free_at / 1e3 - time.perf_counter()))

    def empty(self, size, dtype):
        return SimpleNamespace(nbytes=size, data=self)

    def memset_async(self, value, size, stream):
        self.flushes += 1
        self.queue(0.05)

    def RawKernel(self, source, name):
        return lambda grid, block, arguments: self.queue(arguments[0] / 1e6)

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


class Event:
    def __init__(self, card):
        self.card = card

    def record(self, stream):
        self.card.queue(0)
        self.at = self.card.free_at


def test_gpu_clock_leaves_out_the_host(monkeypatch):
    card = Card()
    monkeypatch.setitem(sys.modules, "cupy", card)

    def slow_launcher():
        time.sleep(0.001)
        card.queue(0.2)

    times = bench.time_gpu({"kernel": slow_launcher}, least=20, target_ms=1)["kernel"]
    assert times.ms == pytest.approx(0.2, rel=0.05)
    assert card.flushes >= times.runs  # a cold cache each time


@pytest.mark.gpu
def test_a_kernel_of_known_length():
    import cupy

    spin = cupy.RawKernel(bench.SPIN, "spin")

    def slow_launcher():
        time.sleep(0.0003)
        spin((1,), (1,), (np.int64(200_000),))

    times = bench.time_gpu({"200 us": slow_launcher, "2 ms": lambda: spin((1,), (1,), (np.int64(2_000_000),))})
    assert times["200 us"].ms == pytest.approx(0.2, rel=0.05)
    assert times["2 ms"].ms == pytest.approx(2, rel=0.05)


@pytest.mark.gpu
def test_agrees_with_triton():
    """On a kernel that takes longer than its launch, where do_bench is right too."""
    torch, testing = pytest.importorskip("torch"), pytest.importorskip("triton.testing")
    A = torch.randn(4096, 4096, device="cuda")
    ours = bench.time_gpu({"product": lambda: A @ A})["product"].ms
    assert ours == pytest.approx(testing.do_bench(lambda: A @ A, return_mode="median"), rel=0.1)


@pytest.mark.gpu
def test_order_does_not_matter_on_the_gpu():
    from common import launch

    inputs = ARTICLE.inputs()
    run = {n: launch.bind(s, *_to_gpu(inputs), on="gpu") for n, s in STAGES.items() if s.is_cuda}
    forth, back = bench.time_gpu(run), bench.time_gpu(dict(reversed(run.items())))
    for number in run:
        assert forth[number].ms == pytest.approx(back[number].ms, rel=0.1)


def _to_gpu(arrays):
    import cupy

    return [cupy.asarray(array) for array in arrays]


# -- a run --

ZEROS = "def attention(Q, K, V, *, causal=False, scale=None):\n    return Q * 0\n"


def test_a_wrong_stage_is_shown_and_not_timed(monkeypatch):
    monkeypatch.setattr(bench.launch, "has_gpu", lambda: False)
    ladder = {1: STAGES[1], 2: STAGES[2].patched(ZEROS), 3: STAGES[3]}
    shares = []
    made = bench.measure(ladder, quick=True, tell=lambda text, share: shares.append(share))
    by_kind = {(row.kind, row.stage): row for row in made.rows}
    assert not by_kind["numpy", 2].ok and by_kind["numpy", 2].ms is None
    assert by_kind["numpy", 2].error > by_kind["numpy", 2].allowed
    for kind in (("core", 3), ("numpy", 1), ("executor", 3), ("torch_cpu", None)):
        assert by_kind[kind].ok and by_kind[kind].p20 <= by_kind[kind].ms <= by_kind[kind].p80
    assert "GPU" in made.notes[0] and not made.ceilings and set(made.shapes) == {"article"}
    assert sum(shares) == pytest.approx(len(bench.phases(quick=True)))


@pytest.mark.gpu
def test_a_quick_run_on_the_gpu():
    made = bench.measure(STAGES, quick=True)
    stages = [row for row in made.rows if row.kind == "stage"]
    assert [row.stage for row in stages] == [n for n, stage in STAGES.items() if stage.is_cuda]
    assert all(row.ok and row.ms and row.registers for row in stages), made.notes
    assert {"eager", "sdpa"} <= {row.kind for row in made.rows}, made.notes
    assert made.ceilings["tflops"] > 1 and made.ceilings["copy_gbs"] > 50


# -- saving --


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "timings" / "nvidia-h200.json"
    record(commit="a" * 40).save(path)
    before = path.read_text()

    def interrupt(*arguments):
        raise KeyboardInterrupt

    for module, name in ((Record, "dump"), (bench.os, "replace")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, interrupt)
            record().save(path)
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]


def test_ctrl_c_writes_nothing(tmp_path, monkeypatch, capsys):
    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupt)
    assert bench.timings(save=tmp_path / "record.json") == 130
    assert not list(tmp_path.iterdir()) and "No file was changed" in capsys.readouterr().out


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A clean repository with one file, in place of this one."""

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "stage.cu").write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    return SimpleNamespace(path=tmp_path, head=git("rev-parse", "HEAD"))


def test_a_clean_tree_gives_its_commit(tree):
    assert bench.provenance(None) == bench.provenance(tree.head[:9]) == (tree.head, "")
    (tree.path / "README.md").write_text("its table is rewritten by every run")
    (tree.path / "stages" / "timings").mkdir(parents=True)
    (tree.path / "stages" / "timings" / "gpu.json").write_text("{}")
    assert bench.provenance(None) == (tree.head, "")


def test_a_dirty_tree_is_refused(tree, monkeypatch, capsys):
    (tree.path / "stage.cu").write_text("two")
    commit, why = bench.provenance(None)
    assert commit is None and "stage.cu" in why
    assert bench.provenance(tree.head)[0] is None
    monkeypatch.setattr(bench, "measure", lambda *arguments, **more: record())
    assert bench.timings(save=tree.path / "record.json") == 0
    assert not (tree.path / "record.json").exists() and "Not saved" in capsys.readouterr().out


def test_another_commit_is_refused(tree):
    assert bench.provenance("0" * 40)[0] is None


@pytest.mark.parametrize("commit, kept", [("1234567", True), ("a" * 40, True), (None, False), ("HEAD", False)])
def test_without_git_the_commit_is_passed_in(tmp_path, monkeypatch, commit, kept):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert (bench.provenance(commit) == (commit, "")) is kept


def test_a_record_is_saved_with_the_commit_of_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setenv("COMMIT", "b" * 40)
    row = Row("stage 5", "stage", "article", ARTICLE.flops, stage=5, ms=0.1)
    monkeypatch.setattr(bench, "measure", lambda *arguments, **more: record(row))
    assert bench.timings(save=tmp_path / "record.json", as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "record.json").read_text())
    assert printed["commit"] == "b" * 40 and printed["rows"][0]["tflops"] == row.tflops
    assert Record.load((tmp_path / "record.json").read_text()).rows == [row]
