"""Spawn-join generation: a pure state machine (`machine.py`) and the engines that feed it."""

import os

VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP", "127.0.0.1"),  # else vLLM finds its address by a socket to 8.8.8.8
    "VLLM_NO_USAGE_STATS": "1",
}
"""What every process with vLLM gets, in a stage or as a server."""
