"""Planted bugs: what a check that has never been seen to fail is worth.

Each bug is a textual patch of a true source, with what a reader would see and what must catch it:

    check      common.check finds wrong numbers
    compiler   the source does not compile
    resources  the compiler's report shows what should not be there
    executor   the CPU executor stops the launch
    trace      the watched launch names the lines: a race, a stray access, or more sectors or wavefronts than before
    far        the last block of a problem with more than 2^32 elements gives wrong numbers

BUGS serves the tests, `make bugs` and the notebooks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from stages import STAGES, Stage


@dataclass(frozen=True)
class Bug:
    """patches  (old, new) texts; old must stand in the source exactly once
    sees     what a reader without a check would see
    caught_by  check, compiler, resources, executor, trace or far
    kind     of a trace: the kind of the finding, or "sectors" or "wavefronts" for what is right but slow
    at       of a trace: texts of the lines that it must name, all of them and no others
    nvidia   the tool of compute-sanitizer that sees it on a GPU too, or why none does
    """

    name: str
    stage: int
    patches: tuple[tuple[str, str], ...]
    sees: str
    caught_by: str = "check"
    d: int = 64
    tiles: dict = field(default_factory=dict, hash=False)
    kind: str = ""
    at: tuple[str, ...] = ()
    nvidia: str = ""

    def lines(self, text: str) -> set[int]:
        """The numbers of the lines `at` in a source."""
        found = [[n for n, line in enumerate(text.splitlines(), 1) if part in line] for part in self.at]
        for part, numbers in zip(self.at, found):
            if len(numbers) != 1:
                raise ValueError(f"bug {self.name!r}: {part!r} stands in {len(numbers)} lines, not in one")
        return {numbers[0] for numbers in found}

    def planted(self) -> Stage:
        """The stage with the bug in it. ValueError if the source no longer has what the patch replaces."""
        try:
            return STAGES[self.stage].changed(*self.patches, tiles={self.d: self.tiles})
        except ValueError as error:
            raise ValueError(f"bug {self.name!r}: {error}") from None


SILENT = "numbers that look right"
CLEAN = "right on normal inputs"
RARELY = "right on most runs, on most machines"
SLOW = "right, and slow"
LENGTHS = (100, 20)  # of what is traced: with a ragged last tile, and with less than one tile
DONE = "__syncthreads();  // all threads are done with the last tile"
THERE = "__syncthreads();  // all of this tile is there"

BUGS = [
    # -- stage 2: the update of max, sum and output --
    Bug("the running max starts at 0", 2, (("np.full_like(q[..., :1], -np.inf)", "np.zeros_like(q[..., :1])"),),
        CLEAN + "; NaN once all scores of a row are far below 0"),
    Bug("the sum is not rescaled", 2, (("l = alpha * l +", "l = l +"),), SILENT),
    Bug("the output is not rescaled", 2, (("o = alpha * o +", "o = o +"),), SILENT),
    Bug("neither sum nor output is rescaled", 2, (("l = alpha * l +", "l = l +"), ("o = alpha * o +", "o = o +")), SILENT),
    Bug("the max is not carried to the next tile", 2, (("np.maximum(m, s.max(-1, keepdims=True))", "s.max(-1, keepdims=True)"),),
        CLEAN + "; inf or NaN once the max falls by 89 from one tile to the next"),
    Bug("the last partial tile is skipped", 2, (("if causal else N, Bc", "if causal else N - N % Bc, Bc"),),
        "right whenever N is a multiple of the tile"),
    Bug("the causal mask keeps one key too many", 2, (("row0 - j0 + 1)", "row0 - j0 + 2)"),), "right when full"),
    # -- stage 3: one thread a row --
    Bug("one float of each K row is read", 3, (("q[x] * K[(size_t)j * d + x]", "q[x] * K[(size_t)j * d]"),), SILENT),
    Bug("the running max starts at 0", 3, (("float m = -INFINITY", "float m = 0"),), CLEAN),
    Bug("the running max starts at -100", 3, (("float m = -INFINITY", "float m = -100"),), CLEAN),
    Bug("the running max starts at the smallest positive float", 3, (("float m = -INFINITY", "float m = 1.17549435e-38f"),), CLEAN),
    Bug("the sum is not rescaled", 3, (("l = l * alpha + p", "l = l + p"),), SILENT),
    Bug("the output is not rescaled", 3, (("o[x] * alpha + p", "o[x] + p"),), SILENT),
    Bug("neither sum nor output is rescaled", 3, (("l = l * alpha + p", "l = l + p"), ("o[x] * alpha + p", "o[x] + p")), SILENT),
    Bug("the scale is forgotten", 3, (("s *= scale;", ""),), SILENT),
    Bug("<= for < in the causal loop", 3, (("causal ? row + 1 : N", "causal ? min(row + 2, N) : N"),), "right when full"),
    Bug("all heads read the keys of the first", 3, (("K += head; ", ""),), "right with one head"),
    Bug("the first key is skipped", 3, (("for (int j = 0; j < keys", "for (int j = 1; j < keys"),), SILENT),
    # -- stage 4: tiles in shared memory --
    Bug("four tiles of 64 x 64 floats", 4, (), "a compiler message: 64 KB of shared memory, and 48 is the limit",
        "compiler", tiles=dict(Br=64, Bc=64)),
    Bug("one float of each K row is loaded", 4, (("Ks[t / d][t % d] = inside", "if (t % d == 0) Ks[t / d][t % d] = inside"),),
        "whatever shared memory held before: other numbers on each run"),
    Bug("the padded tail is not masked", 4, (("j0 + j < N && (!causal", "(!causal"),), "right whenever N is a multiple of the tile"),
    Bug("hidden keys get the score 0", 4, (("s * scale : -INFINITY", "s * scale : 0"),), "right when full, and N a multiple of the tile"),
    Bug("the last tile is skipped", 4, (("j0 < keys; j0 += Bc", "j0 + Bc < keys; j0 += Bc"),), SILENT),
    Bug("every second tile is stale", 4, (("t < Bc * d; t += Br", "t < Bc * d && j0 / Bc % 2 == 0; t += Br"),), SILENT),
    Bug("the max is not carried to the next tile", 4, (("float m_new = m;", "float m_new = -INFINITY;"),), CLEAN),
    Bug("the sum is not rescaled", 4, (("l *= alpha;", ""),), SILENT),
    Bug("the output is not rescaled", 4, (("o[x] *= alpha;", ""),), SILENT),
    Bug("< for <= in the causal mask", 4, (("j0 + j <= row)", "j0 + j < row)"),), "NaN in the first row, when causal"),
    Bug("threads without a row return early", 4, (("const int row = row0 + i;", "const int row = row0 + i; if (row >= N) return;"),),
        "works on some GPUs, hangs on others: the tile's other threads wait at a barrier", "executor",
        nvidia="none: since Volta, a thread that has left counts as arrived"),
    Bug("offsets are counted in 32 bits", 4, (("blockIdx.x / tiles * (size_t)N * d", "blockIdx.x / tiles * N * d"),),
        "right until a batch is large, then another head's numbers", "far", d=128),
    # -- stage 5: scores in registers, float4 --
    Bug("the loop over the scores is not unrolled", 5,
        (("#pragma unroll\n            for (int j = 0; j < Bc; j++) {", "#pragma unroll 1\n            for (int j = 0; j < Bc; j++) {"),),
        "right, and slow: s is in local memory", "resources"),
    Bug("three of the four floats are multiplied", 5, (("                s[j] += q.w * k.w;\n", ""),), SILENT),
    Bug("the causal loop ends one tile early", 5,
        (("causal ? min(row0 + Br, N) : N", "causal ? min(row0 + Br - Bc, N) : N"),), "right when full"),
    Bug("the sum is rescaled twice", 5, (("l *= alpha;", "l *= alpha * alpha;"),), SILENT),
    Bug("the output is not divided by the sum", 5, (("o[x].w / l}", "o[x].w}"),), "right in three features of four"),
    Bug("V is read from the opposite head", 5,
        (("V += head;", "V += (gridDim.x / tiles - 1) * (size_t)N * d - head;"),), "right with one head"),
    # -- races: right on most runs --
    Bug("no barrier after the load", 4, ((THERE, ""),), RARELY, "trace", kind="race", at=("Ks[t / d][t % d] =", "s += Qs[i][x]"),
        nvidia="racecheck"),
    Bug("no barrier before the load", 4, ((DONE, ""),), RARELY, "trace", kind="race", at=("Ks[t / d][t % d] =", "s += Qs[i][x]"),
        nvidia="racecheck"),
    Bug("no barrier after the load", 5, ((THERE, ""),), RARELY, "trace", kind="race",
        at=("Vs[t / (d / 4)][t % (d / 4)] =", "v = Vs[j][x]"),
        nvidia="racecheck"),
    Bug("no barrier before the load", 5, ((DONE, ""),), RARELY, "trace", kind="race",
        at=("Vs[t / (d / 4)][t % (d / 4)] =", "v = Vs[j][x]"),
        nvidia="racecheck"),
    Bug("blocks of one warp, without __syncwarp", 4, ((THERE, ""), (DONE, "__syncwarp();")), RARELY, "trace", tiles=dict(Br=32),
        kind="race", at=("Ks[t / d][t % d] =", "s += Qs[i][x]"),
        nvidia="racecheck"),
    Bug("two blocks write one row", 3, (("% tiles * Br", "% tiles * (Br - 1)"),), "the last rows are missing", "trace",
        kind="race between blocks", at=("= o[x] / l",),
        nvidia="none: racecheck watches shared memory alone"),
    Bug("a barrier in a branch", 4, ((THERE, "if (row < N) __syncthreads();"),), "hangs, or is wrong, when N is no multiple of the tile",
        "trace", kind="divergent barrier", at=("if (row < N) __syncthreads();", DONE),
        nvidia="synccheck"),
    # -- stray accesses --
    Bug("one key too many is read", 3, (("j < keys", "j <= keys"),), "an illegal address, or numbers from elsewhere", "trace",
        kind="out of bounds", at=("s += q[x]",),
        nvidia="memcheck"),
    Bug("rows past N are written", 5, (("if (row < N)  //", "if (true)  //"),), "another head's rows are overwritten", "trace",
        kind="out of bounds", at=("o[x].w / l",),
        nvidia="memcheck"),
    Bug("one key past the tile is read", 4,
        (("j < Bc; j++) {\n            float s", "j <= Bc; j++) {\n            float s"),),
        "numbers from the next tile in shared memory", "trace", kind="out of bounds", at=("s += Qs[i][x]",),
        nvidia="none: memcheck knows where a block's shared memory ends, not where one array in it does"),
    Bug("the tail of a tile is not filled", 5,
        (("Vs[t / (d / 4)][t % (d / 4)] = inside", "if (inside) Vs[t / (d / 4)][t % (d / 4)] = inside"),),
        "NaN now and then: 0 times what shared memory held before", "trace", kind="uninitialised shared read", at=("v = Vs[j][x]",),
        nvidia="none: initcheck watches global memory alone"),
    Bug("a float4 at an address that is not a multiple of 16", 5, (("(Q + (size_t)row0 * d))[t]", "(Q + (size_t)row0 * d + 1))[t]"),),
        "a misaligned address", "trace", kind="misaligned", at=("Qs[t / (d / 4)]",),
        nvidia="memcheck"),
    # -- right, and slow --
    Bug("Q is not padded", 4, (("Qs[Br][d + 1]", "Qs[Br][d]"),), SLOW, "trace", kind="wavefronts", at=("s += Qs[i][x]",)),
    Bug("S is not padded", 4, (("S[Br][Bc + 1]", "S[Br][Bc]"),), SLOW, "trace", kind="wavefronts", at=("S[i][j] = s;",)),
    Bug("Q is not padded", 5, (("Qs[Br][d / 4 + 1]", "Qs[Br][d / 4]"),), SLOW, "trace", kind="wavefronts", at=("q = Qs[i][x]",)),
    Bug("a warp reads a column of Q", 4,
        (("Qs[t / d][t % d] = row0 + t / d < N ? Q[(size_t)row0 * d + t]",
          "Qs[t % Br][t / Br] = row0 + t % Br < N ? Q[(size_t)(row0 + t % Br) * d + t / Br]"),),
        SLOW, "trace", kind="sectors", at=("Qs[t % Br]",)),
]


def catch(bug: Bug, on=None) -> tuple[str, str]:
    """Runs one bug: (what caught it, in what words); ("nothing", "") if all passed."""
    from common import check, launch
    from common.problem import Problem

    stage = bug.planted()
    try:
        if bug.caught_by in ("resources", "trace", "far"):
            words = {"resources": _resources, "trace": _trace, "far": _far}[bug.caught_by](bug, stage)
            return (bug.caught_by, words) if words else ("nothing", "")
        if wrong := check.first_wrong(stage, Problem(1, 2, 200, bug.d), on=on):
            return "check", wrong[1]
    except launch.CompileError as error:
        return "compiler", str(error)
    except launch.LaunchError as error:
        return "executor", str(error)
    return "nothing", ""


def _resources(bug, stage) -> str:
    from common import launch, resources

    seen, true = (resources.compile(launch.source(s, bug.d, False), "sm_90") for s in (stage, STAGES[bug.stage]))
    return f"{seen.stack} bytes of stack frame a thread, {true.stack} in the true source" if seen.stack > true.stack else ""


def _trace(bug, stage) -> str:
    from common import watch
    from common.problem import Problem

    lines = bug.lines(stage.text)
    if bug.kind in ("sectors", "wavefronts"):
        (line,) = lines
        space, unit = ("global", "sectors") if bug.kind == "sectors" else ("shared", "wavefronts")
        seen = watch.trace(stage, Problem(1, 2, 128, bug.d))
        return next((f"{c.file}:{line}: {c.per_request:.1f} {unit} a request, {c.ideal_per_request:.1f} would do"
                     for c in seen.at(line, space) if watch.worse(c)), "")
    found = (f for N in LENGTHS for f in watch.trace(stage, Problem(1, 2, N, bug.d)).findings)
    return next((f.message for f in found if f.kind == bug.kind and {f.line, f.other_line} - {None} == lines), "")


def _far(bug, stage) -> str:
    """Runs the last block alone, over address space that is reserved and almost nowhere touched."""
    import mmap

    from common import cpu, launch

    N, d = stage.tiles[bug.d]["Br"], bug.d  # one block a head
    heads = 2**32 // (N * d) + 2
    text = launch.source(stage.patched(stage.text.replace("blockIdx.x", f"({heads - 1}u + blockIdx.x)")), d, False)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    Q, K, V, O = (np.frombuffer(mmap.mmap(-1, heads * N * d * 4, flags=flags), np.float32).reshape(heads, N, d) for _ in range(4))
    V[-1] = 1
    cpu.compile(text)((1, 1, 1), (N, 1, 1), (Q, K, V, O, np.int32(N), np.float32(1)), workers=1)
    return "" if (O[-1] == 1).all() else f"head {heads - 1:,} of {heads:,}: O is not the V of that head"


def main(names=(), as_json=False, on=None) -> int:
    """`make bugs`: runs the bugs whose name or stage is asked for; 1 if one is caught by nothing or by the wrong thing."""
    from rich.progress import track

    from common import terminal

    chosen = [b for b in BUGS if not names or any(n in (b.name, str(b.stage)) or n in b.name for n in names)]
    if not chosen:
        raise ValueError(f"no bug is named {' or '.join(names)}")
    console = terminal.console(as_json)
    found = []
    for bug in track(chosen, "running the planted bugs", console=console, transient=True):
        with np.errstate(all="ignore"):  # NumPy's own warnings are not what must catch a bug
            by, words = catch(bug, on)
        found.append(dict(bug=bug.name, stage=bug.stage, sees=bug.sees, expected=bug.caught_by, caught_by=by, words=words))
    if as_json:
        print(json.dumps(found, indent=1))
    table = terminal.table()
    for name in ("stage", "bug", "must be caught by", "caught by", "in these words"):
        table.add_column(name, overflow="fold")
    for row in found:
        right = row["caught_by"] == row["expected"]
        table.add_row(str(row["stage"]), row["bug"], row["expected"], f"[{'green' if right else 'red'}]{row['caught_by']}[/]", row["words"])
    console.print(table)
    caught = sum(row["caught_by"] == row["expected"] for row in found)
    console.print(f"\n{caught} of {len(found)} bugs caught by what must catch them.")
    return 0 if caught == len(found) else 1
