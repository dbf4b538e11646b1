"""The environment that vLLM must find before it is imported, in one place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.fleet.connectors import CONNECTORS, Connector
from lab.fleet.zygote import Zygote

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


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What any thread may read counts as quick here: nothing is timed."""
    from kvferry.engines.vllm.haste import Haste
    from kvferry.session.links import Links

    connect, saw = Links.connect, Haste.saw

    def anywhere(self: Links, peer: Any) -> Any:
        link = connect(self, peer)
        link.anywhere = True
        return link

    monkeypatch.setattr(Links, "connect", anywhere)
    monkeypatch.setattr(Haste, "saw", lambda self, peer, tokens, seconds: saw(self, peer, tokens, 1e-6))


@pytest.fixture
def _nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is its whole engine has its orders with the step's, as it does on a device."""
    from kvferry.engines.vllm.wharf import Wharf

    monkeypatch.setattr(Wharf, "on_device", property(lambda self: True))
    monkeypatch.setattr(Wharf, "holds_the_engine_back", lambda self: False)
