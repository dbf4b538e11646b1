"""The environment that vLLM must find before it is imported, in one place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.fleet.connectors import CONNECTORS, Connector
from kvferry.fleet.zygote import Zygote

os.environ.update(
    {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # do not pin this process to cores
        "OMP_NUM_THREADS": "1",  # tiny tensors: threads only cost
        "VLLM_CPU_CI_ENV": "1",  # small buffers, no tuning at start
        "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled
        "VLLM_NO_USAGE_STATS": "1",  # no reports to anybody
        "HF_HUB_OFFLINE": "1",  # configurations are made here
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",  # the CPU backend is what is certified
        "GLOO_SOCKET_IFNAME": "lo",  # the process group of one needs no network
    }
)


def pytest_report_header() -> str:
    import torch

    import vllm

    isas = "amx, vec, vec16" if torch.cpu._is_amx_tile_supported() else "vec, vec16 (no AMX on this machine)"
    return f"vllm {vllm.__version__}, torch {torch.__version__}, cache-write ISAs certified here: {isas}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--connector",
        choices=sorted(CONNECTORS),
        default="ours",
        help="what the engines of test_crossing_* carry requests with",
    )


@pytest.fixture(scope="session")
def connector(request: pytest.FixtureRequest) -> Connector:
    return CONNECTORS[request.config.getoption("--connector")]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("crossing")) as it:
        yield it


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
