"""A local judge server with scripted answers, good and bad."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer:
    """Serves `POST /v1/chat/completions`; `answers` are used up one per request, the last one stays.

    An answer is a text (the reply), a status, a pair of status and body, a function of the request's JSON, or one of
    the words HANG, CLOSE, DRIP, RUBBISH.
    """

    def __init__(self, *answers: Any, headers: dict[str, str] | None = None, seconds: float = 0.0) -> None:
        self.answers, self.headers, self.seconds = list(answers), headers or {}, seconds
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._now = 0
        self._lock, self._end = threading.Lock(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> JudgeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()

    def _next(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self.requests.append(request)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]

    def _handler(outer: JudgeServer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                with outer._lock:
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                outer.keys.append(self.headers.get("Authorization"))
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = outer._next(request) if self.path == "/v1/chat/completions" else (404, self.path)
                time.sleep(outer.seconds)
                with outer._lock:
                    outer._now -= 1
                self._send(answer)

            def _send(self, answer: Any) -> None:
                if answer == "HANG":
                    outer._end.wait(60)
                if answer in ("HANG", "CLOSE"):
                    self.close_connection = True
                    return
                if answer == "RUBBISH":
                    self.wfile.write(b"\x00\xffnot http at all\r\n\r\n")
                    return
                if isinstance(answer, int):
                    answer = (answer, "broken")
                status, body = answer if isinstance(answer, tuple) else (200, reply(answer))
                data = body.encode()
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if answer != "DRIP" else 10_000))
                self.end_headers()
                while answer == "DRIP" and not outer._end.wait(0.05):
                    self.wfile.write(b" ")
                self.wfile.write(data)

        return Handler


def reply(text: str) -> str:
    """The body of a completion."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
