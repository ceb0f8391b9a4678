"""Which machine is this, what can it run, and what would mend what it cannot?

Only the standard library is imported at the top, since this is what explains that NumPy, CuPy or a driver is missing.
`make` asks it which Python to use:

    python3 -m common.device                  "ready" if this Python holds what is needed, else the extra to install
    python3 -m common.device missing          the requirements that this Python does not meet
    python3 -m common.device requirements E…  those of pyproject.toml, extras E included, a line each
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from stages import ROOT


@dataclass(frozen=True)
class Gpu:
    """The current CUDA device; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    l2: int
    shared: int  # what one block may have when it asks for it (the opt-in limit)
    registers: int  # 32-bit registers of one multiprocessor
    driver: str  # NVIDIA's own number, "580.159.04"
    cuda: str  # of the runtime that CuPy uses, "13.0"
    bus: str  # PCI address, by which nvidia-ml-py knows the same card

    @property
    def arch(self) -> str:
        return "sm_{}{}".format(*self.capability)


# -- is there a GPU --


def gpu() -> Gpu | None:
    """The GPU that kernels run on; None where there is none or CuPy cannot reach it (`why_no_gpu` says which)."""
    found = _find_gpu()
    return found if isinstance(found, Gpu) else None


def why_no_gpu() -> str:
    """One sentence; empty when there is a GPU."""
    found = _find_gpu()
    return "" if isinstance(found, Gpu) else found


@cache
def _find_gpu() -> Gpu | str:
    if not _card() and not importlib.util.find_spec("cupy"):
        return _no_card()
    try:
        import cupy

        runtime = cupy.cuda.runtime
        if not runtime.getDeviceCount():
            raise RuntimeError("no device")
        about = runtime.getDeviceProperties(runtime.getDevice())
        bus = cupy.cuda.Device().pci_bus_id
    except ModuleNotFoundError:
        return f"CuPy is missing, and kernels reach the {_card()['name']} through it."
    except Exception as error:  # a driver that is too old or broken says so in many types
        if not _card():
            return _no_card()
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
            return "CUDA_VISIBLE_DEVICES hides the NVIDIA GPU."
        return f"CuPy cannot use the {_card()['name']} with driver {_card()['driver']}: {_first_line(error)}"
    version = runtime.runtimeGetVersion()
    return Gpu(
        name=about["name"].decode(),
        capability=(about["major"], about["minor"]),
        multiprocessors=about["multiProcessorCount"],
        memory=about["totalGlobalMem"],
        l2=about["l2CacheSize"],
        shared=about["sharedMemPerBlockOptin"],
        registers=about["regsPerMultiprocessor"],
        driver=_card().get("driver", "unknown"),
        cuda=f"{version // 1000}.{version % 1000 // 10}",
        bus=bus,
    )


@cache
def _card() -> dict:
    """What nvidia-smi says of the first GPU: name, driver, capability ("9.0"); empty where it says nothing."""
    answer = _output("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
    fields = [field.strip() for field in answer.split("\n")[0].split(",")]
    return dict(zip(("name", "driver", "capability"), fields)) if len(fields) == 3 else {}


def _no_card() -> str:
    if any(_is_nvidia_display(folder) for folder in Path("/sys/bus/pci/devices").glob("*")):
        return "This machine has an NVIDIA GPU, but its driver is missing or does not answer."
    return "This machine has no NVIDIA GPU."


def _is_nvidia_display(folder: Path) -> bool:
    try:
        return (folder / "vendor").read_text().strip() == "0x10de" and (folder / "class").read_text().startswith("0x03")
    except OSError:
        return False


def clocks() -> dict:
    """The GPU's clocks at this moment in MHz, {"sm": …, "memory": …}; empty where they cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu().bus)
        return {
            "sm": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        }
    except Exception:  # no package, no GPU, or a driver that keeps it to itself
        return {}


# -- what else is here --


def facts() -> dict:
    """The machine in words and numbers, as a record of timings carries it. "gpu" is None without one."""
    card = gpu()
    return {
        "gpu": asdict(card) | {"clocks_mhz": clocks()} if card else None,
        "cpu": _cpu_name(),
        "cores": cores(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "compiler": compiler(),
        "versions": {name: version(name) for name in ("numpy", "torch", "cupy", "triton")},
    }


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(name: str) -> str | None:
    """Of an installed package, without importing it; None where it is not installed."""
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy") if name == "cupy" else (name,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def compilers() -> list[list[str]]:
    """The commands that may be the C++ compiler, best first: $CXX alone where it is set."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    return [wanted] if wanted else [["g++"], ["clang++"], ["c++"]]


def compiler() -> str | None:
    """The C++ compiler that runs kernels on the CPU, by its own first line."""
    for command in compilers():
        if answer := _output(*command, "--version"):
            return answer.split("\n")[0]
    return None


def _cpu_name() -> str:
    try:
        return re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What a command prints, or nothing if it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


# -- what Python must hold --


def requirements(*extras: str) -> list[str]:
    """The lines of pyproject.toml that pip should install."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]


def missing() -> list[str]:
    """The requirements that this Python does not meet; CuPy is one where there is a GPU for it."""
    cupy = [line for line in requirements(extra()) if line.startswith("cupy")]
    return [line for line in requirements() if not _met(line)] + (cupy if version("cupy") is None else [])


def _met(line: str) -> bool:
    try:
        from packaging.requirements import Requirement  # comes with pytest: without it something is missing anyway

        requirement = Requirement(line)
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except ImportError:  # PackageNotFoundError is one too
        return False


def extra() -> str:
    """The extra of pyproject.toml that fits this machine: "cu13", "cu12", or "cpu" where no CuPy would run."""
    try:
        driver = int(_card()["driver"].split(".")[0])
        capability = float(_card()["capability"])
    except (KeyError, ValueError):
        return "cpu"
    if driver >= 580 and capability >= 7.5:  # CUDA 13 left older cards behind
        return "cu13"
    return "cu12" if driver >= 525 else "cpu"


# -- doctor --


def can_run(stage, on: str) -> str:
    """Why `stage` cannot run on "gpu" or "cpu" here, in one sentence; empty when it can."""
    if on == "gpu":
        return why_no_gpu()
    if not version("numpy"):
        return "NumPy is missing."
    if stage.is_cuda and not compiler():
        return "There is no C++ compiler, and on the CPU a .cu file is compiled with one."
    return ""


def diagnosis() -> dict:
    """{"facts": …, "checks": [{"what", "have", "why", "mend"}], "stages": [{"number", "name", "gpu", "cpu"}]}.

    `have` is None for what is missing; `mend` is then the command that would bring it, if there is one. A stage's
    "gpu" and "cpu" say why it cannot run there, and are empty where it can.
    """
    from stages import STAGES

    stages = [
        {"number": stage.number, "name": stage.name, "gpu": can_run(stage, "gpu"), "cpu": can_run(stage, "cpu")}
        for stage in STAGES.values()
    ]
    return {"facts": facts(), "checks": _checks(), "stages": stages}


def _checks() -> list[dict]:
    card, here = gpu(), _card()
    lacking = missing()
    own = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ  # not the system's, which pip should not touch

    def install(*lines):
        wanted = shlex.join(line.partition(";")[0] for line in lines)
        return f"{shlex.quote(_shown(sys.executable))} -m pip install {wanted}" if own else "make stages"

    def check(what, have, why="", mend=""):
        return {"what": what, "have": have, "why": "" if have else why, "mend": "" if have else mend}

    def tool(name):
        path = shutil.which(name) or next((p for p in (f"/usr/local/cuda/bin/{name}",) if os.access(p, os.X_OK)), None)
        return path and (_output(path, "--version").split("\n")[-1] or path)

    rows = [
        check("Python", f"{platform.python_version()} ({_shown(sys.executable)})"),
        check(
            "packages",
            None if lacking else "all that make needs",
            f"{', '.join(lacking)} missing.",
            install(*lacking),
        ),
        check("GPU", here.get("name") or (card and card.name), why_no_gpu(), _mend_driver()),
    ]
    if here or card:
        rows += [
            check("compute capability", here.get("capability")),
            check("driver", here.get("driver")),
            check("CuPy", card and f"{version('cupy')} on CUDA {card.cuda}", why_no_gpu(), _mend_cupy(install)),
        ]
    rows += [
        check("torch", _torch(), "Without it, the timings have no rows of torch."),
        check("C++ compiler", compiler(), "Without one, .cu files do not run on the CPU.", _mend_compiler()),
        check(
            "NVRTC (optional)",
            _nvrtc(),
            "Without it, make resources has no compiler.",
            install(*(line for line in requirements("dev") if "cuda" in line)),
        ),
        check("nvcc (optional)", tool("nvcc"), "No stage so far needs it."),
    ]
    if here or card:
        apt = "sudo apt-get install " if shutil.which("apt-get") else ""
        rows += [
            check("ncu (optional)", tool("ncu"), "Without it, no make profile-N.", apt and f"{apt}nsight-compute"),
            check(
                "compute-sanitizer (optional)",
                tool("compute-sanitizer"),
                "Without it, no make sanitize-N on the GPU.",
                apt and f"{apt}nvidia-cuda-toolkit",
            ),
        ]
    return rows


def _shown(path: str) -> str:
    return os.path.relpath(path, ROOT) if path.startswith(f"{ROOT}{os.sep}") else path


def _torch() -> str | None:
    """Torch's version; where CuPy reaches a GPU, also whether torch does."""
    here = version("torch")
    if here and gpu():
        try:
            import torch

            return f"{torch.__version__}, {'with' if torch.cuda.is_available() else 'WITHOUT'} the GPU"
        except Exception as error:
            return f"{here}, which does not load: {_first_line(error)}"
    return here


def _nvrtc() -> str | None:
    try:
        from common import resources

        return resources.nvrtc_version()
    except Exception:  # one of three packages is missing, or does not fit the others
        return None


def _mend_driver() -> str:
    if "driver" not in why_no_gpu():
        return ""
    return "sudo ubuntu-drivers install" if shutil.which("ubuntu-drivers") else "sudo apt-get install nvidia-driver"


def _mend_cupy(install) -> str:
    if "hides" in why_no_gpu():
        return "unset CUDA_VISIBLE_DEVICES"
    wanted = [line for line in requirements(extra()) if line.startswith("cupy")]
    fits = any(version(re.match(r"[\w-]+", line)[0]) for line in wanted)
    return _mend_driver() if fits or not wanted else install(*wanted)


def _mend_compiler() -> str:
    tools = {"apt-get": "install g++", "dnf": "install gcc-c++", "pacman": "-S gcc", "zypper": "install gcc-c++"}
    if sys.platform == "darwin":
        return "xcode-select --install"
    return next((f"sudo {tool} {rest}" for tool, rest in tools.items() if shutil.which(tool)), "")


def doctor(as_json: bool = False) -> None:
    """Print the diagnosis: tables for a reader, or JSON."""
    found = diagnosis()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    machine = found["facts"]
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['os']}\n")
    _print_table(("this machine", ""), [(row["what"], row["have"] or f"no: {row['why']}") for row in found["checks"]])
    stages = [(f"{s['number']} {s['name']}", s["gpu"] or "yes", s["cpu"] or "yes") for s in found["stages"]]
    _print_table(("stage", "on the GPU", "on the CPU"), stages)
    mends = {}  # one command may mend several things
    for row in found["checks"]:
        if row["mend"]:
            mends.setdefault(row["mend"], []).append(row["what"])
    print("To mend:" if mends else "Nothing to mend.")
    for command, whats in mends.items():
        print(f"    {command}    # {', '.join(whats)}")


def _print_table(header: tuple, rows: list[tuple]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # the doctor also comes to a Python that holds nothing yet
        width = max(len(row[0]) for row in (header, *rows))
        for first, *rest in (header, *rows):
            print(f"{first:{width}}  {'  '.join(rest)}")
        print()
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*(text if text != "yes" else "[green]yes[/]" for text in row))
    Console().print(table)


if __name__ == "__main__":
    what, *extras = sys.argv[1:] or ["state"]
    if what == "state":
        print("ready" if not missing() else extra())
    else:
        print(*(missing() if what == "missing" else requirements(*extras)), sep="\n")
