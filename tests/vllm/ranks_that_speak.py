"""One of two ranks that hear each other through the host; in a module of its own, since a spawned process imports all of it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch

from lab.fleet import one_gpu


def speak(rank: int, store: str, pipe: Connection) -> None:
    """What a rank hears from the other, each having numbers of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = torch.distributed.new_group([0, 1])
    me = SimpleNamespace(cpu_group=group, world_size=2, rank_in_group=rank, ranks=[0, 1], device=torch.device("cpu"))
    mine = torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16) + 10 * rank
    found = {
        "sum": one_gpu.all_reduce(me, mine),
        "side by side": one_gpu.all_gather(me, mine, -1),
        "below each other": one_gpu.all_gather(me, mine, 0),
        "a share of the sum": one_gpu.reduce_scatter(me, mine, 0),
        "told": one_gpu.broadcast(me, mine.clone(), 1),
    }
    if rank:
        one_gpu.send(me, mine)
    else:
        found["sent"] = one_gpu.recv(me, mine.shape, mine.dtype)
    pipe.send({name: tensor.tolist() for name, tensor in found.items()})
