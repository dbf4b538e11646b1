"""`kvferry doctor`: what this machine lacks for serving, with cures, and a small measured transfer for each path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.cli.check import exit_code, findings_table
from kvferry.cli.output import show, show_json, write
from kvferry.doctor import Machine, Measured, examine, look, measure
from kvferry.errors import SessionError, SideError
from kvferry.findings import Finding, errors
from kvferry.session import Keys, keys_of
from kvferry.transport.fence import PORTS

MOST_S: Final = 86_400.0


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    well: bool
    machine: Machine
    measured: tuple[Measured, ...]
    findings: tuple[Finding, ...]
    version: int = 1


def doctor_command(
    listen: Annotated[list[str] | None, typer.Option(help="See whether host:port could be listened on here.")] = None,
    to: Annotated[list[str] | None, typer.Option(help="An engine or a serving doctor, at host:port; may be repeated.")] = None,
    serve: Annotated[str, typer.Option(help="Be the other end: listen at host:port and let `doctor --to` read.")] = "",
    serve_s: Annotated[float, typer.Option(help="For how long.")] = 600.0,
    key_file: Annotated[str, typer.Option(help="The cluster's key; needed for everything beyond this machine.")] = "",
    paths: Annotated[bool, typer.Option(help="Measure the paths between two processes of this machine.")] = True,
    strict: Annotated[bool, typer.Option(help="Warnings count as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Look at this machine: exit 0 if nothing is wrong, 1 if something is, 3 if only another machine could not be asked."""
    if serve:
        _serve(serve, keys_of(key_file), serve_s)
        return
    findings: list[Finding] = []
    machine = look()
    measured = measure(machine) if paths else []
    findings += examine(machine, measured)
    keys = _keys(key_file, findings) if key_file or listen or to else None
    if keys is not None and (listen or to):
        from kvferry.doctor.remote import listenable, reached

        for address in listen or []:
            findings += listenable(address, keys)
        for address in to or []:
            found, path = reached(address, keys)
            findings += found
            measured += [path] if path is not None else []
    report = Report(not errors(findings), machine, tuple(measured), tuple(findings))
    if as_json:
        show_json(report)
    else:
        show(_shown(report))
    code = exit_code(findings, strict)
    if code:
        raise typer.Exit(code)


def _keys(path: str, findings: list[Finding]) -> Keys | None:
    """A key that cannot be used is what somebody came here to be told."""
    try:
        return keys_of(path)
    except SessionError as error:
        cure = "make one with: head -c 32 /dev/urandom | base64 > FILE, and copy it to all sides"
        findings.append(Finding("key-file", str(error).partition("; make one")[0], cure))
        return None


def _serve(address: str, keys: Keys, seconds: float) -> None:
    from kvferry.doctor.remote import Berth

    if not 0 < seconds <= MOST_S:
        raise SideError(f"--serve-s {seconds:g}: give seconds up to {MOST_S:g}")
    host = address.rpartition(":")[0]
    with Berth(address, keys) as berth:
        write(f"kvferry doctor --to {host}:{berth.port} measures the path from there; this ends after {seconds:g} s\n")
        berth.serve(seconds)


def _shown(report: Report) -> Iterator[RenderableType]:
    yield _facts(report.machine)
    if report.measured:
        yield _measured(report.measured)
    yield from findings_table(report.findings)


def _facts(machine: Machine) -> Table:
    table = Table(title="this machine", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    rdma = ", ".join(f"{port.device} port {port.number} {port.state} {port.link}".strip() for port in machine.rdma)
    rows = {
        "packages": ", ".join(f"{name} {number}" for name, number in machine.packages.items()),
        "NIXL's backends": ", ".join(machine.nixl.plugins) or "none",
        "UCX": machine.nixl.ucx or "not loaded",
        "cores": str(machine.cores),
        "memory that may be locked": "all" if machine.lockable < 0 else f"{machine.lockable:,} bytes",
        "shared memory left": f"{machine.shared_free / (1 << 30):.1f} GiB",
        "GPUs": ", ".join(machine.gpus) or "none",
        "GPUDirect": ("yes" if machine.gpudirect else "no") if machine.gpus else "",
        "RDMA": rdma or "none",
        "ports of UCX": f"none if listen is loopback; else {'none, RDMA' if rdma else f'TCP {PORTS} (ucx_ports)'}",
        "environment": ", ".join(f"{name}={value}" for name, value in sorted(machine.environment.items())),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table


def _measured(paths: Sequence[Measured]) -> Table:
    table = Table(title="paths, measured", title_justify="left")
    for name in ("path", "what was read", "carried by", "bytes", "GB/s", "right"):
        table.add_column(name, overflow="fold", justify="right" if name in ("bytes", "GB/s") else "left")
    for path in paths:
        speed = f"{path.gigabytes_per_second:.2f}" if path.seconds else ""
        right = "failed" if path.error else "yes" if path.right else "no"
        table.add_row(*map(Text, (path.path, path.meaning, path.carried, f"{path.bytes:,}", speed, right)))
    return table
