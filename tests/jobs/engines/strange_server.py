"""Servers at an engine's URL that are no engines: one port per kind, over plain sockets.

    python -m tests.jobs.engines.strange_server [--at PATH] [--engine URL] KIND...

prints their URLs in one line. Each answers /health, and everything else in its own way. With `--at` it answers only
requests at that path so, and all others that they succeeded. With `--engine` all but generations are the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import zlib
from collections.abc import Awaitable, Callable

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]
TOKENS = [7, 8, 5]


def answer(tokens: list[object], log_probs: list[object], reason: object = "stop") -> bytes:
    """As SGLang and vLLM answer, both at once; NaN and Infinity as Python writes them."""
    pairs = [[value, token, None] for value, token in zip(log_probs, tokens, strict=False)]
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs}
    choice = {"token_ids": tokens, "finish_reason": reason, "logprobs": {"token_logprobs": log_probs}}
    return json.dumps({"output_ids": tokens, "meta_info": meta, "choices": [choice]}).encode()


def http(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def sends(*parts: bytes, pause: float = 0.0) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return reply


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        await writer.drain()


GOOD = answer(TOKENS, [-1.0, -2.0, -3.0])
PACKED = zlib.compress(b"[" * (1 << 26))
HTML = b"<html><body>\x1b[31m502 Bad Gateway\x1b[0m</body></html>"
KINDS: dict[str, Reply] = {
    "good": sends(http(GOOD)),
    "nan": sends(http(answer(TOKENS, [-1.0, float("nan"), -3.0]))),
    "infinite": sends(http(answer(TOKENS, [-1.0, float("-inf"), -3.0]))),
    "huge number": sends(http(GOOD.replace(b"-2.0", b"-1" + b"0" * 400))),
    "words": sends(http(answer(TOKENS, ["-1", None, True]))),
    "unknown ids": sends(http(answer([7, 64, 5], [-1.0, -2.0, -3.0]))),
    "enormous ids": sends(http(answer([7, 1 << 70, 5], [-1.0, -2.0, -3.0]))),
    "negative ids": sends(http(answer([7, -1, 5], [-1.0, -2.0, -3.0]))),
    "floats for ids": sends(http(answer([7.0, 8.5, 5], [-1.0, -2.0, -3.0]))),
    "too few": sends(http(answer(TOKENS, [-1.0, -2.0]))),
    "no tokens": sends(http(answer([], []))),
    "too many": sends(http(answer(TOKENS * 10, [-1.0] * 30))),
    "other reason": sends(http(answer(TOKENS, [-1.0, -2.0, -3.0], ["stop"] * 1000))),
    "html": sends(http(HTML)),
    "500": sends(http(HTML, "500 Internal Server Error")),
    "not utf-8": sends(http(b'{"output_ids": "\xff\xfe"}', headers="Content-Type: text/plain; charset=klingon\r\n")),
    "trickle": sends(*(http(GOOD)[place : place + 1] for place in range(len(GOOD))), pause=0.5),
    "silent": sends(b"", pause=3600),
    "cut": sends(http(GOOD)[:-40]),
    "twice in one": sends(http(GOOD + GOOD)),
    "deep": sends(http(b"[" * 100_000 + b"]" * 100_000)),
    "huge": endless,
    "packed": sends(http(PACKED, headers="Content-Encoding: deflate\r\n")),
    "elsewhere": sends(http(b"", "302 Found", "Location: http://127.0.0.1:9/v1/completions\r\n")),
    "no folder": sends(http(b'{"success": false, "message": "no such directory"}', "400 Bad Request")),
    "no http": sends(b"SSH-2.0-OpenSSH_9.6\r\n"),
}
"""Sent after a complete request, before the connection is closed."""


def forward_to(request: bytes, engine: str) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection("127.0.0.1", int(engine.rsplit(":", 1)[1]))
        to_engine.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        writer.write(await from_engine.read())
        await writer.drain()
        to_engine.close()

    return reply


async def serve(kind: str, path: str = "", engine: str = "") -> str:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
            if engine and (b'"logprob_start_len"' in body or not head.startswith(f"POST {path}".encode())):
                reply = forward_to(head + body, engine)
            elif head.startswith(b"GET /health"):
                reply = sends(http(b""))
            elif head.startswith(f"POST {path}".encode()):
                reply = KINDS[kind]
            else:
                reply = sends(http(b'{"success": true}'))
            await reply(writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    asyncio.ensure_future(server.serve_forever())
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def main(kinds: list[str], path: str, engine: str) -> None:
    print(json.dumps([await serve(kind, path, engine) for kind in kinds]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--at", default="", help="path of the requests that it answers in its own way")
    parser.add_argument("--engine", default="", help="URL of an engine that answers all but generations")
    args = parser.parse_args()
    asyncio.run(main(args.kinds, args.at, args.engine))
