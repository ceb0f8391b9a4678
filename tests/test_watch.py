"""Traces of the stages, and a reader's own kernel: `make trace-4`, `make traffic`, `python -m stages try`."""

import json

import pytest

from common import attempt, watch
from common.problem import Problem
from stages import STAGES
from stages.__main__ import main

CUDA = [stage for stage in STAGES.values() if stage.is_cuda]
cuda_stage = pytest.mark.parametrize("stage", CUDA, ids=lambda stage: stage.name)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [32, 64, 128])
@cuda_stage
def test_no_stage_races_or_strays(stage, d, causal):
    for N in (1, 100):
        seen = watch.trace(stage, Problem(1, 2, N, d, causal))
        assert seen.completed and not seen.findings, watch.sentences(seen)
    assert seen.static_shared_bytes == shared_bytes(stage, d)


def shared_bytes(stage, d):
    """What the header of the source says."""
    if stage.number == 3:
        return 0
    formula = next(line for line in stage.text.splitlines() if line.startswith("// shared")).partition(": ")[2].removesuffix(" bytes")
    product = formula.replace("4 (", "4 * (")
    for name in ("Br", "Bc"):
        product = product.replace(f"{name} (", f"{name} * (")
    return eval(product.replace("2 Bc d", "2 * Bc * d"), {"d": d, **stage.tiles[d]})


def test_counts_are_those_of_the_algorithm():
    N, d = 256, 64
    least = Problem(N=N, d=d).least_bytes
    for stage in CUDA:
        seen = watch.trace(stage, Problem(N=N, d=d))
        rows = N if stage.number == 3 else N // stage.tiles[d]["Br"]  # who reads all keys: each row, or each block
        assert seen.global_load_bytes == 4 * N * d * (1 + 2 * rows)
        assert seen.global_store_bytes == least // 4


def test_trace_prints_the_source_with_its_counts(capsys):
    assert main(["trace", "4", "--n", "128"]) == 0
    out = capsys.readouterr().out
    assert "no races, no stray accesses, no uninitialised reads" in out
    store = next(line for line in out.splitlines() if "o[x] / l;" in line)
    assert "global store" in store and "32.0 sectors" in store and "◀" in store
    assert "shared memory: " in out and "the algorithm needs 128 KiB at least" in out
    assert "how long anything takes" in out


def test_trace_as_json(capsys):
    assert main(["trace", "3", "--n", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["findings"] == [] and data["global_load_bytes"] > data["least_bytes"] > 0
    assert {line["space"] for line in data["lines"]} == {"global"}


def test_trace_draws_a_picture(tmp_path):
    picture = tmp_path / "out.png"
    assert main(["trace", "5", "--n", "64", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_traffic(tmp_path, capsys):
    assert main(["traffic", "--n", "64", "--picture", str(tmp_path / "bars.png")]) == 0
    out = capsys.readouterr().out
    assert all(stage.name in out for stage in CUDA)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_only_cuda_stages_are_traced(capsys):
    with pytest.raises(SystemExit):
        main(["trace", "1"])
    assert "stage 1 is not a CUDA source; 3, 4, 5 are" in capsys.readouterr().err


# -- a reader's own kernel --


def examine(tmp_path, *patches, like=5, N=130):
    text = STAGES[like].text
    for old, new in patches:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "my kernel.cu"
    path.write_text(text)
    return attempt.attempt(path, like, Problem(N=N), on="cpu")


def line_of(text):
    return next(n for n, line in enumerate(STAGES[5].text.splitlines(), 1) if text in line)


def test_a_right_kernel(tmp_path):
    found = examine(tmp_path)
    assert found.right and set(found.ms) == {"my kernel.cu", "stage 5"}


def test_a_race_is_named_by_its_lines(tmp_path):
    found = examine(tmp_path, ("__syncthreads();  // all of this tile is there", ""))
    assert found.stopped == "trace" and found.findings[0]["kind"] == "race"
    load, use = line_of("Ks[t / (d / 4)][t % (d / 4)] ="), line_of("k = Ks[j][x]")
    assert f"my kernel.cu:{load}" in found.words[1] and f"my kernel.cu:{use}" in found.words[1]


def test_wrong_numbers_are_placed(tmp_path):
    found = examine(tmp_path, ("j0 < keys; j0 += Bc", "j0 < keys && j0 < 64; j0 += Bc"))
    assert found.stopped == "check"
    assert "130 of 130 rows wrong" in found.words[0]
    assert found.words[1] == "right up to N = 64, wrong from N = 65 on: with 3 tiles of keys, whose last tile holds 1 of 32 keys"


def test_unwritten_rows_are_told_from_nan(tmp_path):
    found = examine(tmp_path, ("if (row < N)  //", "if (row < N && row % 50)  //"))
    assert found.stopped == "check"
    assert any("3 of 130 rows were never written, the first in batch 0, head 0: row 0" in words for words in found.words)
    found = examine(tmp_path, ("o[x].w / l}", "o[x].w / (l - l)}"))
    assert found.stopped == "check" and not any("never written, the first" in words for words in found.words)


def test_what_does_not_compile(tmp_path, capsys):
    path = tmp_path / "broken.cu"
    path.write_text(STAGES[5].text.replace("float s[Bc];", "float s[Bcc];"))
    assert main(["try", str(path), "--like", "5", "--on", "cpu"]) == 1
    out = capsys.readouterr().out.replace("\n", "")
    assert f"{path}:{line_of('float s[Bc];')}:" in out and "Bcc" in out
    path.write_text(STAGES[4].text.replace("float Ks[Bc][d];", "float *Ks = nullptr;"))
    assert main(["try", str(path), "--like", "4", "--on", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"] == "compile" and f"{path}:" in found["words"][0]


def test_a_kernel_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "TIME_LIMIT", 1)
    found = examine(tmp_path, ("j0 < keys; j0 += Bc", "j0 < keys; j0 += 0"))
    assert not found.right and "time limit" in str(found.findings) + str(found.words)
    assert "my kernel.cu:" in " ".join(found.words)


def test_a_file_that_is_not_there(capsys):
    assert main(["try", "no_such.cu", "--like", "5"]) == 2
    assert "no_such.cu" in capsys.readouterr().err


def test_sanitize_without_a_gpu_traces(capsys):
    from common import nvidia

    if nvidia.sanitizer():
        pytest.skip("there is a GPU, and compute-sanitizer")
    assert main(["sanitize", "3", "--n", "64"]) == 0
    streams = capsys.readouterr()
    assert "The CPU executor watches the launch instead" in streams.err and "no races" in streams.out
    assert main(["profile", "3"]) == 2
