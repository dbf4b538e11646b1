"""The environment that an engine must find before vLLM is imported in it."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from kvferry.up.device import Device

logger = logging.getLogger("lab.fleet")

_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
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
}
_LEAKED = ("LD_PRELOAD", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PP_LAYER_PARTITION")


def environment(device: Device, outer: Mapping[str, str]) -> dict[str, str]:
    """`outer` with what servers need. On a GPU, what is set outside is what is to be measured."""
    kept = {name: value for name, value in outer.items() if name not in _LEAKED}
    if device is Device.CPU:
        return {**kept, **_ANYWHERE, **_CPU}
    compiled = kept.get(_COMPILED) or str(kernels_in(Path(tempfile.gettempdir())))
    return {**_ANYWHERE, **_CUDA, **kept, _COMPILED: compiled}


@cache
def kernels_in(parent: Path) -> Path:
    """Where compiled kernels are kept from run to run: a folder of this user, that no other user can write to, since servers
    run what they find there. If the folder is not that, a new one is used, which is removed when this process ends."""
    folder = parent / f"torchinductor-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    wrong = _distrusted(folder.lstat())
    if not wrong:
        return folder
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=parent))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    logger.warning("%s %s: kernels are compiled anew, in %s; remove it to keep them", folder, wrong, made)
    return made


def _distrusted(found: os.stat_result) -> str:
    """Why other users may have put something there; empty if they cannot have."""
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return "can be written to by other users" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def device_name(device: Device) -> str:
    """The first GPU, from its driver; nothing is initialised."""
    if device is Device.CPU:
        return ""
    for told in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in told.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "CUDA"
