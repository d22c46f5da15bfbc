"""A Prefect server and a worker of one's own, ended with everything they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.pipeline.workspace import Workspace

SERVER_START_SECONDS = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class ServedWorkspace(Workspace):
    """A workspace whose commands find a server of this test's own."""

    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **self.settings}

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """One request to the server's API; returns its JSON."""
        url = self.settings["PREFECT_API_URL"]
        answer = httpx.request(method, f"{url}/{path}", json=body or None, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def flow_runs(self, deployment: str) -> list[dict[str, Any]]:
        """Flow runs of a deployment, the oldest first, without those still to come."""
        wanted = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        runs = self.ask("POST", "flow_runs/filter", **wanted)
        return [run for run in runs if run["state"]["name"] not in ("Scheduled", "Late")]

    def task_runs(self, flow_run: str) -> dict[str, dict[str, Any]]:
        """Task runs of a flow run by task name."""
        runs = self.ask("POST", "task_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
        return {run["name"].rsplit("-", 1)[0]: run for run in runs}


@contextmanager
def started(command: list[str], cwd: Path, environment: dict[str, str], log: Path) -> Iterator[int]:
    """Runs a program in a session of its own with output to `log`; kills all of its family at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process.pid
        finally:
            family: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


@contextmanager
def prefect_server(workspace: Workspace, folder: Path) -> Iterator[ServedWorkspace]:
    """Starts a server on a free loopback port, its state in `folder`, and waits until it is healthy."""
    home = folder / "prefect-home"
    home.mkdir(parents=True)
    port = free_port()
    settings = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_LOGGING_LEVEL": "INFO",
    }
    served = ServedWorkspace(workspace.root, dict(workspace.recipe), settings)
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with started(command, folder, served.environment, folder / "server.log"):
        deadline = time.monotonic() + SERVER_START_SECONDS
        while not _healthy(settings["PREFECT_API_URL"]):
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.5)
        yield served


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False
