"""What KVFerry finds out about a release of vLLM, each probe both ways, and what it refuses or leaves off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from heard import hearing
from served import engines, sides

import kvferry.engines.vllm as adapter
from kvferry.engines.vllm import releases
from kvferry.engines.vllm.releases import (
    CONNECTORS,
    MOVED,
    NEEDED,
    ReleaseError,
    customized,
    hit_source,
    place_of,
    this_release,
)
from kvferry.errors import SessionError

pytestmark = pytest.mark.vllm


HITS = "vllm.v1.metrics.cache_hit_source"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Modules of vLLM with other names in them, or not there."""
    found = releases._module

    def change(name: str, **names: Any) -> None:
        real, before = found(name), releases._module
        lacks = {one for one, value in names.items() if value is None}
        has = {one: getattr(real, one) for one in dir(real) if one not in lacks} | names
        new = SimpleNamespace(**{one: value for one, value in has.items() if value is not None})
        monkeypatch.setattr(releases, "_module", lambda asked: new if asked == name else before(asked))
        this_release.cache_clear()

    yield change
    monkeypatch.undo()
    this_release.cache_clear()


def test_this_release_is_seen_and_nothing_is_off() -> None:
    release = this_release()
    assert release.is_seen
    assert release.off == ()
    assert release.asks_what_is_loaded
    assert hit_source() is not None


@pytest.mark.parametrize("version", ["0.30.0", "0.9.2", "0.30.1rc1"])
def test_a_release_that_is_too_old_is_refused_before_anything_else(version: str, pretend: Callable[..., None]) -> None:
    pretend("vllm.version", __version__=version)
    with pytest.raises(
        ReleaseError, match=rf"vLLM {version} is too old: KVFerry needs 0\.31 or newer, and was seen with 0\.32"
    ):
        _ = adapter.KVFerryConnector


@pytest.mark.parametrize(("module", "name"), NEEDED)
def test_a_release_without_what_is_needed_is_refused_by_name(module: str, name: str, pretend: Callable[..., None]) -> None:
    pretend(module, **{name: None})
    with pytest.raises(ReleaseError, match=rf"has no {module}\.{name}, without which KVFerry cannot serve"):
        _ = adapter.KVFerryConnector


def test_a_name_that_no_probe_knows_of_is_named_when_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvferry.engines.vllm.connector", None)
    with pytest.raises(ReleaseError, match=r"is not as KVFerry knows it: .*connector.*upgrade KVFerry"):
        _ = adapter.KVFerryConnector


@pytest.mark.parametrize("name", MOVED)
def test_a_function_is_found_in_either_place(name: str, pretend: Callable[..., None]) -> None:
    one, other = MOVED[name]
    for absent, place in ((other, one), (one, other)):
        pretend(absent, **{name: None})
        pretend(place, **{name: place})
        assert place_of(name) == place


def test_a_function_that_is_in_neither_place_is_named(pretend: Callable[..., None]) -> None:
    for place in MOVED["make_arg_parser"]:
        pretend(place, make_arg_parser=None)
    with pytest.raises(ReleaseError, match=r"no make_arg_parser in vllm\.entrypoints\.launchers\.cli_args or vllm"):
        place_of("make_arg_parser")


def test_a_spec_is_as_its_backend_wants_it_where_vllm_asks_backends(pretend: Callable[..., None]) -> None:
    place = "vllm.v1.worker.utils"
    pretend(place, customize_attention_spec=lambda backend, spec: (backend, spec))
    assert customized("backend", "spec") == ("backend", "spec")
    pretend(place, customize_attention_spec=None)
    assert customized("backend", "spec") == "spec"


def test_a_release_that_no_run_has_seen_says_what_is_off(pretend: Callable[..., None]) -> None:
    pretend("vllm.version", __version__="0.99.1")
    assert str(this_release()) == (
        "vLLM 0.99.1 was not seen by any recorded run (seen: 0.32, 0.33): off are loads in the step that computes them and "
        "prefix hits that attention has and recurrent states have not"
    )


def test_a_release_that_calls_hits_something_else_is_told_what_it_takes_for_granted(pretend: Callable[..., None]) -> None:
    pretend(HITS, CacheHitSource=None)
    pretend(CONNECTORS, KVConnectorBase_V1=type("Base", (), {"_cache_hit_source": "unspecified"}))
    assert hit_source() == "unspecified"


def test_a_release_that_does_not_ask_where_hits_come_from_is_told_nothing(pretend: Callable[..., None]) -> None:
    pretend(HITS, CacheHitSource=None)
    pretend(CONNECTORS, KVConnectorBase_V1=type("Base", (), {}))
    assert hit_source() is None


def test_a_release_that_does_not_ask_what_is_loaded_serves_no_model_whose_blocks_it_zeroes(
    pretend: Callable[..., None],
) -> None:
    base = type("Base", (), {})
    pretend(CONNECTORS, KVConnectorBase_V1=base)
    release = this_release()
    assert not release.asks_what_is_loaded
    assert [*releases.unserved(release, zeroes=False)] == []
    ((seen, cure),) = releases.unserved(release, zeroes=True)
    assert "zeroes blocks of this model after they were loaded" in seen
    assert "0.32 or newer" in cure


def test_an_engine_of_an_unseen_release_says_so_once_and_makes_no_load_in_its_step(
    pretend: Callable[..., None],
) -> None:
    pretend("vllm.version", __version__="0.99.1")
    with hearing() as heard:
        with engines(*sides("llama", {}, {})) as (_, here):
            assert not here.connector.scheduler.can_undo
        with engines(*sides("nemotron-h", {}, {}, prefix_caching=True)) as (_, here):
            assert not here.connector.supports_divergent_local_hybrid_hits
    assert len([line for line in heard.lines if "0.99.1" in line]) == 4, "one line for each engine"


def test_an_engine_whose_release_zeroes_what_was_loaded_is_refused(pretend: Callable[..., None]) -> None:
    pretend(CONNECTORS, KVConnectorBase_V1=type("Base", (), {}))
    with pytest.raises(SessionError, match="zeroes blocks of this model"), engines(*sides("nemotron-h", {}, {})):
        pass
