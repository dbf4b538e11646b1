"""Hypothesis profiles: `ci` is deterministic and the default; `deep` draws twenty times as many examples at random."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, database=None, suppress_health_check=_quiet)
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=2000, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
