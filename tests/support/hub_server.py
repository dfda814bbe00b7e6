"""An HTTP server with the part of the Hugging Face hub's API that downloads and uploads use; repositories are folders.

`folder/models/OWNER/NAME` and `folder/datasets/OWNER/NAME` hold their files.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/[^/]+)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        if path == "/api/repos/create":
            made = json.loads(body)
            folder = self.server.folder / "models" / made["organization"] / made["name"]
            folder.mkdir(parents=True, exist_ok=True)
            self._send(self._url(f"{made['organization']}/{made['name']}"))
        elif path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif match := _API.match(path):
            kind, name, action = match.groups()
            folder = self.server.folder / kind / name
            if folder.is_dir():
                self._send(self._answer(folder, name, action, body))
            else:
                self._send({"error": "Repository not found"}, 404, "RepoNotFound")
        elif match := _FILE.match(path):
            file = self.server.folder / ("datasets" if match[1] else "models") / match[2] / match[3]
            if file.is_file():
                self._send(file.read_bytes())
            else:
                self._send({}, 404, "EntryNotFound")
        else:
            self._send({}, 404)

    do_HEAD = do_POST = do_GET

    def _url(self, path: str) -> dict[str, str]:
        return {"url": f"http://{self.headers['Host']}/{path}"}

    def _answer(self, folder: Path, name: str, action: str | None, body: bytes) -> Any:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if action in (None, "revision"):
            siblings = [{"rfilename": str(file.relative_to(folder))} for file in files]
            return {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
        if action == "preupload":
            return {
                "files": [
                    entry | {"uploadMode": "regular", "shouldIgnore": False} for entry in json.loads(body)["files"]
                ]
            }
        if action == "commit":
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    path = folder / entry["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(entry["value"]["content"]))
            return {"commitUrl": self._url(f"{name}/commit/{COMMIT}")["url"], "commitOid": COMMIT}
        return [
            {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": COMMIT}
            for file in files
        ]

    def _send(self, content: Any, status: int = 200, error: str = "") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Length": len(data), "X-Repo-Commit": COMMIT, "ETag": f'"{hash(data)}"'}
        for key, value in (headers | ({"X-Error-Code": error} if error else {})).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def hub_server(folder: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A hub of the repositories in `folder`: environment variables of its users, and the requests so far."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.folder, server.requests = folder, []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        yield home | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}, server.requests  # type: ignore[attr-defined]
        server.shutdown()
