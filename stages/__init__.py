"""The ladder. STAGES maps a number to its stage, and is the only list of stages: commands, tables, tests,
notebooks and `make help` derive from it. Importing it needs the standard library alone.

    from stages import STAGES
    O = STAGES[4].attention(Q, K, V, causal=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Stage:
    """One source file and its constants.

    number  its place on the ladder
    file    path of the source, relative to the repository
    tiles   CUDA stages: head size d -> the constants Br (query rows of a block), Bc (keys of a tile)
    dtypes  the types that it computes in; () stands for any float type
    source  replaces the text of the file: a copy with a planted bug, a reader's own kernel
    """

    number: int
    file: str
    tiles: dict[int, dict[str, int]] = field(default_factory=dict, hash=False)
    dtypes: tuple[str, ...] = ()
    source: str | None = None

    @property
    def name(self) -> str:
        return Path(self.file).stem.partition("_")[2] or Path(self.file).stem

    @property
    def text(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8") if self.source is None else self.source

    @property
    def idea(self) -> str:
        """The first sentence of the source."""
        return self.text.lstrip().splitlines()[0].strip('/" ')

    @property
    def is_cuda(self) -> bool:
        return self.file.endswith(".cu")

    def patched(self, source: str, file: str | None = None, tiles: dict | None = None) -> Stage:
        """The same stage with another text, under another name and with other constants where they are given."""
        changed = {d: {**constants, **(tiles or {}).get(d, {})} for d, constants in self.tiles.items()}
        return replace(self, source=source, file=file or self.file, tiles=changed)

    def changed(self, *patches: tuple[str, str], file: str | None = None, tiles: dict | None = None) -> Stage:
        """The same stage with texts replaced: (old, new), where old must stand in the source exactly once (ValueError)."""
        text = self.text
        for old, new in patches:
            if text.count(old) != 1:
                raise ValueError(f"{old!r} stands {text.count(old)} times in {self.file}, not once")
            text = text.replace(old, new)
        return self.patched(text, file, tiles)

    def attention(self, Q, K, V, *, causal=False, scale=None, on=None):
        """softmax(scale Q K^T) V, see common.launch.attention."""
        from common import launch

        return launch.attention(self, Q, K, V, causal=causal, scale=scale, on=on)


STAGES = {
    stage.number: stage
    for stage in (
        Stage(1, "stages/stage1_reference.py"),
        Stage(2, "stages/stage2_online.py"),
        Stage(
            3,
            "stages/stage3_naive.cu",
            tiles={32: dict(Br=64), 64: dict(Br=64), 128: dict(Br=64)},
            dtypes=("float32",),
        ),
        Stage(
            4,
            "stages/stage4_tiled.cu",
            tiles={32: dict(Br=64, Bc=32), 64: dict(Br=64, Bc=16), 128: dict(Br=64, Bc=8)},
            dtypes=("float32",),
        ),
        Stage(
            5,
            "stages/stage5_registers.cu",
            tiles={32: dict(Br=64, Bc=32), 64: dict(Br=64, Bc=32), 128: dict(Br=64, Bc=8)},
            dtypes=("float32",),
        ),
    )
}
