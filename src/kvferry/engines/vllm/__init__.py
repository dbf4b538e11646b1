"""KVFerry for vLLM: a worker's manifest, and the connector.

The connector needs vLLM and is imported when it is asked for; manifests need neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.engines.vllm import dynamo, releases
from kvferry.engines.vllm.manifest import manifest_of

if TYPE_CHECKING:
    from kvferry.engines.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector", "manifest_of", "register"]


def __getattr__(name: str) -> Any:
    if name == "KVFerryConnector":
        releases.this_release()
        try:
            from kvferry.engines.vllm.connector import KVFerryConnector
        except ImportError as error:
            raise releases.missing(error) from error
        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make the connector known to vLLM by its name; vLLM calls this as a plugin in every process."""
    dynamo.make_known("KVFerryConnector")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVFerryConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVFerryConnector", __name__, "KVFerryConnector")
