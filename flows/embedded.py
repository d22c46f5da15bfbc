"""Prefect without a server of the user's own. Call before prefect is imported."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from tasks.paths import Paths
from tasks.stage import heartbeat

STARTUP_SECONDS = "180"


def use_embedded_unless_configured(paths: Paths) -> None:
    """Keeps Prefect's state in the workspace, unless the user has a server (environment or profile).

    The temporary server needs up to half a minute at its first start, more than Prefect's own patience.
    """
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    if os.environ.get("PREFECT_API_URL") or profile_has_server():
        return
    os.environ.setdefault("PREFECT_HOME", str(paths.prefect_home))
    # Prefect makes its folder but not the one above it, and then waits for a server that cannot start.
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", STARTUP_SECONDS)


def profile_has_server() -> bool:
    """Whether the active Prefect profile names a server."""
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return False
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    return "PREFECT_API_URL" in profiles.get("profiles", {}).get(active, {})


def start() -> None:
    """Imports Prefect and waits until its server answers."""
    with heartbeat("starting Prefect"):
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            client.read_flow_runs(limit=1)
