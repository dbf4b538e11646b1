"""`kvferry up`: prefill engines, decode engines and a router, by one command."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvferry.cli.output import show, write
from kvferry.errors import UpError
from kvferry.up import tiny as tiny_model
from kvferry.up.commands import LOOPBACK, WILDCARD, Command, Place, check, curl, router, script
from kvferry.up.device import Device, found_device
from kvferry.up.engines import Role, engines, split_flags
from kvferry.up.harbour import Harbour, NotUpError, Seen, ended_by_signals, folder
from kvferry.up.local import PORTS_EACH, Wanted, check_installed, check_ports, on_this_machine, on_two_machines, usable
from kvferry.up.ports import free_port, reserve
from kvferry.up.view import compared, doing, moved, view
from kvferry.up.watch import Counts, total

PORT: Final = 8000
FIRST_PORT: Final = 8100
KEY_FILE: Final = "/etc/kvferry.key"
RECENT_S: Final = 10.0
FRAME_S: Final = 0.25
SETTLE_S: Final = 5.0
TOKENS: Final = 24
LAST: Final = "Ctrl-C ends all of it"
ROUTER: Final = (sys.executable, "-m", "vllm_router.launch_router")


def up_command(
    model: Annotated[str, typer.Argument(help="What `vllm serve` would be given; none with --tiny.")] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="Serve a tiny random model that is made here: runs anywhere.")] = False,
    prefill: Annotated[list[str] | None, typer.Option(help="A prefill engine, like tp=2,pp=1,block=16; repeatable.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="A decode engine; repeatable.")] = None,
    flags: Annotated[str, typer.Option(help='vLLM flags for every engine, like "--max-model-len 8192".')] = "",
    prefill_flags: Annotated[str, typer.Option(help="vLLM flags for prefill engines.")] = "",
    decode_flags: Annotated[str, typer.Option(help="vLLM flags for decode engines.")] = "",
    router_flags: Annotated[str, typer.Option(help="Flags for vllm-router.")] = "",
    name: Annotated[str, typer.Option(help="What clients call the model; its own name by default.")] = "",
    host: Annotated[str, typer.Option(help="Where the router listens.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="The port of the router; 0 takes a free one.")] = PORT,
    first_port: Annotated[int, typer.Option(help="Engines take two ports each from here on; 0 takes free ones.")] = FIRST_PORT,
    prefill_host: Annotated[str, typer.Option(help="With --dry-run: the machine of the prefill engines.")] = "",
    decode_host: Annotated[str, typer.Option(help="With --dry-run: the machine of the decode engines and the router.")] = "",
    key_file: Annotated[str, typer.Option(help=f"The cluster's key. Between machines: {KEY_FILE} by default.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: what vLLM would find.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, for this machine or for two.")] = False,
    ask: Annotated[
        list[str] | None,
        typer.Option(help="Ask this when all is up, compare with one engine alone, and end; repeatable."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How long an answer to --ask may be.")] = TOKENS,
    logs: Annotated[Path | None, typer.Option(help="Keep logs in this folder; else they are removed at the end.")] = None,
) -> None:
    """Start prefill engines, decode engines and a router on this machine; Ctrl-C ends all of it and leaves nothing behind.

    Needs vLLM and vllm-router in the Python that runs this."""
    if bool(model) == tiny:
        raise UpError("name a model, as for `vllm serve`, or --tiny for one that is made here; not both")
    apart = bool(prefill_host or decode_host)
    if apart and not (dry_run and prefill_host and decode_host):
        raise UpError("--prefill-host and --decode-host go together, and with --dry-run: this command starts nothing elsewhere")
    asked = (
        *engines(Role.PREFILL, prefill or (), f"{flags} {prefill_flags}"),
        *engines(Role.DECODE, decode or (), f"{flags} {decode_flags}"),
    )
    if tokens < 1:
        raise UpError(f"--tokens {tokens}: give a number from 1 on")
    check_ports(port or (PORT if dry_run else 0), first_port or (FIRST_PORT if dry_run else 0), len(asked))
    wanted = Wanted(model, asked, _device(device), name, key_file or (KEY_FILE if apart else ""))
    more = split_flags(router_flags, "--router-flags")
    if dry_run:
        hosts = {Role.PREFILL: prefill_host, Role.DECODE: decode_host} if apart else {}
        wanted = wanted.with_own_model(f"./{tiny_model.NAME}") if tiny else wanted
        write(_printed(wanted, hosts, host, port or PORT, first_port or FIRST_PORT, more))
        return
    check_installed()
    offsets = range(PORTS_EACH * len(asked))
    reserve(port, *(first_port + i for i in offsets if first_port))
    ports = [usable(first_port and first_port + i, "--first-port") for i in offsets]
    entry = Place(host, _reached(host), usable(port, "--port", host))
    try:
        with ended_by_signals() as wish, folder() as kept, Harbour(os.environ, kept, logs) as harbour:
            if tiny:
                wanted = wanted.with_own_model(str(kept / tiny_model.NAME))
                _make_tiny(harbour, wanted.model, wish)
            if not wish.is_set():
                fleet = on_this_machine(wanted, ports)
                commands = fleet.commands()
                gate = (f"--prometheus-port={free_port()}", *more)
                harbour.begin(commands, router(ROUTER, commands, entry, gate))
                notes = (f"OpenAI-compatible at {entry.url}/v1", curl(entry.url, wanted.served), check(fleet), LAST)
                if _attend(harbour, wish, f"kvferry up: {wanted.served}", notes, not ask) and ask:
                    _answer(harbour, wish, wanted, entry.url, ask, tokens)
    except NotUpError as error:
        write(f"{error.tail}\n")
        raise


def _printed(wanted: Wanted, hosts: Mapping[Role, str], host: str, port: int, first_port: int, more: Sequence[str]) -> str:
    if hosts:
        fleet, entry = on_two_machines(wanted, hosts, first_port), Place(WILDCARD, hosts[Role.DECODE], port)
        python: str = "python3"
        starting: tuple[str, ...] = ("vllm-router",)
    else:
        ports = [first_port + i for i in range(PORTS_EACH * len(wanted.engines))]
        fleet, entry = on_this_machine(wanted, ports), Place(host, _reached(host), port)
        python, starting = sys.executable, ROUTER
    commands = fleet.commands()
    first = [f"{python} -m kvferry.up.tiny {wanted.model}"] if wanted.tiny else []
    return script([*commands, router(starting, commands, entry, more)], fleet.key_file, wanted.served, first)


def _reached(host: str) -> str:
    """How this machine calls what listens there."""
    return LOOPBACK if host in (WILDCARD, "::") else host


def _make_tiny(harbour: Harbour, model: str, wish: Event) -> None:
    Console(stderr=True).print("making a tiny checkpoint")
    making = (sys.executable, "-m", "kvferry.up.tiny", model)
    harbour.prepare(Command("checkpoint", "checkpoint", LOOPBACK, "", making), wish)


def _attend(harbour: Harbour, wish: Event, title: str, notes: Sequence[str], watched: bool) -> bool:
    """Wait until the operator ends it or, unless it is to be `watched`, until all serve; whether they do."""
    console = Console(stderr=True, soft_wrap=True)
    shown = _Live(console, title) if console.is_terminal and watched else _Lines(console)
    with shown:
        while not wish.is_set():
            seen = harbour.look()
            shown.update(seen, notes if harbour.ready and watched else [])
            if harbour.ready and not watched:
                return True
            wish.wait(FRAME_S)
    console.print("ending")
    return False


def _answer(harbour: Harbour, wish: Event, wanted: Wanted, url: str, ask: Sequence[str], tokens: int) -> None:
    """Ask both sides together, then a prefill engine alone: it never loads anything, so all that it answers is its own work."""
    if wanted.tiny:
        write("The model's weights are random: what it says means nothing, and must be the same either way.\n\n")
    served = []
    for text in ask:
        served.append(_ask(url, wanted.served, text, tokens))
        write(f"> {text}\n{served[-1].strip()}\n\n")
    _settle(harbour, len(ask), wish)
    show([Text(moved(harbour.look(), Counts()) or "nothing was handed over; see the decode engine's log (--logs)")])
    one = next(it.command for it in harbour.look() if it.command.role == Role.PREFILL.value)
    alone = [_ask(one.url, wanted.served, text, tokens) for text in ask]
    write(f"{compared(one.name, ask, served, alone)}\n")
    if served != alone or not harbour.counted().loaded:
        raise typer.Exit(1)


def _settle(harbour: Harbour, loads: int, wish: Event) -> None:
    """vLLM counts a moment after it answers, and what carries the bytes is known after the first load."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline and not wish.is_set():
        seen = harbour.look()
        counted = total(it.counts for it in seen if it.command.role == "decode")
        if counted.loaded + counted.refused + counted.failed >= loads and any(it.carried_by for it in seen):
            return
        wish.wait(FRAME_S)


class _Live:
    """Where somebody watches."""

    def __init__(self, console: Console, title: str) -> None:
        self._live, self._title = Live(console=console, refresh_per_second=4), title
        self._history: list[tuple[float, Counts]] = []

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, seen: Sequence[Seen], notes: Sequence[str]) -> None:
        now, counts = time.monotonic(), total(it.counts for it in seen if it.command.role == "decode")
        self._history = [it for it in self._history if now - it[0] <= RECENT_S] + [(now, counts)]
        self._live.update(view(self._title, seen, counts - self._history[0][1], notes))


class _Lines:
    """Where nobody does: a line for every change."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()
        self._said: dict[str, str] = {}

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def update(self, seen: Sequence[Seen], notes: Sequence[str]) -> None:
        now = {it.command.name: f"{it.command.name} at {it.command.url}: {doing(it)}" for it in seen}
        now |= {str(i): note for i, note in enumerate(notes)}
        for key, line in now.items():
            if self._said.get(key) != line:
                self._said[key] = line
                self._console.print(f"{time.monotonic() - self._began:6.1f} s  {line}", markup=False, highlight=False)


def _device(text: str) -> Device:
    if text and text not in [it.value for it in Device]:
        raise UpError(f"--device {text}: choose {' or '.join(it.value for it in Device)}")
    return Device(text) if text else found_device()


def _ask(url: str, model: str, text: str, tokens: int) -> str:
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        raise UpError(f"the request failed with {error.code}: {error.read().decode(errors='replace')[:300]}") from None
    except (OSError, ValueError, LookupError) as error:
        raise UpError(f"the request failed: {error}") from None
