"""Hypothesis profiles: `ci` is deterministic and the default; `deep` draws twenty times as many examples at random.

Transports that tests leave to the garbage collector hold open files, more than the 1,024 that many systems grant at first.
The key of this user is one of the tests' own, here and in what they start."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, database=None, suppress_health_check=_quiet)
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=2000, suppress_health_check=_quiet)
_, _most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (_most, _most))

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
