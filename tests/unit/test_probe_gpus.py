"""Which GPUs are visible: CUDA_VISIBLE_DEVICES, MIG slices, old drivers; NVML is a fake machine of cards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from tasks.contracts import Gpu
from tasks.errors import UserError
from tasks.probe import driver
from tasks.probe.gpus import mixed_note, peers_note, read_gpus
from tasks.probe.visible import Card, Shown, visible
from tasks.probe_hardware import read_machine
from tests.unit.planner_cases import plans, strategy_params

GIB = 2**30
NOWHERE = Path("/nonexistent")  # no /dev, no /proc
CARDS = tuple(Card(uuid) for uuid in ("GPU-aa11", "GPU-aa22", "GPU-bb33"))


@dataclass
class FakeCard:
    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    gib: int = 80
    slices: list[FakeCard] | None = None
    capability: tuple[int, int] = (8, 0)


@dataclass
class FakeNvml:
    """The calls of pynvml that the probe makes, over a list of cards."""

    cards: list[FakeCard]
    cuda: int = 13000
    driver: str = "580.95.05"
    shut: int = field(default=0)

    def __getattr__(self, name: str) -> object:
        return getattr(pynvml, name)  # constants and errors are the real ones

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        if not card.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(total=card.gib * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        if card.capability < (8, 0):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(card.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeCard:
        if index >= len(card.slices or ()):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.slices[index]

    def nvmlDeviceGetP2PStatus(self, a: FakeCard, b: FakeCard, caps: int) -> int:
        return pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, a: FakeCard, b: FakeCard) -> int:
        return pynvml.NVML_TOPOLOGY_HOSTBRIDGE


@pytest.fixture
def machine(monkeypatch):
    """Puts cards into the machine, under a torch built for CUDA 13."""

    def build(*cards: FakeCard, **driver_facts: object) -> FakeNvml:
        nvml = FakeNvml(list(cards), **driver_facts)
        monkeypatch.setattr("tasks.probe.gpus.pynvml", nvml)
        monkeypatch.setattr("tasks.probe.gpus.torch_cuda", lambda: 13)
        for module in ("tasks.probe_hardware", "tasks.probe.driver"):
            monkeypatch.setattr(f"{module}.torch_version", lambda: "2.13.0+cu130")
        return nvml

    return build


def sliced(parent: str, *uuids: str) -> FakeCard:
    parts = [FakeCard(uuid, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10) for uuid in uuids]
    return FakeCard(parent, slices=parts)


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
        ("GPU-8932f937,GPU-1", (0, 1)),  # opaque: as many as named, in their order
        ("GPU-8932f937,GPU-aa11", (1, 0)),
        ("GPU-1,GPU-2,GPU-3,GPU-4", (0, 1, 2)),
    ],
)
def test_cuda_visible_devices(wish, indices):
    assert visible(wish, CARDS)[0] == tuple(Shown(index) for index in indices)


def test_what_is_hidden_or_taken_on_trust_is_said():
    assert "7 names no GPU here" in visible("1,7,0", CARDS)[1][0]
    assert "hides all 3 GPUs" in visible("", CARDS)[1][0]
    assert "twice" in visible("0,0", CARDS)[1][0]
    assert "GPU-aa names several GPUs" in visible("GPU-aa", CARDS)[1][0]
    opaque = visible("GPU-8932f937,GPU-1", CARDS)[1]
    assert [("GPU-8932f937" in opaque[0]), ("NVML lists no GPU-1" in opaque[1])] == [True, True]
    assert "GPU-4 names no GPU here" in visible("GPU-1,GPU-2,GPU-3,GPU-4", CARDS)[1][-1]


def test_uuids_are_taken_where_nvml_tells_none(machine):
    machine(FakeCard("", "NVIDIA A40", 45), FakeCard("", "NVIDIA A40", 45))
    assert len(read_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1"}).gpus) == 2


def test_a_subset_keeps_its_order_and_a_rank_takes_the_device_of_its_number(machine):
    machine(*(FakeCard(f"GPU-{index}", f"card {index}") for index in range(3)))
    profile = read_machine("auto", {"CUDA_VISIBLE_DEVICES": "1,2"}, NOWHERE)
    assert [gpu.name for gpu in profile.gpus] == ["card 1", "card 2"]
    assert [(link.a, link.b, link.kind) for link in profile.links] == [(0, 1, "pcie")]
    assert plans(profile, strategy=strategy_params(data_parallel_degree=2))[0].plan.world_size == 2
    with pytest.raises(UserError, match="data_parallel_degree=3"):
        plans(profile, strategy=strategy_params(data_parallel_degree=3, per_device_train_batch_size=1))


def test_a_slice_has_its_own_memory_and_one_rank(machine):
    nvml = machine(sliced("GPU-1", "MIG-1111-aaaa", "MIG-2222-bbbb"))
    seen = read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1111-aaaa,MIG-2222-bbbb"})
    assert [(gpu.name, gpu.memory_bytes) for gpu in seen.gpus] == [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 * GIB)
    ]
    assert seen.links == ()
    assert "2 MIG slice(s) of 1 card(s)" in seen.notes[0] and "1 rank a card" in seen.notes[0]
    assert nvml.shut == 1
    profile = read_machine("auto", {"CUDA_VISIBLE_DEVICES": "MIG-1111-aaaa,MIG-2222-bbbb"}, NOWHERE)
    with pytest.raises(UserError, match="data_parallel_degree=2"):
        plans(profile, strategy=strategy_params(data_parallel_degree=2))


@pytest.mark.parametrize(
    ("wish", "shown", "notes"),
    [
        ("MIG-2222", [(0, 1)], 0),
        ("MIG-3333,MIG-1111", [(1, 0)], 1),  # one of two cards' slices
        ("MIG-9999", [(0, 0)], 1),  # opaque
        ("GPU-1", [(0, 0)], 0),  # a card in MIG mode shows its first slice
        ("0", [(0, 0)], 0),
        ("GPU-3,MIG-1111", [(2, None)], 1),
        ("3", [], 1),  # in MIG mode without slices
        (None, [(2, None)], 0),  # whole cards first
    ],
)
def test_slices_are_chosen_as_cuda_does(wish, shown, notes):
    cards = [
        Card("GPU-1", True, ("MIG-1111", "MIG-2222")),
        Card("GPU-2", True, ("MIG-3333",)),
        Card("GPU-3"),
        Card("GPU-4", True),
    ]
    found, said = visible(wish, cards)
    assert ([(device.card, device.slice) for device in found], len(said)) == (shown, notes)


def test_a_machine_of_slices_alone_shows_the_first():
    cards = [Card("GPU-1", True, ("MIG-1", "MIG-2")), Card("GPU-2", True, ("MIG-3",))]
    assert visible(None, cards)[0] == (Shown(0, 0),)


def test_a_driver_too_old_for_torch_stops_the_probe(machine):
    machine(FakeCard("GPU-1"), cuda=12040, driver="550.54.14")
    with pytest.raises(
        UserError, match=r"driver is too old: it knows CUDA 12, and this torch is built for CUDA 13"
    ) as said:
        read_machine("auto", {}, NOWHERE)
    assert "driver 550.54.14, torch 2.13.0+cu130" in str(said.value)
    assert read_machine("cpu", {}, NOWHERE).device == "cpu"
    machine(FakeCard("GPU-1"), cuda=13000)
    assert read_machine("auto", {}, NOWHERE).driver == "580.95.05"


@pytest.mark.parametrize(
    ("version", "needs", "cuda"),
    [
        ("2.11.0+cu128", (), 12),
        ("2.13.0+cu130", (), 13),
        ("2.13.0+cpu", (), None),
        ("", (), None),
        ("2.11.0", ("sympy>=1.13", "nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'"), 12),
        ("2.13.0", ("nvidia-cuda-runtime==13.0.96; platform_system == 'Linux'",), 13),
        ("2.13.0", ("cuda-toolkit[cudart,nvrtc]==13.0.2; sys_platform == 'linux'",), 13),
        ("2.13.0", None, None),
    ],
)
def test_the_cuda_that_torch_needs_is_read_without_torch(monkeypatch, version, needs, cuda):
    monkeypatch.setattr(driver, "torch_version", lambda: version)
    monkeypatch.setattr(driver, "requires", lambda name: needs and list(needs))
    assert driver.torch_cuda() == cuda


def card(name: str, gib: int = 24, capability: tuple[int, int] = (8, 6)) -> Gpu:
    return Gpu(name=name, memory_bytes=gib * GIB, compute_capability=capability)


def test_mixed_cards_are_noted():
    small, large = card("A"), card("B", 80, (8, 0))
    assert mixed_note([small, small], {}) == ()
    (note,) = mixed_note([small, large], {})
    assert "A (24 GiB), B (80 GiB)" in note and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in note
    assert "CUDA_DEVICE_ORDER" not in mixed_note([small, large], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[0]


@pytest.mark.parametrize(
    ("name", "count", "environment", "noted"),
    [
        ("NVIDIA GeForce RTX 4090", 2, {}, True),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 4, {}, True),
        ("NVIDIA GeForce RTX 4090", 1, {}, False),
        ("NVIDIA GeForce RTX 4090", 2, {"NCCL_P2P_DISABLE": "1"}, False),
        ("NVIDIA GeForce RTX 3090", 2, {}, False),
        ("NVIDIA L40S", 2, {}, False),
    ],
)
def test_cards_that_may_hang_without_peer_access_are_noted(name, count, environment, noted):
    notes = peers_note([card(name)] * count, environment)
    assert bool(notes) is noted
    assert not noted or "set NCCL_P2P_DISABLE=1" in notes[0]
