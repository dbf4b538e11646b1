"""`kvferry completion`: what a shell needs to complete words of this command line."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from kvferry.cli.output import write


class Shell(str, Enum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion_command(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print a script for a shell; in bash: source <(kvferry completion bash)."""
    write(get_completion_script(prog_name="kvferry", complete_var="_KVFERRY_COMPLETE", shell=shell.value) + "\n")


def model_names(incomplete: str) -> list[str]:
    """Names of the zoo; for any other beginning a shell completes names of files."""
    from kvferry.models import zoo_names

    return [name for name in zoo_names() if name.startswith(incomplete.lower())]


def answer_shells() -> None:
    """Shells ask through an environment variable; typer must be told to listen."""
    completion_init()
