"""Transfers to explain, what the plan's own JSON says of their bytes, and the address formula read forwards.

Nothing here looks at how the page works: it traces runs backwards, this expands copies and adds up strides.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np

from kvferry.cli.plan import Shown
from kvferry.explain.request import example_request, sized_manifests
from kvferry.models import Side, load_model, zoo_names

SAMPLES = 200

SIDES = dict.fromkeys(zoo_names(), ("tp=2,pp=2", "tp=4,layout=token")) | {
    "deepseek-v3": ("tp=2,pp=3", "tp=4,block=64"),
    "falcon-h1-34b": ("tp=2,pp=2", "tp=1,block=32,layout=token"),
    "gemma-3-27b": ("tp=2", "tp=4,block=32"),
    "gpt-oss-20b": ("tp=1,pp=2", "tp=2,block=48,spec=1"),
    "synthetic-12": ("tp=2,pp=2,conv=sd", "tp=3,layout=token,spec=2"),
}
"""A pair of unequal sides for every model of the zoo."""

OTHERS = (
    ("synthetic-12", "tp=3,pool=block", "tp=2,pp=2,pool=block,kv=paged"),
    ("synthetic-12", "tp=1,kv=separate", "tp=4,kv=transposed"),
    ("llama-3.1-8b", "tp=4,block=48", "tp=16,kv=separate,pool=block"),
    ("gemma-3-27b", "tp=1,hma=off", "tp=2,hma=off,block=32"),
    ("llama-3.1-8b", "tp=2,pool=block", "tp=2,pool=block"),
)
"""Memory layouts that the pairs above do not have."""


def shown(model: str, prefill: str, decode: str, prompt: int = 150) -> Shown:
    return Shown(load_model(model), Side.parse(prefill), Side.parse(decode), prompt)


def transfer(model: str, prefill: str, decode: str, prompt: int = 100) -> tuple:
    """Manifests of both sides and a request between them."""
    sides = ((prefill, "prefill"), (decode, "decode"))
    producers, consumers = (sized_manifests(load_model(model), Side.parse(side), engine, prompt) for side, engine in sides)
    return producers, consumers, example_request(producers[0], consumers[0], prompt)


@dataclass(frozen=True)
class Sample:
    consumer: int
    region: int
    offset: int
    wanted: tuple


def samples(document: dict, count: int = SAMPLES) -> list[Sample]:
    """Bytes of all decode ranks with what becomes of them: three fifths copied, one fifth filled, one fifth anywhere."""
    random = np.random.default_rng(len(json.dumps(document["plans"])))
    ranks = document["request"]["ranks"]
    bound = [columns(rank) for rank in ranks]
    out = []
    for i in range(count):
        which = int(random.integers(len(ranks)))
        rank = ranks[which]
        regions = document["manifests"]["decode"][rank["consumer"]]["regions"]
        kind = ("copies", "copies", "copies", "fills", "")[i % 5]
        if not regions:
            continue
        if kind and rank[kind]:
            *_, region, first, length = rank[kind][int(random.integers(len(rank[kind])))]
            at = first + int(random.integers(length))
        else:
            region = int(random.integers(len(regions)))
            at = int(random.integers(regions[region]["length"]))
        out.append(Sample(rank["consumer"], region, at, outcome(bound[which], region, at)))
    return sorted(out, key=lambda s: s.consumer)


def columns(rank: dict) -> tuple[np.ndarray, np.ndarray]:
    return np.array(rank["copies"], np.int64).reshape(-1, 6), np.array(rank["fills"], np.int64).reshape(-1, 3)


def outcome(columns: tuple[np.ndarray, np.ndarray], region: int, at: int) -> tuple:
    """("copy", producer, region, offset), ("fill",) or ("none",) according to the bound request, run by run."""
    copies, fills = (rows[(rows[:, -3] == region) & (rows[:, -2] <= at) & (at < rows[:, -2] + rows[:, -1])] for rows in columns)
    found: list[tuple] = [("copy", p, src_region, src + at - dst) for p, src_region, src, _, dst, _ in copies.tolist()]
    found += [("fill",)] * len(fills)
    if len(found) > 1:
        raise AssertionError(f"byte {at} of region {region} is written {len(found)} times: {found}")
    return found[0] if found else ("none",)


@dataclass(frozen=True)
class Meaning:
    """What a page says of a byte, in words that it shows."""

    layer: str
    part: str
    axes: tuple[tuple[str, int], ...]
    token: int | None
    block: int
    byte: int
    entry: int | None = None

    @classmethod
    def read(cls, facts: dict[str, str]) -> Meaning | None:
        if facts["layer"] == "none: padding":
            return None
        part, byte = re.fullmatch(r"(\S+), byte (\d+) of .*", facts["part"]).groups()
        axes = [] if facts["axes"] == "none" else re.findall(r"(\w+) (\d+)(?: of \[\d+, \d+\))?(?:, |$)", facts["axes"])
        token, entry = (re.match(pattern, facts.get("token", "")) for pattern in (r"\d+", r"entry (\d+)"))
        block = re.match(r"\d+", facts["block"])
        return cls(
            facts["layer"], part, tuple((name, int(i)) for name, i in axes), token and int(token[0]),
            int(block[0]), int(byte), entry and int(entry[1]),
        )  # fmt: skip


def address(manifest: dict, meaning: Meaning) -> tuple[int, int]:
    """Region and offset of an element's byte, by the formula of docs/formats.md."""
    layer = next(x for x in manifest["layers"] if x["name"] == meaning.layer)
    part = next(p for p in layer["parts"] if p["name"] == meaning.part)
    shape = manifest["shapes"][part["shape"]]
    group = next(g for g in manifest["groups"] if g["id"] == layer["group"])
    offset = part["offset"] + meaning.block * part["block_stride"] + meaning.byte
    found = dict(meaning.axes)
    for axis in shape["axes"]:
        offset += stepped(axis["digits"], found.pop(axis["name"]) - axis["start"])
    if found:
        raise AssertionError(f"{meaning.layer} {meaning.part} has no axes {sorted(found)}")
    if shape["token"] is not None:
        entry = meaning.entry
        if entry is None:
            entry = meaning.token % group["paging"]["tokens"] // shape["token"]["per_entry"]
        offset += stepped(shape["token"]["digits"], entry)
    return part["region"], offset


def held(manifest: dict, tables: dict, region: int) -> tuple[np.ndarray, np.ndarray]:
    """For every byte of a region: whether it lies in a block that the request holds, and whether a part of that block's group
    has it. The parts of the region share their block stride."""
    length = manifest["regions"][region]["length"]
    block, part_of = np.zeros(length, bool), np.zeros(length, bool)
    for layer in manifest["layers"]:
        for part in layer["parts"]:
            if part["region"] != region:
                continue
            shape, stride = manifest["shapes"][part["shape"]], part["block_stride"]
            at = np.arange(shape["element"]["bytes"])
            for axis in (*shape["axes"], *([shape["token"]] if shape["token"] else [])):
                for count, step in axis["digits"]:
                    at = (at[:, None] + np.arange(count) * step).reshape(-1)
            for place in tables[str(layer["group"])]:
                if place >= 0:
                    block[place * stride : (place + 1) * stride] = True
                    part_of[part["offset"] + place * stride + at] = True
    return block, part_of


def stepped(digits: list, index: int) -> int:
    offset = 0
    for count, stride in reversed(digits):
        index, digit = divmod(index, count)
        offset += digit * stride
    if index:
        raise AssertionError(f"{digits} end before this index")
    return offset
