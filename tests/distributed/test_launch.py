"""How the train stage starts its workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasks import train
from tasks.paths import Paths
from tests.unit.planner_cases import cpu, plans


@pytest.mark.distributed
def test_two_jobs_at_once_take_different_ports(monkeypatch, tmp_path):
    commands = []

    class Agent:
        def wait(self) -> int:
            return 0

    def start(command, **options):
        commands.append(command)
        return Agent()

    monkeypatch.setattr(train.subprocess, "Popen", start)
    train.launch(plans(cpu(2))[0].plan, cpu(2), Path("runs/x"), Paths(tmp_path))
    monkeypatch.undo()
    (command,) = commands
    launcher = command[: command.index("tasks.trainer.worker") - 1]
    jobs = [
        subprocess.Popen([*launcher, "--no-python", "sleep", "2"], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors
