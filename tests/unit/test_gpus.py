"""The table of GPU types: drivers' names find their type, figures hang together, unknown cards are guessed."""

from __future__ import annotations

import re

import pytest

from tasks.planner.gpus import BY_CAPABILITY, TYPES, gpu_type


@pytest.mark.parametrize(
    ("driver", "capability", "name"),
    [
        ("NVIDIA H200", (9, 0), "H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100"),
        ("NVIDIA H100 PCIe", (9, 0), "H100-PCIe"),
        ("NVIDIA H100 NVL", (9, 0), "H100-NVL"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100-80G"),
        ("A100-SXM-80GB", (8, 0), "A100-80G"),
        ("NVIDIA A100 80GB PCIe", (8, 0), "A100-80G-PCIe"),
        ("NVIDIA A100-PCIE-40GB", (8, 0), "A100-40G-PCIe"),
        ("NVIDIA A800-SXM4-80GB", (8, 0), "A800-80G"),
        ("NVIDIA A10G", (8, 6), "A10G"),
        ("NVIDIA A10", (8, 6), "A10"),
        ("NVIDIA L40S", (8, 9), "L40S"),
        ("NVIDIA L40", (8, 9), "L40"),
        ("NVIDIA L4", (8, 9), "L4"),
        ("NVIDIA GB200", (10, 0), "GB200"),
        ("NVIDIA B200", (10, 0), "B200"),
        ("NVIDIA GH200 480GB", (9, 0), "GH200"),
        ("Tesla T4", (7, 5), "T4"),
        ("Tesla V100-SXM2-32GB", (7, 0), "V100-32G"),
        ("Tesla V100-PCIE-16GB", (7, 0), "V100-16G-PCIe"),
        ("NVIDIA GeForce RTX 3090", (8, 6), "RTX3090"),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "RTX3090Ti"),
        ("GeForce RTX 2080 Ti", (7, 5), "RTX2080Ti"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), "RTX6000Ada"),
    ],
)
def test_drivers_names_find_their_type(driver, capability, name):
    found, known = gpu_type(driver, capability)
    assert (found.name, known, found.capability) == (name, True, capability)


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA RTX A1000",
        "NVIDIA T400",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA X1",
    ],
)
def test_names_that_only_begin_alike_are_not_taken(driver):
    found, known = gpu_type(driver, (8, 6))
    assert not known
    assert found.half == next(guess.half for guess in BY_CAPABILITY if guess.capability == (8, 6))


def test_unknown_cards_are_guessed_by_their_generation():
    halves = [gpu_type("X", capability)[0].half for capability in ((9, 0), (8, 6), (6, 1))]
    assert halves == sorted(halves, reverse=True)
    assert gpu_type("X", (13, 0))[0].capability == (12, 0)
    assert gpu_type("X", (9, 9))[0].memory_gb == 0


def test_every_type_is_found_by_its_own_drivers_name():
    assert len(TYPES) >= 30
    assert len({kind.name for kind in TYPES}) == len(TYPES)
    for kind in TYPES:
        assert gpu_type(kind.driver, kind.capability) == (kind, True)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_figures_hang_together(kind):
    assert 0.85 * kind.memory_gb < kind.usable_gib * 2**30 / 1e9 < 1.075 * kind.memory_gb
    assert kind.half >= 1.98 * kind.single or kind.name in ("P100", "P100-PCIe")  # no tensor cores there
    assert (kind.tf32 is not None) == (kind.capability >= (8, 0))
    assert (
        kind.tf32 is None
        or 0.99 * kind.single <= kind.tf32 <= 0.55 * kind.half
        or kind.name in ("L40", "L20")
    )
    assert kind.link.domain == 1 or kind.link.nvlinks
    assert kind.source.startswith("NVIDIA") and not re.search(r"[A-Z]:|/", kind.source)


# One way, a card (stas00/ml-engineering network/README.md @744d01e).
@pytest.mark.parametrize(
    ("driver", "gigabytes"),
    [
        ("NVIDIA A100-SXM4-80GB", 300),
        ("NVIDIA H100 80GB HBM3", 450),
        ("NVIDIA B200", 900),
        ("NVIDIA L40S", 31),
    ],
)
def test_links_are_as_fast_as_published(driver, gigabytes):
    assert gpu_type(driver, (8, 0))[0].link.bytes_per_second / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_a_slice_has_its_share_of_the_card():
    card, _ = gpu_type("NVIDIA A100-SXM4-80GB", (8, 0))
    part, known = gpu_type("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0))
    assert known
    assert part.half == pytest.approx(card.half * 3 / 7)
    assert part.bandwidth == pytest.approx(card.bandwidth / 2)
    assert (part.memory_gb, part.link.kind) == (40, "pcie")
    one_of_three, _ = gpu_type("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", (8, 0))
    assert one_of_three.half == pytest.approx(card.half / 7)
    assert gpu_type("NVIDIA A30 MIG 2g.12gb", (8, 0))[0].half == pytest.approx(165 / 2)
