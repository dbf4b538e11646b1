"""`kvferry explain`: one HTML file of a transfer, to be opened in a browser, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvferry.check.cards import ask_all
from kvferry.cli.completion import model_names
from kvferry.cli.output import write
from kvferry.cli.plan import MAX_TOKENS, SIDE_SYNTAX
from kvferry.engines.vllm.drafters import without_other_drafters
from kvferry.errors import DecodeError, SessionError, SideError, plain
from kvferry.explain import Title, document, page
from kvferry.explain.request import blocks_needed, example_request, sized_manifests
from kvferry.manifest import Manifest
from kvferry.models import Side, load_model
from kvferry.plan import Request
from kvferry.session import Keys, keys_of

MAX_PLAN_BYTES = 1 << 30


def explain_command(
    model: Annotated[
        str, typer.Option(help="A model of the zoo, or the path of a HuggingFace config.json.", autocompletion=model_names)
    ] = "",
    prefill: Annotated[str, typer.Option(help=f"The producer, as {SIDE_SYNTAX}.")] = "",
    decode: Annotated[str, typer.Option(help="The consumer, written likewise.")] = "",
    tokens: Annotated[int, typer.Option(help="Prompt length of the request to show.")] = 1000,
    plan: Annotated[Path | None, typer.Option(help="What `kvferry plan --json` wrote, instead of a model and sides.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="A running engine's listen address, host:port; give two, prefill first.")
    ] = None,
    key_file: Annotated[str, typer.Option(help="The cluster's key, as in the engines' options.")] = "",
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("transfer.html"),
) -> None:
    """Write a page that shows who reads what from whom, down to single bytes."""
    if sum((plan is not None, bool(engine), bool(model or prefill or decode))) != 1:
        raise SideError(
            "give --model, --prefill and --decode, or --plan with a file that `kvferry plan --json` wrote, "
            "or --engine twice with addresses of running engines; one of the three: leave out the others"
        )
    if plan is not None:
        shown = document(*_saved(plan))
    elif engine:
        shown = document(*_running(engine, keys_of(key_file), tokens))
    elif model and prefill and decode:
        shown = document(*_planned(model, prefill, decode, tokens))
    else:
        raise SideError("give all of --model, --prefill and --decode")
    text = page(shown)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SideError(f"--out {out}: cannot be written: {error.strerror}") from None
    write(f"{out}: {len(text.encode()):,} bytes; open it in a browser\n")


Transfer = tuple[Title, tuple[Manifest, ...], tuple[Manifest, ...], Request]


def _running(addresses: Sequence[str], keys: Keys, tokens: int) -> Transfer:
    """What the engines themselves say; the request is made up, since nobody is asked for one."""
    _check_tokens(tokens)
    if len(dict.fromkeys(addresses)) != 2:
        raise SideError(f"--engine is given {len(addresses)} times: give the prefill engine's address and the decode engine's")
    asked = ask_all(addresses, keys)
    for found in asked.findings:
        raise SessionError(str(found))
    there, here = asked.engines
    if not there.is_a("producer") or not here.is_a("consumer"):
        there, here = here, there
    welcome = without_other_drafters(there.welcome, here.manifests)
    producers, consumers = tuple(card.caches for card in welcome.cards), here.manifests
    for side, manifest in (("prefill", producers[0]), ("decode", consumers[0])):
        least = min((group.blocks for group in manifest.groups), default=0)
        if blocks_needed(manifest.groups, tokens) > least:
            raise SideError(f"--tokens {tokens}: the {side} engine has {least:,} blocks, too few for such a prompt; give fewer")
    source = f"asked of {there.address} and {here.address}"
    title = Title(plain(producers[0].identity.model), there.topology, here.topology, source)
    return title, producers, consumers, example_request(producers[0], consumers[0], tokens)


def _check_tokens(tokens: int) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise SideError(f"--tokens {tokens}: give a prompt length from 1 to {MAX_TOKENS:,}")


def _planned(model: str, prefill: str, decode: str, tokens: int) -> Transfer:
    _check_tokens(tokens)
    shape, ours, theirs = load_model(model), Side.parse(prefill), Side.parse(decode)
    producers = sized_manifests(shape, ours, "prefill", tokens)
    consumers = sized_manifests(shape, theirs, "decode", tokens)
    title = Title(shape.name, str(ours), str(theirs), shape.source)
    return title, producers, consumers, example_request(producers[0], consumers[0], tokens)


class _Model(msgspec.Struct):
    name: str
    source: str = ""


class _Manifests(msgspec.Struct):
    prefill: tuple[Manifest, ...]
    decode: tuple[Manifest, ...]


class _Tables(msgspec.Struct):
    prefill: dict[int, list[int]]
    decode: dict[int, list[int]]


class _Request(msgspec.Struct):
    tokens: int
    tables: _Tables


class _Saved(msgspec.Struct):
    """What is read of a plan's JSON: manifests and the request; the plans themselves are made and proved anew."""

    model: _Model
    prefill: str
    decode: str
    manifests: _Manifests
    request: _Request


def _saved(path: Path) -> Transfer:
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise DecodeError(f"--plan {path}: {path.stat().st_size:,} bytes; at most {MAX_PLAN_BYTES:,} are read")
        found = msgspec.json.decode(path.read_bytes(), type=_Saved)
    except OSError as error:
        raise DecodeError(f"--plan {path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"--plan {path}: not what `kvferry plan --json` writes: {error}") from None
    if not found.manifests.prefill or not found.manifests.decode:
        raise DecodeError(f"--plan {path}: a side without ranks")
    tables = found.request.tables
    title = Title(found.model.name, found.prefill, found.decode, found.model.source)
    request = Request(found.request.tokens, tables.prefill, tables.decode)
    return title, found.manifests.prefill, found.manifests.decode, request
