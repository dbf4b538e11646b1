"""What goes to standard output: tables for people, JSON for programs; trouble in writing it is never taken for a result."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from rich.console import RenderableType

WITHOUT_TERMINAL: Final = 132
BROKEN_PIPE: Final = 141


def show(items: Iterable[RenderableType]) -> None:
    """Print tables and lines as wide as the terminal, or as a file likes them."""
    from rich.console import Console

    there = Console()
    page = io.StringIO()
    width = there.width if there.is_terminal else WITHOUT_TERMINAL
    console = Console(file=page, width=width, force_terminal=there.is_terminal, no_color=there.no_color)
    for item in items:
        console.print(item, highlight=False)
    write(page.getvalue())


def show_json(document: Any) -> None:
    import msgspec

    write(msgspec.json.encode(document).decode() + "\n")


def write(text: str) -> None:
    """Write all of it now; characters that the terminal does not know are replaced."""
    if sys.stdout is None:
        _give_up("standard output is closed")
    try:
        sys.stdout.flush()
        encoded = text.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8")
        sys.stdout.write(encoded)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(BROKEN_PIPE) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _give_up(f"standard output: {error.strerror or error}")


def complain(message: str) -> None:
    """One message on standard error, not broken into lines."""
    from rich.console import Console

    Console(stderr=True).print(f"kvferry: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def _give_up(message: str) -> NoReturn:
    complain(message)
    raise SystemExit(2)
