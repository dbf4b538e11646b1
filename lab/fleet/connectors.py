"""The two connectors that are compared, as a user would name them to vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Connector:
    """`side_port`: it listens where an environment variable says. `settings` is its extra configuration."""

    name: str
    kind: str
    module: str = ""
    side_port: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def flag(self, role: str = "kv_both") -> str:
        config: dict[str, Any] = {"kv_connector": self.kind, "kv_role": role}
        if self.module:
            config["kv_connector_module_path"] = self.module
        if self.settings:
            config["kv_connector_extra_config"] = dict(self.settings)
        return json.dumps(config)


STOCK = Connector("stock", "NixlConnector", side_port="VLLM_NIXL_SIDE_CHANNEL_PORT")
OURS = Connector("ours", "KVFerryConnector", module="kvferry.engines.vllm")
CONNECTORS = {it.name: it for it in (STOCK, OURS)}
