"""Prefect for one run of `elastane run`: the user's own server, or one that lives as long as the run."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import UserError
from tasks.paths import Paths
from tasks.stage import die_with_parent, heartbeat

STARTUP_SECONDS = 180.0
POLL_SECONDS = 0.1


def users_server() -> bool:
    """Whether the user has a Prefect server: PREFECT_API_URL in the environment or the active profile."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return False
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    return "PREFECT_API_URL" in profiles.get("profiles", {}).get(active, {})


@contextmanager
def prefect_api(paths: Paths) -> Iterator[None]:
    """Makes Prefect ready; enter it before prefect is imported.

    Prefect can start a server for a run by itself, but that one shares the terminal's process group: Ctrl-C
    ends it before the flow, which then waits for it in vain, and kill -9 of the flow leaves it behind.
    """
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    if users_server():
        with heartbeat("asking the Prefect server"):
            import httpx

            try:
                _first_call()
            except httpx.HTTPError as error:
                raise UserError(
                    f"the Prefect server does not answer ({error}); start it, or unset PREFECT_API_URL (or the "
                    "profile that names it) to run without one"
                ) from None
        yield
        return
    home = Path(os.environ.setdefault("PREFECT_HOME", str(paths.prefect_home)))
    home.mkdir(parents=True, exist_ok=True)
    with heartbeat("starting Prefect"):
        port = _free_port()
        log = home / "server.log"
        server = _serve(port, log)
        # Last of all that end at exit, since Prefect sends its last events then.
        atexit.register(_end, server)
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        try:
            import prefect  # noqa: F401  (reads the environment; takes as long as the server does)

            _wait(server, f"http://127.0.0.1:{port}/api/health", log)
            _first_call()
        finally:
            del os.environ["PREFECT_API_URL"]
    yield


def _serve(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    environment = {**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    raise RuntimeError(f"Prefect's server did not start (code {server.poll()}); its output is in {log}")


def _first_call() -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.read_flow_runs(limit=1)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=3)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
