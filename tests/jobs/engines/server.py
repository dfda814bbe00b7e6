"""Servers with the APIs of SGLang and vLLM over a small transformers model on the CPU, for tests and demo.

    python -m tests.jobs.engines.server MODEL_DIRECTORY --kind sglang --replicas 2 --port 30000

They take the fields that the engines' request models have and refuse all others, sample with a seed per request, load
new weights from a directory, and answer nothing while they are paused. Faults are ordered at /_fault, a path that no
engine has: {"kind": "slow" | "500" | "cut" | "short" | "other" | "stale" | "abort" | "restarts" | "dies" | "longer"
| "experts_cut" | "experts_zero" | "experts_high" | "experts_text", "times": n};
{"kind": "restart"} is a new process with the first weights; {"kind": "die"} closes the port; {"kind":
"weights_refused"} keeps out of process groups; {"kind": "weights_die" | "weights_hang" | "weights_misfit", "after": n}
befalls the update after the next n. /_seen tells what came.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import threading

import torch
from aiohttp import web

from tests.jobs.engines.replica import Options
from tests.jobs.engines.sglang_server import SGLangServer
from tests.jobs.engines.vllm_server import VLLMServer

KINDS = {"sglang": SGLangServer, "vllm": VLLMServer}


async def serve(folder: str, kind: str, ports: list[int], options: Options, host: str = "127.0.0.1") -> None:
    """Serves for ever; tells the URLs in one line."""
    urls = []
    for port in ports:
        server = KINDS[kind](folder, options)
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        server.close = runner.cleanup
        urls.append(f"http://{host}:{runner.addresses[0][1]}")
    print(json.dumps(urls), flush=True)
    await asyncio.Event().wait()


def end_with(parent: int) -> None:
    """Ends this process when the one that it works for is gone."""
    while os.getppid() == parent:
        threading.Event().wait(0.5)
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kind", choices=sorted(KINDS), default="sglang")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="of the first; the others follow. 0: any")
    parser.add_argument("--processed", action="store_true", help="vllm: as --logprobs-mode processed_logprobs")
    parser.add_argument("--sleeps", action="store_true", help="as --enable-sleep-mode, --enable-memory-saver")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that take weights from a process group")
    parser.add_argument("--dummy", action="store_true", help="as --load-format dummy")
    parser.add_argument("--experts", action="store_true", help="as --enable-return-routed-experts")
    parser.add_argument("--keeps-head", choices=["tied", "always"], default="", help="in weight updates")
    parser.add_argument("--token-seconds", type=float, default=0.0, help="time that each token of a response takes")
    parser.add_argument("--older", action="store_true", help="sglang: /get_server_info, and no /server_info yet")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    ports = [args.port + n if args.port else 0 for n in range(args.replicas)]
    with contextlib.suppress(KeyboardInterrupt):
        options = Options(
            processed=args.processed,
            sleeps=args.sleeps,
            ranks=args.tp_size,
            dummy=args.dummy,
            experts=args.experts,
            keeps_head=args.keeps_head,
            older=args.older,
            token_seconds=args.token_seconds,
        )
        asyncio.run(serve(args.model, args.kind, ports, options))


if __name__ == "__main__":
    main()
