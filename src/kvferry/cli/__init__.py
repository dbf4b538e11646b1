"""The command line: `check` and `doctor` look at engines and the machine before they serve, `plan` and `explain` show a
transfer, `verify` proves pairs, `certify` sees what vLLM keeps where, `demo` carries requests, `up` serves.

A command's module is imported when the command is used: the version, help and completion are there at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from kvferry import __version__
from kvferry.cli.completion import answer_shells
from kvferry.cli.output import complain, write
from kvferry.errors import KVFerryError

COMMANDS: Final = {
    "check": "Check a pair of engines before it serves.",
    "doctor": "Look at this machine before it serves.",
    "plan": "Plan and prove the transfer between two sides.",
    "explain": "Write a page that shows a transfer, down to single bytes.",
    "verify": "Prove every legal pair of sides of a model.",
    "certify": "See where vLLM keeps every element of its caches.",
    "demo": "Move caches between two processes and compare every byte.",
    "up": "Start prefill engines, decode engines and a router here.",
    "completion": "Print a script that completes words in a shell.",
}
"""What `kvferry --help` says of each; `kvferry NAME --help` says more."""

app = typer.Typer(
    name="kvferry",
    help="Carries a request's cache from prefill to decode workers, and can explain and prove every transfer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _Later(TyperCommand):
    """Stands for `NAME_command` of `kvferry.cli.NAME` until it is used."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(self.name)(getattr(import_module(f"kvferry.cli.{self.name}"), f"{self.name}_command"))
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


def _version(wanted: bool) -> None:
    if wanted:
        write(f"kvferry {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None: ...


def _nothing() -> None: ...


for _name, _line in COMMANDS.items():
    app.command(_name, cls=_Later, help=_line)(_nothing)


def main() -> None:
    """Run the command line; what is wrong with the input is one message on standard error and exit code 2."""
    try:
        answer_shells()
        app(prog_name="kvferry")
    except KVFerryError as error:
        complain(str(error))
        sys.exit(2)
