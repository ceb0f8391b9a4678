"""The command line: what make calls."""

import json
import re
import subprocess
import sys

import pytest

import stages
from stages import ROOT, STAGES
from stages.__main__ import main


def test_run_prints_right_and_a_table(capsys):
    assert main(["run", "4", "--n", "100", "--d", "32", "--heads", "3", "--batch", "2", "--causal", "--on", "cpu", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert "B = 2, H = 3, N = 100, d = 32, causal" in out and "seed 7" in out
    assert out.count("right") == 4 and "distance to the stage before" in out
    assert STAGES[3].idea[:40] in out and STAGES[4].idea[:40] in out
    assert "these times say nothing about a GPU" in out


def test_run_as_json(capsys):
    assert main(["run", "2", "3", "--n", "70", "--on", "cpu", "--json"]) == 0
    two, three = json.loads(capsys.readouterr().out)
    assert (two["number"], three["number"]) == (2, 3)
    assert three["ok"] and three["ms"] > 0 and 0 <= three["distance"] < 1e-5


def test_a_wrong_stage_exits_1(capsys, monkeypatch):
    wrong = STAGES[3].patched(STAGES[3].text.replace("s *= scale;", ""))
    monkeypatch.setitem(stages.STAGES, 3, wrong)
    assert main(["run", "3", "--n", "70", "--on", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "rows wrong" in out


@pytest.mark.parametrize("old, new, on, words", [
    ("float s = 0;", "float s = zero;", "cpu", r"stages/stage3_naive.cu:\d+: .*zero"),
    ("if (row >= N) return;", "if (row >= N) return; while (true) __syncthreads();", "cpu", "waits at this barrier"),
    ("j < keys", "j <= keys", "trace", "but K has"),
])  # fmt: skip
def test_a_stage_that_does_not_compile_or_run_is_wrong(old, new, on, words, capsys, monkeypatch):
    monkeypatch.setitem(stages.STAGES, 3, STAGES[3].patched(STAGES[3].text.replace(old, new)))
    assert main(["run", "3", "--n", "70", "--on", on]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and re.search(words, out)


def test_without_a_compiler_the_numpy_stages_run(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["run", "2", "3", "--n", "70", "--on", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "left out: There is no C++ compiler" in out and "right" in out and "WRONG" not in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "12"], "stages are 1, 2, 3, 4, 5, not '12'"),
        (["run", "--n", "0"], "at least 1 is wanted, not 0"),
        (["run", "--n", "many"], "a whole number is wanted, not 'many'"),
        (["run", "--d", "48"], "invalid choice: 48"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_usage_errors(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_errors_are_one_sentence(capsys):
    assert main(["diff", "1"]) == 2
    assert "nothing comes before stage 1" in capsys.readouterr().err
    assert main(["bugs", "no such bug"]) == 2


def test_list_needs_the_standard_library_only():
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; from stages.__main__ import main; main(['list'])"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.split()[1] for line in run.stdout.splitlines()] == [str(n) for n in STAGES]


def test_help_and_no_command(capsys):
    assert main([]) == 0
    assert "run" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
