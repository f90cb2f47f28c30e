"""vLLM's side of the engine benchmark: starts its server, asks, ends it; prints one JSON object as its last line.

    .venv-vllm/bin/python scripts/bench/peer_vllm.py --model models/smollm2 --count 32

The server computes on all cores. A wave is `count` requests at once to /v1/completions, each with a prompt of random
ids of its own; temperature 1, no end of sequence, with the log-prob of each token, as a trainer needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes

READY_WITHIN_S = 300.0


def main() -> int:
    """Parses arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=32, help="requests at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--reply", type=int, default=128, help="tokens of a reply")
    parser.add_argument("--waves", type=int, default=3, help="timed waves, after one that warms up")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    with _server(options) as url:
        return processes.main(lambda: _measure(url, options))


def _measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def ask(prompt: list[int], seed: int) -> int:
        body = {
            "model": "policy",
            "prompt": prompt,
            "max_tokens": options.reply,
            "temperature": 1.0,
            "ignore_eos": True,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = _post(f"{url}/v1/completions", body)["choices"][0]
        made, logprobs = len(choice["token_ids"]), len(choice["logprobs"]["token_logprobs"])
        if made != options.reply or logprobs != made:
            raise processes.BenchError(f"a reply of {made} tokens with {logprobs} log-probs instead of {options.reply}")
        return made

    seconds, tokens = [], 0
    with ThreadPoolExecutor(options.count) as threads:
        for _ in range(1 + options.waves):
            prompts = [[rng.randrange(10, vocab) for _ in range(options.prompt)] for _ in range(options.count)]
            seeds = [rng.randrange(2**31) for _ in prompts]
            began = time.perf_counter()
            tokens = sum(threads.map(ask, prompts, seeds))
            seconds.append(time.perf_counter() - began)
    best = min(seconds[1:])
    return {
        "peer": "vllm",
        "seconds": best,
        "waves_s": processes.spread(seconds[1:]),
        "tokens": tokens,
        "tokens_per_s": tokens / best,
        "ms_per_token": 1000 * best / options.reply,
    }


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """The address of a server that is ready; it is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # the `vllm` command of this distribution looks for one of another name
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model), "--served-model-name", "policy", "--dtype", options.dtype]
    command += ["--max-model-len", str(options.prompt + options.reply), "--enforce-eager", "--port", str(port)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--host", "127.0.0.1"]
    cores = sorted(os.sched_getaffinity(0))
    # without the binding it computes on one core
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Any) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > end:
                log.seek(0)
                tail = log.read().decode(errors="replace")[-3000:]
                raise SystemExit(f"the vLLM server did not come up:\n{tail}") from None
            time.sleep(0.5)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
