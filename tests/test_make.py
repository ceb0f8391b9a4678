"""make: what each target calls, and what it says where it cannot set itself up."""

import os
import shutil
import subprocess
import sys

import pytest

from common.device import ROOT
from stages import STAGES

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make here")


def make(*arguments, folder=ROOT):
    """In an environment of its own: `make test ARGS=…` would hand its variables down."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments, called",
    [
        ("stages", "run"),
        ("stages ON=cpu", "run --on cpu"),
        (
            "stage-4 N=1000 D=128 HEADS=3 BATCH=2 CAUSAL=1 ON=cpu SEED=7 JSON=1",
            "run 4 --n 1000 --d 128 --heads 3 --batch 2 --causal --on cpu --seed 7 --json",
        ),
        ("stage-3 CAUSAL=0 JSON=0", "run 3"),
        ("diff-4", "diff 4"),
        ("trace-4 N=65 PICTURE=out.png", "trace 4 --n 65 --picture out.png"),
        ("sanitize-5", "sanitize 5"),
        ("profile-5 D=32", "profile 5 --d 32"),
        ("traffic", "traffic"),
        ("timings ARGS=--quick", "timings --quick"),
        ("bugs JSON=1", "bugs --json"),
        ("resources", "resources --write"),
        ("doctor JSON=1", "doctor --json"),
    ],
)
def test_what_a_target_calls(arguments, called):
    said = make("PY=echo", "NOW=echo", "READY=", *arguments.split())
    assert said.stdout.split() == ["-m", "stages", *called.split()], said.stderr


def test_help_lists_targets_and_stages():
    said = make(f"PYTHON={sys.executable}").stdout
    assert "make stages" in said and "make test" in said
    assert all(stage.idea in said for stage in STAGES.values())


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "un été à Paris"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def python_where(folder, cases):
    """A python3 to order: what the shell's `case` does with its arguments."""
    path = folder / "fake"
    path.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    path.chmod(0o755)
    return "PYTHON=./fake"


@pytest.mark.parametrize(
    "cases, sentence",
    [
        (None, "There is no no-such-python here: install Python 3.11 or later."),
        (
            "--version) echo Python 3.9.2;; *) exit 1;;",
            "Python 3.11 or later is needed and ./fake is Python 3.9.2: name a newer one as in: make PYTHON=python3.12",
        ),
        (
            "*ensurepip*) exit 1;; *common.device*) exit 1;; *) ;;",
            "./fake cannot make virtual environments: "
            "install its venv module (Debian and Ubuntu: sudo apt-get install python3-venv).",
        ),
    ],
)
def test_one_sentence_where_set_up_cannot_begin(clone, cases, sentence):
    said = make("stages", python_where(clone, cases) if cases else "PYTHON=no-such-python", folder=clone)
    assert said.returncode and not said.stdout
    assert said.stderr.split("\n")[0] == sentence
    assert not (clone / ".venv").exists()


def test_an_interrupted_set_up_starts_afresh(clone):
    """The first pip fails: no stamp. The second succeeds, in a new .venv, and a third make sets up nothing."""
    (clone / "common").mkdir()
    shutil.copy(ROOT / "common" / "device.py", clone / "common")
    pip = "mkdir -p .venv/bin; cp fake .venv/bin/python; echo x >>venvs"
    python = python_where(
        clone,
        f"*ensurepip*) ;; *clear*) {pip};; *pip*) test -f online;; "
        f'*requirements*) ;; *"-m common.device") echo cpu;; *stages*) echo ran;; *) ;;',
    )
    said = make("stages", python, folder=clone)
    assert said.returncode and "The same command starts it afresh." in said.stderr
    (clone / "online").touch()
    said = make("stages", python, folder=clone)
    assert said.returncode == 0 and said.stderr.startswith("Setting up") and said.stdout == "ran\n", said
    assert not make("stages", python, folder=clone).stderr
    assert (clone / "venvs").read_text() == "x\nx\n"
