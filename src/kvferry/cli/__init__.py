"""The command line: `check` and `doctor` look at engines and the machine before they serve, `plan` and `explain` show a
transfer, `verify` proves pairs, `certify` sees what vLLM keeps where, `demo` carries requests, `up` serves, `bench` times."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvferry import __version__
from kvferry.cli.bench import bench_app
from kvferry.cli.certify import certify_command
from kvferry.cli.check import check_command
from kvferry.cli.completion import answer_shells, completion_command
from kvferry.cli.demo import demo_command
from kvferry.cli.doctor import doctor_command
from kvferry.cli.explain import explain_command
from kvferry.cli.output import complain, write
from kvferry.cli.plan import plan_command
from kvferry.cli.up import up_command
from kvferry.cli.verify import verify_command
from kvferry.errors import KVFerryError

app = typer.Typer(
    name="kvferry",
    help="Carries a request's cache from prefill to decode workers, and can explain and prove every transfer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        write(f"kvferry {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None: ...


app.command("check")(check_command)
app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("explain")(explain_command)
app.command("verify")(verify_command)
app.command("certify")(certify_command)
app.command("demo")(demo_command)
app.command("up")(up_command)
app.command("completion")(completion_command)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; what is wrong with the input is one message on standard error and exit code 2."""
    try:
        answer_shells()
        app(prog_name="kvferry")
    except KVFerryError as error:
        complain(str(error))
        sys.exit(2)
