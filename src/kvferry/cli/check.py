"""`kvferry check`: would two engines serve together? From their command lines, or from the engines themselves."""

from __future__ import annotations

import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.check.cards import Pair, ask_all, check_engines
from kvferry.check.flags import Flags, read_command
from kvferry.check.offline import Basis, Moves, check_commands
from kvferry.check.shapes import RELEASE
from kvferry.check.verdict import UNDECIDED, UNREACHED, Verdict, verdict
from kvferry.cli.completion import model_names
from kvferry.cli.output import show, show_json
from kvferry.errors import BadReferenceError, SideError
from kvferry.findings import Finding, Severity, errors
from kvferry.session import Keys, Reference, from_params, keys_of

NO: Final = 1
LATER: Final = 3
DEVICES: Final = ("cpu", "cuda")
RELEASES: Final = re.compile(r"v?\d{1,4}\.\d{1,4}(\.[0-9a-z.+]{1,40})?")
MAX_COMMAND_BYTES: Final = 1 << 20
CANARY_TOKENS: Final = 48
HTTP_S: Final = 60.0
SHADES: Final = {Verdict.SERVES: "green", Verdict.REFUSED: "red", Verdict.UNDECIDED: "yellow"}
COLOURS: Final = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def check_command(
    prefill: Annotated[str, typer.Option(help="The prefill engine's command line, or @FILE with it.")] = "",
    decode: Annotated[str, typer.Option(help="The decode engine's.")] = "",
    model: Annotated[
        str,
        typer.Option(help="Its config.json or name in the zoo, if the commands' is not here.", autocompletion=model_names),
    ] = "",
    vllm: Annotated[str, typer.Option(help="The release of vLLM, or two as prefill,decode.")] = RELEASE,
    device: Annotated[str, typer.Option(help="What the caches lie on: cpu or cuda, or two as prefill,decode.")] = "cuda",
    elsewhere: Annotated[
        bool, typer.Option(help="The engines run on other machines: no file of theirs is looked for.")
    ] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="A running engine's listen address, host:port; may be repeated: all pairs.")
    ] = None,
    key_file: Annotated[str, typer.Option(help="The cluster's key, as in the engines' options.")] = "",
    canary: Annotated[
        bool, typer.Option(help="Also read a word of every prefill rank over the transport, and compare it.")
    ] = False,
    through: Annotated[
        list[str] | None,
        typer.Option(help="A prefill engine's API, http://host:port: a prompt is prefilled, its blocks are read and compared."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="How long an engine may take to answer.")] = 5.0,
    strict: Annotated[bool, typer.Option(help="Warnings count as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check a pair before it serves: exit 0 if it would, 1 if it would not, 3 if that cannot be told yet."""
    if bool(engine) == bool(prefill or decode):
        raise SideError("give --prefill and --decode with command lines, or --engine with addresses of running engines")
    if engine:
        if model or elsewhere or vllm != RELEASE:
            raise SideError(
                "--model, --vllm and --elsewhere are for command lines: running engines say themselves what they hold"
            )
        report = _online(engine, keys_of(key_file), canary, through or [], timeout_s)
    else:
        if not prefill or not decode:
            raise SideError("give both --prefill and --decode")
        if key_file or canary or through:
            raise SideError("--key-file, --canary and --through are for running engines: name them with --engine")
        commands = _command(prefill, "--prefill"), _command(decode, "--decode")
        report = _offline(commands, model, _devices(device), elsewhere, _releases(vllm))
    if as_json:
        show_json(report)
    else:
        show(_shown(report))
    code = exit_code(report.findings, strict)
    if code:
        raise typer.Exit(code)


class Judged(msgspec.Struct, frozen=True):
    """One pair: whether it works, and what it moves if it does."""

    prefill: str
    decode: str
    works: bool
    moves: Moves | None = None


class Canary(msgspec.Struct, frozen=True):
    """What was really transferred from where."""

    engine: str
    what: str
    ranks: int
    bytes: int
    paths: tuple[str, ...]


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    works: bool
    verdict: Verdict
    findings: tuple[Finding, ...]
    pairs: tuple[Judged, ...]
    model: str = ""
    engines: tuple[str, ...] = ()
    canaries: tuple[Canary, ...] = ()
    rests_on: tuple[Basis, ...] = ()
    version: int = 1


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """What does not fit outweighs what is not known."""
    wrong = [one for one in findings if strict and one.severity is Severity.WARNING] + errors(findings)
    if not wrong:
        return 0
    return LATER if all(one.name in UNDECIDED for one in wrong) else NO


def _offline(
    commands: tuple[Flags, Flags], model: str, devices: tuple[str, str], elsewhere: bool, vllm: tuple[str, str]
) -> Report:
    found = check_commands(*commands, model, devices, elsewhere, vllm)
    pair = Judged("prefill", "decode", found.works, found.moves)
    return Report(found.works, verdict(found.findings), found.findings, (pair,), found.model, rests_on=found.rests_on)


def _releases(text: str) -> tuple[str, str]:
    words = text.split(",")
    if not 1 <= len(words) <= 2 or not all(RELEASES.fullmatch(word) for word in words):
        raise SideError(f"--vllm {text[:80]}: give a release as {RELEASE}, or two as prefill,decode")
    return words[0], words[-1]


def _command(text: str, option: str) -> Flags:
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            if path.stat().st_size > MAX_COMMAND_BYTES:
                raise SideError(f"{option} {text}: more than {MAX_COMMAND_BYTES:,} bytes are no command line")
            text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        except (OSError, UnicodeDecodeError) as error:
            raise SideError(f"{option} {text}: cannot be read: {error}") from None
    return read_command(text)


def _devices(text: str) -> tuple[str, str]:
    words = text.split(",")
    if not 1 <= len(words) <= 2 or any(word not in DEVICES for word in words):
        raise SideError(f"--device {text}: give {' or '.join(DEVICES)}, or two of them as prefill,decode")
    return words[0], words[-1]


def _online(addresses: Sequence[str], keys: Keys, canary: bool, through: Sequence[str], timeout_s: float) -> Report:
    asked = ask_all(addresses, keys, timeout_s)
    pairs, findings = check_engines(asked.engines)
    missing = any(one.name in UNREACHED for one in asked.findings)
    findings = [*asked.findings, *([] if missing else findings), *(one for pair in pairs for one in pair.findings)]
    canaries: list[Canary] = []
    if canary:
        from kvferry.check.canary import read_beacons

        for one in asked.engines:
            if one.is_a("producer"):
                done = read_beacons(one)
                findings += done.findings
                canaries.append(Canary(one.address, "beacons", done.ranks, done.compared, done.paths))
    for url in through:
        _send(url, pairs, keys, findings, canaries)
    judged = tuple(Judged(p.producer.address, p.consumer.address, not errors(p.findings), p.moves) for p in pairs)
    engines = tuple(f"{one.address} {one.welcome.engine} {one.topology} {one.welcome.role}".strip() for one in asked.engines)
    model = asked.engines[0].manifests[0].identity.model if asked.engines else ""
    return Report(not errors(findings), verdict(findings), tuple(findings), judged, model, engines, tuple(canaries))


def _send(url: str, pairs: Sequence[Pair], keys: Keys, findings: list[Finding], canaries: list[Canary]) -> None:
    """A prompt through a prefill engine, and its blocks to stand-ins for every decode engine that it fits."""
    from kvferry.check.canary import read_blocks

    served = {pair.producer.peer for pair in pairs if pair.plans}
    for pair in pairs:
        if not pair.plans:
            continue
        try:
            reference = _prefilled(url, keys)
        except (OSError, ValueError, KeyError, TypeError, BadReferenceError) as error:
            cure = "give the API address of a prefill engine that runs KVFerry"
            findings.append(Finding("no-reference", f"{url} gives no reference: {error}", cure, where=url))
            return
        if (reference.engine, reference.incarnation) not in {(peer.engine, peer.incarnation) for peer in served}:
            seen = (
                f"{url} is {reference.engine} at {reference.address}, which is none of the prefill engines of a pair that fits"
            )
            findings.append(Finding("no-reference", seen, "name its listen address with --engine too", where=url))
            return
        if (reference.engine, reference.incarnation) == (pair.producer.peer.engine, pair.producer.peer.incarnation):
            done = read_blocks(pair, reference, keys)
            findings += done.findings
            canaries.append(Canary(pair.name, f"{reference.tokens} tokens", done.ranks, done.compared, done.paths))


def _prefilled(url: str, keys: Keys) -> Reference:
    model = _http(f"{url}/v1/models")["data"][0]["id"]
    first = secrets.randbelow(100)
    body = {
        "model": model,
        "prompt": [10 + (first + i) % 100 for i in range(CANARY_TOKENS)],
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    params = _http(f"{url}/v1/completions", body).get("kv_transfer_params") or {}
    if "kvferry" not in params:
        raise ValueError("its answer carries no reference of KVFerry")
    return from_params(params["kvferry"], keys)


def _http(url: str, body: Any = None) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ValueError("it is not an address like http://host:port")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
        return json.load(answer)


def _shown(report: Report) -> Iterator[RenderableType]:
    yield Text(f"{report.model or 'model unknown'}: {_told(report)}", style=SHADES[report.verdict])
    if report.rests_on:
        known = [(one.side, one.vllm, one.cache, one.evidence) for one in report.rests_on]
        yield _table("what this rests on", ("side", "vLLM", "cache", "evidence"), known)
    if report.engines:
        yield _table("engines", ("address, engine, topology, role",), [(one,) for one in report.engines])
    moved = [pair for pair in report.pairs if pair.moves is not None]
    if moved:
        yield _moves(moved)
    if report.canaries:
        rows = [(c.engine, c.what, str(c.ranks), f"{c.bytes:,}", ", ".join(c.paths)) for c in report.canaries]
        yield _table("canaries: transferred and compared", ("from", "what", "ranks", "bytes", "carried by"), rows)
    yield from findings_table(report.findings)


def _told(report: Report) -> str:
    """The verdict; what was not planned is never said to serve."""
    names = {one.name for one in report.findings}
    if report.verdict is Verdict.UNDECIDED and "model-unknown" in names:
        return "only the flags were compared; nothing is known to be wrong, and the caches are not known"
    counts = f"{sum(pair.works for pair in report.pairs)} of {len(report.pairs)} pairs fit"
    if report.verdict is Verdict.UNDECIDED and names & UNREACHED:
        return f"{counts}; not decided, since an engine could not be asked"
    if report.verdict is Verdict.UNDECIDED:
        return "not decided; nothing is known to be wrong, and not everything could be planned"
    return f"{counts}; {'would serve' if report.works else 'would not serve'}"


def _moves(pairs: Sequence[Judged]) -> Table:
    head = ("prefill", "decode", "ranks", "runs a block", "runs a state", "bytes a token", "bytes a state")
    rows = []
    for pair in pairs:
        moves = pair.moves
        if moves is not None:
            numbers = (moves.runs_per_block, moves.runs_per_state, round(moves.bytes_per_token), moves.bytes_per_state)
            cells = [f"{number:,}" if number else "" for number in numbers]
            ranks = f"{moves.ranks[0]} → {moves.ranks[1]}"
            rows.append((_named(pair.prefill, moves.prefill), _named(pair.decode, moves.decode), ranks, *cells))
    return _table("what would move, proved", head, rows)


def _named(address: str, side: str) -> str:
    return side if address in ("prefill", "decode") else f"{address} {side}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def findings_table(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Errors first."""
    if not findings:
        yield Text("nothing was found to be wrong")
        return
    table = Table(title="findings", title_justify="left", show_lines=True)
    for name in ("", "where", "what was seen", "what to do"):
        table.add_column(name, overflow="fold")
    order = list(Severity)
    for one in sorted(findings, key=lambda found: order.index(found.severity)):
        named = Text(f"{one.severity.value}: {one.name}", style=COLOURS[one.severity])
        table.add_row(named, Text(one.where), Text(one.seen), Text(one.cure))
    yield table
