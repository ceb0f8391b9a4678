"""What can be said of a stage without timing it: what it asks of memory, what a card has, and what follows from both.

Counts come from traces, sizes from the registry and the sources' own declarations, registers from the compiler.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from common import bench, device, launch, watch
from common.problem import Problem
from stages import ROOT


@dataclass(frozen=True)
class Card:
    """A GPU by its maker's data sheet.

    sms        multiprocessors             lanes      fp32 multiply-adds of one multiprocessor and clock
    clock      GHz, boost                  registers  KB of one multiprocessor
    shared     KB of one multiprocessor    l2         MB
    memory     GB                          bandwidth  of that memory, GB/s
    """

    name: str
    capability: tuple[int, int]
    sms: int
    lanes: int
    clock: float
    shared: int
    l2: float
    memory: int
    bandwidth: float
    registers: int = 256
    match: str = ""  # of the name that the driver gives it

    @property
    def tflops(self) -> float:
        """fp32: two operations a multiply-add."""
        return 2 * self.lanes * self.sms * self.clock / 1e3

    @property
    def schedulers(self) -> int:
        """Each starts one instruction of one warp a clock; every card here has four a multiprocessor."""
        return 4 * self.sms

    @property
    def levels(self) -> dict:
        """{level: (bytes, bytes per second)}; None where the maker publishes no speed."""
        clocks = self.sms * self.clock * 1e9
        return {
            "registers": (self.sms * self.registers * 1024, 3 * 4 * self.lanes * clocks),  # 3 operands a multiply-add
            "shared": (self.sms * self.shared * 1024, 32 * 4 * clocks),  # 32 banks of 4 bytes
            "L2": (self.l2 * 2**20, None),
            "HBM": (self.memory * 1e9, self.bandwidth * 1e9),
        }


CARDS = [
    Card("RTX 4050 laptop", (8, 9), 20, 128, 2.37, 100, 12, 6, 192, match=r"4050 Laptop"),
    Card("T4", (7, 5), 40, 64, 1.59, 64, 4, 16, 320, match=r"\bT4\b"),
    Card("A100 80 GB", (8, 0), 108, 64, 1.41, 164, 40, 80, 2039, match=r"A100.*80"),
    Card("H200", (9, 0), 132, 128, 1.98, 228, 50, 141, 4800, match=r"\bH200\b"),
]
H200 = CARDS[-1]


def card() -> Card:
    """This machine's GPU; without one, that of the record; without that, the H200."""
    name = device.gpu().name if device.gpu() else record().gpu if record() else H200.name
    known = next((c for c in CARDS if re.search(c.match, name)), None)
    return known or (_asked(name) if device.gpu() else H200)


@functools.cache
def _asked(name) -> Card:
    """A card that is none of CARDS, as its driver describes it."""
    import cupy

    gpu, of = device.gpu(), cupy.cuda.Device().attributes
    width, clock = of["GlobalMemoryBusWidth"] / 8, of["MemoryClockRate"] * 1e3
    return Card(
        name.removeprefix("NVIDIA ").removeprefix("GeForce "),
        gpu.capability,
        gpu.multiprocessors,
        64 if gpu.capability in ((7, 0), (7, 5), (8, 0)) else 128,
        of["ClockRate"] / 1e6,
        of["MaxSharedMemoryPerMultiprocessor"] // 1024,
        gpu.l2 / 2**20,
        round(gpu.memory / 1e9),
        2 * clock * width / 1e9,
    )


def cards() -> list[Card]:
    """CARDS, and this machine's if it is another."""
    return CARDS if card() in CARDS else [*CARDS, card()]


def record():
    """The record of a GPU that is committed here (bench.Record), the newest if there are several; None without one."""
    found = [r for r in bench.records() if r.gpu]
    return max(found, key=lambda r: r.date) if found else None


def constants(stage, d=64) -> dict:
    """Br, Bc of a stage; stage 3 goes key by key: Bc = 1. ValueError for a stage without tiles."""
    if stage.is_cuda:
        return {**stage.tiles[d], "Bc": stage.tiles[d].get("Bc", 1)}
    found = {
        n: int(v)
        for names, values in re.findall(r"^([\w, ]+) = ([\d, ]+)", stage.text, re.M)
        for n, v in zip(names.split(", "), values.split(", "), strict=True)
    }
    if "Br" not in found:
        raise ValueError(f"stage {stage.number} has no tiles")
    return found


SMALL = Problem(N=256)


@functools.lru_cache(maxsize=64)
def trace(stage, problem=SMALL):
    """The trace of a stage on a problem, kept: common.cpu.Trace."""
    return watch.trace(stage, problem)


COUNTED = ("global_bytes", "global_requests", "global_sectors", "shared_requests", "shared_wavefronts")


def counts(stage, problem) -> dict[str, float]:
    """What a CUDA stage asks of memory on a whole problem: {name of COUNTED: number}.

    Traced at three small sizes. For whole tiles each count is a N^2 + b N + c, and the curve through three points gives
    it for any multiple of the tile.
    """
    Br = stage.tiles[problem.d]["Br"]
    sizes = [Br, 2 * Br, 3 * Br]
    small = [_count(trace(stage, Problem(N=n, d=problem.d, causal=problem.causal))) for n in sizes]
    heads = problem.batch * problem.heads
    powers = np.linalg.solve(np.vander(sizes, 3).astype(float), np.array([[s[name] for name in COUNTED] for s in small], float))
    return dict(zip(COUNTED, heads * (np.array([problem.N**2, problem.N, 1.0]) @ powers), strict=True))


def _count(trace):
    of = {space: [c for c in trace.lines if c.space == space] for space in ("global", "shared")}
    return dict(
        global_bytes=trace.global_load_bytes + trace.global_store_bytes,
        global_requests=sum(c.requests for c in of["global"]),
        global_sectors=sum(c.sectors for c in of["global"]),
        shared_requests=sum(c.requests for c in of["shared"]),
        shared_wavefronts=sum(c.wavefronts for c in of["shared"]),
    )


def least_bytes(problem) -> int:
    """Q, K and V read once, O written once."""
    return problem.least_bytes


def limits(stage, problem, on=None) -> dict[str, float]:
    """Milliseconds that a CUDA stage needs at least on a card, by what it asks of each part. With waiting it is more.

    HBM            Q, K, V read once and O written once
    shared         one wavefront a clock on each multiprocessor that has a block
    multiply-adds  one a lane and clock, on each scheduler that has a warp
    instructions   the same schedulers start one a clock: a multiply-add or a request to memory
    """
    on = on or card()
    grid, block = launch.geometry(stage, problem.d, problem.N, problem.batch * problem.heads)
    asked = counts(stage, problem)
    products = problem.flops / 2 / 32  # instructions of a warp
    rate = on.lanes / 32 / 4  # of a scheduler and clock
    schedulers = min(on.schedulers, grid[0] * (block[0] // 32))
    clocks = {
        "multiply-adds": products / rate / schedulers,
        "instructions": (products + asked["global_requests"] + asked["shared_requests"]) / schedulers,
        "shared": asked["shared_wavefronts"] / min(on.sms, grid[0]),
    }
    return {"HBM": least_bytes(problem) / on.bandwidth / 1e6} | {name: n / on.clock / 1e6 for name, n in clocks.items()}


def registers(stage, d=64, causal=False, capability=None) -> int:
    """Registers of one thread: asked of the compiled kernel on a GPU, else from stages/resources.md."""
    if device.gpu() and capability in (None, device.gpu().capability):
        return launch.gpu_kernel(stage, d, causal).num_regs
    major, minor = capability or card().capability
    rows = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in (ROOT / "stages/resources.md").read_text().splitlines()
        if line.startswith("|")
    ]
    row = next(r for r in rows if r[:3] == [f"{stage.number} {stage.name}", str(d), "causal" if causal else "full"])
    known = {name: cell for name, cell in zip(rows[0], row, strict=True) if name.startswith("sm_")}
    at_most = [n for n in known if int(n[3:]) <= 10 * major + minor]
    return int(re.match(r"\d+", known[at_most[-1]])[0])


def shared_bytes(stage, d=64) -> int:
    """Static shared memory of a block, by the declarations of the source."""
    return sum(size for _, where, size in arrays(stage, d) if where == "shared")


def arrays(stage, d=64) -> list[tuple[str, str, int]]:
    """The arrays that a kernel declares: (name, "shared" or "registers", bytes of a block), by its own declarations."""
    space = {"d": d, **constants(stage, d)}
    found = []
    for shared, kind, names in re.findall(r"^\s*(__shared__ )?(float4?) ((?:\w+(?:\[[^\]]+\])+(?:, )?)+);", stage.text, re.M):
        for name, extents in re.findall(r"(\w+)((?:\[[^\]]+\])+)", names):
            size = 16 if kind == "float4" else 4
            for extent in re.findall(r"\[([^\]]+)\]", extents):
                size *= eval(extent.replace("/", "//"), {"__builtins__": {}}, space)
            found.append((name, "shared" if shared else "registers", size if shared else size * space["Br"]))
    return found


def resident(stage, d=64, causal=False, on=None) -> int:
    """Blocks of a stage that one multiprocessor of a card holds at once."""
    on = on or card()
    threads = launch.geometry(stage, d, 1, 1)[1][0]
    warps = -(-threads // 32)
    a_warp = -(-registers(stage, d, causal, on.capability) * 32 // 256) * 256  # registers come in portions of 256 a warp
    limits = [65536 // (a_warp * warps), (64 if on.capability != (7, 5) else 32) // warps, 32]
    if shared := shared_bytes(stage, d):
        limits.append(on.shared * 1024 // (shared + (1024 if on.capability >= (8, 0) else 0)))  # 1 KB of a block is the system's
    return max(1, min(limits))


def same(a, b) -> bool:
    """Whether two problems have one shape and mask."""
    return (a.shape, a.causal) == (b.shape, b.causal)


def ceilings(live=None) -> dict:
    """For `roofline`: the ceilings of a bench.Record of this run, else of the committed one, else of the data sheet."""
    for found in (live, record()):
        if found and found.ceilings:
            return dict(
                tflops=found.ceilings["tflops"],
                gbs=found.ceilings["copy_gbs"],
                title=f"{found.gpu}, ceilings measured on {found.date[:10]}",
            )
    return dict(tflops=card().tflops, gbs=card().bandwidth, title=f"{card().name}, ceilings by the data sheet")


def shape_words(p) -> str:
    heads = p.batch * p.heads
    return f"{heads} head{'s' if heads > 1 else ''}, N = {p.N:,}, d = {p.d}{', causal' if p.causal else ''}"
