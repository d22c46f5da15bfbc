"""Hardware that need not be here, from a few words: '8xA100-80G x 4 nodes IB400' -> HardwareProfile.

What a network's name means. IB200 and IB400 (and RoCE, or NVIDIA's generation names) are InfiniBand at so many
Gbit/s, **one port a GPU**, as clusters with a rail a GPU are built: eight GPUs under IB400 reach 8 x 50 GB/s one way.
`1xIB400` says the ports of a node instead. ETH and EFA are a node's total: ETH100 is 12.5 GB/s, EFA400 is 50 GB/s.
`Fabric.bytes_per_second` is always a node's total one way, at the line rate.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contracts import Fabric, Gpu, HardwareProfile, Link
from tasks.errors import UserError
from tasks.planner.gpus import TYPES, GpuType

GIB = 2**30
GBIT = 1e9 / 8
GRAMMAR = (
    "[GPUs a node x] kind [x N nodes] [network], such as '8xA100-80G x 4 nodes IB400', 'RTX3090', '2xL40S x 2 nodes "
    "ETH100', or 'cpu:16' and '16 cores' for CPUs; networks are IB, ROCE, ETH or EFA with Gbit/s, EDR, HDR, NDR, XDR, "
    "and '8xIB400' says a node's ports"
)
SPEEDS = {
    "IB": (40, 56, 100, 200, 400, 800),
    "ROCE": (25, 100, 200, 400, 800),
    "ETH": (1, 10, 25, 40, 50, 100, 200, 400, 800),
    "EFA": (100, 400, 800, 1600, 3200),
}
GENERATIONS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
A_PORT_A_GPU = ("IB", "ROCE")
LARGEST_NODE = 16
SOCKET = 4  # beyond so many cards without NVLink, half of them sit at the other processor

# What is assumed beside each GPU: (host memory in GiB, cores).
BESIDE = {True: (64, 8), False: (128, 16)}
GIB_A_CORE = 4

_NODES = re.compile(r"(?:\s*[x×*,]\s*|\s+)(\d+)\s*nodes?$")
_NETWORK = re.compile(r"(?:^|[\s,+]+)(?:(\d+)\s*[x×*]\s*)?(ib|infiniband|roce|eth|ethernet|efa)[\s-]*(\d+)$")
_GENERATION = re.compile(r"(?:^|[\s,+]+)(?:(\d+)\s*[x×*]\s*)?(edr|hdr|ndr|xdr)$")
_COUNT = re.compile(r"^(?:(\d+)\s*[x×*]\s*|(\d{1,3})\s+)(?=\D|\d{4}(?!\d))")
_SWAPPED = re.compile(r"^(.*\d.*?)\s*[x×*,;]\s*(\d{1,3})$")
_OTHER_MAKERS = {
    "AMD": re.compile(r"\bmi\s?\d{2,3}[ax]?\b|\bamd\b|radeon|instinct|\brx\s?\d{4}|\bw7\d00\b"),
    "Intel": re.compile(r"gaudi|\bhpu\b|\bmax\s?1\d50\b|\barc\b"),
    "Google": re.compile(r"\btpu"),
    "Huawei": re.compile(r"ascend|\bnpu\b"),
    "Apple": re.compile(r"^m[1-9](\s?(pro|max|ultra))?$|\bapple\b"),
}
_CORES = re.compile(r"^(?:cpu\s*:\s*(\d+)(?:\s*cores?)?|(\d+)\s*(?:cpu\s+)?cores?)$")


def named_hardware(text: str) -> HardwareProfile:
    """The profile of hardware that is named, not here. What the name leaves open is assumed and said in `notes`.

    Raises:
        UserError: the text is not of the grammar, or its kind or network is unknown.
    """
    rest = " ".join(text.lower().split())
    rest, network = _take_network(rest, text)
    nodes = 1
    if found := _NODES.search(rest):
        nodes, rest = int(found.group(1)), rest[: found.start()].strip()
    if nodes < 1 or (re.fullmatch(r"\d*\s*[x×*]?", rest) and rest not in KINDS):
        raise UserError(f"hardware {text!r} is not understood; say {GRAMMAR}")
    if rest in ("cpu", "cpus"):
        raise UserError(
            f"hardware {text!r} leaves the cores open; say so many, such as cpu:16, or leave --hardware out for "
            "this machine"
        )
    if cores := _CORES.match(rest):
        return _cpus(int(cores.group(1) or cores.group(2)), nodes, network, text)
    said = None
    if found := _COUNT.match(rest):
        said, rest = int(found.group(1) or found.group(2)), rest[found.end() :].strip()
    kind, notes = _kind(rest, text, said)
    count = 1 if said is None else said
    most = max(LARGEST_NODE, kind.link.domain)
    if not 1 <= count <= most:
        way_out = f"such as '8x{kind.name} x {count // 8} nodes'" if count else "or say cpu:16 for a CPU"
        raise UserError(
            f"hardware {text!r}: {count} GPUs a node, and a node has 1 to {most}; say so many, {way_out}"
        )
    return _gpus(kind, count, nodes, network, notes)


# --- network ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Network:
    """A network as it was named: `ports` of a node (None: by the rule of its kind) at `gigabits` each."""

    kind: str
    gigabits: int
    ports: int | None = None

    def fabric(self, gpus: int) -> Fabric:
        ports = self.ports or (max(gpus, 1) if self.kind in A_PORT_A_GPU else 1)
        name = f"{self.kind}{self.gigabits}" if ports == 1 else f"{ports}x{self.kind}{self.gigabits}"
        return Fabric(name=name, bytes_per_second=ports * self.gigabits * GBIT)


def _take_network(rest: str, text: str) -> tuple[str, _Network | None]:
    """What is left without the network at its end, and the network.

    Raises:
        UserError: such a network has no such speed.
    """
    if found := _GENERATION.search(rest):
        kind, speed = "IB", GENERATIONS[found.group(2).upper()]
    elif found := _NETWORK.search(rest):
        word = found.group(2).upper()
        kind, speed = {"INFINIBAND": "IB", "ETHERNET": "ETH"}.get(word, word), int(found.group(3))
        if speed not in SPEEDS[kind]:
            known = ", ".join(f"{kind}{gigabits}" for gigabits in SPEEDS[kind])
            raise UserError(f"hardware {text!r}: {kind}{speed} is no network known here; use {known}")
    else:
        return rest, None
    ports = int(found.group(1)) if found.group(1) else None
    if ports == 0:
        raise UserError(f"hardware {text!r}: a node has 0 ports; say at least 1, or leave the ports out")
    return rest[: found.start()].strip(), _Network(kind, speed, ports)


def _fabric(
    kind: GpuType | None, count: int, nodes: int, network: _Network | None
) -> tuple[Fabric | None, str]:
    """The fabric between the nodes, and a note where it is assumed or where its name needs a word."""
    if network is not None:
        fabric = network.fabric(count)
        each = f"{fabric.bytes_per_second / 1e9:g} GB/s a node one way"
        if network.kind in A_PORT_A_GPU and network.ports is None and count > 1:
            return fabric, f"{network.kind}{network.gigabits} is taken as one port a GPU: {each}"
        return fabric, f"{fabric.name}: {each}"
    if nodes == 1:
        return None, ""
    if kind is not None and count * nodes <= kind.link.domain and kind.link.domain > LARGEST_NODE:
        fabric = Fabric(name="NVLink", bytes_per_second=count * kind.link.bytes_per_second)
        why = f"{count * nodes} {kind.name} fit into one NVLink domain of {kind.link.domain}"
    else:
        fabric = _usual(kind).fabric(count)
        why = "no network is named, and this is usual there"
    each = f"{fabric.bytes_per_second / 1e9:g} GB/s a node one way"
    return fabric, f"network between nodes assumed: {fabric.name}, {each} ({why})"


def _usual(kind: GpuType | None) -> _Network:
    if kind is None or kind.consumer:
        return _Network("ETH", 10)
    if kind.link.domain < 8:
        return _Network("ETH", 100)
    return _Network("IB", {6: 100, 7: 100, 8: 200, 9: 400, 10: 400}[kind.capability[0]])


# --- kinds --------------------------------------------------------------------------------------


def _key(name: str) -> str:
    """A name without case, maker, separators and with one spelling of gigabytes."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"\b(nvidia|tesla|geforce|quadro)\b", "", name.lower()))
    return re.sub(r"(\d)gb?$", r"\1g", re.sub(r"(\d)gb(?=\D)", r"\1g", plain))


KINDS: dict[str, GpuType] = {
    _key(name): kind
    for kind in TYPES
    for name in (kind.name, kind.driver, *kind.aliases, f"{kind.name}-{kind.memory_gb:g}G")
}


def _kind(word: str, text: str, count: int | None) -> tuple[GpuType, tuple[str, ...]]:
    """The type behind a user's word, and a note where the word fits several sizes. `count` is what was said before.

    Raises:
        UserError: no such kind; the nearest are named.
    """
    kind = KINDS.get(_key(word))
    if kind is None:
        for maker, pattern in _OTHER_MAKERS.items():
            if pattern.search(word):
                raise UserError(
                    f"hardware {text!r}: {maker} cards are not planned, only NVIDIA's and CPUs; say one such as H100, "
                    "or cpu:16"
                )
        if (swapped := _SWAPPED.match(word)) and _key(swapped.group(1)) in KINDS:
            name, number = swapped.group(1).upper(), swapped.group(2)
            here = "" if count is None else f"{count}x"
            first = f"'{number}x{name}' for {number} in one machine, or " if count is None else ""
            raise UserError(
                f"hardware {text!r}: the number of GPUs comes first and that of machines is said as nodes; say {first}"
                f"'{here}{name} x {number} nodes'"
            )
        if not re.search(r"\d", word) or re.search(r"[x×*,;]\s*\d+$|\bnodes?\b", word):
            raise UserError(f"hardware {text!r}: {word!r} is no GPU kind; say {GRAMMAR}")
        near = difflib.get_close_matches(_key(word), KINDS, n=6, cutoff=0.5)
        names = list(dict.fromkeys(KINDS[key].name for key in near)) or sorted(kind.name for kind in TYPES)
        raise UserError(
            f"hardware {text!r}: {word!r} is no GPU kind known here; near it are {', '.join(names[:5])}"
        )
    sizes = {other.memory_gb for other in TYPES if other.name.split("-")[0] == kind.name.split("-")[0]}
    others = ", ".join(f"{size:g}" for size in sorted(sizes - {kind.memory_gb}))
    if others and re.search(r"-\d+G", kind.name) and f"{kind.memory_gb:g}g" not in _key(word):
        return kind, (f"{word.upper()} is taken as {kind.name}; there is one with {others} GB too",)
    return kind, ()


# --- profiles -----------------------------------------------------------------------------------


def _gpus(
    kind: GpuType, count: int, nodes: int, network: _Network | None, notes: Sequence[str]
) -> HardwareProfile:
    gpu = Gpu(name=kind.driver, memory_bytes=int(kind.usable_gib * GIB), compute_capability=kind.capability)
    memory, cores = BESIDE[kind.consumer]
    fabric, said = _fabric(kind, count, nodes, network)
    assumed = f"host assumed: {memory} GiB and {cores} cores a GPU, so {memory * count} GiB and {cores * count} cores"
    return HardwareProfile(
        device="cuda",
        gpus=(gpu,) * count,
        links=tuple(_link(kind, a, b, count) for a in range(count) for b in range(a + 1, count)),
        driver=None,
        cpu_name="assumed",
        cpu_cores=cores * count,
        host_memory_bytes=memory * count * GIB,
        host_memory_source="physical",
        shm_bytes=memory * count * GIB // 2,
        notes=(*notes, assumed + (" a node" if nodes > 1 else ""), *([said] if said else [])),
        nodes=nodes,
        fabric=fabric,
    )


def _link(kind: GpuType, a: int, b: int, count: int) -> Link:
    """NVLink within a domain; else PCIe, or the way between processors where a node is too full for one."""
    domain = kind.link.domain
    if kind.link.nvlinks and a // domain == b // domain:
        return Link(a=a, b=b, kind="nvlink", nvlinks=kind.link.nvlinks)
    half = (count + 1) // 2
    across = count > SOCKET and a // half != b // half
    return Link(a=a, b=b, kind="system" if across else "pcie", nvlinks=0)


def _cpus(cores: int, nodes: int, network: _Network | None, text: str) -> HardwareProfile:
    if cores < 1:
        raise UserError(f"hardware {text!r}: a machine has at least 1 core; say {GRAMMAR}")
    memory = GIB_A_CORE * cores * GIB
    fabric, said = _fabric(None, 0, nodes, network)
    assumed = f"host memory assumed: {GIB_A_CORE} GiB a core, so {GIB_A_CORE * cores} GiB"
    return HardwareProfile(
        device="cpu",
        gpus=(),
        links=(),
        driver=None,
        cpu_name="assumed",
        cpu_cores=cores,
        host_memory_bytes=memory,
        host_memory_source="physical",
        shm_bytes=memory // 2,
        notes=(assumed + (" a node" if nodes > 1 else ""), *([said] if said else [])),
        nodes=nodes,
        fabric=fabric,
    )
