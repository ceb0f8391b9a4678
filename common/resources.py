"""What the compiler makes of every CUDA kernel on every architecture: registers, shared memory, stack, spills.

No GPU is needed: NVIDIA's own compiler library (NVRTC) is a package, and it runs ptxas for whatever card it is told.
"""

import difflib
import hashlib
import io
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache

from common import device, launch
from common.launch import CompileError
from stages import STAGES

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PAGE = device.ROOT / "stages" / "resources.md"
CACHE = device.ROOT / ".cache" / "resources"


class Unavailable(RuntimeError):
    """There is no NVRTC here, or not the one that wrote the page."""


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture. Registers are of one thread, shared memory of one block; bytes otherwise."""

    registers: int
    shared: int
    stack: int  # local memory of one thread: arrays that found no registers, and spills
    spill_stores: int
    spill_loads: int

    def __str__(self) -> str:
        """As the page has it: "96", or three lines where there is local memory."""
        spills = f"<br>spills {self.spill_stores} / {self.spill_loads}" if self.spill_stores or self.spill_loads else ""
        return f"{self.registers}" + (f"<br>stack {self.stack}" if self.stack else "") + spills


@dataclass(frozen=True)
class Row:
    """One kernel: a CUDA stage with its constants. `by_arch` maps "sm_75" … to Resources."""

    stage: int
    name: str
    d: int
    causal: bool
    by_arch: dict


@cache
def nvrtc_version() -> str:
    """ "13.0"; raises Unavailable where there is no NVRTC that cuda.core can load."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program  # noqa: F401  (what `compile` needs)

        error, major, minor = nvrtc.nvrtcVersion()
        if error:
            raise RuntimeError(str(error))
    except Exception as error:  # not installed, or its library does not load: many types
        message = str(error).strip().split("\n")[0]
        raise Unavailable(f"NVIDIA's compiler library (NVRTC) cannot be used here: {message}") from None
    return f"{major}.{minor}"


def compile(source: str, arch: str) -> Resources:
    """`source` is complete CUDA C++ with one kernel, `arch` as "sm_90". Raises CompileError, Unavailable.

    The error's message is the compiler's own; it names the .cu file and the line, or what ptxas found too much.

    The answer is kept in .cache by content, so that only what was edited is compiled again.
    """
    key = hashlib.sha256("\0".join((nvrtc_version(), arch, source)).encode()).hexdigest()
    kept = CACHE / f"{key[:32]}.json"
    try:
        return Resources(**json.loads(kept.read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or from another version of this file
        found = _report(_compile(source, arch))
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")  # renamed when whole: a reader never sees half a file
    part.write_text(json.dumps(asdict(found)))
    part.replace(kept)
    return found


def _compile(source: str, arch: str) -> str:
    """The compiler's log."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=arch, std="c++17", ptxas_options=["-v"])
    try:
        Program(source, "c++", options).compile("cubin", logs=log)
    except Exception as error:  # the package's own type, whose message is the log
        log = str(error).partition("compilation log:")[2] or str(error)
        # what ptxas -v tells besides its errors would bury them
        lines = [line.strip(" \0") for line in log.split("\n") if not re.match(r"ptxas( info|\s+\.)", line)]
        raise CompileError("\n".join(lines).strip()) from None
    return log.getvalue()


def _report(log: str) -> Resources:
    def number(pattern):
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        shared=number(r"(\d+) bytes smem"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
    )


def kernels() -> list[tuple]:
    """(stage, d, causal) of every CUDA kernel that ships, in ladder order."""
    return [
        (stage, d, causal)
        for stage in STAGES.values()
        if stage.is_cuda
        for d in stage.tiles
        for causal in (False, True)
    ]


def table(architectures=ARCHITECTURES) -> list[Row]:
    """A row for each kernel. Raises CompileError if one does not compile on one architecture, Unavailable."""
    nvrtc_version()
    jobs = [(launch.source(*kernel), arch) for kernel in kernels() for arch in architectures]
    with ThreadPoolExecutor(device.cores()) as pool:  # the compiler does not hold Python's lock
        found = iter(pool.map(compile, *zip(*jobs)))
    return [
        Row(stage.number, stage.name, d, causal, {arch: next(found) for arch in architectures})
        for stage, d, causal in kernels()
    ]


def markdown(rows: list[Row]) -> str:
    """The page: what it is, then one table."""
    architectures = list(rows[0].by_arch)
    lines = [
        "# What the compiler makes of the kernels",
        "",
        f"Written by `make resources` with NVRTC {nvrtc_version()}; no GPU is needed. Shared memory is bytes a block.",
        "Each architecture has the registers of one thread and, only where there are any, the bytes of its stack frame",
        "and of its spills (stores / loads). Both live in local memory, which is global memory under another name.",
        "",
        f"| stage | d | mask | shared | {' | '.join(architectures)} |",
        "|:--|--:|:--|--:|" + "--:|" * len(architectures),
    ]
    lines += [f"| {' | '.join([*_who(row), *map(str, row.by_arch.values())])} |" for row in rows]
    return "\n".join(lines) + "\n"


def _who(row: Row) -> list[str]:
    (shared,) = {resources.shared for resources in row.by_arch.values()}  # one number: the stage declares it
    return [f"{row.stage} {row.name}", str(row.d), "causal" if row.causal else "full", f"{shared:,}"]


def check(architectures=ARCHITECTURES) -> str:
    """How the page's columns of these architectures differ from what the compiler says now, as a diff; "" if nowhere.

    Raises Unavailable where this cannot be told: other versions of the compiler count other registers.
    """
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    wrote = re.search(r"NVRTC ([\d.]+);|$", page)[1] or nvrtc_version()
    if wrote != nvrtc_version():
        raise Unavailable(f"stages/resources.md is by NVRTC {wrote}, and here is {nvrtc_version()}.")
    left_out = [5 + number for number, arch in enumerate(ARCHITECTURES) if arch not in architectures]
    cells = [line.split("|") for line in page.split("\n")]
    then = ["|".join(cell for number, cell in enumerate(line) if number not in left_out) for line in cells]
    now = markdown(table(architectures)).split("\n")
    return "\n".join(difflib.unified_diff(then, now, "stages/resources.md", "now", lineterm=""))


def main(write: bool = False) -> int:
    """`make resources`: compile everything, show the extremes, write the page or say that it is out of date."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    with console.status("Compiling every kernel for seven architectures; a minute or two the first time …"):
        rows = table()
    shown = Table("stage", "d", "mask", "shared", "registers", "stack", "spills")
    shown.title = f"NVRTC {nvrtc_version()}, {ARCHITECTURES[0]} … {ARCHITECTURES[-1]}"
    for row in rows:
        numbers = zip(*((r.registers, r.stack, r.spill_stores + r.spill_loads) for r in row.by_arch.values()))
        extremes = ((min(column), max(column)) for column in numbers)
        shown.add_row(*_who(row), *(f"{low}" if low == high else f"{low} … {high}" for low, high in extremes))
    console.print(shown)
    if write:
        PAGE.write_text(markdown(rows), encoding="utf-8")
        console.print(f"Written, for each architecture: {PAGE.relative_to(device.ROOT)}")
    elif check():
        console.print(f"{PAGE.relative_to(device.ROOT)} says otherwise: `make resources` writes it anew.")
    return 0
