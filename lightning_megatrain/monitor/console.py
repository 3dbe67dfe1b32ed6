"""Where people read: a terminal as wide as it is, a file wide enough that no line breaks."""

from __future__ import annotations

import sys

from rich.console import Console


def make_console() -> Console:
    """The console of standard output."""
    return Console() if sys.stdout.isatty() else Console(width=200)
