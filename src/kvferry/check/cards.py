"""Running engines: asked for their cards as a decode engine would ask, all pairs compared, planned and proved.

Pairs of the same shape are worked out once, so that a fleet costs what its distinct pairs cost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from kvferry.check.offline import Moves, prove
from kvferry.engines.vllm.drafters import without_other_drafters
from kvferry.errors import DecodeError, KVFerryError, SessionError, SideError, TransportError
from kvferry.findings import Finding, Severity
from kvferry.manifest import Manifest
from kvferry.manifest.schema import Identity
from kvferry.plan import Plan
from kvferry.session import Hello, Keys, PeerKey, Welcome, Words
from kvferry.session.key import reach, split_address
from kvferry.session.messages import CONSUMER, PRODUCER
from kvferry.session.wire import RefusedError, SilentError, ask_at, find
from kvferry.transport.metadata import refuse_elsewhere

AT_ONCE: Final = 32

Shape = bytes


@dataclass(frozen=True)
class Engine:
    """An engine that answered, and where it was asked."""

    address: str
    welcome: Welcome

    @property
    def peer(self) -> PeerKey:
        return PeerKey(self.address, self.welcome.engine, self.welcome.incarnation)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(card.caches for card in self.welcome.cards)

    @property
    def topology(self) -> str:
        rank = self.welcome.cards[0].caches.identity.rank
        return f"TP{rank.tp_size}" if rank.pp_size == 1 else f"TP{rank.tp_size},PP{rank.pp_size}"

    def is_a(self, role: str) -> bool:
        """An engine that does not say what it is, or says something that is not known here, may be anything."""
        said = self.welcome.role
        return said not in (PRODUCER, CONSUMER) or said == role


@dataclass(frozen=True)
class Asked:
    """Who answered, and why others did not."""

    engines: tuple[Engine, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Pair:
    """A producer and a consumer, what is wrong between them, and, where nothing is, their proved plans."""

    producer: Engine
    consumer: Engine
    findings: tuple[Finding, ...]
    moves: Moves | None
    plans: tuple[Plan, ...]

    @property
    def name(self) -> str:
        return f"{self.producer.address} → {self.consumer.address}"


def ask_all(addresses: Sequence[str], keys: Keys, timeout_s: float = 5.0) -> Asked:
    """All of them at once; each at most a few seconds. Raises SideError for what is no address."""
    for address in addresses:
        _refuse_other_words(address)
    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(addresses)))) as pool:
        found = list(pool.map(lambda address: _ask(address, keys, timeout_s), dict.fromkeys(addresses)))
    engines: dict[tuple[str, str], Engine] = {}
    findings = []
    for one in found:
        if isinstance(one, Finding):
            findings.append(one)
            continue
        start = (one.welcome.engine, one.welcome.incarnation)
        if start in engines:
            seen = f"{one.address} and {engines[start].address} are the same engine"
            findings.append(Finding("same-engine", seen, "name it once", Severity.WARNING, one.address))
        engines.setdefault(start, one)
    return Asked(tuple(engines.values()), tuple(findings))


def _refuse_other_words(address: str) -> None:
    try:
        split_address(address)
    except SessionError:
        raise SideError(
            f"{address[:80]!r} is no engine: write the address that a running vLLM engine listens on, as host:port "
            "(its option listen, such as 127.0.0.1:7600); engines are not named by their kind"
        ) from None


def _ask(address: str, keys: Keys, timeout_s: float) -> Engine | Finding:
    hello = Hello("kvferry-check", secrets.token_hex(8))
    try:
        reach(address, keys)
    except SessionError as error:
        return Finding(
            "key-needed",
            str(error).partition(": ")[0],
            "give --key-file the cluster's key, or name an engine of this machine as 127.0.0.1:port",
            where=address,
        )
    try:
        number = find(address, keys, timeout_s)
    except SessionError as error:
        cure = (
            "start the engine, look for its options listen and advertise, and open the port; a decode engine answers only "
            "where its listen names a port"
        )
        return Finding("not-reached", str(error), cure, where=address)
    try:
        welcome = ask_at(address, number, hello, keys, timeout_s)
        if keys.local:
            for card in welcome.cards:
                refuse_elsewhere(card.transport)
    except SilentError as error:
        cure = (
            "give --key-file the engine's key; it has one, or is another user's, in another container, or of an older release"
            if keys.local
            else "give --key-file the key that the engine has; without one if it has none"
        )
        return Finding("no-answer", str(error), cure, where=address)
    except RefusedError as error:
        return Finding("refused", str(error), "wait until the engine is up, and ask again", where=address)
    except (DecodeError, SessionError) as error:
        return Finding("session-version", str(error), "run the same release of kvferry on all sides", where=address)
    except TransportError as error:
        return Finding(
            "elsewhere", str(error), "give all engines a key (key_file), and this command too (--key-file)", where=address
        )
    return Engine(address, welcome)


def check_engines(engines: Sequence[Engine]) -> tuple[list[Pair], list[Finding]]:
    """Every producer with every consumer but itself; and what is to be said of the fleet as a whole."""
    producers = [engine for engine in engines if engine.is_a(PRODUCER)]
    consumers = [engine for engine in engines if engine.is_a(CONSUMER)]
    shapes = {id(engine): _shape(engine) for engine in engines}
    known: dict[tuple[Shape, Shape], tuple[tuple[Finding, ...], Moves | None, tuple[Plan, ...]]] = {}
    pairs = []
    for producer in producers:
        for consumer in consumers:
            if producer is consumer:
                continue
            alike = (shapes[id(producer)], shapes[id(consumer)])
            if alike not in known:
                known[alike] = _judged(producer, consumer)
            findings, moves, plans = known[alike]
            pair = Pair(producer, consumer, findings, moves, plans)
            named = tuple(msgspec.structs.replace(one, where=pair.name) for one in findings)
            pairs.append(Pair(producer, consumer, named, moves, plans))
    if pairs or not engines:
        return pairs, []
    seen = "no producer and consumer are among the engines that answered: " + ", ".join(
        f"{engine.address} is a {engine.welcome.role or 'producer'}" for engine in engines
    )
    cure = "name engines of both sides; a decode engine answers only where its option listen names a port"
    return pairs, [Finding("no-pair", seen, cure)]


def _judged(producer: Engine, consumer: Engine) -> tuple[tuple[Finding, ...], Moves | None, tuple[Plan, ...]]:
    """As the decode engine itself would, when it meets the prefill engine."""
    mine = consumer.manifests
    welcome = without_other_drafters(producer.welcome, mine)
    try:
        words = Words(1, mine[0].identity)
        for card in welcome.cards:
            words.plan(card.words)
    except KVFerryError as error:
        return (Finding("words", str(error), "run the same release of kvferry on all sides"),), None, ()
    findings, plans = prove(tuple(card.caches for card in welcome.cards), mine, "")
    moves = Moves.of(producer.topology, consumer.topology, len(welcome.cards), plans) if plans else None
    return tuple(findings), moves, plans


def _shape(engine: Engine) -> Shape:
    """Everything that a plan depends on: not where regions lie, nor what the engine is called."""
    out = []
    for manifest in engine.manifests:
        regions = tuple(msgspec.structs.replace(region, address=0) for region in manifest.regions)
        own = manifest.identity
        identity = Identity("", "", own.model, own.rank)
        out.append(msgspec.structs.replace(manifest, regions=regions, identity=identity))
    return msgspec.msgpack.encode(out)
