"""Which machine is this: never a crash, and one clear sentence for each thing that is missing."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from common import device
from stages import STAGES

H200 = {"name": "NVIDIA H200", "driver": "580.159.04", "capability": "9.0"}


@pytest.fixture
def machine(monkeypatch):
    """A machine to order: its card as nvidia-smi tells it, its CuPy as a module, an exception or None."""

    def make(card, cupy):
        monkeypatch.setattr(device, "_card", lambda: card)
        monkeypatch.setattr(device, "_is_nvidia_display", lambda folder: False)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        device._find_gpu.cache_clear()

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys.modules.get(name))
    yield make
    device._find_gpu.cache_clear()


def cupy_where(count):
    """A CuPy whose getDeviceCount is `count`."""
    about = dict(
        name=b"NVIDIA H200",
        major=9,
        minor=0,
        multiProcessorCount=132,
        totalGlobalMem=150_000_000_000,
        l2CacheSize=60_000_000,
        sharedMemPerBlockOptin=232_448,
        regsPerMultiprocessor=65_536,
    )
    runtime = SimpleNamespace(
        getDeviceCount=count,
        getDevice=lambda: 0,
        getDeviceProperties=lambda index: about,
        runtimeGetVersion=lambda: 13000,
    )
    cuda = SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(pci_bus_id="0000:00:04.0"))
    return SimpleNamespace(cuda=cuda)


def fails():
    raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient\nmore")


def test_this_machine():
    assert (device.gpu() is None) == bool(device.why_no_gpu())
    facts = device.facts()
    assert json.loads(json.dumps(facts))["cores"] >= 1 and facts["versions"]["numpy"]
    assert (facts["gpu"] is None) == (device.gpu() is None)
    assert isinstance(device.clocks(), dict)


def test_a_gpu(machine):
    machine(H200, cupy_where(lambda: 1))
    found = device.gpu()
    assert (found.name, found.arch, found.cuda, found.driver) == ("NVIDIA H200", "sm_90", "13.0", "580.159.04")
    assert device.why_no_gpu() == "" and device.can_run(STAGES[3], "gpu") == ""


@pytest.mark.parametrize(
    "card, cupy, hidden, why",
    [
        ({}, None, None, "This machine has no NVIDIA GPU."),
        ({}, cupy_where(fails), None, "This machine has no NVIDIA GPU."),
        (H200, None, None, "CuPy is missing, and kernels reach the NVIDIA H200 through it."),
        (H200, cupy_where(lambda: 0), "", "CUDA_VISIBLE_DEVICES hides the NVIDIA GPU."),
        (
            H200,
            cupy_where(fails),
            None,
            "CuPy cannot use the NVIDIA H200 with driver 580.159.04: "
            "cudaErrorInsufficientDriver: CUDA driver version is insufficient",
        ),
    ],
)
def test_why_there_is_none(machine, monkeypatch, card, cupy, hidden, why):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    machine(card, cupy)
    assert device.gpu() is None and device.why_no_gpu() == why == device.can_run(STAGES[3], "gpu")
    assert device.facts()["gpu"] is None
    for check in device.diagnosis()["checks"]:
        assert check["have"] or check["why"], check


def test_a_gpu_without_its_driver(machine, monkeypatch):
    machine({}, None)
    monkeypatch.setattr(device, "_is_nvidia_display", lambda folder: True)
    if os.path.isdir("/sys/bus/pci/devices") and os.listdir("/sys/bus/pci/devices"):
        assert "driver is missing" in device.why_no_gpu()
        assert "nvidia-driver" in device._mend_driver() or "ubuntu-drivers" in device._mend_driver()


@pytest.mark.parametrize(
    "driver, capability, extra",
    [
        ("580.159.04", "9.0", "cu13"),
        ("595.10", "12.0", "cu13"),
        ("580.65", "7.0", "cu12"),  # CUDA 13 knows no Volta
        ("550.54.15", "8.6", "cu12"),
        ("470.82", "8.6", "cpu"),
        ("[N/A]", "[N/A]", "cpu"),
    ],
)
def test_extra_fits_the_card(monkeypatch, driver, capability, extra):
    monkeypatch.setattr(device, "_card", lambda: {"name": "a card", "driver": driver, "capability": capability})
    assert device.extra() == extra
    cupy = [line for line in device.requirements(extra) if line.startswith("cupy")]
    assert [line[:11] for line in cupy] == {"cpu": []}.get(extra, [f"cupy-cuda{extra[2:]}"])


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert device.compiler() is None
    assert device.can_run(STAGES[3], "cpu").startswith("There is no C++ compiler")
    assert device.can_run(STAGES[1], "cpu") == ""


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["list"]])
def test_doctor_and_list_need_nothing_installed(arguments):
    """-S: a Python without any packages; no PATH: a machine without any tools."""
    command = [sys.executable, "-S", "-m", "stages", *arguments]
    bare = subprocess.run(command, cwd=device.ROOT, env={"PATH": "/nonexistent"}, capture_output=True, text=True)
    assert bare.returncode == 0 and not bare.stderr, bare.stderr
    if arguments == ["doctor"]:
        assert "NumPy is missing." in bare.stdout and "no: " in bare.stdout
    elif arguments == ["list"]:
        assert all(stage.idea in bare.stdout for stage in STAGES.values())
    else:
        found = json.loads(bare.stdout)
        assert [stage["number"] for stage in found["stages"]] == list(STAGES)
        assert {"Python", "packages", "GPU", "torch", "C++ compiler"} <= {check["what"] for check in found["checks"]}


@pytest.mark.gpu
def test_the_gpu_here():
    found = device.gpu()
    assert found.multiprocessors > 0 and found.shared >= 48 * 1024 and found.memory > 1 << 30
    facts = device.facts()["gpu"]
    assert facts["name"] == found.name and facts["driver"][0].isdigit()
    assert set(device.clocks()) in ({"sm", "memory"}, set())
