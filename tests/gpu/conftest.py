"""Tests that need a GPU and CUDA vLLM: `python -m pytest tests/gpu`. `make test` does not run them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
