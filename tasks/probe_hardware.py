"""Stage probe_hardware: facts of this machine that are the same on every run -> hardware.json.

torch is not imported, so that the probe takes less than a second. Rates are measured elsewhere
(tasks/commands/measure.py) and kept out of every DVC out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tasks.contracts import HardwareProfile
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.probe.driver import card_seen, kernel_driver, torch_version, unusable
from tasks.probe.gpus import Gpus, read_gpus
from tasks.probe.host import DATA_WORKERS, cpu_cores, cpu_name, host_memory, shm_bytes, shm_note, usable_cores
from tasks.stage import say, stage_main

ROOT = Path("/")


def probe_hardware(params: Params, paths: Paths) -> HardwareProfile:
    """Reads the machine and writes hardware.json.

    Raises:
        UserError: probe_hardware.device=cuda, and no GPU can be used; or a card is here that cannot be used.
    """
    profile = read_machine(params.probe_hardware.device, os.environ, ROOT)
    profile.write(paths.hardware)
    gpus = ", ".join(gpu.name for gpu in profile.gpus) or "no GPU"
    say(f"{gpus}; {profile.cpu_cores} CPU cores, {profile.host_memory_bytes / 2**30:.1f} GiB host memory")
    for note in profile.notes:
        say(f"note: {note}")
    return profile


def read_machine(
    device: Literal["auto", "cuda", "cpu"], environment: Mapping[str, str], root: Path
) -> HardwareProfile:
    """The profile as `device` wishes it; `root` is where /proc, /sys and /dev lie.

    Raises:
        UserError: `device` is cuda, and no GPU can be used; or it is auto, and a card is here that cannot be used.
    """
    seen = Gpus() if device == "cpu" else _usable(device, read_gpus(environment), environment, root)
    memory, source = host_memory(root)
    shm, ranks = shm_bytes(root), max(1, len(seen.gpus))
    return HardwareProfile(
        device="cuda" if seen.gpus else "cpu",
        gpus=seen.gpus,
        links=seen.links,
        driver=seen.driver,
        cpu_name=cpu_name(root),
        cpu_cores=cpu_cores(root, usable_cores()),
        host_memory_bytes=memory,
        host_memory_source=source,
        shm_bytes=shm,
        notes=(*seen.notes, *shm_note(shm, ranks, DATA_WORKERS, nccl=bool(seen.gpus))),
    )


def _usable(device: str, seen: Gpus, environment: Mapping[str, str], root: Path) -> Gpus:
    """What of `seen` torch can use.

    Raises:
        UserError: see read_machine.
    """
    where = card_seen(root) or ("NVML" if seen.gpus else None)
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if where and seen.problem and not hidden:
        raise UserError(unusable(where, seen.problem, seen.driver or kernel_driver(root)))
    if seen.gpus and torch_version().endswith("+cpu"):
        note = (
            f"torch {torch_version()} is built without CUDA, so the GPUs are not used; install a CUDA build"
        )
        seen = Gpus(driver=seen.driver, notes=(*seen.notes, note))
    if device == "cuda" and not seen.gpus:
        reason = "; ".join(seen.notes) or "the NVIDIA driver is absent or shows none"
        raise UserError(
            f"probe_hardware.device=cuda, but no GPU can be used ({reason}); mend that or set device to auto or cpu"
        )
    return seen


def main() -> None:
    def run(params: Params, paths: Paths) -> None:
        probe_hardware(params, paths)

    stage_main("probe_hardware", run)


if __name__ == "__main__":
    main()
