"""The probe against real files: fake /proc and /sys folders, and this machine itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.contracts import Gpu, HardwareProfile
from tasks.errors import UserError
from tasks.probe_hardware import (
    cpu_cores,
    cpu_name,
    host_memory,
    mixed_note,
    read_machine,
    shm_bytes,
    torch_version,
    visible_gpus,
)

REPOSITORY = Path(__file__).parents[2]
GIB = 2**30
UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.fixture
def machine(tmp_path):
    """Writes files below a root with 64 GiB of memory."""

    def build(files: dict[str, str]) -> Path:
        for name, text in {"proc/meminfo": f"MemTotal:  {64 * 2**20} kB\nMemFree: 1 kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return build


def test_no_cgroup_is_the_whole_machine(machine):
    assert host_memory(machine({})) == (64 * GIB, "physical")


def test_version_2_takes_the_least_limit_above_it(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/slice/pod/box",
            "sys/fs/cgroup/slice/pod/box/memory.max": "max",
            "sys/fs/cgroup/slice/pod/memory.max": str(8 * GIB),
            "sys/fs/cgroup/slice/memory.max": str(16 * GIB),
        }
    )
    assert host_memory(root) == (8 * GIB, "cgroup")


def test_a_limit_above_the_machine_is_none(machine):
    root = machine({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(128 * GIB)})
    assert host_memory(root) == (64 * GIB, "physical")


def test_a_container_that_shows_the_hosts_path_still_finds_its_own_limit(machine):
    root = machine({"proc/self/cgroup": "0::/docker/abc", "sys/fs/cgroup/memory.max": str(4 * GIB)})
    assert host_memory(root) == (4 * GIB, "cgroup")


def test_version_1_and_its_unlimited_number(machine):
    lines = "5:cpu,cpuacct:/box\n4:memory:/box\n0::/"
    root = machine(
        {
            "proc/self/cgroup": lines,
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        }
    )
    assert host_memory(root) == (64 * GIB, "physical")
    assert cpu_cores(root, 8) == 8
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(str(2 * GIB))
    (root / "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us").write_text("250000")
    assert host_memory(root) == (2 * GIB, "cgroup")
    assert cpu_cores(root, 8) == 2


@pytest.mark.parametrize(
    ("quota", "usable", "cores"),
    [("400000 100000", 16, 4), ("max 100000", 16, 16), ("50000 100000", 16, 1), ("400000 100000", 2, 2)],
)
def test_cores_are_the_least_of_affinity_and_quota(machine, quota, usable, cores):
    root = machine({"proc/self/cgroup": "0::/box", "sys/fs/cgroup/box/cpu.max": quota})
    assert cpu_cores(root, usable) == cores


def test_cpu_name_and_missing_shm(machine):
    root = machine({"proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast Chip 9\nmodel name\t: Fast Chip 9"})
    assert cpu_name(root) == "Fast Chip 9"
    assert shm_bytes(root) == 0
    (root / "dev/shm").mkdir(parents=True)
    assert shm_bytes(root) > 0


@pytest.mark.parametrize(
    ("wish", "indices"),
    [
        (None, (0, 1, 2)),
        ("2,0", (2, 0)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (0,)),
        ("1,7,0", (1,)),
        ("GPU-bb,GPU-aa11", (2, 0)),
        ("GPU-aa", ()),  # two begin so
        ("1, 2", (1, 2)),
        ("0,0", ()),
        ("abc", ()),
    ],
)
def test_cuda_visible_devices(wish, indices):
    assert visible_gpus(wish, UUIDS)[0] == indices


def test_hidden_gpus_are_said():
    assert "7 names no GPU here" in visible_gpus("1,7,0", UUIDS)[1][0]
    assert "hides all 3 GPUs" in visible_gpus("", UUIDS)[1][0]
    assert "twice" in visible_gpus("0,0", UUIDS)[1][0]
    with pytest.raises(UserError, match="MIG slice"):
        visible_gpus("MIG-1234", UUIDS)


def test_mixed_cards_are_noted():
    small = Gpu(name="A", memory_bytes=24 * GIB, compute_capability=(8, 6))
    large = Gpu(name="B", memory_bytes=80 * GIB, compute_capability=(8, 0))
    assert mixed_note([small, small], {}) == ()
    (note,) = mixed_note([small, large], {})
    assert "A (24 GiB), B (80 GiB)" in note and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in note
    assert "CUDA_DEVICE_ORDER" not in mixed_note([small, large], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[0]


def test_wishing_for_a_gpu_that_is_hidden_is_an_error():
    with pytest.raises(UserError, match=r"probe_hardware\.device=cuda, but no GPU can be used"):
        read_machine("cuda", {"CUDA_VISIBLE_DEVICES": ""}, Path("/"))


def test_cpu_is_obeyed_everywhere():
    profile = read_machine("cpu", {}, Path("/"))
    assert (profile.device, profile.gpus, profile.links) == ("cpu", (), ())
    assert 1 <= profile.cpu_cores <= (os.cpu_count() or 1)


def test_torch_version_is_the_installed_one():
    import torch

    assert torch_version() == torch.__version__


def test_the_stage_is_quick_and_writes_the_same_bytes(tmp_path):
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    command = [sys.executable, "-m", "tasks.probe_hardware"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    texts, fastest = set(), float("inf")
    for _ in range(3):
        start = time.monotonic()
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        fastest = min(fastest, time.monotonic() - start)
        texts.add((tmp_path / "reports/hardware.json").read_bytes())
    assert len(texts) == 1
    assert fastest < 1.0
    assert HardwareProfile.read(tmp_path / "reports/hardware.json").cpu_cores >= 1


def test_torch_stays_out_of_the_probe():
    code = "import sys, tasks.probe_hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


@pytest.mark.gpu
def test_what_torch_sees_is_what_the_probe_sees():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    profile = read_machine("cuda", os.environ, Path("/"))
    assert len(profile.gpus) == torch.cuda.device_count()
    assert len(profile.links) == len(profile.gpus) * (len(profile.gpus) - 1) // 2
    for index, gpu in enumerate(profile.gpus):
        seen = torch.cuda.get_device_properties(index)
        assert (gpu.name, gpu.compute_capability) == (seen.name, (seen.major, seen.minor))
        assert 0 <= gpu.memory_bytes - seen.total_memory < 0.08 * gpu.memory_bytes
