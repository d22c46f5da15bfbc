"""The measuring probe on this machine's CPU with tiny settings, its cache, and ranks that hang or fail."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tasks.commands.measure import KIB, MIB, Effort, disk_rates, measure, measured_rates
from tasks.commands.measure_links import _gist, group_sizes, measure_links
from tasks.commands.probe import document, lines
from tasks.contracts import Gpu, Rates
from tasks.errors import UserError
from tasks.paths import rates_file
from tasks.probe.rates import cached_rates
from tasks.probe_hardware import read_machine

TINY = Effort(
    cpu_shapes=((64, 64, 64), (64, 576, 576)),
    seconds=0.02,
    copy_bytes=4 * MIB,
    disk_bytes=8 * MIB,
    gloo_messages=(4 * KIB, 64 * KIB, 1 * MIB),
)


@pytest.fixture(scope="module")
def two_cores():
    return read_machine("cpu", {}, Path("/")).model_copy(update={"cpu_cores": 2})


@pytest.fixture(scope="module")
def rates(two_cores, tmp_path_factory):
    return measure(two_cores, tmp_path_factory.mktemp("workspace"), TINY)


def test_a_cpu_is_measured(rates, two_cores):
    assert rates.identity == two_cores.identity
    assert set(rates.matmul_flops) == {"64x64x64 float32", "64x576x576 float32", "64x576x576 bfloat16"}
    assert min(rates.matmul_flops.values()) > 1e7 and max(rates.matmul_flops.values()) < 1e14
    assert (rates.host_to_device, rates.device_to_host) == (None, None)
    assert rates.memory_bandwidth == rates.host_memory_bandwidth > 1e8
    assert rates.disk_read > 1e5 and rates.disk_write > 1e5
    assert not [note for note in rates.notes if not note.startswith("disk:")]


def test_curves_hold_every_message_between_two_ranks(rates):
    for curves in (rates.all_reduce, rates.all_gather):
        assert [size for size, _ in curves[2]] == [4 * KIB, 64 * KIB, 1 * MIB]
        assert all(0 < seconds < 5 for _, seconds in curves[2])


def test_measured_once_a_machine_and_read_back_byte_for_byte(rates, two_cores, monkeypatch, tmp_path):
    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path))
    taken = []
    monkeypatch.setattr("tasks.commands.measure.measure", lambda *given: taken.append(given) or rates)
    assert cached_rates(two_cores) is None
    assert measured_rates(two_cores, tmp_path, TINY) == rates
    path = rates_file(two_cores.identity)
    assert path == tmp_path / "rates" / f"{two_cores.identity}.json"
    before = path.read_bytes()
    assert measured_rates(two_cores, tmp_path, TINY) == rates
    assert len(taken) == 1
    assert Rates.read(path).to_json().encode() == before == path.read_bytes()


def test_another_driver_torch_or_contract_measures_anew(rates, two_cores, monkeypatch, tmp_path):
    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path))
    path = rates_file(two_cores.identity)
    rates.write(path)
    assert cached_rates(two_cores) == rates
    assert cached_rates(two_cores.model_copy(update={"driver": "580.95"})) is None
    rates.model_copy(update={"torch": "2.0.0"}).write(path)
    assert cached_rates(two_cores) is None
    path.write_text("{}")
    assert cached_rates(two_cores) is None


def test_facts_and_rates_are_one_document(rates, two_cores):
    both = json.loads(document(two_cores, rates))
    assert both["rates"]["identity"] == rates.identity and both["hardware"]["cpu_cores"] == 2
    assert document(two_cores, None) + "\n" == two_cores.to_json()
    said = lines(two_cores, rates)
    assert any(line.startswith("reduce    2 ranks: 4 KiB") for line in said)
    assert not any("TFLOP" in line for line in lines(two_cores, None))


def test_the_command_shows_what_was_measured_before(rates, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from flows.cli import app

    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    params = (Path(__file__).parents[2] / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(params.replace("device: auto", "device: cpu"))
    profile = read_machine("cpu", {}, Path("/"))
    rates.model_copy(update={"identity": profile.identity}).write(rates_file(profile.identity))
    shown = CliRunner().invoke(app, ["probe", "--measure", "--json"])
    assert json.loads(shown.stdout)["rates"]["matmul_flops"] == rates.matmul_flops
    assert "TFLOP/s" in CliRunner().invoke(app, ["probe", "--measure"]).stdout
    assert CliRunner().invoke(app, ["probe", "--json"]).stdout == profile.to_json()


def test_group_sizes_double_up_to_all():
    assert [group_sizes(ranks) for ranks in (1, 2, 6, 8)] == [(), (2,), (2, 4, 6), (2, 4, 8)]


def hang(rank, ranks, backend, port, messages, pipe):
    if rank == 0:
        pipe.send(("testing",))
    time.sleep(600)


def fail(rank, ranks, backend, port, messages, pipe):
    if rank == 1:
        pipe.send(("failed", "rank 1: RuntimeError: no device"))
    time.sleep(600)


def die(rank, ranks, backend, port, messages, pipe):
    os._exit(3)


def slow(rank, ranks, backend, port, messages, pipe):
    if rank == 0:
        pipe.send(("testing",))
        pipe.send(("passed",))
        pipe.send(("point", "all_reduce", 2, 4096, 0.5))
    time.sleep(600)


@pytest.mark.parametrize(
    ("main", "backend", "said"),
    [
        (
            hang,
            "nccl",
            "with nccl over 2 GPUs did not end within 0.2 s, as on cards without peer access; set NCCL_P2P",
        ),
        (hang, "gloo", "with gloo over 2 processes did not end within 0.2 s; look for a firewall"),
        (fail, "nccl", "failed (rank 1: RuntimeError: no device)"),
        (die, "gloo", "failed (a rank ended without a word)"),
        (slow, "gloo", "the time was up"),
    ],
)
def test_ranks_that_hang_or_fail_are_said_and_not_waited_for(main, backend, said):
    start = time.monotonic()
    curves = measure_links(backend, 2, (4096,), start + 5, self_test_seconds=0.2, main=main)
    assert time.monotonic() - start < 12  # the first start may have to import torch
    assert len(curves.notes) == 1 and said in curves.notes[0]
    assert curves.all_reduce == ({2: ((4096, 0.5),)} if main is slow else {})


def test_the_gist_of_an_error_is_a_line():
    assert (
        _gist("CUDA error: invalid device ordinal\nCompile with `X`") == "CUDA error: invalid device ordinal"
    )
    nccl = "NCCL error in: x.cpp:94, unhandled system error\nncclSystemError: y\nLast error:\nno space left in /dev/shm"
    assert _gist(nccl) == "NCCL error in: x.cpp:94, unhandled system error; no space left in /dev/shm"
    assert _gist("") == ""


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere cannot take a test file"):
        disk_rates(tmp_path / "nowhere", MIB)
    assert disk_rates(tmp_path, MIB)[0] > 0
    assert list(tmp_path.iterdir()) == []


def test_fewer_gpus_than_the_profile_says_is_an_error(two_cores, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    gpu = Gpu(name="NVIDIA L4", memory_bytes=2**34, compute_capability=(8, 9))
    profile = two_cores.model_copy(update={"device": "cuda", "gpus": (gpu, gpu)})
    with pytest.raises(UserError, match=r"lists 2 visible GPUs and torch .* sees 0"):
        measure(profile, tmp_path, TINY)


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    profile = read_machine("cuda", os.environ, Path("/"))
    small = Effort(gpu_shapes=((512, 1024, 1024), (4096, 4096, 4096)), seconds=0.05, disk_bytes=8 * MIB)
    found = measure(profile, tmp_path, small)
    large = "4096x4096x4096"
    assert found.matmul_flops[f"{large} float16"] > found.matmul_flops[f"{large} float32"]
    assert found.memory_bandwidth > 1e11
    assert found.host_to_device > 1e9 and found.device_to_host > 1e9
    assert max(found.all_reduce, default=1) == len(profile.gpus)
