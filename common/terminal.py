"""What commands print with: one console, one look of tables."""

import sys

from rich.console import Console
from rich.table import Table


def console(as_json=False, width=130) -> Console:
    """Silent where data is asked for; as wide as the terminal, or `width` columns in a pipe or file."""
    return Console(quiet=as_json, highlight=False, width=None if sys.stdout.isatty() else width)


def table(**options) -> Table:
    return Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), **options)
