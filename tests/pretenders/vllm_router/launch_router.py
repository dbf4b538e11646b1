"""Takes the router's flags and answers for the engines."""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

from serving import serve

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--decode", action="append")
found, _ = parser.parse_known_args()


def relay(asked: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{found.decode[0]}/v1/completions", json.dumps(asked).encode())
    with urllib.request.urlopen(request) as answer:
        out: dict[str, Any] = json.load(answer)
    return out


serve(found.port, {"/health": ""}, relay)
