"""Scattered against consecutive blocks between two network namespaces, over TCP with a limited bandwidth.

    unshare -Urnm python benchmarks/two_namespaces.py [--rate 2gbit] [--tokens 16000] [--json FILE]

A pair of virtual interfaces joins this process's namespace with one of the producer's own; `tc` limits what goes through. Needs
no privileges where user namespaces are allowed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from kvferry.bench import strategies
from kvferry.bench.case import size_of
from kvferry.bench.child import child
from kvferry.bench.machine import this_machine
from kvferry.bench.scatters import SCATTERS, Scatter
from kvferry.bench.staging_ends import Ask, End, Holder, _hold, consumer_end, memory_of
from kvferry.strategy.staging import BUDGET

HERE, THERE = "ferry-d", "ferry-p"
NET_AND_MOUNTS: Final = 0x40000000 | 0x00020000
WAYS: Final = ("direct", "packed", "staged", "auto")
CHOSEN: Final = ("consecutive blocks", "scattered blocks", "head slices, TP 1 → 2", "token-major, TP 1 → 2")


def tcp(device: str) -> dict[str, str]:
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def see_own_devices() -> None:
    """UCX looks for devices under /sys, which shows those of the namespace that it was mounted in."""
    subprocess.run(["mount", "-t", "sysfs", "none", "/sys"], check=True)


def elsewhere(parent: Connection) -> None:
    """The producer: in a namespace of its own from before it has anything open."""
    if ctypes.CDLL(None, use_errno=True).unshare(NET_AND_MOUNTS):
        sys.exit(f"no network namespace can be had: {os.strerror(ctypes.get_errno())}")
    parent.send_bytes(b"apart")
    parent.recv_bytes()
    see_own_devices()
    ip("link", "set", "lo", "up")
    ip("addr", "add", "10.77.0.2/24", "dev", THERE)
    ip("link", "set", THERE, "up")
    parent.send_bytes(b"up")
    _hold(parent)


@contextmanager
def joined(rate: str) -> Iterator[Holder]:
    with child("the producer's process", elsewhere) as found:
        found.receive(60.0)
        ip("link", "set", "lo", "up")
        ip("link", "add", HERE, "type", "veth", "peer", "name", THERE)
        ip("link", "set", THERE, "netns", str(found.process.pid))
        ip("addr", "add", "10.77.0.1/24", "dev", HERE)
        ip("link", "set", HERE, "up")
        found.send(b"go")
        found.receive(60.0)
        # What this end receives is what the producer's end may send: a limit on either end would do for its own direction.
        for device, prefix in ((HERE, ()), (THERE, ("nsenter", "-t", str(found.process.pid), "-n"))):
            words = (
                *prefix,
                "tc",
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256kb",
                "latency",
                "50ms",
            )
            subprocess.run(words, check=True)
        yield Holder(found)
        found.send(b"")


def measured(held: Holder, scatter: Scatter, tokens: int, repeats: int, budget: int) -> dict[str, float]:
    case = scatter.case(tokens)
    ready = held.hold(Ask(scatter.name, scatter.layers, tokens, "dram", budget, tcp(THERE)))
    here = memory_of(size_of(case.consumers[0]), "dram", shared=False)
    ends: dict[str, End] = {}
    try:
        for way in WAYS:
            ends[way] = consumer_end(way, here, "dram", budget, tcp(HERE))
        cell = strategies._Cell(scatter, case, "dram", ready, here, ends)
        for way in WAYS:
            cell._load(way)
        rounds = [{way: cell._load(way) for way in WAYS} for _ in range(repeats)]
        taken = ends["auto"].scattered.carried.most_common(1)[0][0]
    finally:
        for end in ends.values():
            end.close()
    found = {way: sorted(one[way] for one in rounds)[repeats // 2] for way in WAYS}
    print(
        f"{scatter.name}: " + ", ".join(f"{way} {1000 * s:.0f} ms" for way, s in found.items()) + f"; auto went {taken}",
        flush=True,
    )
    return found


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="2gbit")
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--staging-bytes", type=int, default=BUDGET)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args(words)
    see_own_devices()
    with joined(said.rate) as held:
        chosen = [scatter for scatter in SCATTERS if scatter.name in CHOSEN]
        found = {s.name: measured(held, s, said.tokens, said.repeats, said.staging_bytes) for s in chosen}
    scattered, consecutive = found["scattered blocks"], min(found["consecutive blocks"].values())
    for way in WAYS:
        print(f"scattered, {way}: {scattered[way] / consecutive:.2f} × consecutive at its best")
    if said.json:
        kept = {"rate": said.rate, "tokens": said.tokens, "machine": this_machine(), "seconds": found}
        said.json.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
