"""Several ranks of one engine on one GPU, which NCCL refuses: what ranks tell each other goes through the host. For tests only.

Every rank takes the first device. Collectives are slow, and as exact as NCCL's: sums are made in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VARIABLE = "FLEET_ONE_GPU"
"""The variable that asks for it; together with FLAGS and ENVIRONMENT."""
FLAGS = ("--distributed-executor-backend=mp", "--disable-custom-all-reduce")
ENVIRONMENT = {
    VARIABLE: "1",
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def share() -> None:
    """Once a process, before any engine; forked children inherit it."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    type(current_platform).dist_backend = "gloo"
    Worker.init_device = _on_the_first_device(Worker.init_device)
    for method in (all_reduce, all_gather, reduce_scatter, gather, broadcast, send, recv):
        setattr(CudaCommunicator, method.__name__, method)
    group = parallel_state.GroupCoordinator
    group.isend_tensor_dict = _from_the_host(group.isend_tensor_dict)
    group.irecv_tensor_dict = _onto_the_device(group.irecv_tensor_dict)


def _on_the_first_device(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def init_device(self: Any) -> None:
        self.local_rank = 0
        original(self)

    return init_device


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8)


def all_reduce(self: Any, input_: Any) -> Any:
    import torch

    held = (input_.float() if input_.is_floating_point() else input_).cpu()
    torch.distributed.all_reduce(held, group=self.cpu_group)
    return held.to(input_.device, input_.dtype)


def all_gather(self: Any, input_: Any, dim: int = -1) -> Any:
    import torch

    mine = _bytes(input_)
    found = [torch.empty_like(mine) for _ in range(self.world_size)]
    torch.distributed.all_gather(found, mine, group=self.cpu_group)
    pieces = [piece.view(input_.dtype).view(input_.shape) for piece in found]
    return torch.cat(pieces, dim=dim).to(input_.device)


def reduce_scatter(self: Any, input_: Any, dim: int = -1) -> Any:
    whole = all_reduce(self, input_)
    return whole.chunk(self.world_size, dim=dim)[self.rank_in_group].contiguous()


def gather(self: Any, input_: Any, dst: int = 0, dim: int = -1) -> Any:
    whole = all_gather(self, input_, dim)
    return whole if self.rank_in_group == dst else None


def broadcast(self: Any, tensor: Any, src: int = 0) -> Any:
    import torch

    held = _bytes(tensor)
    torch.distributed.broadcast(held, self.ranks[src], group=self.cpu_group)
    return tensor.copy_(held.view(tensor.dtype).view(tensor.shape))


def send(self: Any, tensor: Any, dst: int | None = None) -> None:
    import torch

    to = (self.rank_in_group + 1) % self.world_size if dst is None else dst
    torch.distributed.send(_bytes(tensor), self.ranks[to], group=self.cpu_group)


def recv(self: Any, size: Any, dtype: Any, src: int | None = None) -> Any:
    import torch

    of = (self.rank_in_group - 1) % self.world_size if src is None else src
    held = torch.empty(size, dtype=dtype)
    torch.distributed.recv(held.reshape(-1).view(torch.uint8), self.ranks[of], group=self.cpu_group)
    return held.to(self.device)


def _from_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def isend_tensor_dict(self: Any, tensor_dict: Any, *args: Any, **kwargs: Any) -> Any:
        held = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in tensor_dict.items()}
        return original(self, held, *args, **kwargs)

    return isend_tensor_dict


def _onto_the_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def irecv_tensor_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, handles, finish = original(self, *args, **kwargs)
        for handle in handles:
            handle.wait()
        for work in finish:
            work()
        if found is None:
            return None, [], []
        return {name: value.to(self.device) if hasattr(value, "to") else value for name, value in found.items()}, [], []

    return irecv_tensor_dict
