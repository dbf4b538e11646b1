"""Takes vLLM's flags, writes some of its lines and serves, unless its model is called otherwise."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from serving import serve

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--port", type=int)
parser.add_argument("--kv-transfer-config")
found, _ = parser.parse_known_args()

METRICS = """# HELP vllm:request_success_total requests
vllm:request_success_total{engine="0",finished_reason="length"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop"} 1.0
kvferry_loads_total{engine="0",outcome="loaded"} 4.0
kvferry_tokens_loaded_total{engine="0"} 396.0
kvferry_bytes_moved_total{engine="0"} 811008.0
kvferry_wire_seconds_total{engine="0"} 0.01
"""


def complete(asked: dict[str, Any]) -> dict[str, Any]:
    alters = "alters" in found.model and "kv_consumer" in found.kv_transfer_config
    return {"choices": [{"text": f"{asked['prompt']} and {'elsewhere' if alters else 'back'}"}]}


print("Resolved architecture: Pretender", flush=True)
(Path(tempfile.gettempdir()) / "written").write_text("by an engine")
if "dies" in found.model:
    sys.exit("ValueError: no pretender is called so")
print("carried by shared memory (zero-copy, cma/memory)", flush=True)
serve(found.port, {"/health": "", "/metrics": METRICS}, complete)
