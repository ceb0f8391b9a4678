"""What all tests share: GPU tests are skipped where there is none, and random tests are the same on every CI run."""

import os

import pytest
from hypothesis import settings

from common import device

# No deadline: the first call of a kernel compiles it.
settings.register_profile("ladder", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("ladder")


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    why = device.why_no_gpu() if on_gpu else ""
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=why) if why else pytest.mark.xdist_group("gpu"))  # one at a time
