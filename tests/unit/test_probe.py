"""The probe against real files: fake /proc and /sys folders, and this machine itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from tasks.contracts import HardwareProfile
from tasks.errors import UserError
from tasks.probe.driver import card_seen, kernel_driver, too_old, torch_cuda, torch_version
from tasks.probe.host import cpu_cores, cpu_name, host_memory, shm_bytes, shm_note
from tasks.probe_hardware import read_machine

REPOSITORY = Path(__file__).parents[2]
GIB = 2**30
MIB = 2**20


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
    ("mib", "ranks", "workers", "nccl", "needed"),
    [
        (64, 2, 4, True, 384),  # a container's default
        (64, 2, 4, False, 256),
        (64, 1, 4, True, 128),
        (64, 2, 0, True, 128),
        (384, 2, 4, True, None),
        (64, 1, 2, False, None),
        (0, 2, 4, True, None),  # no /dev/shm at all
    ],
)
def test_small_shared_memory_is_noted_with_the_size_needed(mib, ranks, workers, nccl, needed):
    notes = shm_note(mib * MIB, ranks, workers, nccl)
    if needed is None:
        assert notes == ()
    else:
        assert f"/dev/shm holds {mib} MiB" in notes[0] and f"can need {needed} MiB" in notes[0]
        assert "--shm-size=1g" in notes[0] and "fewer workers" in notes[0]


def test_the_probe_warns_of_small_shared_memory(machine, monkeypatch):
    root = machine({"dev/shm/.keep": ""})
    small = os.statvfs_result((4096, 4096, 64 * MIB // 4096, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    profile = read_machine("cpu", {}, root)
    assert profile.shm_bytes == 64 * MIB
    assert "/dev/shm holds 64 MiB" in profile.notes[0]


@pytest.fixture
def no_nvml(monkeypatch):
    """A driver whose library cannot be used, on any machine."""

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)


VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  418.40.04  Fri Mar 15 00:59:12 CDT 2019"


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"dev/nvidia0": "", "dev/nvidiactl": ""}, "/dev/nvidia0"),
        ({"proc/driver/nvidia/version": VERSION}, "/proc/driver/nvidia"),
        (
            {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: X"},
            "/proc/driver/nvidia/gpus/0000:01:00.0",
        ),
    ],
)
def test_a_card_that_cannot_be_used_stops_the_probe(machine, no_nvml, files, where):
    root = machine(files)
    with pytest.raises(UserError, match=f"NVIDIA card is here .{where}., but it cannot be used: NVML says"):
        read_machine("auto", {}, root)
    with pytest.raises(UserError, match=r"set probe_hardware\.device=cpu"):
        read_machine("cuda", {}, root)
    for device, environment in (("cpu", {}), ("auto", {"CUDA_VISIBLE_DEVICES": ""})):
        assert read_machine(device, environment, root).device == "cpu"


def test_the_sentence_names_the_versions(machine, no_nvml):
    root = machine({"dev/nvidia0": "", "proc/driver/nvidia/version": VERSION})
    with pytest.raises(UserError) as caught:
        read_machine("auto", {}, root)
    assert "driver 418.40.04" in str(caught.value) and f"torch {torch_version()}" in str(caught.value)


def test_control_devices_alone_are_no_card(machine, no_nvml):
    root = machine({"dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    assert card_seen(root) is None
    assert kernel_driver(root) is None
    assert read_machine("auto", {}, root).device == "cpu"


def test_open_kernel_modules_say_their_version_too(machine):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    assert kernel_driver(machine({"proc/driver/nvidia/version": text})) == "580.95.05"


def test_a_driver_is_too_old_by_its_major_version_of_cuda():
    assert too_old(12, 12) is None  # minor versions are compatible
    assert too_old(13, 12) is None
    assert too_old(None, 12) is None and too_old(12, None) is None
    assert "knows CUDA 10, and this torch is built for CUDA 12, which needs driver 525" in too_old(10, 12)


def test_wishing_for_a_gpu_that_is_hidden_is_an_error():
    with pytest.raises(UserError, match=r"probe_hardware\.device=cuda, but no GPU can be used"):
        read_machine("cuda", {"CUDA_VISIBLE_DEVICES": ""}, Path("/"))


def test_cpu_is_obeyed_everywhere():
    profile = read_machine("cpu", {}, Path("/"))
    assert (profile.device, profile.gpus, profile.links) == ("cpu", (), ())
    assert 1 <= profile.cpu_cores <= (os.cpu_count() or 1)


def test_torch_and_its_cuda_are_known_without_importing_it():
    import torch

    assert torch.__version__.startswith(
        torch_version()
    )  # wheels of PyPI leave "+cu130" out of their metadata
    assert torch_cuda() == (int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None)


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
