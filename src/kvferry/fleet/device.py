"""What servers run on, and the environment that vLLM must find there before it is imported."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "GLOO_SOCKET_IFNAME": "lo",
}
_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_NET_DEVICES": "lo",
}
_CUDA = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_TLS": "cuda_ipc,cuda_copy,tcp,sm,self",
}
_LEAKED = ("LD_PRELOAD", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PP_LAYER_PARTITION")


class Device(str, Enum):
    CPU = "cpu"
    CUDA = "cuda"


def found_device() -> Device:
    """CUDA where vLLM would find it: a device file, not hidden, and a torch that was built for it. Nothing is initialised."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    try:
        built = not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        built = False
    return Device.CUDA if built and not hidden and Path("/dev/nvidiactl").exists() else Device.CPU


def environment(device: Device, outer: Mapping[str, str]) -> dict[str, str]:
    """`outer` with what servers need. On a GPU, what somebody has set outside is what they want to measure."""
    kept = {name: value for name, value in outer.items() if name not in _LEAKED}
    if device is Device.CPU:
        return {**kept, **_ANYWHERE, **_CPU}
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}")}
    return {**_ANYWHERE, **_CUDA, **compiled, **kept}


def device_name(device: Device) -> str:
    """The first GPU, from its driver; nothing is initialised."""
    if device is Device.CPU:
        return ""
    for told in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in told.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "CUDA"
