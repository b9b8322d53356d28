"""A vLLM server with its engine as a fork, for `tests/fixtures/forked_servers.py`: [arguments of `vllm serve`]."""

from __future__ import annotations

import multiprocessing

from vllm.entrypoints.launchers.api_server import entry
from vllm.v1.engine import utils

if __name__ == "__main__":
    # The CPU platform asks for spawn, which would import everything again.
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
