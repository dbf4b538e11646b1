"""How a NIXL agent is started: NIXL under whichever name it is installed, its options, and a progress thread that may sleep."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvferry.errors import TransportError
from kvferry.transport.fence import LOOPBACK, PORTS, Fence, fence, operators

logger = logging.getLogger("kvferry.transport")

_MODULES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
GET_NIXL: Final = "pip install --no-deps nixl-cu12 (nixl-cu13 for CUDA 13)"
_POSTERS: Final = 4
"""Threads that post where there are cores for them: with four, vLLM's own connector posts a descriptor over CUDA IPC in 3.4 us,
a single thread needs 8.2 us (H200)."""
_SPLIT: Final = 128
"""From so many descriptors on a window is worth splitting among threads: posting them takes about a millisecond."""
_SLOW_US: Final = 5000
"""How long a slow progress thread sleeps at most; arrivals wake it, but for some that UCX does not announce. It takes less than
0.5 % of a core then."""


NO_STRIDES: Final = (
    "this NIXL is older than 1.5 and takes no strided lists: connecting to a peer prepares one descriptor for each run of each "
    "block, which costs time and memory; reads are the same"
)


@dataclass(frozen=True)
class NixlOptions:
    """How NIXL is run; every field has a default that is right where nothing is known.

    `progress_thread`: whether a thread of NIXL's keeps connections and emulated reads going. Without it, which is the default,
    they move on while `poll` and `notifications` are called. True is NIXL's own: it spins, which costs a core, and holds the
    lock that posting needs. "slow" sleeps until something arrives, and at most some milliseconds.
    `posting_threads`: that many of UCX's own post reads of many descriptors, beside each other and without Python's lock. They
    sleep while nothing is in flight, and spin while something is. None: 4 where at least 8 cores are usable, else 0, which is
    the caller's thread.
    `window`: descriptors in flight to one peer; some NICs' send queues overflow past 4,096. Reads of at most a 64th of it are
    posted beside it.
    `timeout_s`: how long a read may go without visible progress before it fails.
    `address`: where others reach this end. On loopback UCX opens no port; else it works over RDMA, or TCP on the interface that
    has the address and the range `ports` ("0": any port). See `kvferry.transport.fence`.
    `backend_parameters` are NIXL's for the backend (for UCX: ucx_devices, num_workers, ucx_error_handling_mode); `ucx` are
    UCX settings beside those of `kvferry.transport.ucx`, and neither overrides the operator's environment.
    `sync`: "strict" has NIXL lock around every call, for a transport that several threads call at once; a ferry's has one.
    """

    backend: str = "UCX"
    progress_thread: bool | Literal["slow"] | None = None
    window: int = 4096
    timeout_s: float = 30.0
    backend_parameters: Mapping[str, str] = field(default_factory=dict)
    ucx: Mapping[str, str] = field(default_factory=dict)
    posting_threads: int | None = None
    sync: Literal["none", "strict"] = "none"
    address: str = LOOPBACK
    ports: str = PORTS

    @property
    def fence(self) -> Fence:
        """What UCX is told, beside the settings it always needs; nothing for another backend."""
        if self.backend != "UCX":
            return Fence(False, "", self.ucx)
        return fence(self.address, self.ports, operators(self.ucx), 1 + self.posters)

    @property
    def posters(self) -> int:
        """How many threads of UCX's post."""
        if self.posting_threads is not None:
            return self.posting_threads
        return _POSTERS if len(os.sched_getaffinity(0)) >= 2 * _POSTERS else 0

    @property
    def parameters(self) -> dict[str, str]:
        """The backend's parameters; the operator's come last."""
        threads = {"num_threads": str(self.posters), "split_batch_size": str(_SPLIT)} if self.posters else {}
        return {**(threads if self.backend == "UCX" else {}), **self.backend_parameters}


@dataclass(frozen=True)
class Library:
    """NIXL's Python interface, under whichever name it is installed. `strided`: it takes lists of strided rows, as from its
    release 1.5 on; else every element of a row is a descriptor."""

    api: Any
    errors: tuple[type[Exception], ...]
    strided: bool = True


def library() -> Library:
    for name in _MODULES:
        try:
            api = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.partition(".")[0] == name:
                continue
            raise TransportError(f"NIXL is installed as {name} but cannot be imported: {error}") from error
        except ImportError as error:
            raise TransportError(f"NIXL is installed as {name} but cannot be imported: {error}") from error
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        found = (getattr(api.nixlBind, attribute) for attribute in dir(api.nixlBind))
        errors = tuple(e for e in found if isinstance(e, type) and issubclass(e, Exception))
        strided = "mem_type" in (api.nixlBind.nixlAgent.prepXferDlist.__doc__ or "")
        return Library(api, (*errors, RuntimeError, ValueError, KeyError), strided)
    raise TransportError(
        f"NIXL is not installed (looked for {', '.join(_MODULES)}); {GET_NIXL}, or with PyTorch, several gigabytes: "
        "pip install 'kvferry[nixl]'"
    )


def start(name: str, options: NixlOptions, found: Library) -> tuple[Any, bool]:
    """The agent, with its backend; and whether a thread of its own makes progress."""
    api, backend = found.api, options.backend
    modes = api.nixl_thread_sync_t
    mode = modes.NIXL_THREAD_SYNC_STRICT if options.sync == "strict" else modes.NIXL_THREAD_SYNC_NONE
    spins = options.progress_thread is True
    try:
        config = api.nixl_agent_config(enable_prog_thread=spins, backends=[], capture_telemetry=True, sync_mode=mode)
        agent = api.nixl_agent(name, config)
        progresses = spins or (options.progress_thread == "slow" and slowed_down(agent, name, mode.value, api.nixlBind))
        if backend not in agent.get_plugin_list():
            raise TransportError(f"NIXL has no backend {backend} here; it has {', '.join(agent.get_plugin_list())}")
        agent.create_backend(backend, options.parameters)
    except found.errors as error:
        raise TransportError(f"{name}: NIXL cannot start its backend {backend}: {error}") from error
    return agent, progresses


def slowed_down(agent: Any, name: str, sync: Any, bind: Any) -> bool:
    """Give an agent that has no backend yet a progress thread that sleeps. NIXL's Python interface has no word for that: it
    asks for one that never does, so what it has configured is replaced by the same with another delay."""
    try:
        if not isinstance(agent.agent, bind.nixlAgent) or agent.backends:
            raise TypeError("the agent is not what it was")
        config = bind.nixlAgentConfig()
        settings = {
            "pthrDelay": _SLOW_US,
            "useProgThread": True,
            "useListenThread": False,
            "captureTelemetry": True,
            "syncMode": sync,
        }
        for setting, value in settings.items():
            if not hasattr(config, setting):
                raise TypeError(f"its configuration has no {setting}")
            setattr(config, setting, value)
        agent.agent = bind.nixlAgent(name, config)
    except (AttributeError, TypeError) as error:
        logger.warning("this NIXL has no slow progress thread (%s); reads move on while this process polls", error)
        return False
    return True
