"""References as a router relays them: they come back as they were, or are refused as damaged, and never do anything else."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyed import KEYS, NAMED, keys, opened, sealed
from kvferry.errors import BadReferenceError
from kvferry.session import Key, Lease, Reference, digest, from_params, to_params
from kvferry.session import reference as reference_module
from kvferry.session.reference import MAX_GROUPS, Sizes

GOOD = Reference(
    "127.0.0.1:7000", "engine", "3f", "request", Lease(3, (1 << 63) - 1), 40, {"0": [1, -1, 3], "1": 7, "12": []}, "ab12"
)

names = st.text(min_size=1, max_size=30)
blocks = st.integers(-1, 1 << 40)
references = st.builds(
    Reference,
    address=st.sampled_from(["127.0.0.1:7000", "[::1%lo]:1", "::1:65535", "localhost:9"]),
    engine=names,
    incarnation=names,
    request=names,
    lease=st.builds(Lease, slot=st.integers(0, 1 << 40), generation=st.integers(1, (1 << 63) - 1)),
    tokens=st.integers(1, 1 << 40),
    blocks=st.dictionaries(st.integers(0, 10**9 - 1).map(str), st.one_of(blocks, st.lists(blocks, max_size=5)), max_size=4),
    digest=names,
)


@given(references)
def test_a_reference_comes_back_from_json_as_it_was(reference):
    relayed = json.loads(json.dumps(sealed(reference)))
    assert opened(relayed) == reference
    assert opened(relayed).tables == {int(group): table for group, table in reference.blocks.items()}


@given(references)
def test_a_router_that_keeps_53_bits_of_a_number_changes_nothing(reference):
    def lossy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lossy(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [lossy(inner) for inner in value]
        return int(float(value)) if isinstance(value, int) else value

    assert opened(lossy(sealed(reference))) == reference


def test_a_generation_may_be_a_number_and_newer_fields_are_ignored():
    params = sealed(msgspec.structs.replace(GOOD, lease=Lease(3, 17)))
    params["lease"]["generation"] = 17
    params["remark"] = {"of": ["a newer producer"]}
    assert opened(params).lease == Lease(3, 17)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("blocks", "0", 2), 4),
        (("blocks", "1"), 8),
        (("blocks",), {}),
        (("blocks", "3"), [2]),
        (("lease", "slot"), 4),
        (("lease", "generation"), "12"),
        (("tokens",), 39),
        (("incarnation",), "40"),
        (("address",), "127.0.0.2:7000"),
        (("seal",), "0" * 32),
        (("seal",), None),
    ],
    ids=str,
)
def test_a_change_that_passes_for_sound_is_refused(path, value):
    with pytest.raises(BadReferenceError, match="not as it was given out"):
        opened(changed(path, value))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from paths(child, (*path, key))


def changed(path: tuple[Any, ...], to: Any) -> Any:
    params = copy.deepcopy(sealed(GOOD))
    at = params
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return params


FIELDS = ["address", "engine", "incarnation", "request", "lease", "tokens", "blocks", "digest", "version"]
WRONG: list[Any] = [None, True, -2, 1.5, "", [], {}, [[]], {"a": 1}, "\ud800", float("nan"), float("inf"), b"x", object()]
HUGE = [1 << 64, -(1 << 64), 10**400, "x" * 257, "9" * 5000]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_is_named(field):
    params = sealed(GOOD)
    del params[field]
    with pytest.raises(BadReferenceError, match=field):
        opened(params)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [*WRONG, *HUGE], ids=lambda value: type(value).__name__)
def test_a_field_of_a_wrong_kind_is_refused(field, value):
    with pytest.raises(BadReferenceError):
        opened(changed((field,), value))


@pytest.mark.parametrize(
    "params",
    [None, 1, "text", [], [sealed(GOOD)], b"", {}, {"version": 1}, {1: 2}, {"version": [[[]]] * 1000}],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_reference_at_all_is_refused(params):
    with pytest.raises(BadReferenceError):
        opened(params)


@pytest.mark.parametrize("version", [0, 2, "1", True, 1 << 70, 10**5000, None, [], {}], ids=lambda value: type(value).__name__)
def test_another_version_is_refused_and_both_are_named(version):
    with pytest.raises(BadReferenceError) as caught:
        opened(changed(("version",), version))
    assert "version" in str(caught.value) or "`int`" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "generation", ["", "0", "-1", "1.0", "0x1", "9" * 19, "1" * 20, " 1", "1\n", "²", None, 0, -1, 1 << 63]
)
def test_generations_that_no_lease_has_are_refused(generation):
    with pytest.raises(BadReferenceError):
        opened(changed(("lease", "generation"), generation))


@pytest.mark.parametrize("group", ["", "00", "01", "-1", "1\n", "1 ", "x", "1" * 10, "٣"])
def test_group_ids_are_written_in_one_way_only(group):
    with pytest.raises(BadReferenceError):
        opened(changed(("blocks",), {group: [1]}))


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:123456", "a b:1", "a\0b:1", "host:1\n", "tcp://host:1", "é:1", "h:٣"]
)
def test_addresses_that_cannot_be_dialled_are_refused(address):
    with pytest.raises(BadReferenceError, match="address"):
        opened(changed(("address",), address))


def test_a_refusal_is_short_however_long_the_damage():
    long = "x" * 1_000_000
    for params in (changed(("version",), long), changed(("lease",), {**sealed(GOOD)["lease"], long: 1})):
        with pytest.raises(BadReferenceError) as caught:
            opened(params)
        assert len(str(caught.value)) < 500


def test_nesting_beyond_reason_is_refused():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for field in FIELDS:
        with pytest.raises(BadReferenceError):
            opened({**sealed(GOOD), field: deep})
    while deep:
        deep = deep.pop()


def mutant(rng: random.Random) -> Any:
    params = copy.deepcopy(sealed(GOOD))
    for _ in range(rng.randint(1, 3)):
        at, found = params, list(paths(params))
        if not found:
            break
        path = rng.choice(found)
        for key in path[:-1]:
            at = at[key]
        kind = rng.randrange(4)
        if kind == 0:
            del at[path[-1]]
        elif kind == 1:
            at[path[-1]] = rng.choice([*WRONG, *HUGE])
        elif kind == 2:
            at[path[-1]] = rng.choice([at[path[-1]], [at[path[-1]]], {"0": at[path[-1]]}, str(at[path[-1]])])
        elif isinstance(at, dict):
            at[rng.choice(["0", "x", "lease", "slot", "version", ""])] = rng.choice(WRONG)
    return params


def readable(params: Any) -> Reference | None:
    try:
        return opened(params)
    except BadReferenceError:
        return None


def test_mutants_are_references_or_damaged_and_nothing_else():
    rng = random.Random(5)
    found = [readable(mutant(rng)) for _ in range(5000)]
    assert 3000 < found.count(None) < 5000
    for reference in filter(None, found):
        assert opened(json.loads(json.dumps(sealed(reference)))) == reference


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_text_that_a_router_cut_or_flipped_is_a_reference_or_damaged():
    rng = random.Random(6)
    text = json.dumps(sealed(GOOD))
    places = [rng.randrange(len(text)) for _ in range(3000)]
    flipped = [text[:at] + rng.choice('09"{}[],:-.ex\\ ') + text[at + 1 :] for at in places]
    found = [readable(parsed(damaged)) for damaged in (*flipped, *(text[:at] + text[at + 1 :] for at in places))]
    assert 0 < found.count(None) < len(found)
    for reference in filter(None, found):
        assert opened(json.loads(json.dumps(sealed(reference)))) == reference


WHAT = st.tuples(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
    st.text(max_size=4),
    st.lists(st.tuples(st.text(max_size=3), st.integers(0, 1 << 40)), max_size=3),
    st.text(max_size=4),
)


@settings(max_examples=500)
@given(one=WHAT, other=WHAT)
def test_digests_are_equal_for_equal_prefixes_only(one, other):
    found, compared = (digest(t, adapter=a, media=m, salt=s) for t, a, m, s in (one, other))
    assert (found == compared) == (one == other)


def test_each_field_changes_the_digest_and_none_runs_into_the_next():
    found = [
        digest([]),
        digest([0]),
        digest([0, 0]),
        digest([1]),
        digest([], adapter="a"),
        digest([], salt="a"),
        digest([], adapter="a", salt="b"),
        digest([], adapter="ab"),
        digest([], salt="ab"),
        digest([], adapter="b", salt="a"),
        digest([], media=[("a", 0)]),
        digest([], media=[("a", 1)]),
        digest([], media=[("", 0)]),
        digest([], media=[("", 0), ("", 0)]),
        digest([], media=[("a", 0), ("b", 0)]),
        digest([], media=[("b", 0), ("a", 0)]),
        digest([], media=[("ab", 0)]),
        digest([], media=[("a", 0)], salt="b"),
        digest([int.from_bytes(b'[1,"xxxx', "little")]),
        digest([], adapter="\ud83d\ude00"),
        digest([], adapter="😀"),
        digest([], adapter="\ud800"),
    ]
    assert len(set(found)) == len(found)
    assert all(len(text) == 32 for text in found)


def test_a_digest_is_the_same_in_every_process_and_for_every_kind_of_sequence():
    assert digest([1, 2, 3]) == digest((1, 2, 3)) == digest(range(1, 4))
    assert digest([1, 2, 3], adapter="lora", media=[("image", 1)], salt="s") == "5d810a232bfd61c2b2497b856bf6a720"


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=90), st.integers(0, 90))
def test_the_digest_of_a_beginning_is_that_of_the_beginning_alone(tokens, count):
    assert digest(tokens, count=count, salt="s") == digest(tokens[:count], salt="s")


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, (1 << 16) - 1, 1 << 16])
@pytest.mark.parametrize("beyond", [0, 1, 2, 64, 65, 1000])
def test_a_beginning_has_its_digest_whatever_its_length(count, beyond):
    tokens = [number * 7919 % 130_000 for number in range(count + beyond)]
    assert digest(tokens, count=count) == digest(tuple(tokens[:count]))


def test_seals_and_digests_are_the_same_in_every_version():
    assert to_params(GOOD, Key(b"", b"the cluster's"))["seal"] == "86cac518eea008245530093bf501854b"
    tokens = [*range(300), 1 << 16, 1 << 32]
    assert digest(tokens, adapter="lora", media=[("image", 1)], salt="s") == "93a1788b1399471c6fcb1c7db4990206"


def test_nothing_is_hashed_in_pieces_for_which_python_lets_go_of_its_lock(monkeypatch):
    fed: list[int] = []

    class Heard:
        def __init__(self, state: Any) -> None:
            self._state = state

        def copy(self) -> Heard:
            return Heard(self._state.copy())

        def update(self, data: bytes) -> None:
            fed.append(len(data))
            self._state.update(data)

        def hexdigest(self) -> str:
            return self._state.hexdigest()

    keyed = reference_module._keyed
    blake2b = hashlib.blake2b
    monkeypatch.setattr(reference_module, "_keyed", lambda secret: Heard(keyed(secret)))
    monkeypatch.setattr(reference_module.hashlib, "blake2b", lambda *data, **kinds: Heard(blake2b(*data, **kinds)))
    tokens = [100_000 + number for number in range(5000)]
    digest(tokens, count=4999, salt="s" * 5000, media=[("m" * 300, place) for place in range(20)])
    digest(tokens)
    whole = sum(fed)
    opened(sealed(msgspec.structs.replace(GOOD, blocks={"0": tokens})))
    assert whole > 2 * 5 * 4999 + 5000 + 20 * 300
    assert sum(fed) - whole > 2 * 6 * 5000
    assert max(fed) <= 2047


def test_an_address_beyond_this_machine_is_believed_with_a_key_only_however_often_it_was_read():
    far = msgspec.structs.replace(GOOD, address="10.1.2.3:7000")
    for _ in range(2):
        assert opened(sealed(far, NAMED), NAMED) == far
        with pytest.raises(BadReferenceError, match="leads beyond this machine"):
            opened(sealed(far))
        assert opened(sealed(GOOD)) == opened(sealed(GOOD, NAMED), NAMED) == GOOD


def test_an_address_that_nobody_can_listen_at_is_refused_each_time():
    for _ in range(2):
        for at in ("127.0.0.1:0", "127.0.0.1:65536"):
            with pytest.raises(BadReferenceError, match=r"the reference is damaged: .*127"):
                opened(sealed(msgspec.structs.replace(GOOD, address=at)))


def test_a_reference_under_another_key_is_refused():
    assert opened(sealed(GOOD, NAMED), NAMED) == GOOD
    for made, read in ((keys("another's"), NAMED), (KEYS, NAMED), (NAMED, KEYS)):
        with pytest.raises(BadReferenceError, match="under another key"):
            opened(sealed(GOOD, made), read)


def test_each_of_two_keys_opens_a_seal_and_the_first_makes_it():
    both = keys("old", "new")
    assert opened(sealed(GOOD, keys("old")), both) == opened(sealed(GOOD, keys("new")), both) == GOOD
    assert sealed(GOOD, both) == sealed(GOOD, keys("old")) != sealed(GOOD, keys("new"))


def test_a_seal_with_the_empty_secret_opens_nothing():
    forged = to_params(GOOD, Key(b"", b""))
    assert forged["seal"] == "e103d70594f6550d182c7a85673a632c"
    for held in (KEYS, NAMED):
        with pytest.raises(BadReferenceError, match="under another key"):
            opened(forged, held)


SMALL = Sizes(3, 40)


class Worked:
    """What was done with references: tables that were converted, and bytes that were encoded and hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.converted: list[Any] = []
        self.encoded = self.hashed = 0
        convert, encode, feed = msgspec.convert, msgspec.json.encode, reference_module._feed

        def converts(said: Any, kind: Any) -> Any:
            self.converted += [kind] if kind is reference_module.Tables else []
            return convert(said, kind)

        def encodes(said: Any, **how: Any) -> bytes:
            text = encode(said, **how)
            self.encoded += len(text)
            return text

        def feeds(update: Any, data: Any) -> None:
            self.hashed += len(data)
            feed(update, data)

        monkeypatch.setattr(msgspec, "convert", converts)
        monkeypatch.setattr(msgspec.json, "encode", encodes)
        monkeypatch.setattr(reference_module, "_feed", feeds)


@pytest.mark.parametrize(
    "blocks", [{"0": [1] * 41}, {"0": [1], "1": [1] * 41}, {str(group): 1 for group in range(4)}, {"0": [1] * 1_000_000}]
)
def test_a_reference_that_is_larger_than_the_longest_prompts_is_refused_by_lengths_alone(blocks, monkeypatch):
    """The engine's thread reads it: what that costs is for the engine's own groups to say, not for the reference."""
    params = sealed(msgspec.structs.replace(GOOD, blocks=blocks))
    worked = Worked(monkeypatch)
    with pytest.raises(BadReferenceError, match="takes has 3 groups with 40 blocks at most"):
        from_params(params, KEYS, SMALL)
    assert (worked.converted, worked.encoded, worked.hashed) == ([], 0, 0)


@pytest.mark.parametrize("blocks", [{"0": [1] * 40}, {"0": ["x" * 10_000_000]}, {"0": [[[1] * 1_000_000]]}, {"x": [None] * 40}])
def test_tables_are_converted_under_a_seal_of_ours_only(blocks, monkeypatch):
    """And what is no table of numbers is not even hashed, beyond what the longest would cost."""
    params = {**sealed(GOOD), "blocks": blocks}
    worked = Worked(monkeypatch)
    with pytest.raises(BadReferenceError, match="not as it was given out"):
        from_params(params, KEYS, SMALL)
    assert worked.converted == []
    assert worked.hashed <= SMALL.text < 20_000


@pytest.mark.parametrize("field", ["engine", "address", "lease", "seal", "digest", "a newer one's"])
def test_long_fields_are_not_hashed_either(field, monkeypatch):
    worked = Worked(monkeypatch)
    long = {"slot": 1, "generation": "1" * 10_000_000} if field == "lease" else "x" * 10_000_000
    params = {**sealed(GOOD), field: long}
    worked.encoded = worked.hashed = 0
    if field == "a newer one's":
        assert from_params(params, KEYS, SMALL) == GOOD
    else:
        with pytest.raises(BadReferenceError):
            from_params(params, KEYS, SMALL)
    assert worked.hashed <= SMALL.text


def test_a_reference_with_more_fields_than_there_will_ever_be_is_refused():
    with pytest.raises(BadReferenceError, match=r"it has 1,0\d\d fields"):
        opened({**sealed(GOOD), **{str(field): 1 for field in range(1000)}})


def test_a_reference_of_the_longest_prompt_is_read():
    found = msgspec.structs.replace(GOOD, blocks={str(group): [(1 << 40) - 1] * 40 for group in range(3)})
    assert from_params(sealed(found), KEYS, SMALL) == found


def test_sizes_are_those_of_the_engines_own_groups_and_of_somewhat_finer_ones():
    assert Sizes.of(4096, 1, [16]) == Sizes(4, 513)
    assert Sizes.of(4096, 3, [128, 64]) == Sizes(8, 513)
    assert Sizes.of(4097, 1, [4]) == Sizes(4, 1026)
    assert Sizes.of(4096, 2, []) == Sizes(6, 513)
    assert Sizes.of(1, 200, [16]).groups == MAX_GROUPS
