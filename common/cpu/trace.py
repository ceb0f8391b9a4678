"""What a run of a kernel on the CPU found: findings (mistakes) and, in trace mode, counts for each source line."""

import ctypes
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field, replace

from . import abi


class LaunchError(RuntimeError):
    """The launch is wrong or ended early: arguments, a barrier not reached by all, deadlock, time limit, a fault."""


@dataclass(frozen=True)
class Finding:
    """One mistake, found at one pair of source lines (however often it happened there: `count`)."""

    kind: str                          # one of KINDS
    message: str                       # one plain sentence that names the place or places
    file: str | None = None            # "stages/stage4_tiled.cu", None where no line is known
    line: int | None = None
    other_file: str | None = None      # the other access of a race, the other barrier
    other_line: int | None = None
    array: str | None = None           # parameter name (K) or shared array's name (Ks)
    index: int | None = None           # in elements of the array, counted from its start; may lie outside
    block: int = 0                     # linear block index
    other_block: int = 0
    thread: int | None = None          # linear thread index in the block
    other_thread: int | None = None
    count: int = 1                     # times seen; for a race, pairs of accesses


# In the order of Kind in runtime.h. Each message begins with the place.
MESSAGES = (
    ("early return before a barrier",
     "{who} waits at this barrier, but thread {other_thread} has already returned from the kernel"),
    ("divergent barrier", "{who} reached this barrier while thread {other_thread} waits at another one, {other}"),
    ("divergent warp operation",
     "{who} is at this warp operation while thread {other_thread} of its warp is at another one, {other}"),
    ("lane not in its mask", "{who} calls a warp operation with mask {note}, which leaves its own lane out"),
    ("deadlock", "no thread of block {block} can go on: {stood}"),
    ("stack overflow", "{who} needs more than 256 KB of stack (a large local array, or recursion)"),
    ("fault", "{who} touched memory that is not its own, or not aligned (address {address}); "
              "trace mode says which array"),
    ("division by zero", "{who} divided an integer by zero"),
    ("trap", "{note} in {who}"),
    ("write past the end", "block {block} wrote past the end of the shared array {array}; trace mode says where"),
    ("race", "thread {thread} {verb} {what}, which thread {other_thread} {other_verb} at {other}; "
             "no barrier orders the two (block {block})"),
    ("race between blocks", "block {block} {verb} {what}, which block {other_block} {other_verb} at {other}; "
                            "nothing orders two blocks"),
    ("out of bounds", "{who} {verb} {what}"),
    ("uninitialised shared read", "{who} reads {what}, which no thread of the block has written"),
    ("misaligned", "{who} {verb} {size} bytes at {what}, byte {offset} of {array}, which is not a multiple of {size}"),
)
KINDS = (*(kind for kind, _ in MESSAGES), "time limit")


@dataclass(frozen=True)
class Example:
    """One request of a warp: which address each of its 32 lanes touched. For pictures.

    Arrays start at multiples of 256 bytes: sector = offset // 32 of that array, bank = offset // 4 % 32.
    """

    size: int                                        # bytes of each lane's access: 1, 2, 4, 8 or 16
    lanes: tuple[tuple[str, int] | None, ...]        # (array, byte offset), None: took no part
    cost: int                                        # sectors (global) or wavefronts (shared)
    ideal: int                                       # the fewest possible for the bytes touched


@dataclass(frozen=True)
class LineCounts:
    """What one source line asked of one kind of memory, summed over the launch."""

    file: str
    line: int
    space: str                         # "global" or "shared"
    op: str                            # "load", "store" or "atomic"
    arrays: tuple[str, ...]            # names, in the order met
    size: int                          # bytes of one lane's access (the widest)
    requests: int                      # warp-level instructions
    bytes: int                         # asked for: sum over lanes
    sectors: int                       # global: 32-byte sectors; 0 for shared
    wavefronts: int                    # shared: passes over the 32 banks; 0 for global
    ideal: int                         # sectors that the bytes touched would fill; wavefronts without conflicts
    examples: tuple[Example, ...] = ()          # for each array its first full warp; then the most wasteful, if another

    @property
    def cost(self) -> int:
        """Sectors or wavefronts, whichever this space counts."""
        return self.sectors if self.space == "global" else self.wavefronts

    @property
    def per_request(self) -> float:
        return self.cost / self.requests if self.requests else 0.0

    @property
    def ideal_per_request(self) -> float:
        return self.ideal / self.requests if self.requests else 0.0

    @property
    def conflicts(self) -> int:
        """Bank conflicts: wavefronts beyond the ideal (0 for global)."""
        return self.wavefronts - self.ideal if self.space == "shared" else 0


@dataclass(frozen=True)
class Trace:
    """A traced launch. `findings` is empty and `completed` true when nothing was wrong."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    findings: tuple[Finding, ...]
    lines: tuple[LineCounts, ...]      # by file, line, space, op
    completed: bool                    # False: stopped by a finding or the time limit; the counts end there
    static_shared_bytes: int           # for each block, as `ptxas -v` says
    dynamic_shared_bytes: int
    arrays: dict[str, int] = field(default_factory=dict)      # bytes of each parameter's array and shared array
    seconds: float = 0.0               # time of the run on this CPU; says nothing about a GPU

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes

    def _bytes(self, space, *ops):
        return sum(c.bytes for c in self.lines if c.space == space and c.op in ops)

    @property
    def global_load_bytes(self) -> int:
        """Bytes asked of global memory by loads: what the lanes asked for, not what DRAM delivered."""
        return self._bytes("global", "load", "atomic")

    @property
    def global_store_bytes(self) -> int:
        return self._bytes("global", "store", "atomic")

    @property
    def shared_load_bytes(self) -> int:
        return self._bytes("shared", "load", "atomic")

    @property
    def shared_store_bytes(self) -> int:
        return self._bytes("shared", "store", "atomic")

    def at(self, line: int, space: str | None = None, op: str | None = None) -> tuple[LineCounts, ...]:
        """The counts of one source line."""
        return tuple(c for c in self.lines if c.line == line and space in (None, c.space) and op in (None, c.op))

    def to_json(self) -> dict:
        """Plain dicts, lists, numbers and strings, with the sums and rates included."""
        rates = ("cost", "per_request", "ideal_per_request", "conflicts")
        sums = ("shared_bytes", "global_load_bytes", "global_store_bytes", "shared_load_bytes", "shared_store_bytes")
        return {**asdict(self), **{n: getattr(self, n) for n in sums},
                "lines": [{**asdict(c), **{n: getattr(c, n) for n in rates}} for c in self.lines]}


# -- from program counters to source lines --

def _look_up(kernel, counters) -> dict[int, tuple[str | None, int | None]]:
    """Program counter -> (file, line) of the innermost frame in the user's source: the shim's own are skipped."""
    base, found = kernel._c.cpu_base() or 0, {pc: (None, None) for pc in counters}
    wanted = [pc for pc in counters if 0 < pc - base < 1 << 32]
    if not wanted:
        return found
    if shutil.which("addr2line"):
        command = ["addr2line", "-a", "-i", "-e", str(kernel.library), *(hex(pc - base) for pc in wanted)]
        rows = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    elif shutil.which("atos"):         # macOS: one line for each address
        command = ["atos", "-o", str(kernel.library), "-l", hex(base), *map(hex, wanted)]
        answers = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        rows = [r for pc, a in zip(wanted, answers) for r in (hex(pc - base), *re.findall(r"\((\S+:\d+)\)", a))]
    else:
        return found
    at = None
    for row in rows:
        if re.fullmatch(r"0x[0-9a-f]+", row):
            at = int(row, 16) + base
        elif at and found[at] == (None, None):
            m = re.match(r"(?:/kernel/)?(.*):(\d+)", row)
            if m and m[2] != "0" and not m[1].endswith(("shim.h", "entry", "kernel.cpp", "runtime.cpp", "trace.cpp")):
                found[at] = (m[1], int(m[2]))
    return found


# -- from the runtime's records to findings --

def _ranges(numbers) -> str:
    """[0, 1, 2, 7] -> "0-2, 7"."""
    out, numbers = [], sorted(numbers)
    for n in numbers:
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _threads(numbers) -> str:
    return f"thread{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}"


@dataclass
class Watched:
    """An array that an address can belong to. `base`: from the start of its space."""

    name: str
    space: str
    base: int
    size: int
    element: int                       # bytes; 0 unknown
    writable: bool
    array: object = None               # the caller's, for global ones


def findings_of(kernel, late, watched=()) -> list[Finding]:
    """The findings of the launch that has just ended. `late`: the time limit in seconds, if that ended it."""
    c, raw, standing = kernel._c, [], []
    while c.cpu_finding(len(raw), ctypes.byref(f := abi.Finding())):
        raw.append(f)
    while c.cpu_standing(len(standing), ctypes.byref(s := abi.Standing())):
        standing.append(s)
    # Return addresses point behind the call; the pc of a signal points at the culprit.
    for f in raw:
        if f.kind not in (abi.FAULT, abi.STACK_OVERFLOW, abi.DIVISION):
            f.here.pc -= f.here.pc > 0
        f.there.pc -= f.there.pc > 0
    lines = _look_up(kernel, {p.pc for f in raw for p in (f.here, f.there)} | {s.here.pc for s in standing})

    def where(place):
        if place.pc:
            return lines[place.pc]
        return (place.file.decode(), place.line) if place.file else (None, None)

    merged = {}
    for f in raw:
        found = _finding(kernel, f, where, _standing(standing, where), watched)
        places = [(found.file, found.line), (found.other_file, found.other_line)]
        key = found.kind, *(sorted(places, key=str) if "race" in found.kind else places)
        merged[key] = replace(merged[key], count=merged[key].count + found.count) if key in merged else found
    # A read that races with the only write is also a read of nothing; the race is the cause, so it alone is told.
    racing = {(*place, f.array) for f in merged.values() if f.kind == "race"
              for place in ((f.file, f.line), (f.other_file, f.other_line))}
    findings = [f for f in merged.values()
                if f.kind != "uninitialised shared read" or (f.file, f.line, f.array) not in racing]
    if late is not None and not any(f.fatal for f in raw):
        running = next((s for s in standing if s.running), None)
        file, line = where(running.here) if running else (None, None)
        at = f"{file}:{line}" if file else f"kernel {kernel.name}"
        text = _standing(standing, where) or "where its threads stood is not known"
        findings.append(Finding("time limit", f"{at}: no block ended within {late:g} s: {text}", file, line,
                                thread=running.thread if running else None))
    return findings


def _standing(standing, where) -> str:
    """Where the threads of the block stood when it was stopped: "threads 0-30 wait at the barrier of x.cu:12; …"."""
    groups = {}
    for s in standing:
        file, line = where(s.here)
        at = f"{file}:{line}" if file else "an unknown line"
        text = (f"stood at {at}" if s.running else f"waited at the barrier of {at}" if s.state == abi.AT_BARRIER
                else f"waited in the warp operation of {at}" if s.state == abi.IN_WARP
                else f"could go on from {at}" if file else "had not begun")
        groups.setdefault(text, []).append(s.thread)
    return "; ".join(f"{_threads(threads)} {text}" for text, threads in groups.items())


def _finding(kernel, f, where, stood, watched) -> Finding:
    here, there = where(f.here), where(f.there)
    at, other = (f"{file}:{line}" if file else f"kernel {kernel.name}" for file, line in (here, there))
    array = index = element = w = None
    if f.kind == abi.PAST_THE_END:
        dynamic = next((a.name for a in kernel.arrays if a.dynamic), None)
        array = kernel.layout[f.array][0] if f.array in kernel.layout else dynamic
    elif f.array >= 0:
        w = watched[f.array]
        array, element = w.name, w.element or f.size
        index = f.offset // element
    verbs = "reads", "writes", "updates"
    kind, text = MESSAGES[f.kind]
    text = text.format(
        who=f"thread {f.thread} of block {f.block}", thread=f.thread, block=f.block, size=f.size, offset=f.offset,
        other_thread=f.other_thread, other_block=f.other_block, other=other, note=f.note.decode(), stood=stood,
        verb=verbs[f.write], other_verb=verbs[f.other_write], array=array, address=hex(f.offset % 2**64),
        what=f"{array}[{index}], but {array} has {w.size // element:,} elements" if w and f.kind == abi.OUT_OF_BOUNDS
        else f"{array}[{index}]" if w else "an address that belongs to no array")
    return Finding(kind, f"{at}: {text}", *here, *there, array=array, index=index, block=f.block,
                   other_block=f.other_block, thread=f.thread,
                   other_thread=f.other_thread if f.other_thread >= 0 else None, count=f.count)


# -- from the detector's sites to lines --

def counts_of(kernel, watched) -> list[LineCounts]:
    """Sums the instructions of each source line."""
    sites = []
    while kernel._c.cpu_site(len(sites), ctypes.byref(s := abi.Counts())):
        sites.append(s)
    sites = [s for s in sites if s.requests]
    lines = _look_up(kernel, {s.pc - 1 for s in sites})
    groups = {}
    for s in sites:
        groups.setdefault((*lines[s.pc - 1], abi.SPACES[s.space], abi.OPS[s.op]), []).append(s)

    def lane(space, offset):
        w = next((w for w in watched if w.space == space and w.base <= offset < w.base + w.size), None)
        return (w.name, offset - w.base) if w else None

    def example(space, size, r):
        lanes = (lane(space, r.offset[i]) if r.lanes >> i & 1 else None for i in range(32))
        return Example(size, tuple(lanes), r.cost, r.ideal)

    counts = []
    for (file, line, space, op), group in groups.items():
        def total(what, group=group):
            return sum(getattr(s, what) for s in group)

        mask = 0
        for s in group:
            mask |= s.arrays
        fullest = {}                                                   # one for each array: `Q[i] * K[j]` gets two
        for s in sorted(group, key=lambda s: -s.first.lanes.bit_count()):
            fullest.setdefault(s.arrays, example(space, s.size, s.first))
        worst = max(group, key=lambda s: s.worst.cost - s.worst.ideal)
        examples = list(fullest.values())
        if worst.worst.lanes and (extra := example(space, worst.size, worst.worst)) not in examples:
            examples.append(extra)
        cost = total("cost")
        names = tuple(w.name for i, w in enumerate(watched) if mask >> i & 1)
        counts.append(LineCounts(file or "", line or 0, space, op, names, max(s.size for s in group),
                                 total("requests"), total("bytes"), cost if space == "global" else 0,
                                 cost if space == "shared" else 0, total("ideal"), tuple(examples)))
    return sorted(counts, key=lambda c: (c.file, c.line, c.space, c.op))
