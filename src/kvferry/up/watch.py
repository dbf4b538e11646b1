"""What can be seen of a process from outside: how far it is by its log, whether it serves, and what it has counted."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

ASK_SECONDS: Final = 5.0

STAGES: Final = (
    ("Resolved architecture", "reading the configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing the model"),
    ("Dynamo bytecode transform", "compiling"),
    ("KV cache size", "allocating the cache"),
    ("Capturing CUDA graphs", "capturing CUDA graphs"),
    ("Creating v1 connector", "registering the cache"),
    ("answers decode engines at", "cache registered"),
    ("Starting vLLM server", "opening its port"),
)
"""What vLLM and KVFerry write on the way up, in that order, and what it means."""
FIRST: Final = "importing vLLM"
_CARRIED: Final = re.compile(r"carried by (.+)$", re.MULTILINE)
_ERROR: Final = re.compile(r"\b\w*(?:Error|Exception): .+")
_REPORTS: Final = ("ulimit", "Worker failed with error", "Engine core initialization failed", "Tokenizer not available")
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class State(str, Enum):
    """ENDED: it did not come up, or died."""

    STARTING = "starting"
    SERVING = "serving"
    SILENT = "silent"
    ENDED = "ended"


@dataclass(frozen=True)
class Counts:
    """Of one engine, or of several together. `answered`: requests; `moved`: bytes; `wire_s`: seconds from posting a load's
    reads to its last byte, over all loads."""

    answered: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    loaded: float = 0.0
    refused: float = 0.0
    failed: float = 0.0
    tokens: float = 0.0
    moved: float = 0.0
    wire_s: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Counts) -> Counts:
        return self._with(other, lambda a, b: a - b)

    def _with(self, other: Counts, join: Callable[[float, float], float]) -> Counts:
        return Counts(**{f.name: join(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})

    @property
    def hand_over_ms(self) -> float:
        return 1e3 * self.wire_s / self.loaded if self.loaded else 0.0


NAMES: Final = {
    ("vllm:request_success_total", ""): "answered",
    ("vllm:num_requests_running", ""): "running",
    ("vllm:num_requests_waiting", ""): "waiting",
    ("kvferry_loads_total", "loaded"): "loaded",
    ("kvferry_loads_total", "refused"): "refused",
    ("kvferry_loads_total", "failed"): "failed",
    ("kvferry_tokens_loaded_total", ""): "tokens",
    ("kvferry_bytes_moved_total", ""): "moved",
    ("kvferry_wire_seconds_total", ""): "wire_s",
}


def stage(log: str) -> str:
    """How far an engine has come, by the last of these things that it wrote of."""
    return next((meaning for words, meaning in reversed(STAGES) if words in log), FIRST)


def carried_by(log: str) -> str:
    """What carries the bytes, as a decode engine says once it knows."""
    found = _CARRIED.findall(log)
    return str(found[-1]).strip() if found else ""


def reason(log: str) -> str:
    """The first error in a log that is not the report of another one."""
    for line in log.splitlines():
        found = _ERROR.search(line)
        if found and not any(words in line for words in _REPORTS):
            return found.group()
    return ""


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every line of a metrics page."""
    for line in page.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found:
            yield found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])


def counts(page: str) -> Counts:
    """What a page of metrics says, over all labels that do not matter here."""
    found: dict[str, float] = {}
    for name, labels, value in samples(page):
        known = NAMES.get((name, labels.get("outcome", "")))
        if known:
            found[known] = found.get(known, 0.0) + value
    return Counts(**found)


def total(each: Iterable[Counts]) -> Counts:
    return sum(each, Counts())


def serves(url: str) -> bool:
    """Whether it says that it is well."""
    return get(f"{url}/health") is not None


def get(url: str) -> str | None:
    """The page there, if there is one."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ASK_SECONDS)
    try:
        connection.request("GET", where.path)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return text if answer.status == 200 else None
