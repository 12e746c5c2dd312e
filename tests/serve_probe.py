# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Run as a program: what vLLM's own parser, configuration and our gate make of commands of `vllm serve`.

Standard input is a JSON list of commands, each a list of words behind `vllm serve`; MODEL stands for the folder that is
the one argument. Output, in its last line, is what came of each: the limits that the configuration has, and the gate's
decision. Nothing is started. A program of its own, so that any stack's interpreter can run it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(words: list[str], folder: str) -> dict[str, Any]:
    """Configure as `vllm serve` does, up to where it would start its engines."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from afd_dsv4.plugin import state

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    try:
        told = parser.parse_args([folder if word == "MODEL" else word for word in words])
        validate_parsed_serve_args(told)
        told.model = told.model_tag  # as the command does behind its parser
        made = AsyncEngineArgs.from_cli_args(told).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except SystemExit:
        return {"error": "the parser refuses it"}
    except Exception as error:  # vLLM's own
        return {"error": f"{type(error).__name__}: {error}"}
    found = state()
    assert found is not None
    assert found.decision is not None, found.error
    sizes = found.decision.sizes
    return {
        "active": found.decision.active,
        "reasons": list(found.decision.reasons),
        "reserved": sizes.device_bytes if sizes else None,
        "slots": sizes.slots if sizes else None,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "asynchronous": made.scheduler_config.async_scheduling,
        "limits": {
            "max_num_batched_tokens": made.scheduler_config.max_num_batched_tokens,
            "block_size": made.cache_config.block_size,
            "max_num_seqs": made.scheduler_config.max_num_seqs,
        },
    }


def main() -> None:
    """Load every plugin, and answer."""
    folder = sys.argv[1]
    os.environ.pop("VLLM_PLUGINS", None)
    commands = json.load(sys.stdin)

    import vllm.plugins

    vllm.plugins.load_general_plugins()
    print(json.dumps([answer(words, folder) for words in commands]))


if __name__ == "__main__":
    main()
