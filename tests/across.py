"""A request between an engine with caches on a GPU and one with caches in host memory: what either of vLLM's backends keeps in
them, written down here tensor by tensor, and sessions that bring it across.

Sides declare their caches as vLLM's connector does, from tensors that are numbers; what lies there is written and read back
through views that share no line with the table of layouts, with manifests or with plans. The same body runs with both caches
in host memory, where there is no GPU, and with labels that lie about it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.doctor.child import Child, child
from kvferry.doctor.memory import Memory, allocate
from kvferry.engines.vllm import manifest_of
from kvferry.engines.vllm.layouts import Cell, Grid, Own, certified
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.wharf import Wharf
from kvferry.errors import KVFerryError
from kvferry.manifest import Identity, Manifest, Rank
from kvferry.plan import Fills
from kvferry.session import Card, Ferry, Lease, Load, Outcome, PeerKey, Producer, Welcome, Words, meet
from kvferry.session.fills import apply_fills
from kvferry.transport import Transport
from vllm_stubs import StubTensor

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
Kind = Literal["dram", "vram"]
Tables = dict[int, list[int] | int]

BLOCKS, LAYERS, PADDING = 12, 2, 64
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
NUMBER: Mapping[int, Any] = {2: np.uint16, 4: np.uint32}
TAPS = 3
SLOTS = 8
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer: what vLLM calls it, what its object says, channels of its conv by part (units that are shared out, and
    channels of each), and its matrix state, whose heads are."""

    mamba_type: str
    says: Mapping[str, int]
    channels: tuple[tuple[int, int], ...]
    state: tuple[int, int, int]

    def mine(self, rank: int, tp: int) -> list[int]:
        """Which of all channels a rank holds, in the order of its page."""
        out, first = [], 0
        for units, each in self.channels:
            share = units // tp * each
            out += range(first + rank * share, first + (rank + 1) * share)
            first += units * each
        return out


MAMBA2 = Recurrent(
    "MAMBA2",
    {"num_heads": 4, "head_dim": 8, "ssm_state_size": 16, "conv_kernel_size": TAPS + 1, "num_spec": 0, "n_groups": 2},
    ((4, 8), (2, 16), (2, 16)),
    (4, 8, 16),
)
GATED = Recurrent(
    "GDN_ATTN",
    {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 8, "conv_kernel_size": TAPS + 1, "num_spec": 0},
    ((2, 16), (2, 16), (4, 8)),
    (4, 8, 16),
)
SQUARE = replace(GATED, says={**GATED.says, "head_v_dim": 16}, channels=((2, 16), (2, 16), (4, 16)), state=(4, 16, 16))
"""Turned around, its state still fits: nothing but its numbers tells."""


@dataclass(frozen=True)
class Side:
    """One engine: where its caches lie as vLLM knows it, its attention backend and how that keeps a cell, its states."""

    device: Literal["cuda", "cpu"]
    backend: str
    cell: Literal["k then v", "k by dims", "tiles", "latent"]
    layout: str
    block: int
    dtype: str = "bfloat16"
    isa: str = ""
    heads: int = 2
    dim: int = 32
    states: Recurrent | None = None
    conv: Literal["SD", "DS"] = "SD"
    tp: int = 1

    @property
    def latent(self) -> bool:
        return self.cell == "latent"

    @property
    def local(self) -> int:
        return 1 if self.latent else self.heads // self.tp

    @property
    def width(self) -> int:
        return self.dim if self.latent else 2 * self.dim

    @property
    def item(self) -> int:
        return ITEM[self.dtype]

    @property
    def sizes(self) -> dict[str, int]:
        return {"L": LAYERS, "B": BLOCKS, "H": self.local, "N": self.block, "C": self.width}

    @property
    def paged_bytes(self) -> int:
        return prod(self.sizes.values()) * self.item

    @property
    def conv_bytes(self) -> int:
        return len(self.states.mine(0, self.tp)) * TAPS * self.item if self.states else 0

    @property
    def state_bytes(self) -> int:
        """States are kept in float32."""
        return prod(self.states.state) // self.tp * 4 if self.states else 0

    @property
    def page(self) -> int:
        return self.conv_bytes + self.state_bytes + PADDING if self.states else 0

    @property
    def bytes(self) -> int:
        return self.paged_bytes + LAYERS * BLOCKS * self.page


@dataclass(frozen=True)
class Truth:
    """The model's tensors for a request: k and v [layer, token, head, dim], or a latent; conv [layer, channel, tap] and states
    [layer, head, value or dim, key or state]."""

    tokens: int
    paged: tuple[Array, ...]
    conv: Array
    state: Array


def truth_of(side: Side, tokens: int, seed: int = 3) -> Truth:
    rng = np.random.default_rng([seed, tokens])
    heads = 1 if side.latent else side.heads
    shape = (LAYERS, tokens, heads, side.dim)
    number = NUMBER[side.item]

    def drawn(shape: tuple[int, ...], kind: Any) -> Array:
        return rng.integers(1, np.iinfo(kind).max, shape, kind, endpoint=True)

    paged = tuple(drawn(shape, number) for _ in range(1 if side.latent else 2))
    recurrent = side.states or MAMBA2
    conv = drawn((LAYERS, len(recurrent.mine(0, 1)), TAPS), number)
    return Truth(tokens, paged, conv, drawn((LAYERS, *recurrent.state), np.uint32))


@dataclass(frozen=True)
class Views:
    """One rank's memory as its backends see it."""

    side: Side
    rank: int
    memory: Bytes

    @property
    def paged(self) -> Array:
        """[layer, block, head, token, content]"""
        side = self.side
        numbers = self.memory[: side.paged_bytes].view(NUMBER[side.item])
        return numbers.reshape([side.sizes[c] for c in side.layout]).transpose([side.layout.index(c) for c in "LBHNC"])

    def token(self, layer: int, block: int, token: int) -> tuple[Array, ...]:
        """Views of what a token has in a block: k and v of all heads of this rank, or its latent."""
        side, paged = self.side, self.paged[layer, block]
        dim, tokens = side.dim, side.block
        if side.cell == "latent":
            return (paged[:, token],)
        if side.cell == "k then v":
            return paged[:, token, :dim], paged[:, token, dim:]
        cells = paged.reshape(side.local, -1)
        k, v = cells[:, : dim * tokens], cells[:, dim * tokens :]
        if side.cell == "k by dims":
            return k.reshape(-1, dim, tokens)[:, :, token], v.reshape(-1, tokens, dim)[:, token]
        by_16 = k.reshape(-1, tokens // 16, dim // 2, 16, 2)[:, token // 16, :, token % 16]
        by_2 = v.reshape(-1, dim // 16, tokens // 2, 16, 2)[:, :, token // 2, :, token % 2]
        return by_16, by_2

    @property
    def pages(self) -> Bytes:
        """[layer, block, byte]"""
        return self.memory[self.side.paged_bytes :].reshape(LAYERS, BLOCKS, self.side.page)

    def conv(self, layer: int, block: int) -> Array:
        """[channel, tap]"""
        numbers = self.pages[layer, block, : self.side.conv_bytes].view(NUMBER[self.side.item])
        return numbers.reshape(-1, TAPS) if self.side.conv == "DS" else numbers.reshape(TAPS, -1).T

    def state(self, layer: int, block: int) -> Array:
        """[head, value or dim, key or state]"""
        side = self.side
        assert side.states is not None
        heads, rows, columns = side.states.state
        numbers = self.pages[layer, block, side.conv_bytes : side.conv_bytes + side.state_bytes].view(np.uint32)
        if side.states.mamba_type == "GDN_ATTN" and side.device == "cpu":
            return numbers.reshape(heads // side.tp, columns, rows).transpose(0, 2, 1)
        return numbers.reshape(heads // side.tp, rows, columns)

    @property
    def heads(self) -> slice:
        return slice(0, 1) if self.side.latent else slice(self.rank * self.side.local, (self.rank + 1) * self.side.local)

    def write(self, truth: Truth, tables: Tables) -> None:
        """What prefilling leaves."""
        for layer in range(LAYERS):
            for token in range(truth.tokens):
                block = _blocks(tables)[token // self.side.block]
                for view, part in zip(self.token(layer, block, token % self.side.block), truth.paged, strict=True):
                    view[...] = part[layer, token, self.heads].reshape(view.shape)
            if self.side.states is not None:
                conv, state = self._wanted(truth, layer)
                self.conv(layer, _state(tables))[...] = conv
                self.state(layer, _state(tables))[...] = state

    def _wanted(self, truth: Truth, layer: int) -> tuple[Array, Array]:
        side = self.side
        assert side.states is not None
        each = side.states.state[0] // side.tp
        mine = side.states.mine(self.rank, side.tp)
        return truth.conv[layer][mine], truth.state[layer, self.rank * each : (self.rank + 1) * each]

    def wrong(self, truth: Truth, tables: Tables, before: Bytes) -> Iterator[str]:
        """What is not as a load must leave it."""
        side, was = self.side, Views(self.side, self.rank, before)
        blocks = _blocks(tables)
        for layer in range(LAYERS):
            for token in range(len(blocks) * side.block):
                found = self.token(layer, blocks[token // side.block], token % side.block)
                for view, part in zip(found, truth.paged, strict=True):
                    wanted = part[layer, token, self.heads] if token < truth.tokens else np.zeros((1, 1), part.dtype)
                    if not (view.reshape(side.local, -1) == wanted).all():
                        yield f"layer {layer}, token {token} of {truth.tokens}"
        others = np.setdiff1d(np.arange(BLOCKS), blocks)
        if not (self.paged[:, others] == was.paged[:, others]).all():
            yield "blocks of others"
        if side.states is None:
            return
        for layer in range(LAYERS):
            conv, state = self._wanted(truth, layer)
            if not (self.conv(layer, _state(tables)) == conv).all():
                yield f"conv of layer {layer}"
            if not (self.state(layer, _state(tables)) == state).all():
                yield f"state of layer {layer}"
        others = np.setdiff1d(np.arange(BLOCKS), [_state(tables)])
        if not (self.pages[:, others] == was.pages[:, others]).all():
            yield "states of others"
        if not (self.pages[:, :, -PADDING:] == was.pages[:, :, -PADDING:]).all():
            yield "padding"


def _blocks(tables: Tables) -> list[int]:
    found = tables[0]
    assert isinstance(found, list)
    return found


def _state(tables: Tables) -> int:
    found = tables[1]
    assert isinstance(found, int)
    return found


def tables_of(side: Side, tokens: int, seed: int) -> Tables:
    """Blocks that are nowhere near each other."""
    free = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist()
    out: Tables = {0: [free.pop() for _ in range(-(-tokens // side.block))]}
    if side.states is not None:
        out[1] = int(free.pop())
    return out


def bytes_of(side: Side, tokens: int) -> int:
    """What a rank of a side must be brought."""
    paged = LAYERS * tokens * side.local * side.width * side.item
    return paged + LAYERS * (side.conv_bytes + side.state_bytes)


def declared(side: Side, rank: int, engine: str, address: int, label: Kind) -> tuple[Manifest, dict[str, StubTensor]]:
    """The manifest of a rank whose caches lie at an address of such memory, and its tensors, as the connector has them."""
    device = SimpleNamespace(type="cuda", index=0) if label == "vram" else SimpleNamespace(type="cpu", index=None)
    strides, total = {}, 1
    for letter in reversed(side.layout):
        strides[letter] = total
        total *= side.sizes[letter]
    caches: dict[str, StubTensor] = {}
    layers: dict[str, Any] = {}
    for i in range(LAYERS):
        shape, step = ([of[c] for c in "BHNC"] for of in (side.sizes, strides))
        begins = i * strides["L"] * side.item
        name = f"model.layers.{i}.self_attn.attn"
        caches[name] = StubTensor(shape, step, side.dtype, address, begins, side.paged_bytes, device)
        layers[name] = _attention_layer(side)
    spec = type("MLAAttentionSpec" if side.latent else "FullAttentionSpec", (), {})()
    spec.__dict__.update(
        block_size=side.block,
        num_kv_heads=side.local,
        head_size=side.dim,
        head_size_v=0 if side.latent else side.dim,
        kv_quant_mode=0,
        max_tp_shards=1 if side.latent else side.heads,
    )
    groups = [_group(list(layers), spec)]
    if side.states is not None:
        states = _state_layers(side, address + side.paged_bytes, device)
        caches |= {name: tensor for name, (tensor, _) in states.items()}
        layers |= {name: layer for name, (_, layer) in states.items()}
        spec = type("MambaSpec", (), {})()
        spec.__dict__.update(mamba_type=SimpleNamespace(name=side.states.mamba_type), tp_replicated=False)
        groups.append(_group(list(states), spec))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False, kv_cache_layout=side.layout),
        parallel_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(
            model_arch_config=[SimpleNamespace(total_num_kv_heads=side.heads)] * LAYERS,
            hf_text_config=SimpleNamespace(n_groups=2),
        ),
        speculative_config=None,
    )
    manifest = manifest_of(
        SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups),
        caches,
        config,
        Identity(engine, "1", "model", Rank(rank, side.tp)),
        version="0.32.0",
        conv_layout=side.conv,
        own=Own(_cells(side, caches)),
    )
    return manifest, caches


def _cells(side: Side, caches: Mapping[str, StubTensor]) -> dict[str, Cell]:
    """What runs have recorded of the side's backend."""
    out = {}
    for name, tensor in caches.items():
        if len(tensor.shape) == 4 and tensor.shape[2] > 1:
            grid = Grid(tensor.shape[2], tensor.shape[3], tensor.strides[2])
            cell = certified("0.32.0", side.backend, side.isa, tensor.dtype, side.layout, grid)
            out |= {name: cell} if cell is not None else {}
    return out


def _attention_layer(side: Side) -> Any:
    named = SimpleNamespace(get_name=lambda: side.backend)
    return SimpleNamespace(get_attn_backend=lambda: named, isa=side.isa, kv_cache_dtype="auto")


def _group(names: list[str], spec: Any) -> Any:
    return SimpleNamespace(layer_names=names, kv_cache_spec=spec, host_resident=False, enable_kv_transfer=True)


def _state_layers(side: Side, address: int, device: Any) -> dict[str, tuple[StubTensor, Any]]:
    """Pages behind each other, layer by layer, and the views that vLLM binds to them."""
    assert side.states is not None
    says, length = dict(side.states.says), LAYERS * BLOCKS * side.page
    if side.states.mamba_type == "GDN_ATTN":
        says |= {"gdn_decode_kernel": "CPU" if side.device == "cpu" else "triton"}  # type: ignore[dict-item]
    channels, (heads, rows, columns) = len(side.states.mine(0, side.tp)), side.states.state
    conv = [channels, TAPS] if side.conv == "DS" else [TAPS, channels]
    state = [heads // side.tp, rows, columns]
    out = {}
    for i in range(LAYERS):
        first = i * BLOCKS * side.page
        views = [
            StubTensor([BLOCKS, *shape], [side.page // size, *_packed(shape)], dtype, address, first + at, length, device)
            for shape, size, dtype, at in (
                (conv, side.item, side.dtype, 0),
                (state, 4, "float32", side.conv_bytes),
            )
        ]
        whole = StubTensor([BLOCKS, 1, 1, side.page], [side.page] * 3 + [1], "uint8", address, first, length, device)
        layer = SimpleNamespace(kv_cache=views, **says)
        out[f"model.layers.{LAYERS + i}.mixer"] = (whole, layer)
    return out


def _packed(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


class End(Protocol):
    """What a rank needs to be read from and to read: the connector's own is a Wharf."""

    words: Words
    transport: Transport
    tended: bool

    @property
    def hurried(self) -> bool: ...

    def filler(self, kv_caches: Any) -> Callable[[Fills], Any]: ...

    def close(self) -> None: ...


MakeEnd = Callable[[Manifest, Identity], End]


@dataclass(frozen=True)
class Place:
    """Memory of a kind, which is said to be of a kind."""

    kind: Kind
    label: Kind


DRAM, VRAM = Place("dram", "dram"), Place("vram", "vram")
SAID_TO_BE_VRAM = Place("dram", "vram")


class Berth:
    """One rank: memory, manifest, and a ferry on its own thread."""

    def __init__(self, side: Side, place: Place, rank: int, engine: str, make_end: MakeEnd) -> None:
        self.side, self.rank = side, rank
        self.memory: Memory = allocate(side.bytes, place.kind)
        self.manifest, caches = declared(side, rank, engine, self.memory.storage.address, place.label)
        self.end = make_end(self.manifest, self.manifest.identity)
        host = self.memory.read() if place.kind == "dram" else None
        fill = self.end.filler(caches) if host is None else _on_host(self.manifest, host, self.memory.storage.address)
        self.ferry = Ferry(
            self.end.transport, self.end.words, rank, fill, tended=self.end.tended, hurried=lambda: self.end.hurried
        )

    @property
    def card(self) -> Card:
        return Card(self.manifest, self.end.words.manifest, self.end.transport.metadata(), self.end.words.beacon)

    def start(self) -> None:
        self.ferry.start()

    def prefill(self, truth: Truth, tables: Tables) -> None:
        made = np.random.default_rng([1, self.rank]).integers(0, 256, self.side.bytes, np.uint8)
        Views(self.side, self.rank, made).write(truth, tables)
        self.memory.write(made)

    def garbage(self) -> Bytes:
        made = np.random.default_rng([2, self.rank]).integers(0, 256, self.side.bytes, np.uint8)
        self.memory.write(made)
        return made

    def wrong(self, truth: Truth, tables: Tables, before: Bytes) -> list[str]:
        return list(Views(self.side, self.rank, np.array(self.memory.read())).wrong(truth, tables, before))

    def close(self) -> None:
        self.ferry.close()
        self.end.close()


def _on_host(manifest: Manifest, memory: Bytes, address: int) -> Callable[[Fills], Any]:
    regions = [memory[r.address - address :][: r.length] for r in manifest.regions]
    return lambda fills: apply_fills(fills, regions)


def wharf(settings: Mapping[str, Any]) -> MakeEnd:
    """The connector's own end, with options as an operator gives them."""
    options = msgspec.convert(dict(settings), Options)
    return lambda manifest, identity: Wharf(f"{identity.engine}.{identity.rank.ordinal}", manifest, options, SLOTS, identity)


@dataclass
class Pier:
    """A producer with one prefilled request and its lease."""

    berths: list[Berth]
    lease: Lease

    @property
    def welcome(self) -> Welcome:
        return Welcome("P", "1", 60.0, tuple(berth.card for berth in self.berths))

    def close(self) -> None:
        for berth in self.berths:
            berth.close()


def pier(side: Side, place: Place, tokens: int, make_end: MakeEnd) -> Pier:
    leases = Producer("1", SLOTS, 60.0)
    leases.open("r")
    lease = leases.publish("r", 0.0)
    berths = [Berth(side, place, rank, "P", make_end) for rank in range(side.tp)]
    for berth in berths:
        berth.prefill(truth_of(side, tokens), tables_of(side, tokens, 1))
        berth.end.words.live(lease)
    return Pier(berths, lease)


@dataclass
class Arrival:
    """How a request came across: outcomes by rank, what is wrong with their memory, by which paths and ways they read."""

    outcomes: list[Outcome]
    wrong: list[str]
    paths: list[str]
    ways: list[dict[str, int]] = field(default_factory=list)


def arrive(
    side: Side,
    place: Place,
    tokens: int,
    make_end: MakeEnd,
    welcome: Welcome,
    lease: Lease,
    src: Tables,
    pump: Callable[[list[Berth]], None] | None = None,
) -> Arrival:
    """Load the request into a consumer's blocks; `pump` moves everybody on where no thread does."""
    berths = [Berth(side, place, rank, "D", make_end) for rank in range(side.tp)]
    try:
        before = [berth.garbage() for berth in berths]
        peer = PeerKey("127.0.0.1:7000", "P", "1")
        meeting = meet(peer, welcome, [berth.manifest for berth in berths])
        dst = tables_of(side, tokens, 2)
        for berth in berths:
            if pump is None:
                berth.start()
            berth.ferry.meet(meeting)
            berth.ferry.load(Load("r", peer, lease, tokens, 0, src, dst))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(outcomes) < len(berths) and time.monotonic() < deadline:
            if pump is None:
                time.sleep(0.002)
            else:
                pump(berths)
            for berth in berths:
                outcomes.update((berth.rank, outcome) for outcome in berth.ferry.outcomes())
        if len(outcomes) < len(berths):
            raise TimeoutError(f"{len(outcomes)} of {len(berths)} ranks were loaded in {PATIENCE_S:g} s")
        truth = truth_of(side, tokens)
        wrong = [f"rank {b.rank}: {one}" for b, was in zip(berths, before, strict=True) for one in b.wrong(truth, dst, was)]
        paths = [_path(berth) for berth in berths]
        ways = [dict(berth.end.gathers.carried) for berth in berths if getattr(berth.end, "gathers", None)]  # type: ignore[attr-defined]
        return Arrival([outcomes[rank] for rank in sorted(outcomes)], wrong, paths, ways)
    finally:
        for berth in berths:
            berth.close()


def _path(berth: Berth) -> str:
    try:
        (peer,) = berth.ferry._links.peers.values()
        assert peer.link is not None
        return ", ".join(berth.end.transport.path(name).name for name in peer.link.names)
    except (KVFerryError, AssertionError, ValueError) as error:
        return f"not known: {error}"


@dataclass(frozen=True)
class Ask:
    """What a producer's process is to hold."""

    side: Side
    place: Place
    tokens: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Fetch(Ask):
    """What a consumer's process is to load."""

    welcome: Welcome
    lease: Lease
    src: Tables


def serve(parent: Connection) -> None:
    """One of the two processes: holds one prefilled engine at a time, or loads, until nothing more is asked."""
    held: Pier | None = None
    while True:
        try:
            asked = parent.recv()
        except (EOFError, OSError):
            asked = None
        if held is not None:
            held.close()
            held = None
        if asked is None:
            return
        try:
            if isinstance(asked, Fetch):
                end = wharf(asked.settings)
                parent.send(arrive(asked.side, asked.place, asked.tokens, end, asked.welcome, asked.lease, asked.src))
            else:
                held = pier(asked.side, asked.place, asked.tokens, wharf(asked.settings))
                for berth in held.berths:
                    berth.start()
                parent.send((held.welcome, held.lease))
        except Exception as error:  # noqa: BLE001  whatever it is, the other process says it
            parent.send(f"{type(error).__name__}: {error}")


class Helper:
    """A process of its own, started when it is needed and again if it died; `environment` is set in it."""

    def __init__(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        self._name, self._environment = name, environment or {}
        self._stack: ExitStack | None = None
        self._child: Child | None = None

    def ask(self, what: Any) -> Any:
        pipe = self._running().pipe
        try:
            pipe.send(what)
            if not pipe.poll(2 * PATIENCE_S):
                raise TimeoutError(f"{self._name} says nothing for {2 * PATIENCE_S:g} s")
            said = pipe.recv()
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise RuntimeError(f"{self._name} is gone: {type(error).__name__} {error}") from None
        if isinstance(said, str):
            raise RuntimeError(f"{self._name}: {said}")
        return said

    def _running(self) -> Child:
        if self._child is None or not self._child.process.is_alive():
            self.close()
            self._stack = ExitStack()
            before = {name: os.environ.get(name) for name in self._environment}
            os.environ.update(self._environment)
            try:
                self._child = self._stack.enter_context(child(self._name, serve))
            finally:
                for name, value in before.items():
                    os.environ.pop(name)
                    if value is not None:
                        os.environ[name] = value
        return self._child

    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack = self._child = None


def ferried(
    helpers: tuple[Helper, Helper],
    sides: tuple[Side, Side],
    places: tuple[Place, Place],
    tokens: int,
    settings: Mapping[str, Any],
) -> Arrival:
    """A request from one process's engine into another's, over NIXL, as connectors with these options do it."""
    welcome, lease = helpers[0].ask(Ask(sides[0], places[0], tokens, dict(settings)))
    src = tables_of(sides[0], tokens, 1)
    found = helpers[1].ask(Fetch(sides[1], places[1], tokens, dict(settings), welcome, lease, src))
    assert isinstance(found, Arrival)
    return found


def assert_right(arrival: Arrival, here: Side, tokens: int) -> None:
    """Every token and state arrived, all else is as it was, and so many bytes were seen to move as there had to be."""
    assert [outcome.error for outcome in arrival.outcomes] == [""] * here.tp
    assert arrival.wrong == []
    moved = [bytes_of(here, tokens)] * here.tp
    assert [outcome.moved for outcome in arrival.outcomes] == moved
    assert [outcome.predicted for outcome in arrival.outcomes] == moved


FLASH = Side("cuda", "FLASH_ATTN", "k then v", "BLHNC", 16)
TRITON = Side("cuda", "TRITON_ATTN", "k then v", "BLHNC", 16, "float32")
CPU = Side("cpu", "CPU_ATTN", "k by dims", "LBHNC", 32, isa="vec")
TRITON_MLA = Side("cuda", "TRITON_MLA", "latent", "BLHNC", 16, heads=1, dim=192)
CPU_MLA = Side("cpu", "CPU_MLA", "latent", "LBNHC", 32, heads=1, dim=192)

PAIRS: Mapping[str, tuple[Side, Side]] = {
    "FLASH_ATTN, CPU_ATTN (vec)": (FLASH, CPU),
    "FLASH_ATTN of large blocks, CPU_ATTN (vec16)": (
        replace(FLASH, layout="BHLNC", block=64),
        replace(CPU, isa="vec16", block=16),
    ),
    "FLASH_ATTN, CPU_ATTN (amx)": (replace(FLASH, layout="LBNHC"), replace(CPU, isa="amx", cell="tiles")),
    "TRITON_ATTN, CPU_ATTN (vec)": (TRITON, replace(CPU, dtype="float32")),
    "TRITON_MLA, CPU_MLA": (TRITON_MLA, CPU_MLA),
    "Mamba2": (replace(FLASH, states=MAMBA2), replace(CPU, states=MAMBA2, conv="DS")),
    "gated delta net": (replace(FLASH, states=GATED), replace(CPU, states=GATED)),
    "gated delta net, square": (replace(FLASH, states=SQUARE, conv="DS"), replace(CPU, states=SQUARE)),
}
"""The first of each lies on a GPU, the second in host memory."""
