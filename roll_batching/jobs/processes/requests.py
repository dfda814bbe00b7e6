"""HTTP requests to servers: one client for engines and agents, and one retry rule, which LLM judges share."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.errors import EngineError

HEALTH_SECONDS = 5.0
_LARGEST_REPLY = 32 << 20
"""Bytes, uncompressed; a reply of 100,000 tokens has 10 MB."""
_RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another attempt may change."""
_jitter = random.Random()
"""Not the module's own generator, whose state belongs to the job's results."""


@dataclass(frozen=True)
class Call:
    """One POST request."""

    path: str
    body: Any = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    extra_bytes: int = 0
    """Bytes by which the reply may exceed the usual limit."""


class RequestFailed(Exception):
    """A request that failed, and may succeed when repeated."""


class ReplyTooLarge(RequestFailed):
    """A reply with more bytes than are read."""


def excerpt(reply: Any, length: int = 200) -> str:
    """The beginning of a server's reply, without control characters, which would change a terminal.

    Runs of backslashes become one: a server that quotes another's error doubles them, level by level.
    """
    text = re.sub(r"\\+", r"\\", str(reply)[: 100 * length])
    return "".join(character if character.isprintable() else " " for character in text[:length])


def is_temporary(status: int) -> bool:
    """Whether an error with this HTTP status may go away when the request is repeated."""
    return status >= 500 or status in _RETRIED


def retry_pause(attempt: int, first: float = 1.0, *, most: float = 60.0, asked: float | None = None) -> float:
    """Seconds to wait after attempt `attempt`, from 1: about `first`, then twice as long each time, up to `most`.

    `asked` are the seconds that the server asks for instead. Half of a pause is random, so that clients spread.
    """
    return min(most, first * 2.0 ** (attempt - 1) * _jitter.uniform(0.5, 1.0) if asked is None else asked)


def open_session(seconds: float) -> Any:
    """An aiohttp session with a limit of `seconds` per request; an asynchronous context manager."""
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError("engines by URL need aiohttp: pip install 'roll-batching[engines]'") from error
    timeout = aiohttp.ClientTimeout(total=seconds)
    # One connection per request: the next request on a reused one would fail if the server had closed it.
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def post(session: Any, url: str, call: Call) -> Any:
    """Sends `call`; returns the reply's JSON, or else its text.

    Raises EngineError when the server refuses the request, RequestFailed when a repetition may succeed.
    """
    request = session.post(url + call.path, json=call.body, params=call.parameters, allow_redirects=False)
    return await _reply(request, url, call.path, _LARGEST_REPLY + call.extra_bytes)


async def get(session: Any, url: str, path: str) -> Any:
    """Sends a GET request; otherwise as `post`."""
    return await _reply(session.get(url + path, allow_redirects=False), url, path)


async def _reply(request: Any, url: str, path: str, most_bytes: int = _LARGEST_REPLY) -> Any:
    import aiohttp

    try:
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > most_bytes:
                    raise ReplyTooLarge(f"{path}: its reply has more than {most_bytes >> 20} MiB")
            status = response.status
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise RequestFailed(f"{path}: {type(error).__name__} {error}".strip()) from None
    text = body.decode(errors="replace")
    if is_temporary(status):
        raise RequestFailed(f"{path}: status {status}: {excerpt(text, 500)}")
    if status >= 300:
        raise EngineError(f"{url}{path} refuses the request with status {status}: {excerpt(text, 500)}")
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


async def is_healthy(session: Any, url: str) -> bool:
    """Whether a GET request to `url`, path included, returns status 200."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
    try:
        async with session.get(url, timeout=timeout) as response:
            return bool(response.status == 200)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False
