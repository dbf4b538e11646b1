"""A process that imports vLLM once and forks an API server for every line on its standard input.

Importing is most of what starting a tiny engine costs, and forked servers share what was imported. The process ends, and ends
every server it forked, when its standard input closes, so that nothing outlives a test run that was killed.
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from typing import Any, NoReturn

from crossing import process_group

POLL_SECONDS = 0.05


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    process_group.adopt_orphans()
    _prepare()
    answers.write('{"ready": true}\n')
    children: set[int] = set()
    pending = b""
    try:
        while True:
            children -= process_group.reap()
            if not select.select([0], [], [], POLL_SECONDS)[0]:
                continue
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                child = _fork(json.loads(line), answers.fileno())
                children.add(child)
                answers.write(json.dumps({"pid": child}) + "\n")
    finally:
        for child in children:
            process_group.end(child)
    os._exit(0)


def _prepare() -> None:
    """Everything that a server and its workers import, and nothing that starts a thread."""
    import vllm.v1.worker.cpu_worker  # noqa: I001  it must come before other parts of vLLM
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.entrypoints.openai.completion.serving
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401
    from vllm.platforms import current_platform

    from crossing import patches

    current_platform.import_kernels()
    patches.apply()


def _fork(order: dict[str, Any], answers: int) -> int:
    child = os.fork()
    if not child:
        _become_server(order, answers)
    return child


def _become_server(order: dict[str, Any], answers: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.close(answers)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        _serve(order["arguments"])
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(arguments: list[str]) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
