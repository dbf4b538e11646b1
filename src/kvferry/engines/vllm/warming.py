"""What is ready before the first request, which would wait for it.

vLLM compiles and loads its kernels when an engine starts, by steps of made-up requests, but not where it is eager: there the
first request does it. On an H200 that one took 7 times as long as later ones; with this, 0.6 to 1.8 times, as steps vary."""

from __future__ import annotations

from typing import Any


def warm_up(config: Any) -> None:
    """Have vLLM do it for an eager engine too, with the runner whose steps it makes up. To be called in a worker, before its
    caches are there. vLLM watches for later compilations then: an engine that is to fail of one is left alone."""
    if (
        config.model_config.enforce_eager
        and getattr(config, "use_v2_model_runner", False)
        and config.observability_config.jit_monitor_mode != "error"
    ):
        config.kernel_config.enable_jit_warmup = True
