"""Copies and fills on a real device, out of another process's memory, against plain copies of the same bytes."""

from __future__ import annotations

import multiprocessing as mp
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import TransportError
from kvferry.strategy.moves import COLUMNS, FIELDS, ROWS, UNITS, Bound, Form, Launch
from kvferry.transport import Storage

BYTES = 64 << 20


def hold(pipe: Connection, seed: int) -> None:
    from kvferry.strategy.cuda import CudaMover

    torch.cuda.init()
    made = np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)
    memory = torch.from_numpy(made).cuda()
    pipe.send(CudaMover(0).export(Storage(memory.data_ptr(), BYTES, "vram", 0)))
    pipe.recv()


@pytest.fixture(scope="module")
def mover() -> Any:
    from kvferry.strategy.cuda import CudaMover

    return CudaMover(0, 16)


@pytest.fixture(scope="module")
def peer(mover: Any) -> Any:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(there, 5), daemon=True)
    process.start()
    opened = mover.open(here.recv(), BYTES)
    yield opened.address, np.random.default_rng(5).integers(0, 256, BYTES, np.uint8)
    opened.close()
    here.send("end")
    process.join(20)


def wait(ticket: Any) -> Any:
    while not ticket.done:
        pass
    return ticket


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_form_copies_what_plain_copies_do(mover: Any, peer: Any, unit: int, columns: int) -> None:
    address, theirs = peer
    form = Form(unit, columns, ROWS[columns])
    chosen = np.random.default_rng(columns * unit)
    length = columns * form.width - (unit if unit < columns * form.width else 0)
    page = -(-columns * form.width // 16) * 16 + 64
    pages = min(BYTES // page, 4000)
    source, target = chosen.permutation(pages)[: pages // 2], chosen.permutation(pages)[: pages // 2]
    here = torch.full((BYTES,), 7, dtype=torch.uint8, device="cuda")
    shift = unit if unit < 16 else 0
    pieces = np.array([[address + shift, here.data_ptr() + shift, length // form.width, 0, 1]], np.int64)
    job = np.array([0, 1, len(source), FIELDS, 3], np.int64)
    table = np.concatenate([job, source * page, target * page])
    bound = Bound(table, (Launch(form, 0, 1),), length * len(source), len(source))
    mover._warm(form)
    for _ in range(3):
        ticket = wait(mover.start(torch.from_numpy(pieces).cuda(), bound))
        assert ticket.moved == bound.bytes
    want = np.full(BYTES, 7, np.uint8)
    for one, other in zip((source * page + shift).tolist(), (target * page + shift).tolist(), strict=True):
        want[other : other + length] = theirs[one : one + length]
    assert np.array_equal(here.cpu().numpy(), want)


def test_fills_zero_their_runs_and_nothing_else(mover: Any) -> None:
    here = torch.full((1 << 20,), 9, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    runs = np.array([[0, 1], [100, 37], [4096, 4096], [10_001, 9000], [(1 << 20) - 3, 3]], np.int64)
    assert wait(mover.zero(runs + np.array([here.data_ptr(), 0]))).done
    want = np.full(1 << 20, 9, np.uint8)
    for start, length in runs.tolist():
        want[start : start + length] = 0
    assert np.array_equal(here.cpu().numpy(), want)


def test_a_launch_that_writes_no_count_moves_nothing(mover: Any, peer: Any) -> None:
    """A slot that was used before must not lend its counts."""
    address, _ = peer
    here = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    pieces = torch.from_numpy(np.array([[address, here.data_ptr(), 8, 0, 1]], np.int64)).cuda()
    table = np.concatenate([np.array([0, 1, 1, FIELDS, 0]), [0], [0]]).astype(np.int64)
    full = Bound(table, (Launch(Form(16, COLUMNS[0], ROWS[COLUMNS[0]]), 0, 1),), 64, 1)
    assert wait(mover.start(pieces, full)).moved == 64
    none = Bound(table, (Launch(Form(16, COLUMNS[0], ROWS[COLUMNS[0]]), 0, 0),), 64, 1)
    assert wait(mover.start(pieces, none)).moved == 0


def test_what_is_no_handle_is_refused(mover: Any) -> None:
    import msgspec

    for token in (b"", b"\x00" * 70, msgspec.msgpack.encode((b"x" * 64, 0)), msgspec.msgpack.encode((b"x" * 63, 0))):
        with pytest.raises(TransportError):
            mover.open(token, 1024)


def test_a_thread_beside_the_engines_does_not_spoil_the_graph_that_it_captures(mover: Any, peer: Any) -> None:
    """Engines capture graphs when they start, and meet producers meanwhile."""
    address, theirs = peer
    here = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    counter = torch.zeros(1, device="cuda")

    def beside() -> None:
        mover.enter()
        form = Form(16, COLUMNS[0], ROWS[COLUMNS[0]])
        mover._ready.pop(form, None)
        mover._warm(form)
        with torch.cuda.stream(mover._stream):
            pieces = torch.from_numpy(np.array([[address, here.data_ptr(), form.columns, 0, 1]], np.int64)).to("cuda")
        offsets = np.arange(0, 1 << 20, form.width * form.columns, dtype=np.int64)
        table = np.concatenate([np.array([0, 1, len(offsets), FIELDS, 3], np.int64), offsets, offsets])
        bound = Bound(table, (Launch(form, 0, 1),), 1 << 20, len(offsets))
        assert wait(mover.start(pieces, bound)).moved == bound.bytes

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        counter += 1
        with ThreadPoolExecutor(1) as thread:
            thread.submit(beside).result()
        counter += 1
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 2
    assert np.array_equal(here.cpu().numpy(), theirs[: 1 << 20])
