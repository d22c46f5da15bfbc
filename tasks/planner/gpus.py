"""GPU types: what their makers state of memory, speed and links, and how a driver's name finds its type."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

# Bytes/s of one PCIe lane one way after encoding, by generation: x16 gives 15.8, 31.5 and 63 GB/s
# (stas00/ml-engineering network/README.md @744d01e rounds to 31 and 63).
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}


@dataclass(frozen=True)
class GpuLink:
    """How cards of a type are joined in one node.

    `nvlinks` lanes a card of `lane` bytes/s one way; `domain` cards are joined by them (0 lanes, domain 1: by PCIe
    alone). The PCIe slot is also the way to host memory (Grace's chip-to-chip link is not counted).
    """

    pcie_generation: int
    nvlinks: int = 0
    lane: float = 0.0
    domain: int = 1
    pcie_width: int = 16

    @property
    def kind(self) -> Literal["nvlink", "pcie"]:
        return "nvlink" if self.nvlinks else "pcie"

    @property
    def pcie_bytes_per_second(self) -> float:
        """One way."""
        return self.pcie_width * PCIE_LANE[self.pcie_generation]

    @property
    def bytes_per_second(self) -> float:
        """One way, of a card to all its peers together."""
        return self.nvlinks * self.lane or self.pcie_bytes_per_second


PCIE3, PCIE4, PCIE5 = GpuLink(3), GpuLink(4), GpuLink(5)
NVLINK1 = GpuLink(3, 4, 20e9, 8)  # P100
NVLINK2 = GpuLink(3, 6, 25e9, 8)  # V100
NVLINK3 = GpuLink(4, 12, 25e9, 8)  # A100: 300 GB/s (stas00/ml-engineering network/README.md @744d01e)
NVLINK4 = GpuLink(5, 18, 25e9, 8)  # H100 and H200: 450 GB/s (the same)
NVLINK5 = GpuLink(5, 18, 50e9, 8)  # B200: 900 GB/s (the same)


@dataclass(frozen=True)
class GpuType:
    """One type of card.

    `driver` is the name its driver gives, `pattern` a regular expression that finds it in such names. `memory_gb` is
    what is sold (10^9 bytes), `usable_gib` about what CUDA shows as a card's total (2^30 bytes). Peaks are dense, in
    TFLOP/s: `half` of 16-bit tensor cores with float32 sums, `single` of plain float32, `tf32` where there is such.
    `bandwidth` of memory in TB/s. A type that is only guessed from its compute capability has no memory.
    """

    name: str
    driver: str
    pattern: str
    memory_gb: float
    usable_gib: float
    half: float
    single: float
    tf32: float | None
    bandwidth: float
    capability: tuple[int, int]
    link: GpuLink
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def consumer(self) -> bool:
        return "GeForce" in self.driver or "TITAN" in self.driver


def _geforce(
    number: str,
    memory_gb: float,
    usable_gib: float,
    half: float,
    single: float,
    bandwidth: float,
    link: GpuLink = PCIE4,
) -> GpuType:
    """A GeForce RTX card; its half rate with float32 sums is half of what is advertised with 16-bit sums."""
    series = number[:2]
    capability = {"20": (7, 5), "30": (8, 6), "40": (8, 9), "50": (12, 0)}[series]
    source = {
        "20": "NVIDIA Turing architecture white paper",
        "30": "NVIDIA GA102 architecture white paper",
        "40": "NVIDIA Ada architecture white paper",
        "50": "NVIDIA RTX Blackwell architecture white paper",
    }[series]
    return GpuType(
        name="RTX" + number.replace(" ", ""),
        driver=f"NVIDIA GeForce RTX {number}",
        pattern=rf"RTX {number}(?! (?:Ti|SUPER|Laptop|D\b|with))",
        memory_gb=memory_gb,
        usable_gib=usable_gib,
        half=half,
        single=single,
        tf32=None if series == "20" else half / 2,
        bandwidth=bandwidth,
        capability=capability,
        link=link,
        source=source,
        aliases=(number,),
    )


# fmt: off
# name, driver's name, pattern, GB sold, GiB usable, half, single, TF32, TB/s, capability, link, source, aliases.
# The first pattern that stands whole in a driver's name counts, so the longer ones come first.
TYPES: tuple[GpuType, ...] = (
    GpuType("GB300", "NVIDIA GB300", "GB300", 288, 276, 2500, 80, 1250, 8.0, (10, 3), GpuLink(5, 18, 50e9, 72),
            "NVIDIA GB300 NVL72 data sheet"),
    GpuType("GB200", "NVIDIA GB200", "GB200", 186, 184, 2500, 80, 1250, 8.0, (10, 0), GpuLink(5, 18, 50e9, 72),
            "NVIDIA GB200 NVL72 data sheet"),
    GpuType("B300", "NVIDIA B300 SXM6 AC", "B300", 288, 267, 2250, 75, 1125, 8.0, (10, 3), NVLINK5,
            "NVIDIA HGX B300 data sheet"),
    GpuType("B200", "NVIDIA B200", "B200", 180, 178.3, 2250, 75, 1125, 8.0, (10, 0), NVLINK5,
            "NVIDIA HGX B200 data sheet"),
    GpuType("GH200-144G", "NVIDIA GH200 144G HBM3e", "GH200 144G", 144, 140, 989, 67, 494, 4.9, (9, 0),
            GpuLink(5, 18, 25e9, 4), "NVIDIA GH200 data sheet"),
    GpuType("GH200", "NVIDIA GH200 480GB", "GH200", 96, 94.5, 989, 67, 494, 4.0, (9, 0), GpuLink(5, 18, 25e9, 4),
            "NVIDIA GH200 data sheet", ("GH200-96G",)),
    GpuType("H200-NVL", "NVIDIA H200 NVL", "H200 NVL", 141, 139.7, 835, 60, 418, 4.8, (9, 0),
            GpuLink(5, 18, 25e9, 4), "NVIDIA H200 data sheet"),
    GpuType("H200", "NVIDIA H200", "H200", 141, 139.7, 989, 67, 494, 4.8, (9, 0), NVLINK4, "NVIDIA H200 data sheet",
            ("H200-SXM", "H200-141G", "H200-SXM5-141G")),
    GpuType("H100-PCIe", "NVIDIA H100 PCIe", "H100 PCIe", 80, 79.1, 756, 51, 378, 2.0, (9, 0), PCIE5,
            "NVIDIA H100 data sheet", ("H100-80G-PCIe", "H100-PCIe-80G")),
    GpuType("H100-NVL", "NVIDIA H100 NVL", "H100 NVL", 94, 93.1, 835, 60, 418, 3.9, (9, 0),
            GpuLink(5, 12, 25e9, 2), "NVIDIA H100 data sheet", ("H100-94G",)),
    GpuType("H100", "NVIDIA H100 80GB HBM3", "H100", 80, 79.1, 989, 67, 494, 3.35, (9, 0), NVLINK4,
            "NVIDIA H100 data sheet", ("H100-80G", "H100-SXM", "H100-SXM5", "H100-SXM5-80G", "H100-80G-SXM")),
    GpuType("H800", "NVIDIA H800", "H800", 80, 79.1, 989, 67, 494, 3.35, (9, 0), GpuLink(5, 8, 25e9, 8),
            "NVIDIA H800 data sheet", ("H800-80G", "H800-SXM")),
    GpuType("H20", "NVIDIA H20", "H20", 96, 95.1, 148, 44, 74, 4.0, (9, 0), NVLINK4, "NVIDIA H20 data sheet",
            ("H20-96G",)),
    GpuType("A100-80G", "NVIDIA A100-SXM4-80GB", "A100-SXM(?:4|-)?-?80GB", 80, 79.2, 312, 19.5, 156, 2.04, (8, 0),
            NVLINK3, "NVIDIA A100 80GB data sheet", ("A100-80G-SXM", "A100-SXM-80G", "A100-SXM4-80G")),
    GpuType("A100-80G-PCIe", "NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 80, 79.2, 312, 19.5, 156, 1.94, (8, 0), PCIE4,
            "NVIDIA A100 80GB data sheet", ("A100-PCIe-80G",)),
    GpuType("A100-40G-PCIe", "NVIDIA A100-PCIE-40GB", "A100-PCI[Ee]-40GB", 40, 39.4, 312, 19.5, 156, 1.555, (8, 0),
            PCIE4, "NVIDIA A100 data sheet", ("A100-PCIe", "A100-PCIe-40G")),
    GpuType("A100-40G", "NVIDIA A100-SXM4-40GB", "A100", 40, 39.4, 312, 19.5, 156, 1.555, (8, 0), NVLINK3,
            "NVIDIA A100 data sheet", ("A100", "A100-40G-SXM", "A100-SXM", "A100-SXM-40G", "A100-SXM4-40G")),
    GpuType("A800-80G-PCIe", "NVIDIA A800 80GB PCIe", "A800 80GB PCIe", 80, 79.2, 312, 19.5, 156, 1.94, (8, 0), PCIE4,
            "NVIDIA A800 data sheet", ("A800-PCIe",)),
    GpuType("A800-80G", "NVIDIA A800-SXM4-80GB", "A800", 80, 79.2, 312, 19.5, 156, 2.04, (8, 0),
            GpuLink(4, 8, 25e9, 8), "NVIDIA A800 data sheet", ("A800", "A800-SXM")),
    GpuType("A40", "NVIDIA A40", "A40", 48, 44.5, 150, 37.4, 75, 0.696, (8, 6), PCIE4, "NVIDIA A40 data sheet",
            ("A40-48G",)),
    GpuType("A30", "NVIDIA A30", "A30", 24, 23.6, 165, 10.3, 82, 0.933, (8, 0), PCIE4, "NVIDIA A30 data sheet",
            ("A30-24G",)),
    GpuType("A10G", "NVIDIA A10G", "A10G", 24, 22.2, 70, 31.5, 35, 0.6, (8, 6), PCIE4, "NVIDIA A10G data sheet"),
    GpuType("A10", "NVIDIA A10", "A10", 24, 22.2, 125, 31.2, 62.5, 0.6, (8, 6), PCIE4, "NVIDIA A10 data sheet",
            ("A10-24G",)),
    GpuType("A6000", "NVIDIA RTX A6000", "RTX A6000", 48, 47.5, 155, 38.7, 77.4, 0.768, (8, 6), PCIE4,
            "NVIDIA RTX A6000 data sheet", ("RTX-A6000",)),
    GpuType("A5000", "NVIDIA RTX A5000", "RTX A5000", 24, 23.6, 111, 27.8, 55.6, 0.768, (8, 6), PCIE4,
            "NVIDIA RTX A5000 data sheet", ("RTX-A5000",)),
    GpuType("A4000", "NVIDIA RTX A4000", "RTX A4000", 16, 15.6, 77, 19.2, 38.3, 0.448, (8, 6), PCIE4,
            "NVIDIA RTX A4000 data sheet", ("RTX-A4000",)),
    GpuType("RTX6000Ada", "NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48, 47.4, 364, 91.1, 182, 0.96, (8, 9),
            PCIE4, "NVIDIA RTX 6000 Ada data sheet", ("6000-Ada", "RTX6000-Ada-48G")),
    GpuType("RTXPRO6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 96, 94.9, 500, 125, 250,
            1.79, (12, 0), PCIE5, "NVIDIA RTX PRO 6000 Blackwell data sheet", ("PRO-6000",)),
    GpuType("L40S", "NVIDIA L40S", "L40S", 48, 44.4, 362, 91.6, 183, 0.864, (8, 9), PCIE4, "NVIDIA L40S data sheet",
            ("L40S-48G",)),
    GpuType("L40", "NVIDIA L40", "L40", 48, 44.4, 181, 90.5, 90.5, 0.864, (8, 9), PCIE4, "NVIDIA L40 data sheet",
            ("L40-48G",)),
    GpuType("L20", "NVIDIA L20", "L20", 48, 44.4, 119.5, 59.8, 59.8, 0.864, (8, 9), PCIE4, "NVIDIA L20 data sheet"),
    GpuType("L4", "NVIDIA L4", "L4", 24, 22.0, 121, 30.3, 60, 0.3, (8, 9), PCIE4, "NVIDIA L4 data sheet", ("L4-24G",)),
    GpuType("V100-32G-PCIe", "Tesla V100-PCIE-32GB", "V100-PCI[Ee]-32GB", 32, 31.7, 112, 14, None, 0.9, (7, 0), PCIE3,
            "NVIDIA V100 data sheet", ("V100-PCIe-32G",)),
    GpuType("V100-16G-PCIe", "Tesla V100-PCIE-16GB", "V100-PCI[Ee]-16GB", 16, 15.8, 112, 14, None, 0.9, (7, 0), PCIE3,
            "NVIDIA V100 data sheet", ("V100-PCIe", "V100-PCIe-16G")),
    GpuType("V100-32G", "Tesla V100-SXM2-32GB", "V100-[A-Z0-9]+-32GB(?:-LS)?", 32, 31.7, 125, 15.7, None, 0.9, (7, 0),
            NVLINK2, "NVIDIA V100 data sheet", ("V100-SXM2-32G", "V100-SXM-32G")),
    GpuType("V100-16G", "Tesla V100-SXM2-16GB", "V100", 16, 15.8, 125, 15.7, None, 0.9, (7, 0), NVLINK2,
            "NVIDIA V100 data sheet", ("V100", "V100-SXM2", "V100-SXM2-16G", "V100-SXM-16G")),
    GpuType("T4", "Tesla T4", "T4", 16, 14.6, 65, 8.1, None, 0.32, (7, 5), PCIE3, "NVIDIA T4 data sheet", ("T4-16G",)),
    GpuType("RTX8000", "Quadro RTX 8000", "Quadro RTX 8000", 48, 47.4, 130, 16.3, None, 0.672, (7, 5), PCIE3,
            "NVIDIA Turing architecture white paper"),
    GpuType("TITAN-RTX", "NVIDIA TITAN RTX", "TITAN RTX", 24, 23.6, 130, 16.3, None, 0.672, (7, 5), PCIE3,
            "NVIDIA Turing architecture white paper"),
    GpuType("P100-PCIe", "Tesla P100-PCIE-16GB", "P100-PCI[Ee]-16GB", 16, 15.9, 18.7, 9.3, None, 0.732, (6, 0), PCIE3,
            "NVIDIA P100 data sheet", ("P100-PCIe-16G",)),
    GpuType("P100", "Tesla P100-SXM2-16GB", "P100", 16, 15.9, 21.2, 10.6, None, 0.732, (6, 0), NVLINK1,
            "NVIDIA P100 data sheet", ("P100-16G", "P100-SXM2", "P100-SXM2-16G")),
    _geforce("2080 Ti", 11, 10.7, 53.8, 13.4, 0.616, PCIE3),
    _geforce("3060", 12, 11.7, 25.5, 12.7, 0.36),
    _geforce("3060 Ti", 8, 7.7, 32.4, 16.2, 0.448),
    _geforce("3070", 8, 7.7, 40.6, 20.3, 0.448),
    _geforce("3070 Ti", 8, 7.7, 43.5, 21.7, 0.608),
    _geforce("3080", 10, 9.7, 59.5, 29.8, 0.76),
    _geforce("3080 Ti", 12, 11.7, 68.2, 34.1, 0.912),
    _geforce("3090", 24, 23.6, 71.2, 35.6, 0.936),
    _geforce("3090 Ti", 24, 23.6, 80, 40, 1.008),
    _geforce("4060", 8, 7.6, 30.2, 15.1, 0.272, GpuLink(4, pcie_width=8)),
    _geforce("4060 Ti", 16, 15.6, 44.1, 22.1, 0.288, GpuLink(4, pcie_width=8)),
    _geforce("4070", 12, 11.7, 58.3, 29.1, 0.504),
    _geforce("4070 Ti", 12, 11.7, 80.2, 40.1, 0.504),
    _geforce("4070 Ti SUPER", 16, 15.6, 88.2, 44.1, 0.672),
    _geforce("4080", 16, 15.6, 97.5, 48.7, 0.717),
    _geforce("4080 SUPER", 16, 15.6, 104.4, 52.2, 0.736),
    _geforce("4090", 24, 23.6, 165.2, 82.6, 1.008),
    _geforce("5070", 12, 11.5, 61.7, 30.8, 0.672, PCIE5),
    _geforce("5070 Ti", 16, 15.5, 87.9, 43.9, 0.896, PCIE5),
    _geforce("5080", 16, 15.5, 112.6, 56.3, 0.96, PCIE5),
    _geforce("5090", 32, 31.3, 209.5, 104.8, 1.792, PCIE5),
)
# fmt: on


def _guess(
    capability: tuple[int, int], half: float, single: float, bandwidth: float, link: GpuLink
) -> GpuType:
    name = f"a card of compute capability {capability[0]}.{capability[1]} or newer"
    tf32 = half / 2 if capability >= (8, 0) else None
    source = "assumed: a modest card of its generation"
    return GpuType(name, "", "", 0, 0, half, single, tf32, bandwidth, capability, link, source)


BY_CAPABILITY: tuple[GpuType, ...] = (
    _guess((12, 0), 200, 100, 1.5, PCIE5),
    _guess((10, 0), 2000, 70, 7.0, PCIE5),
    _guess((9, 0), 750, 50, 2.0, PCIE5),
    _guess((8, 9), 160, 60, 0.7, PCIE4),
    _guess((8, 6), 70, 30, 0.6, PCIE4),
    _guess((8, 0), 300, 19, 1.5, PCIE4),
    _guess((7, 5), 60, 8, 0.32, PCIE3),
    _guess((7, 0), 110, 14, 0.9, PCIE3),
    _guess((0, 0), 10, 10, 0.4, PCIE3),
)

MIG = re.compile(r" MIG (?:(\d)c\.)?(\d)g\.(\d+)gb")


def gpu_type(name: str, capability: tuple[int, int]) -> tuple[GpuType, bool]:
    """The type behind a driver's `name`, and whether the name is known; else a guess from `capability`.

    A MIG slice gets its share of the card's compute (of 7 parts, 4 on an A30) and of its memory's bandwidth.
    """
    known = next((kind for kind in TYPES if re.search(rf"\b(?:{kind.pattern})(?![0-9A-Za-z])", name)), None)
    if known is None:
        return next(kind for kind in BY_CAPABILITY if capability >= kind.capability), False
    slice_of = MIG.search(name)
    if slice_of is None:
        return known, True
    compute, whole, memory = (int(part or 0) for part in slice_of.groups())
    share = (compute or whole) / (4 if known.name == "A30" else 7)
    of_memory = memory / known.memory_gb
    return replace(
        known,
        name=known.name + slice_of.group(0),
        memory_gb=memory,
        usable_gib=known.usable_gib * of_memory,
        half=known.half * share,
        single=known.single * share,
        tf32=known.tf32 and known.tf32 * share,
        bandwidth=known.bandwidth * of_memory,
        link=GpuLink(known.link.pcie_generation),
    ), True
