"""How planned bytes travel: one contract, over NIXL between machines and in plain memory for tests and simulation."""

from kvferry.transport.agent import NixlOptions
from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry, Transport
from kvferry.transport.inprocess import Harbour, InProcessTransport
from kvferry.transport.nixl import NixlTransport

__all__ = [
    "Harbour",
    "InProcessTransport",
    "NixlOptions",
    "NixlTransport",
    "Path",
    "Prepared",
    "Read",
    "State",
    "Storage",
    "Telemetry",
    "Transport",
]
