"""Requests to servers, over HTTP."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.dialect import Call
from roll_batching.jobs.engines.protocol import shown

SECONDS_FOR_HEALTH = 5.0
_LARGEST_REPLY = 32 << 20
"""Bytes, unpacked; an answer of 100,000 tokens takes 10 MB."""
_BUSY = (408, 429)
"""Statuses below 500 that say nothing of the request itself."""


class Failed(Exception):
    """An attempt that failed in a way that another one may not."""


def open_session(seconds: float) -> Any:
    """What requests go through, of which each may take `seconds`. An asynchronous context manager."""
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError("engines by URL need aiohttp: pip install 'roll-batching[engines]'") from error
    timeout = aiohttp.ClientTimeout(total=seconds)
    # Every request a connection of its own: one that a server cut in between would fail the next request.
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def post(session: Any, url: str, call: Call) -> Any:
    """The reply's JSON, or its text. Raises EngineError where it is refused, Failed for what may pass."""
    request = session.post(url + call.path, json=call.body, params=call.parameters, allow_redirects=False)
    return await _reply(request, url, call.path)


async def get(session: Any, url: str, path: str) -> Any:
    """As `post`."""
    return await _reply(session.get(url + path, allow_redirects=False), url, path)


async def _reply(request: Any, url: str, path: str) -> Any:
    import aiohttp

    try:
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _LARGEST_REPLY:
                    raise Failed(f"{path}: its reply has more than {_LARGEST_REPLY >> 20} MiB")
            status = response.status
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise Failed(f"{path}: {type(error).__name__} {error}".strip()) from None
    text = body.decode(errors="replace")
    if status >= 500 or status in _BUSY:
        raise Failed(f"{path}: status {status}: {shown(text, 200)}")
    if status >= 300:
        raise EngineError(f"{url}{path} refuses the request with status {status}: {shown(text, 500)}")
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


async def is_well(session: Any, url: str) -> bool:
    """Whether the server answers at `url`, the whole of a path, with status 200."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=SECONDS_FOR_HEALTH)
    try:
        async with session.get(url, timeout=timeout) as response:
            return bool(response.status == 200)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False
