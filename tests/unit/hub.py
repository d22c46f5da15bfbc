"""A Hugging Face hub of one repository on the loopback interface: as much of its HTTP API as reading it needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = "owner/model"


@dataclass
class Hub:
    """Commits by name, each a folder; `main` is the newest. `fetched` notes the files that were asked for."""

    url: str = ""
    commits: dict[str, Path] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)

    def push(self, folder: Path) -> str:
        """Makes `folder` the newest commit and returns its name."""
        commit = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = folder
        return commit

    @property
    def main(self) -> str:
        return list(self.commits)[-1]

    def commit(self, revision: str) -> str:
        return self.main if revision == "main" else revision

    def file(self, revision: str, *path: str) -> Path:
        return self.commits[self.commit(revision)].joinpath(*path)


@contextmanager
def serve(kind: str = "models") -> Iterator[Hub]:
    """Serves an empty hub as long as the block lasts; its repository is one of `kind` (models, datasets)."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0].strip("/")
            parts = path.removeprefix("datasets/").split("/")
            api = f"api/{kind}/{REPOSITORY}".split("/")
            headers, body, code = {}, b"{}", 200
            if parts[:4] == api and parts[4:5] in ([], ["revision"]):
                body = json.dumps({"id": REPOSITORY, "sha": hub.main, "siblings": []}).encode()
            elif parts[:4] == api and parts[4:5] == ["tree"]:
                body = json.dumps([_entry(file) for file in hub.commits[parts[5]].iterdir()]).encode()
            elif (
                parts[:3] == [*REPOSITORY.split("/"), "resolve"] and (file := hub.file(*parts[3:])).is_file()
            ):
                body = file.read_bytes()
                headers = {
                    "X-Repo-Commit": hub.commit(parts[3]),
                    "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
                }
                hub.fetched.add(file.name)
            else:
                headers, code = {"X-Error-Code": "EntryNotFound"}, 404
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
