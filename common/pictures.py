"""The pictures of the notebooks and of `make trace-N`, `make traffic`: each function returns a matplotlib Figure.

All are drawn from the registry's constants, the launcher's geometry, traces and records, in one visual language: one
colour each for Q, K, V, S (and P), O; memory always in the order of LEVELS; red for what could be better.
"""

from __future__ import annotations

import functools
import io
import textwrap

import numpy as np

from common import launch
from common.counted import arrays, card, constants, resident, shape_words
from stages import STAGES

# Okabe and Ito's colours, which the colour-blind can tell apart; in print each also has a lightness of its own.
COLORS = {"Q": "#0072B2", "K": "#E69F00", "V": "#009E73", "S": "#CC79A7", "O": "#D55E00"}
INK, GREY, PALE, ALARM = "#222222", "#8A8A8A", "#E8E8E8", "#B00020"
LEVELS = ("registers", "shared", "L2", "HBM")  # from the fastest, always in this order
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "hatch.linewidth": 0.5,
    "figure.facecolor": "white",
    "hatch.color": GREY,
}


def _drawn(function):
    """A picture in the style of all; matplotlib is imported by the first."""

    @functools.wraps(function)
    def draw(*args, **options):
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return function(*args, **options)

    return draw


def _figure(width, height):
    """A matplotlib Figure that needs no pyplot, and that any notebook shows."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self):
            from PIL import Image  # matplotlib needs it too

            drawn, small = io.BytesIO(), io.BytesIO()
            self.savefig(drawn, format="png", dpi=110)
            Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)
            return small.getvalue()  # a third of the size: notebooks carry their pictures

    return Picture(figsize=(width, height), layout="constrained")


def _color(array):
    return COLORS.get(array[:1].upper(), GREY)


def _tint(color):
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("tint", ["white", color])


def _bare(ax):
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)


@_drawn
def attention(Q, K, V, causal=False):
    """Attention of one small head as blocks of its own numbers: Q, K^T, S, P, V, O; arrays (N, d)."""
    N, d = Q.shape
    S = (Q @ K.T) * d**-0.5
    hidden = np.triu(np.ones((N, N), bool), 1) if causal else np.zeros((N, N), bool)
    P = np.exp(np.where(hidden, -np.inf, S))
    P /= P.sum(1, keepdims=True)
    shown = np.ma.array(S, mask=hidden), np.ma.array(P, mask=hidden)
    blocks = [
        ("Q", Q, "Q", "N × d"),
        ("Kᵀ", K.T, "K", "d × N"),
        ("S", shown[0], "S", "N × N"),
        ("P", shown[1], "S", "N × N"),
        ("V", V, "V", "N × d"),
        ("O", P @ V, "O", "N × d"),
    ]
    signs = ["·", "=", "softmax\n→", "·", "="]
    fig = _figure(8.6, 2.3)
    axes = fig.subplots(1, 11, width_ratios=[w for _, a, *_ in blocks for w in (max(a.shape[1], N * 0.62), N * 0.3)][:-1])
    for ax, (name, array, color, shape) in zip(axes[::2], blocks, strict=True):
        ax.imshow(array, cmap=_tint(COLORS[color]), vmin=np.min(array) - 0.15 * np.ptp(array), interpolation="nearest")
        if causal and name in "SP":
            ax.fill_between([-0.5, N - 0.5], [-0.5, -0.5], [-0.5, N - 0.5], facecolor=PALE, hatch="////", edgecolor=GREY, lw=0)
        ax.set_title(f"$\\bf{{{name.replace('ᵀ', '^T')}}}$  {shape}", loc="center")
        ax.set_xlabel(f"{array.size:,} numbers", fontsize=7.5)
        ax.set_xticks([])
        ax.set_yticks([])
        for side in ax.spines.values():
            side.set(visible=True, color=COLORS[color], linewidth=1.2)
    for ax, sign in zip(axes[1::2], signs, strict=True):
        ax.text(0.5, 0.5, sign, ha="center", va="center", fontsize=8 if "soft" in sign else 15, transform=ax.transAxes)
        _bare(ax)
    return fig


@_drawn
def memory(*cards, measured=None):
    """The levels of memory: how much and how fast, of several cards (Card), always from registers to HBM.

    measured  {level: bytes per second} of this machine, drawn as a diamond
    """
    fig = _figure(8.6, 3)
    size, speed = fig.subplots(1, 2, sharey=True)
    shades = [str(shade) for shade in np.linspace(0.8, 0.05, len(cards))]
    height = 0.8 / len(cards)
    here = cards.index(card()) if card() in cards else len(cards) - 1
    for c, (one, shade) in enumerate(zip(cards, shades, strict=True)):
        for y, level in enumerate(LEVELS):
            at = y - 0.4 + height * (c + 0.5)
            room, rate = one.levels[level]
            size.barh(at, room, height * 0.92, color=shade, label=one.name if y == 0 else None)
            size.text(room * 1.15, at, _bytes(room), va="center", fontsize=7)
            if rate:
                speed.barh(at, rate, height * 0.92, color=shade)
                speed.text(rate * 1.1, at, _bytes(rate) + "/s", va="center", fontsize=7)
            else:
                speed.text(2e11, at, "not published", va="center", fontsize=7, color=GREY)
    for y, level in enumerate(LEVELS):
        if measured and level in measured:
            at = y - 0.4 + height * (here + 0.5)
            speed.plot(measured[level], at, "D", color=COLORS["O"], ms=6)
            speed.text(6e13, at, f"measured here: {_bytes(measured[level])}/s", va="center", fontsize=7, color=COLORS["O"])
    size.set(
        xscale="log",
        title="how much (all of a card together)",
        yticks=range(len(LEVELS)),
        yticklabels=LEVELS,
        xlim=(1e6, 1e13),
    )
    speed.set(xscale="log", title="how fast", xlim=(1e11, 1e16))
    size.invert_yaxis()
    size.legend(loc="upper right")
    for ax in (size, speed):
        ax.set_xticks([])
        ax.minorticks_off()
        ax.spines["bottom"].set_visible(False)
    return fig


def _bytes(n):
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} PB"


@_drawn
def homes(*stages, d=64):
    """Where the arrays of CUDA stages live, by their own declarations, with the bytes of one block.

    Scores that no stage declares as an array are one number of each thread, in a register.
    """
    fig = _figure(1.2 + 2.6 * len(stages), 2.9)
    ax = fig.subplots()
    for c, stage in enumerate(stages):
        found = {level: [] for level in LEVELS}
        for name, where, size in arrays(stage, d):
            found[where].append((name, size))
        if not any(name.upper() == "S" for name, *_ in arrays(stage, d)):
            found["registers"].append(("s", 4 * constants(stage, d)["Br"]))
        found["HBM"] = [(name, None) for name in "QKVO"]
        for y, level in enumerate(LEVELS):
            chips = found[level]
            for i, (name, size) in enumerate(chips):
                x = c + 0.06 + 0.23 * i
                ax.add_patch(_rect(x, y - 0.33, 0.21, 0.66, facecolor=_color(name), lw=0))
                text = name if size is None else f"{name}\n{size / 1024:.3g} KB"
                ax.text(
                    x + 0.105,
                    y,
                    text,
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if name[0].upper() != "K" else INK,
                )
    for y in range(4):
        ax.axhline(y + 0.5, color=PALE, zorder=0)
    for c in range(1, len(stages)):
        ax.axvline(c, color=GREY, lw=0.6)
    ax.set(xlim=(0, len(stages)), ylim=(3.5, -0.5), yticks=range(4), yticklabels=LEVELS)
    ax.set_xticks([c + 0.5 for c in range(len(stages))], [f"stage {s.number} {s.name}" for s in stages])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.text(0.06, 2, "caches what comes from HBM", va="center", fontsize=7.5, color=GREY)
    return fig


@_drawn
def budget(*stages, d=64, limit=48 * 1024):
    """The shared memory of one block of each stage, against what a block may declare."""
    fig = _figure(8.6, 0.5 + 0.5 * len(stages))
    ax = fig.subplots()
    labels = []
    for y, stage in enumerate(stages):
        x = 0
        for name, where, size in arrays(stage, d):
            if where == "shared":
                ax.barh(y, size / 1024, 0.62, left=x, color=_color(name), edgecolor="white")
                ax.text(
                    x + size / 2048,
                    y,
                    name,
                    ha="center",
                    va="center",
                    color="white" if name[0] != "K" else INK,
                    fontsize=8,
                )
                x += size / 1024
        ax.text(x + 0.6, y, f"{x:.1f} KB", va="center")
        sizes = ", ".join(f"{name} = {v}" for name, v in constants(stage, d).items())
        labels.append(f"stage {stage.number}, {sizes}")
    ax.axvline(limit / 1024, color=INK, ls="--", lw=1)
    ax.text(limit / 1024, -0.62, f" the limit: {limit // 1024} KB", va="bottom", fontsize=8)
    ax.set(yticks=range(len(stages)), yticklabels=labels, ylim=(len(stages) - 0.5, -0.65), xticks=[])
    ax.spines[["bottom", "left"]].set_visible(False)
    ax.tick_params(length=0)
    return fig


@_drawn
def tiles(stage, N=256, d=64, causal=(False, True)):
    """How a stage walks over the score matrix: its tiles, in the order in which a block visits them."""
    size = constants(stage, d) if "Br" in stage.text or stage.is_cuda else {}
    Br, Bc = size["Br"], size["Bc"]
    by_row = Bc == 1  # each row ends where it likes
    Br = 1 if by_row else Br
    wanted = causal if isinstance(causal, tuple) else (causal,)
    fig = _figure(4.3 * len(wanted), 4.1)
    for ax, masked in zip(np.atleast_1d(fig.subplots(1, len(wanted))), wanted, strict=True):
        last = -(-N // Bc)
        rows, columns = np.append(np.arange(0, N, Br), N), np.append(np.arange(0, N, Bc), N)
        ends = np.minimum(rows[1:], N) if masked else np.full(len(rows) - 1, N)
        order = np.ma.array(np.tile(np.arange(1, last + 1), (len(ends), 1)), mask=columns[:-1] >= ends[:, None])
        visited = int(order.count())
        ax.pcolormesh(
            columns,
            rows,
            order,
            cmap=_tint(COLORS["S"]),
            vmin=-last / 3,
            vmax=last,
            edgecolors="white",
            lw=0.4 if by_row else 1,
        )
        if not by_row and last <= 18:
            for (i, t), number in np.ma.ndenumerate(order):
                x, y = columns[t : t + 2].mean(), rows[i : i + 2].mean()
                ax.text(x, y, number, ha="center", va="center", fontsize=7)
        if masked and not by_row:
            ax.fill([0, N, N], [0, N, 0], facecolor="none", hatch="////", edgecolor=GREY, lw=0)
            ax.plot([0, N], [0, N], color=INK, lw=1)
        total = -(-N // Br) * last
        ax.set(
            xlim=(0, N),
            ylim=(N, 0),
            aspect="equal",
            xlabel="key  j →",
            ylabel="← query row",
            title=f"{'causal' if masked else 'full'}: {visited:,} of {total:,} " + ("scores" if by_row else f"tiles of {Br} × {Bc}"),
        )
        ticks = np.arange(0, N + 1, max(Br, N // 4))
        ax.set_xticks(ticks)
        ax.set_yticks(ticks)
        ax.spines[:].set_visible(False)
    return fig


def _rect(x, y, width, height, **style):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **style)


@_drawn
def running(s, m, l, o, right=None):
    """Running max m, sum l, output o (one feature) of one row after each key, and its scores s: arrays of one length.

    o is drawn as o / l, what the output would be if the pass ended there; right: what it is in the end.
    """
    fig = _figure(8.6, 4.2)
    top, middle, bottom = fig.subplots(3, 1, sharex=True)
    j = np.arange(len(s))
    rises = np.flatnonzero(np.diff(m, prepend=-np.inf) > 0)
    top.plot(j, s, ".", color=COLORS["S"], ms=4, label="score s of each key")
    top.step(j, m, where="post", color=INK, lw=1.6, label="running max m")
    middle.step(j, l, where="post", color=INK, lw=1.6, label="running sum l")
    bottom.step(j, o / l, where="post", color=COLORS["O"], lw=1.6, label="o / l, one feature")
    if right is not None:
        bottom.axhline(right, color=INK, ls=":", lw=1, label="the right answer")
    for ax in (top, middle, bottom):
        for x in rises:
            ax.axvline(x, color=PALE, zorder=0)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    bottom.set(xlabel="keys seen; grey lines: the max rose, so l and o were multiplied by alpha < 1")
    return fig


def _line_text(stage, line):
    lines = stage.text.splitlines()
    text = lines[line - 1].split("//")[0].strip() if 0 < line <= len(lines) else ""
    return text if len(text) < 41 else text[:39] + " …"


def _together(example):
    """How many lanes shared memory serves at once: the rule of count_wavefronts in cpu/trace.cpp."""
    if example.size < 8:
        return 32
    at = example.lanes
    pairs = any(all(at[i ^ by] in (None, at[i]) for i in range(32) if at[i]) for by in (1, 2))
    return 128 // example.size * (2 if pairs else 1)


def _request(ax, counted, example, title=None):
    """One request of a warp: lanes along x; banks (shared) or sectors (global) along y. Red edges: a bank conflict."""
    lanes = [(lane, *at) for lane, at in enumerate(example.lanes) if at]
    words = [(lane, name, offset + b) for lane, name, offset in lanes for b in range(0, max(4, example.size), 4)]
    shared = counted.space == "shared"
    if shared:
        place = {word: offset // 4 % 32 for word in words for offset in word[2:]}
        ax.set(ylim=(32, -1), yticks=(0, 8, 16, 24, 31), ylabel="bank")
    else:
        touched = sorted({(name, offset // 32) for _, name, offset in words})
        place = {word: touched.index((word[1], word[2] // 32)) for word in words}
        few = touched if len(touched) <= 4 else [touched[0], touched[len(touched) // 2], touched[-1]]
        ax.set(
            ylim=(max(len(touched), 8), -1),
            ylabel="sector, by its first byte",
            yticks=[touched.index(t) for t in few],
            yticklabels=[f"{32 * sector:,}" for _, sector in few],
        )
        for y in range(len(touched) + 1):
            ax.axhline(y - 0.5, color=PALE, lw=0.6, zorder=0)
    asked, together = {}, _together(example)  # (lanes served together, bank) -> words
    for word in words:
        asked.setdefault((word[0] // together, place[word]), set()).add(word[1:])
    same = len({at for at in example.lanes if at}) == 1
    for word in words:
        conflict = shared and len(asked[word[0] // together, place[word]]) > 1
        width = 1.0 if same else 0.84  # one word for all: one bar
        ax.add_patch(
            _rect(
                word[0] - width / 2,
                place[word] - 0.42,
                width,
                0.84,
                facecolor=_color(word[1]),
                lw=0.9 if conflict else 0,
                edgecolor=ALARM,
            )
        )
    ax.set(xlim=(-1, 32), xticks=(0, 8, 16, 24, 31), xlabel="lane of the warp")
    unit = ("wavefront" if shared else "sector") + ("s" if example.cost != 1 else "")
    few = "the fewest possible" if example.cost <= example.ideal else f"{example.ideal} would do"
    names = ", ".join(dict.fromkeys(name for _, name, _ in lanes))
    what = f"{names}: {counted.op} {example.size} bytes{', one for all' if same else ' a lane'}"
    ax.set_title(
        title or f"{what}\n{example.cost} {unit}, {few}",
        fontsize=8,
        color=INK if example.cost <= example.ideal else ALARM,
    )


@_drawn
def requests(trace, stage, space=None, most=8):
    """Which address or bank each of a warp's 32 lanes touches: a picture for each line that touches memory.

    trace  common.cpu.Trace;  space  "global" or "shared" alone;  most  at most so many lines, the costliest of them
    """
    wanted = [c for c in trace.lines if c.examples and space in (None, c.space)]
    wanted = sorted(wanted, key=lambda c: -c.cost)[:most]
    wanted = sorted(wanted, key=lambda c: (c.line, c.space, c.op))
    columns = max(1, len(wanted) if len(wanted) <= 4 else 3 if len(wanted) % 3 == 0 else 4)
    rows = -(-len(wanted) // columns)
    fig = _figure(max(8.8, 2.2 * columns) if columns > 2 else 3.2 * columns, 2.6 * max(1, rows))
    axes = np.atleast_1d(fig.subplots(max(1, rows), columns)).ravel()
    for ax, counted in zip(axes, wanted, strict=False):
        _request(ax, counted, max(counted.examples, key=lambda e: e.cost))
        ax.set_xlabel(
            f"lane;   line {counted.line}, {counted.requests:,} requests:\n{_line_text(stage, counted.line)}",
            fontsize=7,
        )
    for ax in axes[len(wanted) :]:
        ax.set_visible(False)
    return fig


@_drawn
def banks(traces, array, op="load"):
    """The same shared access of several kernels, {title: Trace}: which bank each lane asks, conflicts in red."""
    fig = _figure(3.9 * len(traces), 3.2)
    for ax, (title, one) in zip(np.atleast_1d(fig.subplots(1, len(traces))), traces.items(), strict=True):
        lines = [c for c in one.lines if c.space == "shared" and c.op == op and array in c.arrays and c.examples]
        pairs = [(c, e) for c in lines for e in c.examples if any(at and at[0] == array for at in e.lanes)]
        counted, example = max(pairs, key=lambda pair: (pair[1].cost, pair[0].requests))
        words = f"{example.cost} wavefront{'s' if example.cost > 1 else ''} a read"
        _request(
            ax,
            counted,
            example,
            f"{title}\n{words}" + ("" if example.cost <= example.ideal else f", {example.ideal} would do"),
        )
    return fig


@_drawn
def traffic(traces, problem=None):
    """Bytes that stages ask of global memory, beside the least that attention needs: {stage or its number: Trace}.

    problem  that they ran on, for the title
    """
    fig = _figure(8.6, 0.9 + 0.45 * len(traces))
    ax = fig.subplots()
    one = next(iter(traces.values()))
    least = sum(one.arrays[name] for name in "QKVO")
    labels = []
    for y, (stage, seen) in enumerate(traces.items()):
        stage = STAGES.get(stage, stage)
        by_array = {}
        for c in seen.lines:
            if c.space == "global":
                for name in c.arrays:  # a line that reads two arrays counts half for each
                    by_array[name] = by_array.get(name, 0) + c.bytes / len(c.arrays)
        x = 0
        for name in sorted(by_array, key="QKVO".find):
            ax.barh(y, by_array[name], 0.62, left=x, color=_color(name), label=name if y == 0 else None)
            x += by_array[name]
        ax.text(x * 1.01, y, f" {_bytes(x)}: {x / least:,.1f} × the least", va="center")
        labels.append(f"stage {stage.number} {stage.name}")
    ax.axvline(least, color=INK, ls="--", lw=1)
    ax.text(least, -0.55, f" the least, {_bytes(least)}: Q, K, V read once, O written once", va="bottom", fontsize=8)
    ax.set(
        yticks=range(len(labels)),
        yticklabels=labels,
        ylim=(len(labels) - 0.4, -0.6),
        xlabel="bytes asked of global memory",
    )
    ax.set_xlim(0, ax.get_xlim()[1] * 1.28)
    ax.xaxis.set_major_formatter(lambda x, _: _bytes(x) if x else "0")
    if problem:
        fig.suptitle(shape_words(problem), fontsize=8, x=0.01, ha="left")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=4)
    return fig


@_drawn
def grid(stage, *problems, on=None):
    """The blocks of a launch, and how much of a card they fill, by the launcher's geometry; a panel a problem."""
    on = on or card()
    fig = _figure(4.3 * len(problems), 3.6)
    at_once = {p: resident(stage, p.d, p.causal, on) for p in problems}
    columns = max(1, round((0.9 * on.sms) ** 0.5))
    for ax, p in zip(np.atleast_1d(fig.subplots(1, len(problems))), problems, strict=True):
        heads = p.batch * p.heads
        blocks = launch.geometry(stage, p.d, p.N, heads)[0][0]
        first = np.bincount(np.arange(min(blocks, at_once[p] * on.sms)) % on.sms, minlength=on.sms)
        for sm, held in enumerate(first):
            x, y = sm // columns, sm % columns
            face = "white" if not held else _tint(COLORS["Q"])(0.25 + 0.75 * held / at_once[p])
            ax.add_patch(_rect(x, y, 0.9, 0.9, facecolor=face, edgecolor=GREY, lw=0.5))
            if held:
                ax.text(
                    x + 0.45,
                    y + 0.45,
                    held,
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if held > at_once[p] / 2 else INK,
                )
        busy = int((first > 0).sum())
        warps = blocks * launch.geometry(stage, p.d, p.N, heads)[1][0] // 32
        rounds = blocks / (at_once[p] * on.sms)
        ax.set(
            xlim=(0, -(-on.sms // columns)),
            ylim=(columns, -0.1),
            aspect="equal",
            title=f"{heads} head{'s' if heads > 1 else ''} × {blocks // heads} tiles = {blocks:,} blocks, "
            f"{warps:,} warps\n"
            f"{busy} of {on.sms} multiprocessors busy" + (f", {rounds:.1f} rounds" if rounds > 1 else ""),
        )
        ax.set_xlabel(
            f"{on.name}: a square is a multiprocessor, the number in it\nthe blocks that it holds at first (at most {at_once[p]})",
            fontsize=7.5,
        )
        _bare(ax)
    return fig


@_drawn
def ladder(times, title=None):
    """Times on a logarithmic scale: show.Times, or rows (label, ms, kind).

    Kind "stage" and "executor" in blue, "published" in orange, all others grey.
    """
    rows = times if isinstance(times, list) else times.chart()
    title = textwrap.fill(times.where.replace("`", ""), 100) if title is None else title
    fig = _figure(8.6, 0.8 + 0.27 * len(rows))
    ax = fig.subplots()
    for y, (_, ms, kind) in enumerate(rows):
        color = COLORS["Q"] if kind in ("stage", "executor") else COLORS["K"] if kind == "published" else "#B5B5B5"
        ax.barh(y, ms, 0.7, color=color, left=0)
        ax.text(ms * 1.06, y, f"{ms:.3g} ms", va="center", fontsize=7.5)
    ax.set(
        xscale="log",
        yticks=range(len(rows)),
        yticklabels=[label for label, *_ in rows],
        ylim=(len(rows) - 0.4, -0.6),
        xlabel="milliseconds, logarithmic: from one line to the next is ten times",
    )
    ax.set_title(title or "", fontsize=8)
    low, high = min(ms for _, ms, _ in rows), max(ms for _, ms, _ in rows)
    ax.set_xlim(low / 3, high * 4)
    ax.grid(axis="x", color=PALE)
    ax.set_axisbelow(True)
    return fig


@_drawn
def roofline(points, tflops, gbs, title=""):
    """Speed against work for each byte asked of global memory: points {label: (flop per byte, TFLOP/s)}, under the
    ceilings of a card: tflops of its multiply-adds, gbs of its HBM."""
    fig = _figure(8.6, 3.9)
    ax = fig.subplots()
    xs = np.array([0.1, tflops * 1e3 / gbs, 1e4])
    ax.plot(xs, np.minimum(tflops, xs * gbs / 1e3), color=INK, lw=1.5)
    ax.text(xs[1] * 1.2, tflops * 1.08, f"multiply-adds: {tflops:.3g} TFLOP/s", va="bottom", fontsize=8)
    ax.text(0.12, 0.12 * gbs / 1e3 * 1.7, f"HBM: {_bytes(gbs * 1e9)}/s", rotation=35, fontsize=8)
    for label, (x, y) in points.items():
        ax.plot(x, y, "o", ms=7, color=COLORS["Q"])
        ax.annotate(label, (x, y), textcoords="offset points", xytext=(7, -3), fontsize=8, bbox=dict(facecolor="white", lw=0, pad=0.5))
    lowest = min([y for _, y in points.values()] + [tflops / 100])
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(0.1, 1e4),
        ylim=(lowest / 3, tflops * 3),
        ylabel="TFLOP/s",
        title=title,
        xlabel="floating-point operations for each byte asked of global memory",
    )
    ax.grid(color=PALE)
    ax.set_axisbelow(True)
    return fig
