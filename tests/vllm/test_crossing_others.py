"""Engines that the matrix has no place for: bfloat16, data-parallel producers, and the two of the documentation."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.up.ports import free_port
from lab.crossing.checkpoints import checkpoint
from lab.crossing.compare import differences
from lab.crossing.engine import Engine
from lab.fleet.connectors import OURS
from lab.fleet.legs import ask, ask_all, cross, cross_all, prompt
from lab.fleet.metrics import counted, counters
from lab.fleet.server import MODEL, servers
from lab.fleet.zygote import Zygote

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


@pytest.mark.parametrize("model", ["qwen3-next", "llama", "gemma3", "nemotron-h"])
def test_in_bfloat16_too_nothing_differs_from_an_engine_that_computes_the_last_token_apart(
    zygote: Zygote, checkpoints: Path, model: str
) -> None:
    """In bfloat16 a prompt computed at once and one whose last token is computed apart differ by more than a tie. So the
    reference is an engine whose steps hold one token less than the prompt; with the same steps, nothing may differ. D is
    asked something first: on a CPU with AMX, vLLM's engine dies if its very first step is a decode, with any connector."""
    made, tokens, short = checkpoint(model, checkpoints), 64, "--dtype=bfloat16"
    apart = Engine(made, flags=(short, f"--max-num-batched-tokens={tokens - 1}", "--max-num-seqs=8"))
    prompts = [prompt(tokens, seed) for seed in range(5)]
    ours = Engine(made, OURS, flags=(short,))
    with servers(zygote, {"P": ours, "D": ours, "apart": apart}) as up:
        assert ask(up["D"], prompt(tokens - 1)).good
        before = counters(up["D"])
        crossed = [cross(up["P"], up["D"], it) for it in prompts]
        reference = [ask(up["apart"], it) for it in prompts]
        counts = counted(up["D"], before, lambda c: c.prompt_tokens >= tokens * len(prompts))
    assert [it.decode.tokens for it in crossed] == [it.tokens for it in reference]
    assert [it.decode.logprobs for it in crossed] == [it.logprobs for it in reference]
    assert counts.tokens_loaded == (tokens - 1) * len(prompts)
    assert counts.bytes_moved == counts.bytes_predicted > 0


def test_each_of_several_data_parallel_producers_has_a_name_and_a_port(zygote: Zygote, checkpoints: Path) -> None:
    made = checkpoint("llama", checkpoints)
    port = free_port(2)
    listening = replace(OURS, settings={"listen": f"127.0.0.1:{port}"})
    producer = Engine(made, listening, flags=("--data-parallel-size=2",), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    prompts = [prompt(n) for n in (33, 64, 100, 150, 200, 300)]
    with servers(zygote, {"P": producer, "D": Engine(made, OURS)}) as up:
        reference = ask_all(up["D"], prompts)
        before = counters(up["D"])
        crossed = cross_all(up["P"], up["D"], prompts)
        wanted = sum(map(len, prompts)) - len(prompts)
        counts = counted(up["D"], before, lambda c: c.tokens_loaded >= wanted)
    assert [it.why for it in differences(crossed, reference, "float32") if not it.right] == []
    seen = {(it.prefill.params["remote_engine_id"][-4:], it.prefill.params["remote_port"]) for it in crossed}
    assert seen == {("_dp0", port), ("_dp1", port + 1)}
    assert counts.tokens_loaded == wanted
    assert counts.bytes_moved == counts.bytes_predicted > 0


def shown(info: str) -> list[str]:
    return re.findall(rf"^```{info}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def shown_config(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "MODEL"]
    config: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return config


def test_the_engines_and_the_router_of_the_documentation_work_together(zygote: Zygote, checkpoints: Path) -> None:
    made = checkpoint("llama", checkpoints)
    configs = [shown_config(it) for it in shown("vllm")]
    assert [it["kv_role"] for it in configs] == ["kv_producer", "kv_consumer"]
    producer, consumer = (Engine(made, flags=(f"--kv-transfer-config={json.dumps(it)}",)) for it in configs)
    (router,) = shown("python router")
    with servers(zygote, {"P": producer, "D": consumer}) as up:
        for address, server in (("127.0.0.1:8100", up["P"]), ("127.0.0.1:8200", up["D"])):
            assert address in router
            router = router.replace(address, f"127.0.0.1:{server.port}")
        names: dict[str, Any] = {}
        exec(compile(router, str(PAGE), "exec"), names)
        tokens = prompt(100)
        before = counters(up["D"])
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = names["complete"](body)
        counts = counted(up["D"], before, lambda c: c.tokens_loaded >= len(tokens) - 1)
        alone = ask(up["D"], tokens, max_new=8)
    assert tuple(answer["choices"][0]["token_ids"]) == alone.tokens
    assert counts.tokens_loaded == len(tokens) - 1
    assert counts.bytes_moved > 0
