"""The connector's options, from `kv_connector_extra_config`. vLLM logs them as they are, so no secret is among them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from kvferry.errors import SessionError, TransportError
from kvferry.findings import Finding
from kvferry.session.key import Keys, is_loopback, keys_of, loopback, split_address
from kvferry.strategy.gathering import SLOT_S
from kvferry.strategy.staging import BUDGET, LEAST
from kvferry.transport import NixlOptions
from kvferry.transport.fence import PORTS, TLS, allows_tcp, operators, port_range

Seconds = Annotated[float, Meta(gt=0)]
NOT_LOADED: Final = {"recompute": "it is recomputed here", "fail": "it fails (kv_load_failure_policy)"}
"""What becomes of a request that cannot be loaded, by vLLM's policy."""
RETRY_S: Final = 0.25
"""Between two tries to meet a named peer that is not there yet."""

SWITCH_S: Final = {"cuda": 0.0001}
"""`switch_s` by device. On a GPU the engine's thread lets go of the lock with every kernel that it launches, and waits so long
to have it back while vLLM's other thread takes in requests. On a CPU its steps compute, and Python's own 5 ms do."""

STOCK_OPTIONS: Final = {
    "backends": "it is NixlConnector's; name one with backend",
    "num_threads": "it is NixlConnector's; here it is posting_threads",
    "kv_lease_duration": "it is NixlConnector's; here it is lease_s",
    "engine_ttl": "it is NixlConnector's; leave it out, since a producer that ends is noticed and let go of",
    "enforce_handshake_compat": "it is NixlConnector's; leave it out, since what matters is compared by name",
    "bidirectional_kv_xfer": "it is NixlConnector's; leave it out: no prefill engine reads what a decode engine computed",
    "decoder_kv_blocks_ttl": "it is NixlConnector's; leave it out: a decoded request keeps no blocks for others",
    "kv_recompute_threshold": "it is NixlConnector's; leave it out: the router decides which prompts cross",
    "push_registration_timeout": "it is NixlConnector's; leave it out, since nothing is pushed",
}
"""What becomes of the options of vLLM's own connector."""


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """Every field has a default that works on one machine.

    `listen`: where this engine answers consumers, host:port; port 0 takes a free one, any other is offset by the data-parallel
    index. A consumer answers there too, for whoever checks a fleet, if it is given a port. `advertise`: the host that
    references name, where it is not the one listened on. `key_file`: the cluster's shared key; needed for everything beyond
    this machine, and on it for engines of several users or containers. Without one, engines of one user on one machine share a
    key of their own. `peers`: producers to meet at start, so that one that cannot be read is
    refused then. `lease_s`: how long a producer keeps blocks for a consumer that is silent, `lease_most_s` for one that is not.
    `greeting_s`: how long a producer may take to answer. `weights`: what the model's weights are called, where a digest of the
    checkpoint does not do. `read_s`: how long a read may go without progress. `strategies`: how caches may be read: `mapped`,
    out of device memory of this machine's processes; `packed`, gathered by the producer into staging; `staged`, covered and
    extracted here; `direct`, by descriptors, which is always possible; out of several, what costs least. `staging`: where that
    memory is; empty: on the device, or in host memory if vLLM's `kv_buffer_device` is cpu. `staging_bytes`: what a rank takes
    for it in all. `slot_s`: how long a consumer may leave what was gathered for it. `map_rings`: whether staging is mapped
    by consumers of this machine, and theirs here. `copy_programs`: how many programs of a GPU's kernel copy at a time.
    `switch_s`: how long a thread of the engine's process keeps Python's lock while others want it, at most; None: by SWITCH_S.
    `warm_up`: whether an eager engine's kernels are made ready on a GPU when it starts, rather than by its first request.
    `cache_layout`: the order of the cache's axes to ask vLLM for, by vLLM's names; empty: what suits transfers best.
    `progress_thread`, `posting_threads`, `sync`, `window`, `backend`, `backend_parameters`, `ucx`: see
    `kvferry.transport.NixlOptions`. `ucx_ports`: the TCP ports that UCX may listen on, if `listen` is not loopback; "0": any.
    """

    listen: str = "127.0.0.1:0"
    advertise: str = ""
    key_file: str = ""
    peers: tuple[str, ...] = ()
    lease_s: Seconds = 60.0
    lease_most_s: Seconds = 600.0
    greeting_s: Seconds = 15.0
    weights: Annotated[str, Meta(max_length=96)] = ""
    read_s: Seconds = 30.0
    strategies: tuple[Literal["mapped", "packed", "staged", "direct"], ...] = ("mapped", "direct")
    staging: Literal["", "device", "host"] = ""
    staging_bytes: Annotated[int, Meta(ge=LEAST)] = BUDGET
    slot_s: Seconds = SLOT_S
    map_rings: bool = True
    copy_programs: Annotated[int, Meta(ge=2, le=1024)] = 128
    switch_s: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
    warm_up: bool = True
    cache_layout: Literal["", "LBHNC", "BLHNC", "BHLNC"] = ""
    progress_thread: bool | Literal["slow"] | None = None
    posting_threads: Annotated[int, Meta(ge=0, le=64)] | None = None
    sync: Literal["none", "strict"] = "none"
    window: Annotated[int, Meta(ge=1)] = 4096
    backend: str = "UCX"
    backend_parameters: dict[str, str] = msgspec.field(default_factory=dict)
    ucx: dict[str, str] = msgspec.field(default_factory=dict)
    ucx_ports: str = PORTS

    @property
    def nixl(self) -> NixlOptions:
        """UCX opens a port only for an engine whose address is not loopback: it authenticates no peer."""
        host = split_address(self.listen)[0]
        address = self.advertise if self.advertise and not is_loopback(host) else host
        return NixlOptions(
            self.backend,
            self.progress_thread,
            self.window,
            self.read_s,
            self.backend_parameters,
            dict(self.ucx),
            self.posting_threads,
            self.sync,
            address=loopback(address) or address,
            ports=self.ucx_ports,
        )

    def keys(self) -> Keys:
        """Of `key_file`; without one, this user's own on this machine."""
        return keys_of(self.key_file)

    def switching_s(self, device: str, usual: float) -> float:
        """How long threads keep Python's lock on this device, where it is `usual` now: never longer than that."""
        return min(self.switch_s or SWITCH_S.get(device, usual), usual)

    def answers(self, produces: bool) -> bool:
        """Whether anybody is answered: producers always are, a consumer only where it is told to."""
        return produces or split_address(self.listen)[1] > 0

    def listening(self, data_parallel_index: int) -> str:
        """Where this one of several data-parallel engines listens."""
        host, port = split_address(self.listen)
        return f"{host}:{port + data_parallel_index if port else 0}"

    def advertised(self, port: int) -> str:
        """The address for references; a wildcard cannot be one."""
        host = self.advertise or split_address(self.listen)[0]
        if host in ("0.0.0.0", "::", "*"):
            raise SessionError(
                f"listen on {self.listen} says no address that consumers could reach: set advertise to the host's"
            )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        split_address(address)
        return address


def read_options(extra: Mapping[str, Any]) -> Options:
    """Raises SessionError naming the option that is wrong, with the nearest one there is."""
    for found in option_troubles(extra):
        raise SessionError(str(found))
    return msgspec.convert(dict(extra), Options)


def option_troubles(extra: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything that is wrong with the options; what is behind a value that cannot be read is not looked at."""
    names = Options.__struct_fields__
    known = {name: value for name, value in extra.items() if name in names}
    for name in extra:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            seen = f"kv_connector_extra_config has no option {name!r}"
            yield Finding("unknown-option", seen, STOCK_OPTIONS.get(name, hint))
    try:
        options = msgspec.convert(known, Options)
        said = [("listen on", split_address(options.listen)[0])]
        said += [("advertise", options.advertise)] if options.advertise else []
        said += [("peers with", split_address(peer)[0]) for peer in options.peers]
        if options.ucx_ports != "0":
            port_range(options.ucx_ports)
    except (msgspec.ValidationError, SessionError, TransportError) as error:
        yield Finding("option-value", f"kv_connector_extra_config: {error}", _words(str(error)) or _VALUES)
        return
    for option, host in said:
        if not options.key_file and not is_loopback(host):
            cure = "set key_file to a file that all sides hold, or stay on this machine (127.0.0.1)"
            yield Finding("key-needed", f"{option} {host} needs a key", cure)
    away = next((peer for peer in options.peers if not is_loopback(split_address(peer)[0])), "")
    opens = allows_tcp(operators(options.ucx).get(TLS, "^tcp"))
    if away and options.key_file and not opens and is_loopback(split_address(options.listen)[0]):
        seen = f"listen {options.listen} is loopback, so that UCX opens no port, and peers names {away}"
        yield Finding(
            "listen-loopback", seen, "set listen to this machine's address (port 0 will do), or name this machine alone"
        )
    if options.lease_most_s < options.lease_s:
        seen = f"lease_most_s {options.lease_most_s:g} is less than lease_s {options.lease_s:g}"
        yield Finding("lease-times", seen, "raise it")


def _words(said: str) -> str:
    """The words that the option takes of which an error of msgspec says that a word is none of them."""
    at = re.search(r"at `\$\.(\w+)", said)
    if at is None or not said.startswith("Invalid enum value"):
        return ""
    found = _literals(get_type_hints(Options, include_extras=True)[at[1]])
    return f"give it {' or '.join(json.dumps(word) for word in found)}"


def _literals(hint: Any) -> tuple[str | bool, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if hint is bool:
        return True, False
    return tuple(word for inner in get_args(hint) for word in _literals(inner))


def buffered(options: Options, buffer_device: str | None, device: str) -> Options:
    """The same as vLLM's `kv_buffer_device` asks, unless `staging` says where it is to be. A buffer in host memory for caches
    on a device is for a NIC that cannot reach the device: then everything that is not mapped is gathered."""
    if options.staging or buffer_device != "cpu" or device == "cpu":
        return options
    return msgspec.structs.replace(options, staging="host", strategies=("mapped", "packed"))


_VALUES: Final = "give it a value of that kind; the table of options in docs/vllm.md has them all"
