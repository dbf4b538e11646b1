"""Paths to and from other machines: what can be listened on here, who is reached there, and what a read from there costs.

`Berth` is the other end: memory that anybody who has the key may read, so that a path can be measured before any engine runs.
"""

from __future__ import annotations

import secrets
import threading
import time
from types import TracebackType
from typing import Final

from kvferry.check.canary import options_for, read_beacons
from kvferry.check.cards import ask_all
from kvferry.check.pages import as_pages
from kvferry.doctor.machine import Answer
from kvferry.doctor.memory import allocate, pattern
from kvferry.doctor.paths import Measured
from kvferry.doctor.probe import PAGE, read_pages
from kvferry.errors import KVFerryError, SessionError
from kvferry.findings import Finding, Severity
from kvferry.manifest.schema import Identity, Rank, Region
from kvferry.session import Card, Keys, Listener, Welcome, Words
from kvferry.session.key import split_address
from kvferry.transport import NixlOptions, NixlTransport
from kvferry.transport.fence import PORTS

BYTES: Final = 32 << 20
NAME: Final = "kvferry-doctor"
_TICK_S: Final = 0.0005


class Berth:
    """Holds a pattern in `size` bytes and answers who asks for it, until it is closed."""

    def __init__(self, listen: str, keys: Keys, size: int = BYTES) -> None:
        self._serving, self._closing = threading.Lock(), threading.Event()
        self._memory = allocate(size, "dram")
        self._memory.write(pattern(0, size))
        self._transport = NixlTransport(NAME, NixlOptions(address=split_address(listen)[0]))
        words = Words(1, Identity(NAME, "0", "words", Rank()))
        self._words = words
        storage = self._memory.storage
        self._transport.register([storage, words.storage])
        pages = as_pages(NAME, [Region("pages", size, storage.address)], [(0, 0, PAGE)], size // PAGE)
        card = Card(pages, words.manifest, self._transport.metadata(), words.beacon)
        try:
            self._listener = Listener(listen, keys)
        except KVFerryError:
            self._transport.close()
            raise
        self.port = self._listener.port
        self._listener.welcome(Welcome(NAME, secrets.token_hex(8), 60.0, (card,), role="producer"))

    def serve(self, seconds: float) -> None:
        """Let others read for so long."""
        deadline = time.monotonic() + seconds
        with self._serving:
            while time.monotonic() < deadline and not self._closing.is_set():
                self._transport.notifications()
                time.sleep(_TICK_S)

    def close(self) -> None:
        """Whoever serves ends first."""
        self._closing.set()
        self._listener.close()
        with self._serving:
            self._transport.close()

    def __enter__(self) -> Berth:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def listenable(address: str, keys: Keys) -> list[Finding]:
    """Whether an engine of this machine could listen there."""
    try:
        Listener(address, keys).close()
    except SessionError as error:
        text = str(error)
        for words, name, cure in _UNHEARD:
            if words in text:
                return [Finding(name, text.partition("; choose")[0].partition(": set key")[0], cure, where=address)]
    return []


_UNHEARD: Final = (
    ("needs a key", "key-needed", "give --key-file here, and key_file to the engines"),
    ("Address already in use", "port-taken", "end who listens there (ss -ltnp), or choose another port, or 0 for a free one"),
    ("", "cannot-listen", "choose an address and a port of this machine"),
)


def reached(address: str, keys: Keys, timeout_s: float = 5.0) -> tuple[list[Finding], Measured | None]:
    """An engine, or a doctor that serves, at an address: asked, and read from. Only a doctor's memory is read at length: it
    holds what can be compared, and nobody waits for it."""
    asked = ask_all([address], keys, timeout_s)
    if not asked.engines:
        return list(asked.findings), None
    (engine,) = asked.engines
    if engine.welcome.engine != NAME:
        done = read_beacons(engine)
        found = ", ".join(done.paths)
        meaning = f"a word of each of {done.ranks} ranks of the engine there"
        return list(done.findings), Measured(address, meaning, found, done.compared, right=not done.findings)
    card = engine.welcome.cards[0]
    region = next(iter(card.caches.regions), None)
    size = min(region.length, BYTES) // PAGE * PAGE if region is not None else 0
    if region is None or not size:
        return [Finding("path-failed", "the doctor there holds nothing", "run the same release on both", where=address)], None
    memory = allocate(size, "dram")
    memory.clear()
    try:
        transport = NixlTransport(f"{NAME}-reader", options_for(card.transport, address))
        try:
            answer: Answer = read_pages(transport, card.transport, region.address, memory, size, "dram")
        finally:
            transport.close()
    except KVFerryError as error:
        cure = f"let the TCP ports of ucx_ports ({PORTS}) through the firewall between the machines, both ways"
        return [Finding("path-failed", str(error), cure, where=address)], None
    findings = []
    if not answer.right:
        seen = f"{answer.bytes:,} bytes arrived otherwise than they were sent, by {answer.carried}"
        findings.append(Finding("path-wrong", seen, "do not serve over it; report it", where=address))
    if answer.slow:
        findings.append(Finding("slow-path", f"it is read by {answer.carried}", answer.remedy, Severity.WARNING, address))
    meaning = "host memory of the doctor there"
    return findings, Measured(address, meaning, answer.carried, answer.bytes, answer.seconds, answer.right, answer.slow)
