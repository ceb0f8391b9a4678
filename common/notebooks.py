"""Runs the notebooks: python -m common.notebooks [--only 03] [--in-place]

On a GPU they are run in place and keep their outputs. Without one they run into .cache/notebooks, and the committed
outputs stay as they are. --badges only writes the repository's address into the first cells anew.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
import tomllib
from pathlib import Path

from stages import ROOT, STAGES

FOLDER = ROOT / "notebooks"
SCRATCH = ROOT / ".cache" / "notebooks"
SIZE_LIMIT = 500_000  # bytes of a committed notebook


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


# -- what the first two cells say --


def address() -> str:
    """Of the repository: [project.urls] of pyproject.toml, where it is written once."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return urls.get("Repository", "https://github.com/flash-attention-stage-by-stage/flash-attention-stage-by-stage")


def badge(name: str) -> str:
    """The Markdown that opens a notebook (its file name) in Colab."""
    owner_and_name = address().removeprefix("https://github.com/").removesuffix(".git")
    link = f"https://colab.research.google.com/github/{owner_and_name}/blob/main/notebooks/{name}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


SET_UP = """\
# Lets Python find this repository. In Colab it is fetched first; elsewhere nothing is installed.
import importlib.util
import sys
from pathlib import Path

if "google.colab" in sys.modules:
    address = "{address}"
    root = Path("/content/{folder}")
    if not root.exists():
        !git clone --quiet --depth 1 {{address}} {{root}}
    if not importlib.util.find_spec("cupy"):
        %pip install --quiet cupy-cuda12x
else:
    root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "stages").is_dir())
sys.path.insert(0, str(root))

from common import show

show.machine()"""


def set_up() -> str:
    """The source of the first code cell."""
    return SET_UP.format(address=address(), folder=address().rstrip("/").split("/")[-1])


def write_badges() -> None:
    """Puts the address into every notebook: the badge of the first cell, and the set-up cell."""
    import nbformat

    for path in notebooks():
        notebook = nbformat.read(path, 4)
        first, second = notebook.cells[:2]
        first.source = re.sub(r"\[!\[Open in Colab\].*", lambda _, name=path.name: badge(name), first.source)
        second.source = set_up()
        nbformat.write(notebook, path)


# -- are outputs as new as what they show --


def fingerprint(path: Path, notebook) -> dict[str, str]:
    """Hashes of what the outputs of a notebook come from: its own code cells, and the stages it shows.

    Notebook 04 shows stages up to 4; 00 and 99 show the whole ladder.
    """
    number = int(path.name[:2])
    shown = [s for s in STAGES.values() if number in (0, 99) or s.number <= number]
    parts = {s.file: f"{s.text}{s.tiles}" for s in shown}
    parts["cells"] = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in parts.items()}


def has_outputs(notebook) -> bool:
    return any(cell.get("outputs") for cell in notebook.cells)


# -- running --


class Failed(RuntimeError):
    """A cell raised; the message names the notebook, the cell and the error."""


def execute(path: Path, target: Path, tell=lambda done, all: None) -> float:
    """Runs a notebook from top to bottom in a fresh kernel, and writes it with outputs to target; returns seconds.

    Failed if a cell raises; then nothing is written.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    at = 0

    def next_cell(cell, **_):
        nonlocal at
        at = cells.index(cell)
        tell(at, len(cells))

    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        on_cell_execute=next_cell,
        extra_arguments=["--log-level=40"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    try:
        client.execute(env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise Failed(f"{path.name}, code cell {at + 1} ({cells[at].id}): {error}") from None
    notebook.metadata["outputs_of"] = fingerprint(path, notebook)
    notebook.metadata["language_info"] = {"name": "python"}  # and not the version of whoever ran it
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return time.perf_counter() - start


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.notebooks", description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="those whose name holds this: 03")
    parser.add_argument("--in-place", action="store_true", help="keep the outputs in notebooks/, GPU or not")
    parser.add_argument("--badges", action="store_true", help="write the repository's address into the first cells, and end")
    options = parser.parse_args(arguments)
    if options.badges:
        write_badges()
        return 0
    chosen = [path for path in notebooks() if (options.only or "") in path.name]
    if not chosen:
        parser.error(f"no notebook has {options.only!r} in its name: {', '.join(p.name for p in notebooks())}")
    try:
        import ipykernel  # noqa: F401
        import nbclient  # noqa: F401
    except ImportError as error:
        print(f"{error.name} is not installed: pip install nbclient ipykernel", file=sys.stderr)
        return 2

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from common import launch

    folder = FOLDER if options.in_place or launch.has_gpu() else SCRATCH
    console = Console(highlight=False)
    for path in chosen:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("cell {task.completed} of {task.total}"),
            console=console,
            transient=True,
        ) as bar:
            task = bar.add_task(path.name, total=None)
            try:
                seconds = execute(
                    path,
                    folder / path.name,
                    lambda n, all, bar=bar, task=task: bar.update(task, completed=n, total=all),
                )
            except Failed as error:
                bar.stop()
                print(error, file=sys.stderr)
                return 1
        size = (folder / path.name).stat().st_size
        console.print(f"{path.name:<24} {seconds:5.1f} s   {size / 1000:4.0f} KB" + ("   TOO LARGE" if size > SIZE_LIMIT else ""))
    console.print(
        f"Written to {os.path.relpath(folder)}." + ("" if folder == FOLDER else " The committed outputs, of a GPU, were left alone.")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
