"""What is compared: engines that differ in their connector and its settings, and in nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvferry.errors import MeasureError
from lab.fleet.connectors import OURS, STOCK, Connector
from lab.fleet.patches import STOCK_AGENT, SWITCH_SECONDS

DIRECT_ALONE: Final[Mapping[str, Any]] = {"strategies": ["direct"]}
"""Our connector's settings with which it reads over NIXL alone."""
STOCK_AGENT_SETTINGS: Final[Mapping[str, Any]] = {"progress_thread": True, "backend_parameters": {"num_threads": "4"}}

LEAST_SWITCH_S: Final = 1e-6
"""Python counts in microseconds."""

STOCK_STATES: Final[Mapping[str, str]] = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""Without it vLLM's own connector does not start with a model that has convolution states."""


@dataclass(frozen=True)
class Arm:
    """`block`: tokens in a block; the device's usual number if 0. In an arm without a connector all is asked of D: what is
    handed over elsewhere it finds in its own prefix cache. Its P is there, and idle, as a P is beside every other D."""

    name: str
    connector: Connector | None = None
    block: int = 0
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return self.connector is None


_DIRECT: Final = replace(OURS, settings=DIRECT_ALONE)
ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm("none"),
        Arm("none-64", block=64),
        Arm("stock", STOCK, environment=STOCK_STATES),
        Arm("stock-64", STOCK, block=64, environment=STOCK_STATES),
        Arm("kvferry", OURS),
        Arm("kvferry-64", OURS, block=64),
        Arm("kvferry-direct", _DIRECT),
        Arm("kvferry-direct-64", _DIRECT, block=64),
        Arm("kvferry-stock-agent", replace(OURS, settings=STOCK_AGENT_SETTINGS), environment={STOCK_AGENT: "1"}),
    )
}


class _Definition(Struct, frozen=True, forbid_unknown_fields=True):
    like: str
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    block: int = 0
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    switch_s: float | None = None


def defined(text: str, known: Mapping[str, Arm] = ARMS) -> Arm:
    """An arm from NAME={"like": ARM, ...}: a known one with other settings, blocks, flags or environment; or in whose
    engines a thread keeps Python's lock from others for `switch_s`."""
    name, equals, definition = text.partition("=")
    if not name or not equals:
        raise MeasureError(f'{text}: define an arm as NAME={{"like": "kvferry", "settings": {{...}}}}')
    try:
        found = msgspec.json.decode(definition, type=_Definition)
    except msgspec.DecodeError as error:
        raise MeasureError(f"the definition of the arm {name}: {error}") from None
    (model,) = chosen(found.like, known)
    connector = model.connector
    if found.settings and connector is None:
        raise MeasureError(f"the definition of the arm {name}: {model.name} has no connector to give settings to")
    if connector is not None:
        connector = replace(connector, settings={**connector.settings, **found.settings})
    environment = {**model.environment, **found.environment}
    if found.switch_s is not None:
        if not LEAST_SWITCH_S <= found.switch_s <= 1:
            told = f"give seconds from {LEAST_SWITCH_S:f} to 1; Python's own interval is 0.005"
            raise MeasureError(f"the definition of the arm {name}: switch_s {found.switch_s:g}: {told}")
        environment[SWITCH_SECONDS] = str(found.switch_s)
    return Arm(name, connector, found.block or model.block, (*model.flags, *found.flags), environment)


def chosen(names: str, known: Mapping[str, Arm] = ARMS) -> tuple[Arm, ...]:
    """The arms with these names, separated by commas."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise MeasureError(f"there is no arm {name!r}; {hint}")
    return tuple(known[name] for name in dict.fromkeys(wanted))


def turns(arms: Sequence[Arm], modes: Sequence[str], starts: int) -> list[tuple[int, str, Arm]]:
    """Every start of every arm: arms take turns, and each start begins with another one, so that a machine that slows down
    slows all of them."""
    out = []
    for start in range(starts):
        first = start % len(arms)
        for mode in modes:
            out += [(start, mode, arm) for arm in (*arms[first:], *arms[:first])]
    return out
