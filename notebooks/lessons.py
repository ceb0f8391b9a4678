"""What the notebooks do with the stages besides showing them: bugs, experiments, predictions, exercises.

Kernel text stands here, and in no cell: as patches of the true sources, which are asserted to match.
"""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common import bench, check, device, launch, resources, show
from common.problem import ARTICLE, FULL_64, Problem
from stages import STAGES
from stages import bugs as planted

BLANK = "____"


def fold(title, body) -> str:
    """Markdown that opens on a click."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


# -- bugs -------------------------------------------------------------------------------------------------------------


# Stage 1 is the measure of all others, so that stages/bugs.py has none of it.
FIRST = [
    planted.Bug("the max is not taken away", 1, (("S - S.max(-1, keepdims=True)", "S"),), planted.CLEAN),
    planted.Bug("the sum runs over queries, not keys", 1, (("P.sum(-1,", "P.sum(-2,"),), planted.SILENT),
    planted.Bug("the scale is forgotten", 1, (("K.swapaxes(-1, -2) * scale", "K.swapaxes(-1, -2)"),), planted.SILENT),
]


def find_bug(number, name) -> planted.Bug:
    for one in [*FIRST, *planted.BUGS]:
        if (one.stage, one.name) == (number, name):
            return one
    raise ValueError(f"stage {number} has no bug {name!r} in stages/bugs.py")


def bug(number, name) -> show.Text:
    """A planted bug, run on the CPU: its lines, what a lenient check says, what the true check says."""
    one = find_bug(number, name)
    stage, lenient = one.planted(), ""
    with np.errstate(all="ignore"):
        by, words = _catch(one)
        if by in ("check", "trace"):
            word = "passes" if _lenient(stage) else "fails"
            lenient = f"\n* the lenient check, `allclose` with tolerance 0.01 on uniform inputs: **{word}**"
    shown = show.diff(stage, STAGES[number], context=0)
    lines = _to_the_left(line for line in shown.splitlines() if not line.startswith(("---", "+++", "@@")))
    constants = f"`{one.tiles}`\n\n" if one.tiles else ""
    return show.Text(
        f"**{name}** (stage {number})\n\n{constants}"
        + (f"{show.highlighted(lines, shown.language)}\n\n" if lines else "")
        + f"* what one sees: {one.sees}{lenient}\n* caught by **{by}**: `{words.splitlines()[0]}`"
    )


def _catch(one):
    try:
        return planted.catch(one, on="cpu")
    except resources.Unavailable as error:
        if not device.gpu():
            return "resources", f"the compiler's report, which cannot be had here ({error})"
        seen, true = (launch.gpu_kernel(s, one.d, False).local_size_bytes for s in (one.planted(), STAGES[one.stage]))
        return "resources", f"{seen} bytes of local memory a thread, {true} in the true source"


def findings(number, name, N=128) -> show.Text:
    """What the trace finds in a planted bug, in its own words."""
    _, seen = launch.trace(find_bug(number, name).planted(), *Problem(N=N).inputs())
    return show.Text("\n".join(f"* **{f.kind}**: {f.message}" for f in seen.findings[:4]) or "* nothing")


def _to_the_left(lines) -> str:
    """The lines of a diff, moved to the left together."""
    lines = list(lines)
    indent = min((len(line) - 1 - len(line[1:].lstrip()) for line in lines if line[1:].strip()), default=0)
    return "\n".join(line[0] + " " + line[1 + indent :] for line in lines)


def _lenient(stage) -> bool:
    """The check that one often meets: inputs from 0 to 1, a fixed tolerance."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.random((1, 1, 1024, 64), np.float32) for _ in range(3))
    return bool(np.allclose(stage.attention(Q, K, V, on="cpu"), STAGES[1].attention(Q, K, V), atol=1e-2))


# -- the online softmax, step by step --


def walk(row=0, N=96, d=64, seed=3):
    """One row of attention, key by key: its scores s; max m, sum l, output o (feature 0) after each; the right o."""
    Q, K, V = (a[0, 0].astype(float) for a in Problem(N=N, d=d, seed=seed).inputs())
    s = K @ Q[row] * d**-0.5
    m = np.maximum.accumulate(s)
    l, o = np.zeros(N), np.zeros(N)
    before_m, before_l, before_o = -np.inf, 0.0, 0.0
    for j in range(N):
        alpha, p = np.exp(before_m - m[j]), np.exp(s[j] - m[j])
        l[j], o[j] = alpha * before_l + p, alpha * before_o + p * V[j, 0]
        before_m, before_l, before_o = m[j], l[j], o[j]
    right = STAGES[1].attention(*(a[None, None] for a in (Q, K, V)))[0, 0, row, 0]
    return s, m, l, o, right


# -- the memory wall --


def costs(*sizes) -> show.Text:
    """How much memory the scores of one head take, beside everything else, for sequence lengths."""
    MiB = 2**20
    header = [
        "N",
        "scores of one head",
        "MiB in 16-bit numbers",
        "MiB in 32-bit numbers",
        "Q, K, V and O (d = 64), MiB in 32-bit numbers",
    ]
    rows = [
        (
            f"{N:,}",
            f"{N * N:,}",
            f"{2 * N * N / MiB:,.0f}",
            f"{4 * N * N / MiB:,.0f}",
            f"{show.least_bytes(Problem(N=N)) / MiB:,.0f}",
        )
        for N in sizes
    ]
    return show.table(header, rows)


# Reads an array again and again, past L1: from L2 if it fits there, else from HBM.
SWEEP = r"""
extern "C" __global__ void sweep(const float4 *data, long long count, int times, float *out)
{
    const long long step = gridDim.x * (long long)blockDim.x, first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < times; t++)
        #pragma unroll 4
        for (long long i = first; i < count; i += step) {
            const float4 v = __ldcg(data + i);
            sum += v.x + v.y + v.z + v.w;
        }
    if (sum == 12345) *out = sum;  // never; without it the compiler would drop the loads
}
"""


def levels() -> dict[str, float]:
    """Bytes per second that this GPU reads from L2 and from HBM; empty without a GPU."""
    if not device.gpu():
        return {}
    import cupy

    kernel, out = cupy.RawKernel(SWEEP, "sweep"), cupy.zeros(1, "float32")
    blocks, found = device.gpu().multiprocessors * 8, {}
    for level, size, times in (("L2", device.gpu().l2 // 4, 50), ("HBM", min(2**31, device.gpu().memory // 8), 1)):
        data = cupy.zeros(size // 16 * 4, "float32")
        arguments = data, np.int64(size // 16), np.int32(times), out
        sweep = {level: functools.partial(kernel, (blocks,), (256,), arguments)}
        found[level] = size // 16 * 16 * times / bench.time_gpu(sweep, least=10, budget_ms=500)[level].ms * 1e3
    return found


def passes() -> show.Text:
    """How long each of the three passes takes, as separate calls: torch on the GPU where there is one, else NumPy."""
    problem = Problem(heads=8, N=4096)
    if device.gpu() and show.torch_on_gpu():
        import torch

        q, k, v = (torch.randn(problem.shape, device="cuda") for _ in range(3))
        S = q @ k.mT * problem.scale
        P = torch.softmax(S, -1)
        calls = {
            "scores": lambda: torch.matmul(q, k.mT, out=S),
            "softmax": lambda: torch.softmax(S, -1),
            "output": lambda: P @ v,
        }
        ms = bench.time_gpu(calls, least=10, budget_ms=500)
        where = f"torch on the {device.gpu().name}"
    else:
        problem = Problem(N=2048)
        q, k, v = (a[0, 0] for a in problem.inputs())
        S = q @ k.T * np.float32(problem.scale)

        def softmax():
            weights = np.exp(S - S.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            return weights

        P = softmax()
        ms = bench.time_cpu({"scores": lambda: q @ k.T, "softmax": softmax, "output": lambda: P @ v}, least=3, budget_ms=300)
        where = "NumPy on this CPU"
    score = problem.batch * problem.heads * problem.N**2
    flops = {"scores": problem.flops / 2, "softmax": 4 * score, "output": problem.flops / 2}  # max, exp, sum, division
    total = sum(t.ms for t in ms.values())
    rows = [(name, f"{t.ms:.3g}", f"{t.ms / total:.0%}", f"{flops[name] / sum(flops.values()):.0%}") for name, t in ms.items()]
    return show.Text(f"{where}; {show.shape_words(problem)}.\n\n" + show.table(["pass", "ms", "of the time", "of the arithmetic"], rows))


# -- experiments: one thing changed, to learn what a time is made of; some make the answer wrong on purpose --

EXPERIMENTS = {
    "only four rows": (
        3,
        ("K[(size_t)j * d + x]", "K[(size_t)(j & 3) * d + x]"),
        ("V[(size_t)j * d + x]", "V[(size_t)(j & 3) * d + x]"),
    ),
    "no padding": (4, ("Qs[Br][d + 1]", "Qs[Br][d]"), ("S[Br][Bc + 1]", "S[Br][Bc]")),
    "as the compiler reads": (
        4,
        (
            "float m_new = m;",
            """float q[d];
        #pragma unroll
        for (int x = 0; x < d; x++)
            q[x] = Qs[i][x];
        float m_new = m;""",
        ),
        (
            """for (int x = 0; x < d; x++)
                s += Qs[i][x] * Ks[j][x];""",
            """for (int x = 0; x < d; x += 4) {
                const float4 k = *(const float4 *)&Ks[j][x];
                s += q[x] * k.x;
                s += q[x + 1] * k.y;
                s += q[x + 2] * k.z;
                s += q[x + 3] * k.w;
            }""",
        ),
        (
            """for (int x = 0; x < d; x++)
                o[x] += p * Vs[j][x];""",
            """for (int x = 0; x < d; x += 4) {
                const float4 v = *(const float4 *)&Vs[j][x];
                o[x] += p * v.x;
                o[x + 1] += p * v.y;
                o[x + 2] += p * v.z;
                o[x + 3] += p * v.w;
            }""",
        ),
    ),
    "four sums": (
        4,
        (
            """float s = 0;
            #pragma unroll
            for (int x = 0; x < d; x++)
                s += Qs[i][x] * Ks[j][x];""",
            """float part[4] = {0, 0, 0, 0};
            #pragma unroll
            for (int x = 0; x < d; x++)
                part[x % 4] += Qs[i][x] * Ks[j][x];
            float s = part[0] + part[1] + part[2] + part[3];""",
        ),
    ),
}


def experiment(name):
    """The stage that an experiment changes, changed."""
    number, *patches = EXPERIMENTS[name]
    return STAGES[number].changed(*patches)


def compare(name, problem=ARTICLE) -> show.Text:
    """An experiment's time beside its true stage's, on the GPU."""
    number = EXPERIMENTS[name][0]
    if not device.gpu():
        return show.Text(f"*This takes a GPU: it times stage {number} beside its changed copy.* {device.why_no_gpu()}")
    true, changed = _pair(name, problem)
    return show.Text(
        f"On the {device.gpu().name}; {show.shape_words(problem)}.\n\n"
        + show.table(
            ["", "ms"],
            [
                (f"stage {number} as it is", f"{true:.3g}"),
                (f"stage {number}, {name}", f"{changed:.3g}"),
                ("ratio", f"{true / changed:.2f}"),
            ],
        )
    )


def _pair(name, problem):
    """Milliseconds of the true and of the changed stage, in alternating rounds."""
    both = {"true": STAGES[EXPERIMENTS[name][0]], "changed": experiment(name)}
    found = bench.time_stages(both, problem, "gpu", least=20, budget_ms=1000)
    return found["true"].ms, found["changed"].ms


# -- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A number said before it is measured.

    holds  "exactly", "about" (within a quarter), "at most", "at least", "between"
    measure()  the number, None where it cannot be measured
    """

    what: str
    holds: str
    value: float | tuple[float, float] | None
    unit: str
    measure: Callable[[], float | None]
    why: str

    def _said(self):
        if self.value is None:
            return "cannot be said without a GPU"
        value = " and ".join(map(_number, np.atleast_1d(self.value)))
        return f"{self.holds} {value}{self.unit}"

    def verdict(self):
        """(the measured number in words, whether the prediction held)."""
        seen = self.measure()
        if seen is None:
            return "needs a GPU, or a record of one", "–"
        if self.value is None:
            return f"{_number(seen)}{self.unit}", "–"
        low, high = {
            "exactly": (1 - 1e-9, 1 + 1e-9),
            "about": (0.8, 1.25),
            "at most": (0, 1),
            "at least": (1, np.inf),
            "between": (1, 1),
        }[self.holds]
        held = np.min(self.value) * low <= seen <= np.max(self.value) * high
        return f"{_number(seen)}{self.unit}", "yes" if held else "**no**"


def _number(value) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def predict(number) -> show.Text:
    """What the notebook before stage `number` says of it."""
    rows = PREDICTIONS[number]()
    return show.Text("\n".join(f"* **{p.what}**: {p._said()}. {p.why}" for p in rows))


def hold(number) -> show.Text:
    """The same predictions against what was measured."""
    rows = PREDICTIONS[number]()
    return show.table(["", "predicted", "measured", "held"], [(p.what, p._said(), *p.verdict()) for p in rows])


def peak(stage, N, d=64) -> int:
    """Bytes that a NumPy stage has allocated at its fullest, the inputs apart."""
    Q, K, V = Problem(N=N, d=d).inputs()
    run = launch.bind(stage, Q, K, V, on="cpu")
    run()
    tracemalloc.start()
    run()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def _speedup(a, b, problem):
    def measure():
        ms = show.times(STAGES[a], STAGES[b], problem=problem).ms
        return ms[a] / ms[b] if a in ms and b in ms else None

    return measure


def _predict_2():
    return [
        Prediction(
            "memory when N doubles",
            "about",
            2.0,
            " times as much",
            lambda: peak(STAGES[2], 2048) / peak(STAGES[2], 1024),
            "No array of it has N × N entries: the largest is O, with N × d.",
        ),
        Prediction(
            "time",
            "about",
            1.0,
            " times stage 1's",
            lambda: 1 / _speedup(1, 2, ARTICLE)(),
            "It multiplies the same numbers.",
        ),
    ]


def _predict_3():
    p, card = ARTICLE, show.card()
    products = p.flops / 2 / 32
    schedulers = min(card.schedulers, p.N // 32)
    return [
        Prediction(
            "bytes asked of global memory",
            "exactly",
            4 * (2 * p.N**2 * p.d + 2 * p.N * p.d),
            " bytes",
            lambda: round(show.counts(STAGES[3], p)["global_bytes"]),
            "Each of the N threads reads all of K and V, a row of Q, and writes one of O.",
        ),
        Prediction(
            "time, one head",
            "at least",
            2 * products / schedulers / card.clock / 1e6,
            " ms",
            lambda: show.times(STAGES[3]).ms.get(3),
            f"Each multiply-add takes a load and itself: two instructions. There are {p.N // 32} warps; each starts one "
            "instruction a clock at best.",
        ),
    ]


def _predict_4():
    p, Br = ARTICLE, show.constants(STAGES[4])["Br"]
    before, after = 2 * p.N**2 * p.d + 2 * p.N * p.d, 2 * p.N**2 * p.d / Br + 2 * p.N * p.d
    most = _ratio("only four rows", p) if device.gpu() else None
    return [
        Prediction(
            "bytes asked of global memory",
            "exactly",
            before / after,
            " times fewer",
            lambda: show.counts(STAGES[3], p)["global_bytes"] / show.counts(STAGES[4], p)["global_bytes"],
            f"A block of {Br} rows reads K and V once, where {Br} threads read them {Br} times.",
        ),
        Prediction(
            "speed, one head",
            "at most",
            most,
            " times stage 3",
            _speedup(3, 4, p),
            "That is what the experiment with four rows gained, where every K and V row came from the nearest cache.",
        ),
    ]


def _ratio(name, problem):
    true, changed = _pair(name, problem)
    return true / changed


CHAIN = 4  # clocks from one multiply-add to another that needs its result, on every card since Volta


def _predict_5():
    one, full = ARTICLE, FULL_64
    products = full.flops / 2 / 32
    ms = show.times(STAGES[4], problem=full).ms.get(4)
    limit = max(show.limits(experiment("as the compiler reads"), full).values())
    return [
        Prediction(
            "requests to shared memory for each multiply-add",
            "about",
            0.25,
            "",
            lambda: show.counts(STAGES[5], full)["shared_requests"] / products,
            "One read of 16 bytes of K or V feeds four multiply-adds; q is read once for all keys of a tile.",
        ),
        Prediction(
            "speed, one head",
            "at most",
            (CHAIN + 1) / 2,
            " times stage 4",
            _speedup(4, 5, one),
            f"With one warp on a scheduler nothing hides a wait. Stage 4 waits {CHAIN} clocks for each multiply-add of a "
            "score, since each needs the sum before it, and 1 for each of the output. Stage 5 has a sum for each key of "
            "the tile, and need not wait.",
        ),
        Prediction(
            "speed, a full card",
            "at most",
            ms and ms / limit,
            " times stage 4",
            _speedup(4, 5, full),
            "That is where shared memory would be busy all the time: each value of K and V is still read once for each row.",
        ),
    ]


def _predict_6():
    p, rows = FULL_64, 4
    limit = show.limits(STAGES[5], p)
    ms = show.times(STAGES[5], problem=p).ms.get(5)
    best = max(limit["multiply-adds"], limit["instructions"] * (1 + 0.25 / rows) / 1.25, limit["shared"] / rows)
    return [
        Prediction(
            f"speed with {rows} rows a thread, a full card",
            "at most",
            ms and ms / best,
            " times stage 5",
            lambda: None,
            f"Each read of K or V then feeds {rows} times as many multiply-adds. What is left is the multiply-adds themselves.",
        ),
    ]


PREDICTIONS = {2: _predict_2, 3: _predict_3, 4: _predict_4, 5: _predict_5, 6: _predict_6}


# -- exercises --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exercise:
    """A gap in a copy of a stage, for the reader to fill.

    true, gap  text that stands in the source once, and what it becomes: BLANK in it is what the answer replaces
    wrong      answers that one might give, and that must not pass
    quick(trace)  why a right answer is not good enough, None if it is: for exercises about speed
    """

    name: str
    stage: int
    title: str
    task: str
    true: str
    gap: str
    hints: tuple[str, ...]
    wrong: tuple[str, ...]
    section: str
    nth: int | None = None
    quick: Callable | None = None

    @property
    def answer(self) -> str:
        """What stands in the true source where the gap is."""
        before, after = self.gap.split(BLANK)
        return self.true[len(before) : len(self.true) - len(after)]

    def filled(self, answer):
        return STAGES[self.stage].changed((self.true, self.gap.replace(BLANK, answer)))

    def _repr_markdown_(self):
        source = show.source(self.filled(BLANK), self.section, self.nth)._repr_markdown_()
        hints = "\n\n".join(fold(f"Hint {i}", hint) for i, hint in enumerate(self.hints, 1))
        return f"**Exercise {self.name}: {self.title}** {self.task}\n\n{source}\n\n{hints}"

    def __repr__(self):
        return self._repr_markdown_()

    def solution(self) -> show.Text:
        """The true source's own lines, folded."""
        return show.Text(fold(f"Solution of {self.name}", show.source(STAGES[self.stage], self.section, self.nth)._repr_markdown_()))

    def check(self, answer) -> Outcome:
        """Judges an answer: does it compile, does it race or stray, is it right, is it quick; then times it."""
        if answer.strip() == BLANK:
            return Outcome(False, f"The gap {BLANK} is still open. Put your text between the quotes.")
        stage = self.filled(answer)
        try:
            if fault := self._fault(stage):
                return Outcome(False, fault)
        except launch.CompileError as error:
            return Outcome(False, f"It does not compile: {str(error).splitlines()[0]}")
        except launch.LaunchError as error:
            return Outcome(False, f"It does not run to its end: {error}")
        except Exception as error:  # NumPy stages: the reader's text runs as Python, and anything can come of it
            return Outcome(False, f"{type(error).__name__}: {error}")
        return Outcome(True, f"Right. {self._timed(stage)}")

    def _fault(self, stage):
        if stage.is_cuda and device.compiler():  # first on the CPU, where a stray access does no harm
            _, seen = launch.trace(stage, *Problem(1, 2, 100).inputs())
            if seen.findings:
                return f"It runs into trouble: {seen.findings[0].message}"
        with np.errstate(all="ignore"):
            if wrong := check.first_wrong(stage, Problem(1, 2, 200)):
                return f"Wrong: {wrong[1]}"
        return self.quick and self.quick(show.trace(stage))

    def _timed(self, stage):
        both = {"yours": stage, "the true one": STAGES[self.stage]}
        if stage.is_cuda and device.gpu():
            found = bench.time_stages(both, ARTICLE, "gpu", least=20, budget_ms=500)
            where = f"on the {device.gpu().name}"
        else:
            found = bench.time_stages(both, ARTICLE, "cpu", least=3, budget_ms=300)
            where = "on this CPU" + (", which says nothing about a GPU" if stage.is_cuda else "")
        return f"{', '.join(f'{name} {t.ms:.3g} ms' for name, t in found.items())}, one head, N = 1024, {where}."


@dataclass(frozen=True)
class Outcome:
    ok: bool
    words: str

    def __repr__(self):
        return ("✓ " if self.ok else "✗ ") + self.words


def _no_conflicts(trace):
    worst = max((c for c in trace.lines if c.space == "shared"), key=lambda c: c.conflicts)
    if worst.conflicts:
        return (
            f"The answer is right, but line {worst.line} takes {worst.per_request:.1f} wavefronts a request, "
            f"where {worst.ideal_per_request:.1f} would do"
        )
    return None


EXERCISES = [
    Exercise(
        "1.1",
        1,
        "the softmax that does not overflow",
        "Which number must be taken away from the scores before `exp`?",
        "np.exp(S - S.max(-1, keepdims=True))",
        f"np.exp(S - {BLANK})",
        (
            "Taking the same number away from all scores of a row leaves the softmax as it is. Which number makes the "
            "largest exponential exactly 1?",
            "`keepdims=True` leaves an axis of length 1, so that the result fits beside S.",
        ),
        ("0", "S.mean(-1, keepdims=True)"),
        "softmax",
    ),
    Exercise(
        "1.2",
        1,
        "who sees whom",
        "Make it causal: query row i may see keys 0 to i, itself included.",
        "S[np.triu(np.ones_like(S, bool), 1)] = -np.inf",
        f"S[{BLANK}] = -np.inf",
        (
            "Wanted is an array of booleans of the shape of S, True where a key is hidden: row i, column j > i.",
            "`np.triu(A, k)` keeps what lies on and above the k-th diagonal of A; the main diagonal is k = 0.",
        ),
        ("np.triu(np.ones_like(S, bool))", "np.tril(np.ones_like(S, bool), -1)"),
        "score",
    ),
    Exercise(
        "2.1",
        2,
        "an old sum under a new max",
        "`l` was summed against the max of the tiles before. Update it.",
        "l = alpha * l + p.sum(-1, keepdims=True)",
        f"l = {BLANK}",
        (
            "Every term of the old sum is exp(s − m). It should be exp(s − m_new). Which factor makes one the other?",
            "The new tile's terms, p, are against m_new already.",
        ),
        ("l + p.sum(-1, keepdims=True)", "alpha * (l + p.sum(-1, keepdims=True))", "p.sum(-1, keepdims=True)"),
        "softmax",
    ),
    Exercise(
        "2.2",
        2,
        "the mask of a tile",
        "The tile begins at row row0 and key j0. On which diagonal does hiding begin?",
        "row0 - j0 + 1)]",
        f"{BLANK})]",
        (
            "Key j0 + j is hidden from row row0 + i if j0 + j > row0 + i. Solve for j − i.",
            "`np.triu(A, k)` keeps j − i ≥ k.",
        ),
        ("1", "row0 - j0", "j0 - row0 + 1"),
        "score",
    ),
    Exercise(
        "3.1",
        3,
        "which row is mine",
        "A block has Br threads, and the blocks of a head stand one after another in blockIdx.x. Which row of its head "
        "does this thread compute?",
        "const int row = blockIdx.x % tiles * Br + threadIdx.x;",
        f"const int row = {BLANK};",
        (
            "Head 0 has blocks 0 to tiles − 1, head 1 the next, and so on. What remains if you count within a head?",
            "Each block before it in the same head has taken Br rows.",
        ),
        ("blockIdx.x * Br + threadIdx.x", "threadIdx.x", "blockIdx.x / tiles * Br + threadIdx.x"),
        "who am I",
    ),
    Exercise(
        "3.2",
        3,
        "one more key",
        "The key's weight is p, its value V[j]. Bring the output o up to date, feature by feature.",
        "o[x] = o[x] * alpha + p * V[(size_t)j * d + x];",
        f"o[x] = {BLANK};",
        (
            "It is the same update as that of l, with V's number in place of 1.",
            "Element x of row j is at j * d + x. Multiply as size_t: 64 bits.",
        ),
        (
            "o[x] + p * V[(size_t)j * d + x]",
            "o[x] * alpha + p * V[(size_t)x * N + j]",
            "o[x] * alpha + p * K[(size_t)j * d + x]",
        ),
        "output",
        0,
    ),
    Exercise(
        "4.1",
        4,
        "what must stand here",
        "Without this line the answer depends on which warp is the fastest. Put it back.",
        "__syncthreads();  // all of this tile is there",
        f"{BLANK};  // all of this tile is there",
        (
            "Each thread loads some elements of the tile and reads all of them. Who loaded the others? Are they done?",
            "A barrier: no thread goes on before all threads of the block have come to it.",
        ),
        ("__syncwarp()", "__threadfence_block()", "if (row < N) __syncthreads()"),
        "load",
        1,
    ),
    Exercise(
        "4.2",
        4,
        "32 rows, 32 banks",
        "How long must a row of Qs be, for the 32 lanes of a warp to read a column without conflicts?",
        "float Qs[Br][d + 1];",
        f"float Qs[Br][{BLANK}];",
        (
            "Word w of shared memory lies in bank w mod 32. Lanes i and i + 1 read words that are one row apart.",
            "With rows of 64 words all lanes meet in one bank. What length takes each to the next bank?",
        ),
        ("d", "d + 2", "d - 1"),
        "top",
        quick=_no_conflicts,
    ),
    Exercise(
        "5.1",
        5,
        "four products",
        "q and k are four floats each. Add their products to s[j].",
        """s[j] += q.x * k.x;
                s[j] += q.y * k.y;
                s[j] += q.z * k.z;
                s[j] += q.w * k.w;""",
        BLANK,
        (
            "The four members of a float4 are called x, y, z and w.",
            "Four statements, or one sum: the check takes either.",
        ),
        (
            "s[j] += q.x * k.x;",
            "s[j] = q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;",
            "s[j] += (q.x + q.y) * (k.x + k.y) + (q.z + q.w) * (k.z + k.w);",
        ),
        "score",
    ),
    Exercise(
        "5.2",
        5,
        "where float4 number t goes",
        "Thread i loads float4 number t of the tile of K, counted row by row. In which place of Ks does it belong?",
        "Ks[t / (d / 4)][t % (d / 4)] = inside",
        f"Ks{BLANK} = inside",
        ("A row has d / 4 of them.", "Row: how many whole rows fit in t. Column: what is left."),
        ("[t / d][t % d]", "[t % Bc][t / Bc]", "[i][t % (d / 4)]"),
        "load",
        1,
    ),
]


def exercise(name) -> Exercise:
    return next(e for e in EXERCISES if e.name == name)
