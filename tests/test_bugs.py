"""Every planted bug is caught by what must catch it, and every true source passes the same examination."""

import numpy as np
import pytest

from common import check, resources
from common.problem import Problem
from stages import STAGES
from stages.bugs import BUGS, Bug, catch

by_name = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.stage}: {bug.name}")


@by_name
def test_bug_is_caught(bug):
    if bug.caught_by == "resources":
        try:
            resources.nvrtc_version()
        except resources.Unavailable as why:
            pytest.skip(str(why))
    with np.errstate(all="ignore"):
        caught_by, words = catch(bug, "cpu")
    assert caught_by == bug.caught_by, words
    assert words


@pytest.mark.gpu
@by_name
def test_bug_is_caught_on_the_gpu(bug):
    if bug.caught_by not in ("check", "compiler") or "barrier" in bug.name:
        pytest.skip("a matter of luck, or of another tool, on a GPU")
    with np.errstate(all="ignore"):
        assert catch(bug, "gpu")[0] == bug.caught_by


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_true_source_passes_the_same(stage):
    for problem in check.relatives(Problem(1, 2, 200, 64)):
        assert check.check(stage, problem, on="cpu").ok


def test_every_stage_from_2_on_has_bugs():
    assert {bug.stage for bug in BUGS} == set(STAGES) - {1}
    assert len({(bug.stage, bug.name) for bug in BUGS}) == len(BUGS)


def test_a_patch_that_no_longer_fits_is_an_error():
    with pytest.raises(ValueError, match="stands 0 times in stages/stage3_naive.cu"):
        Bug("x", 3, (("no such text", ""),), "").planted()
