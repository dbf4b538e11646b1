"""The command line of the repository, `python -m lab`: what measures KVFerry and is not installed with it."""

from __future__ import annotations

import sys

import typer

from kvferry.cli.output import complain
from kvferry.errors import KVFerryError
from lab.cli.bench import bench_app

app = typer.Typer(
    name="lab",
    help="Measures KVFerry from its repository; none of this is installed with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; what is wrong with the input is one message on standard error and exit code 2."""
    try:
        app(prog_name="python -m lab")
    except KVFerryError as error:
        complain(str(error))
        sys.exit(2)
