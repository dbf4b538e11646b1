"""How planned bytes travel: one contract, over NIXL between machines and in plain memory for tests and simulation."""

from kvferry.transport.contract import Path, Prepared, Read, State, Storage, Telemetry, Transport

__all__ = ["Path", "Prepared", "Read", "State", "Storage", "Telemetry", "Transport"]
