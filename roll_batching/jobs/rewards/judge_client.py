"""Asks a judge model behind an OpenAI-like URL, with a time limit and retries."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from roll_batching.registry import printable

_LONGEST_REPLY = 4 << 20
"""Bytes of a reply."""
_RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another attempt may change."""
_LONGEST_PAUSE = 60.0
"""Seconds between two attempts."""
_HIDDEN = "<secret>"


class JudgeError(Exception):
    """The judge gave no reply that can be used."""


class _TemporaryError(JudgeError):
    """An error that another attempt may not have; `pause` is the number of seconds that the server asks for."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True, kw_only=True, repr=False)
class JudgeClient:
    """A server with `POST {url}/chat/completions`."""

    url: str
    bearer: str | None
    """Sent as bearer authorization; never part of a message."""
    timeout: float
    """Seconds of one attempt, from connecting to the last byte."""
    retries: int
    """Attempts after the first."""

    def ask(self, request: Mapping[str, Any]) -> str:
        """The text of the judge's first choice. Raises JudgeError when the last attempt fails, or none can succeed."""
        data = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            try:
                return self._attempt(data)
            except _TemporaryError as error:
                if attempt == self.retries:
                    raise JudgeError(f"{error} (attempt {attempt + 1} of {self.retries + 1})") from None
                pause = error.pause if error.pause is not None else 2.0**attempt * random.uniform(0.5, 1.0)
                time.sleep(min(pause, _LONGEST_PAUSE))
        raise AssertionError

    def _attempt(self, data: bytes) -> str:
        begin = time.monotonic()
        try:
            status, after, body = self._post(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            waited = time.monotonic() - begin
            if waited >= self.timeout:
                raise _TemporaryError(f"the judge at {self.url} did not answer within {self.timeout:g} s") from None
            text = self._excerpt(f"{type(error).__name__}: {error}")
            raise _TemporaryError(f"no answer from the judge at {self.url}: {text}") from None
        if status != http.HTTPStatus.OK:
            text = f"the judge at {self.url} answered {status}: {self._excerpt(body.decode('utf-8', 'replace'))}"
            if status in _RETRIED or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
                raise _TemporaryError(text, _seconds(after))
            raise JudgeError(text)
        reply = _content(body)
        if reply is None:
            text = self._excerpt(body.decode("utf-8", "replace"))
            raise _TemporaryError(f"the judge at {self.url} sent no text at choices[0].message.content: {text}")
        return reply

    def _post(self, data: bytes) -> tuple[int, str | None, bytes]:
        """Status, header Retry-After and body. Redirects are not followed: they could take the key elsewhere."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.bearer is not None:
            headers["Authorization"] = f"Bearer {self.bearer}"
        begin = time.monotonic()
        try:
            connection.connect()
            # The connection's own limit is for one read: a server that sends a byte now and then never exceeds it.
            left = max(self.timeout - (time.monotonic() - begin), 0.0)
            watchdog = threading.Timer(left, _shut_down, (connection.sock,))
            watchdog.daemon = True
            watchdog.start()
            try:
                connection.request("POST", f"{parts.path.rstrip('/')}/chat/completions", data, headers)
                response = connection.getresponse()
                body = response.read(_LONGEST_REPLY + 1)
            finally:
                watchdog.cancel()
        finally:
            connection.close()
        if len(body) > _LONGEST_REPLY:
            raise ValueError(f"its reply is longer than {_LONGEST_REPLY:,} bytes")
        if response.length:  # `read` with a number of bytes does not raise
            raise http.client.IncompleteRead(body, response.length)
        return response.status, response.headers.get("Retry-After"), body

    def _excerpt(self, text: str) -> str:
        """The beginning of `text` without the key, which servers repeat in errors."""
        hidden = text.replace(self.bearer, _HIDDEN) if self.bearer else text
        return printable(hidden, characters=300, lines=3)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        # Not `SSLSocket.shutdown`, which takes the encryption away under the reading thread.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _content(body: bytes) -> str | None:
    """The text of the first choice; None if there is none."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return content if isinstance(content, str) and content.strip() else None


def _seconds(text: str | None) -> float | None:
    """The header Retry-After in seconds; None for a date."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
