"""Scattered against consecutive blocks between two network namespaces, over TCP with a limited bandwidth.

    unshare -Urnm python -m benchmarks.two_namespaces [--rate 2gbit] [--tokens 16000] [--json FILE]
    unshare -Urnm python -m benchmarks.two_namespaces --engines [--tokens 2049] [--repeats 7] [--json FILE]

A pair of virtual interfaces joins this process's namespace with one of the producer's own; `tc` limits what goes through. Needs
no privileges where user namespaces are allowed. The namespaces stand for machines: no memory of one is mapped in the other,
unless it is asked for. Bytes move between two transports, or with --engines between two vLLM servers, which need vLLM in the
Python that runs this; `python -m lab bench serve --starts 0 --add FILE` shows what was measured of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from kvferry.doctor.child import Child, child
from kvferry.errors import MeasureError
from kvferry.strategy.staging import BUDGET
from kvferry.up.device import Device
from lab.bench import strategies
from lab.bench.case import size_of
from lab.bench.machine import this_machine
from lab.bench.scatters import SCATTERS, Scatter
from lab.bench.serve import result
from lab.bench.serve.arms import ARMS, Arm, chosen, defined
from lab.bench.serve.engine import EAGER, Place
from lab.bench.serve.measure import ALONE, CONSECUTIVE, IN_TURNS, SHUFFLED
from lab.bench.serve.models import model
from lab.bench.serve.runner import Order, Watcher, check, run
from lab.bench.staging_ends import Ask, End, Holder, _hold, consumer_end, memory_of
from lab.fleet import namespaces
from lab.fleet.zygote import Start

HERE, THERE = "ferry-d", "ferry-p"
ADDRESS_HERE, ADDRESS_THERE = "10.77.0.1", "10.77.0.2"
WAYS: Final = ("direct", "packed", "staged", "auto")
CHOSEN: Final = ("consecutive blocks", "scattered blocks", "head slices, TP 1 → 2", "token-major, TP 1 → 2")
STRATEGIES: Final = {"any": ("packed", "staged", "direct"), "direct": ("direct",), "packed": ("packed",), "staged": ("staged",)}
"""Arms beside the connector as it comes: the cost model chooses among all, and each that there is on host memory is forced."""
TOKENS: Final = {False: 16_000, True: 2049}
REPEATS: Final = {False: 3, True: 7}
POOL: Final = "512M"


def tcp(device: str) -> dict[str, str]:
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def see_own_devices() -> None:
    """UCX looks for devices under /sys, which shows those of the namespace that it was mounted in."""
    subprocess.run(["mount", "-t", "sysfs", "none", "/sys"], check=True)


def go_elsewhere(parent: Connection) -> None:
    """The producer's side: in a namespace of its own from before it has anything open."""
    namespaces.leave()
    parent.send_bytes(b"apart")
    parent.recv_bytes()
    see_own_devices()
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{ADDRESS_THERE}/24", "dev", THERE)
    ip("link", "set", THERE, "up")
    parent.send_bytes(b"up")


def hold_elsewhere(parent: Connection) -> None:
    """Memory to be read."""
    go_elsewhere(parent)
    _hold(parent)


def stay_elsewhere(parent: Connection) -> None:
    """Nothing but the namespaces, for a server to enter."""
    go_elsewhere(parent)
    with suppress(EOFError):
        parent.recv_bytes()


@contextmanager
def joined(rate: str, there: Callable[[Connection], None]) -> Iterator[Child]:
    with child("the producer's process", there) as found:
        found.receive(60.0)
        ip("link", "set", "lo", "up")
        ip("link", "add", HERE, "type", "veth", "peer", "name", THERE)
        ip("link", "set", THERE, "netns", str(found.process.pid))
        ip("addr", "add", f"{ADDRESS_HERE}/24", "dev", HERE)
        ip("link", "set", HERE, "up")
        found.send(b"go")
        found.receive(60.0)
        # What this end receives is what the producer's end may send: a limit on either end would do for its own direction.
        limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        for device, prefix in ((HERE, ()), (THERE, ("nsenter", "-t", str(found.process.pid), "-n"))):
            subprocess.run((*prefix, "tc", "qdisc", "add", "dev", device, *limit), check=True)
        yield found
        found.send(b"")


def measured(held: Holder, scatter: Scatter, tokens: int, repeats: int, budget: int, maps: bool) -> dict[str, float]:
    case = scatter.case(tokens)
    ready = held.hold(Ask(scatter.name, scatter.layers, tokens, "dram", budget, tcp(THERE)))
    here = memory_of(size_of(case.consumers[0]), "dram", shared=False)
    ends: dict[str, End] = {}
    try:
        for way in WAYS:
            ends[way] = consumer_end(way, here, "dram", budget, tcp(HERE), maps)
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


def between_transports(said: argparse.Namespace) -> None:
    with joined(said.rate, hold_elsewhere) as found:
        held = Holder(found)
        scatters = [scatter for scatter in SCATTERS if scatter.name in CHOSEN]
        seconds = {s.name: measured(held, s, said.tokens, said.repeats, said.staging_bytes, said.mapped) for s in scatters}
    scattered, consecutive = seconds["scattered blocks"], min(seconds["consecutive blocks"].values())
    for way in WAYS:
        print(f"scattered, {way}: {scattered[way] / consecutive:.2f} × consecutive at its best")
    if said.json:
        kept = {"rate": said.rate, "tokens": said.tokens, "machine": this_machine(), "seconds": seconds}
        said.json.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))


def arms(names: str, staging_bytes: int) -> tuple[Arm, ...]:
    known = {"kvferry": ARMS["kvferry"]}
    for name, ways in STRATEGIES.items():
        definition = {"like": "kvferry", "settings": {"strategies": ways, "staging_bytes": staging_bytes, "map_rings": False}}
        known[name] = defined(f"{name}={msgspec.json.encode(definition).decode()}")
    return chosen(names, known)


def received() -> int:
    """Bytes that came over the limited pair of interfaces, with all headers."""
    return int(Path(f"/sys/class/net/{HERE}/statistics/rx_bytes").read_text())


def told(found: result.Run, carried: int) -> str:
    """One arm in a line. Raises where its figures would say nothing: not all came from P, blocks did not lie as they should
    have, or not over the interfaces."""
    rows = {row.order: row for row in found.rows if row.name == ALONE}
    troubles = [found.error, *(f"{row.order}: {row.void}" for row in found.rows if row.void)]
    moved = sum(row.moved_bytes for row in rows.values())
    if set(rows) != {CONSECUTIVE, SHUFFLED}:
        troubles.append(f"only {', '.join(rows) or 'nothing'} was measured")
    elif not moved or any(row.moved_bytes != row.foretold_bytes for row in rows.values()):
        foretold = sum(row.foretold_bytes for row in rows.values())
        troubles.append(f"{moved} bytes were moved, {foretold} were foretold")
    if carried < moved:
        troubles.append(f"{moved} bytes were moved, and {carried} came over the interfaces: the others took another way")
    if any(troubles):
        raise MeasureError(f"{found.arm}: {'; '.join(filter(None, troubles))}")
    times = {
        name: [median(rows[order].samples[sample]) for order in (CONSECUTIVE, SHUFFLED)]
        for name, sample in (("first token", "ttft"), ("in D's engine", "in the engine"), ("on the wire", "on the wire"))
    }
    shown = [f"{name} {a:.0f} and {b:.0f} ms ({b / a:.2f} ×)" for name, (a, b) in times.items()]
    laid = [f"{row.runs} runs of {row.blocks} blocks" for row in (rows[CONSECUTIVE], rows[SHUFFLED])]
    return (
        f"{found.arm}: consecutive and scattered: {', '.join(shown)}; {' and '.join(laid)}, {rows[SHUFFLED].pieces} pieces; "
        f"{moved / 1e6:.1f} MB moved as foretold, {carried / 1e6:.1f} MB over the interfaces"
    )


def between_engines(said: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="two-namespaces-") as name, joined(said.rate, stay_elsewhere) as found:
        folder, before = Path(name), received()
        (folder / "key").write_text(os.urandom(32).hex())
        key = {"key_file": str(folder / "key")}
        there = {**tcp(THERE), namespaces.VARIABLE: str(found.process.pid)}
        places = {"P": Place(ADDRESS_THERE, key, there), "D": Place(settings=key, environment=tcp(HERE))}
        served = model(said.model, folder / "models")
        compared = arms(said.arms, said.staging_bytes)
        order = Order(served, compared, (EAGER,), said.starts, Device.CPU, Start.FORK, (IN_TURNS,), places=places)
        settings = result.Settings(
            model=served.name,
            device=Device.CPU.value,
            dtype=served.dtype,
            lengths=(said.tokens,),
            repeats=said.repeats,
            at_once=1,
            at_once_length=said.tokens,
            rounds=1,
            beside=1,
            output=2,
            idle_s=1.0,
            prefills=1,
            rate=1.0,
            rate_s=1.0,
            kv_cache_bytes=POOL,
            prefix_caching=served.prefix_caching,
            seed=0,
        )
        check(order, settings)
        record = result.Record(this_machine(), settings, [])

        def finished(ended: result.Run) -> None:
            nonlocal before
            print(told(ended, received() - before), flush=True)
            before = received()

        def save() -> None:
            if said.json:
                result.write(said.json, record)

        run(order, record, said.logs or folder / "logs", Watcher(lambda what: None, finished, save))


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--engines", action="store_true", help="between two vLLM servers, by each strategy in turn")
    out.add_argument("--rate", default="2gbit", help="as for tc")
    out.add_argument("--tokens", type=int, help=f"{TOKENS[False]}, between engines {TOKENS[True]}")
    out.add_argument("--repeats", type=int, help=f"{REPEATS[False]}, between engines {REPEATS[True]} of each order, by turns")
    out.add_argument("--arms", default=",".join(("kvferry", *STRATEGIES)), help="engines to compare, separated by commas")
    out.add_argument("--model", default="small-llama", help="what they serve: a shape that `bench serve` knows, or a folder")
    out.add_argument("--starts", type=int, default=1, help="how often engines of each kind are started")
    out.add_argument("--staging-bytes", type=int, default=BUDGET)
    out.add_argument("--mapped", action="store_true", help="between transports, rings are mapped: containers of one machine")
    out.add_argument("--json", type=Path)
    out.add_argument("--logs", type=Path, help="keep the engines' logs in this folder")
    return out


def main(words: Sequence[str]) -> None:
    said = parser().parse_args(words)
    said.tokens, said.repeats = said.tokens or TOKENS[said.engines], said.repeats or REPEATS[said.engines]
    see_own_devices()
    try:
        (between_engines if said.engines else between_transports)(said)
    except MeasureError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
