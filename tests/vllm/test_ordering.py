"""What is relied on of vLLM's order of things on a GPU, where loads run beside its stream (docs/vllm.md says what for).

Scheduling is seen as it happens here. The model runner of GPUs does not run on a CPU: the order of its calls is read off its
source, and a release that changes it has to be read again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
from served import engines, load, side, sides
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu import async_utils, kv_connector, model_runner

pytestmark = pytest.mark.vllm

PROMPT = list(range(7, 247))
RUNNER = model_runner.GPUModelRunner
OUTPUT = async_utils.AsyncOutput
CONNECTOR = kv_connector.ActiveKVConnector


def calls(function: Any) -> list[str]:
    """What a function calls, in the order of its text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    found = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda it: (it.lineno, it.col_offset))
    return [ast.unparse(node.func) for node in found]


def in_order(wanted: list[str], found: list[str]) -> bool:
    rest = iter(found)
    return all(name in rest for name in wanted)


ORDERS = {
    "a token reaches the host once all that was launched before it is done": (
        OUTPUT.__init__,
        ["copy_stream.wait_stream", "async_copy_to_np", "self.copy_event.record"],
    ),
    "a step's tokens are looked at when they have reached the host": (OUTPUT.get_output, ["self.copy_event.synchronize"]),
    "tokens are copied after the forward pass has been launched and sampled": (
        RUNNER.sample_tokens,
        ["self.sample", "AsyncOutput", "self.kv_connector.post_forward"],
    ),
    "new blocks are zeroed, then loads are ordered, then the forward pass is launched": (
        RUNNER.execute_model,
        ["self.update_requests", "self.kv_connector.pre_forward", "self.model", "self.kv_connector.finish_forward"],
    ),
    "new blocks are zeroed where requests are updated": (RUNNER.update_requests, ["self.kv_block_zeroer.zero_block_ids"]),
    "orders are given before the forward pass": (CONNECTOR.pre_forward, ["self.kv_connector.bind_connector_metadata"]),
    "results are taken after it": (
        CONNECTOR.post_forward,
        ["self.kv_connector.get_transfer_results", "self.kv_connector.clear_connector_metadata"],
    ),
}


@pytest.mark.parametrize("what", ORDERS)
def test_the_model_runner_of_gpus_keeps_the_order_that_is_relied_on(what: str) -> None:
    function, wanted = ORDERS[what]
    assert in_order(wanted, calls(function)), f"{what}: no longer so; read {inspect.getsourcefile(function)} again"


def test_control_another_order_is_noticed() -> None:
    assert not in_order(["self.copy_event.record", "copy_stream.wait_stream"], calls(OUTPUT.__init__))
    assert not in_order(["self.kv_connector.pre_forward", "self.update_requests"], calls(RUNNER.execute_model))


def test_the_wait_for_a_token_comes_before_anything_is_made_of_it() -> None:
    assert calls(OUTPUT.get_output)[0] == "self.copy_event.synchronize"


def test_blocks_that_a_step_in_flight_may_write_are_not_given_to_a_load() -> None:
    """A load is not ordered with the stream that steps run on: vLLM keeps the blocks until the step has come back, wherever
    several steps are in flight. On a GPU that is so by default, here with pipeline stages."""
    with engines(*sides("llama", {}, side(pp=2))) as (_, here):
        here.scheduler.add_request(here.request("r", PROMPT[:100], None, max_tokens=8))
        out = here.scheduler.schedule()
        table = here.scheduler.kv_cache_manager.get_block_ids("r")[0]
        free = here.pool.get_num_free_blocks()
        here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
        assert here.scheduler.get_num_unfinished_requests() == 0
        assert here.pool.get_num_free_blocks() == free
        assert {block.block_id for _, blocks in here.scheduler.deferred_frees for block in blocks} == set(table)
        here.scheduler.update_from_output(out, ModelRunnerOutput(["r"], {"r": 0}, [[5]]))
        assert here.pool.get_num_free_blocks() == free + len(table)


def test_control_without_steps_in_flight_blocks_are_free_at_once() -> None:
    with engines(*sides("llama", {}, {})) as (_, here):
        here.scheduler.add_request(here.request("r", PROMPT[:100], None, max_tokens=8))
        here.scheduler.schedule()
        free = here.pool.get_num_free_blocks()
        here.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
        assert here.pool.get_num_free_blocks() > free


def test_blocks_of_a_load_are_not_zeroed_beside_it() -> None:
    with engines(*sides("nemotron-h", {}, {})) as (there, here):
        here.scheduler.needs_kv_cache_zeroing = here.scheduler.kv_cache_manager.needs_kv_cache_zeroing = True
        zeroed: list[int] = []
        schedule = here.scheduler.schedule

        def watched() -> Any:
            out = schedule()
            zeroed.extend(out.new_block_ids_to_zero or ())
            return out

        here.scheduler.schedule = watched
        params = there.prefill("r", PROMPT[:101])
        load(there, here, "r", PROMPT[:101], params, max_tokens=2)
        assert zeroed == []
        here.scheduler.add_request(here.request("own", PROMPT[5:50], None))
        here.step_until(lambda: "own" in here.outputs)
        assert zeroed
