"""The last block of a request: cut at its last token, or moved whole where cutting it would cost more than the rest of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.plan import Shown
from kvferry.explain.cost import Load
from kvferry.manifest import Attention, GroupSpec, Identity, LayerSpec, Layout, Manifest, build_manifest
from kvferry.models import Side, load_model, manifests
from kvferry.plan import SPARE, Binder, Binding, Plan, Request, make_plans
from kvferry.session import Ferry, Meeting, PeerKey, Words
from kvferry.session.crossing import Peer
from kvferry.strategy.cost import Counter, direct_s
from kvferry.strategy.forecast import USUAL
from kvferry.transport import Harbour, InProcessTransport

BLOCKS = 12


def manifest(name: str, layers: int, heads: int, layout: Layout) -> Manifest:
    specs = tuple(LayerSpec(f"layers.{i}.attn", Attention(heads, 8)) for i in range(layers))
    return build_manifest(Identity(name, "1", "m"), (GroupSpec(0, specs, layout.block),), layout, BLOCKS)


def moved(binding: Binding, there: list[np.ndarray], here: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Memory after plain copies and fills, and how often each byte was written."""
    out, times = [some.copy() for some in here], [np.zeros(len(some), np.int64) for some in here]
    for copies in binding.copies:
        columns = (copies.src_region, copies.src_offset, copies.dst_region, copies.dst_offset, copies.length)
        for src, at, dst, to, length in zip(*(column.tolist() for column in columns), strict=True):
            out[dst][to : to + length] = there[src][at : at + length]
            times[dst][to : to + length] += 1
    fills = binding.fills
    for region, at, length in zip(fills.region.tolist(), fills.offset.tolist(), fills.length.tolist(), strict=True):
        out[region][at : at + length] = 0
        times[region][at : at + length] += 1
    return out, times


def memory(of: Manifest, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 256, region.length, np.uint8) for region in of.regions]


@given(
    tokens=st.integers(1, 70),
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    pools=st.tuples(st.sampled_from(("block", "layer")), st.sampled_from(("block", "layer"))),
    blocks=st.tuples(st.sampled_from((8, 16)), st.sampled_from((8, 16, 32))),
    start=st.sampled_from((0, 32)),
    spare=st.sampled_from((0, 1, 40, 300, SPARE)),
)
def test_tokens_are_the_same_whole_or_cut_and_every_byte_is_written_once(
    tokens: int, layers: int, heads: int, pools: tuple[str, str], blocks: tuple[int, int], start: int, spare: int
) -> None:
    start = min(start, tokens // 32 * 32)
    sides = [
        manifest(name, layers, heads, Layout(block=block, pool=pool))  # type: ignore[arg-type]
        for name, block, pool in zip("PD", blocks, pools, strict=True)
    ]
    (plan,) = make_plans(sides[1:], sides[:1])
    order = np.random.default_rng(tokens).permutation(BLOCKS)
    tables = [order[: -(-tokens // block)] if side else order[::-1][: -(-tokens // block)] for side, block in enumerate(blocks)]
    request = Request(tokens, {0: tables[0]}, {0: tables[1]}, start)
    there, here = memory(sides[0], 1), memory(sides[1], 2)
    cut, whole = Binder(plan).bind(request), Binder(plan, spare).bind(request)
    (wanted, once), (found, again) = moved(cut, there, here), moved(whole, there, here)
    for left, right, one, other in zip(wanted, found, once, again, strict=True):
        assert np.array_equal(one, other)
        assert one.max(initial=0) <= 1
        apart = left != right
        assert not left[apart].any(), "what differs is past the last token: zero where the block is cut"
    runs = [sum(len(copies) for copies in binding.copies) + len(binding.fills) for binding in (cut, whole)]
    assert 0 <= whole.bytes - cut.bytes <= spare * layers * heads
    assert whole.useful_bytes == cut.useful_bytes
    assert whole.bytes == cut.bytes or runs[1] < runs[0]
    assert Binder(plan, spare).load(request).bytes == whole.bytes


def bound(model: str, tokens: int, pool: str, spare: int) -> Binding:
    shape, side = load_model(model), Side.parse(f"tp=1,pool={pool}")
    one, other = (manifests(shape, side, name, blocks=300) for name in "PD")
    (plan,) = make_plans(other, one)
    tables: dict[int, list[int] | int] = {}
    free = iter(range(1, 300))
    for group in one[0].groups:
        tables[group.id] = [next(free) for _ in range(-(-tokens // group.tokens))] if group.tokens else next(free)
    return Binder(plan, spare).bind(Request(tokens, tables, tables))


@pytest.mark.parametrize("tokens", [1, 23, 4095])
def test_a_block_that_is_one_run_for_all_layers_is_not_cut_into_hundreds(tokens: int) -> None:
    whole, cut = (bound("llama-3.1-8b", tokens, "block", spare) for spare in (SPARE, 0))
    assert (sum(map(len, whole.copies)), len(whole.fills)) == (1, 0)
    assert sum(map(len, cut.copies)) + len(cut.fills) > 500
    assert whole.bytes - cut.bytes < 2 << 20


def test_a_short_prompt_in_a_large_block_moves_its_tokens_and_the_states() -> None:
    found = bound("nemotron-3-nano-30b-a3b", 99, "block", SPARE)
    assert found.bytes == found.useful_bytes
    states = bound("nemotron-3-nano-30b-a3b", 1, "block", SPARE).bytes - 6 * 2 * 2 * 128 * 2
    assert found.bytes - states == 99 * 6 * 2 * 2 * 128 * 2


def test_where_a_block_is_many_runs_anyway_it_is_cut() -> None:
    cut, whole = (bound("llama-3.1-8b", 23, "layer", spare) for spare in (0, SPARE))
    assert (cut.bytes, len(cut.fills)) == (whole.bytes, len(whole.fills))


def met(plans: Sequence[Plan]) -> Peer:
    """A producer as a session knows it once it has met it."""
    harbour, identity = Harbour(), Identity("D", "1", "m")
    ferry = Ferry(InProcessTransport("d", harbour), Words(2, identity), 0, lambda fills: None)
    peer = PeerKey("127.0.0.1:7000", "P", "1")
    ferry.meet(Meeting(peer, (), tuple(plans)))
    ferry.step()
    return ferry._links.peers[peer]


@pytest.mark.parametrize(("pool", "tokens"), [("block", 32), ("layer", 23)])
def test_what_is_planned_explained_and_foretold_is_what_a_session_moves(pool: str, tokens: int) -> None:
    side = Side.parse(f"tp=1,pool={pool}")
    shown = Shown(load_model("llama-3.1-8b"), side, side, 24)
    (plan,) = shown.plans
    served = met(shown.plans).binder.load(shown.request)
    assert served.bytes == tokens * 32 * 2 * 8 * 128 * 2
    (planned,) = shown.document()["request"]["ranks"]
    assert (planned["bytes"], planned["useful_bytes"]) == (served.bytes, 23 * 32 * 2 * 8 * 128 * 2)
    assert len(planned["fills"]) == len(served.fills)
    explained = Load.of(plan, shown.request)
    assert (sum(explained.bytes), explained.filled) == (served.bytes, served.fills.bytes)
    foretold = {found.path: found.seconds["direct"] for found in shown.forecasts}
    counted = Counter(plan, 0).count(served.tiles)
    assert foretold == {path: pytest.approx(direct_s(counted, rates)) for path, rates in USUAL.items()}
