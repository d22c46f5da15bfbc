"""Hardware said in words: what is understood, what is assumed and said, and what is refused."""

from __future__ import annotations

import pytest

from tasks.errors import UserError
from tasks.planner.gpus import TYPES, gpu_type
from tasks.planner.hardware_names import named_hardware

GIB = 2**30


def kind_of(profile):
    gpu = profile.gpus[0]
    return gpu_type(gpu.name, gpu.compute_capability)[0].name


@pytest.mark.parametrize(
    ("text", "gpus", "kind", "nodes"),
    [
        ("8xA100-80G", 8, "A100-80G", 1),
        ("1xA100-40G", 1, "A100-40G", 1),
        ("A100-80G", 1, "A100-80G", 1),
        ("2xRTX3090", 2, "RTX3090", 1),
        ("2 x rtx 3090", 2, "RTX3090", 1),
        ("3090 Ti", 1, "RTX3090Ti", 1),
        ("3090", 1, "RTX3090", 1),
        ("4060", 1, "RTX4060", 1),
        ("RTX 3070 Ti", 1, "RTX3070Ti", 1),
        ("2x5070Ti", 2, "RTX5070Ti", 1),
        ("2 4090", 2, "RTX4090", 1),
        ("  8 X a100 80gb   x4 nodes ", 8, "A100-80G", 4),
        ("8×H100-SXM5-80GB", 8, "H100", 1),
        ("8xH100 x 4 nodes IB400", 8, "H100", 4),
        ("8xH100 4 nodes, ib 400", 8, "H100", 4),
        ("NVIDIA A100-SXM4-80GB", 1, "A100-80G", 1),
        ("8xA100 80GB PCIe", 8, "A100-80G-PCIe", 1),
        ("2xH100 NVL x 2 nodes ETH100", 2, "H100-NVL", 2),
        ("RTX 6000 Ada", 1, "RTX6000Ada", 1),
        ("16xV100-32GB", 16, "V100-32G", 1),
    ],
)
def test_gpus_are_understood(text, gpus, kind, nodes):
    profile = named_hardware(text)
    assert (profile.device, len(profile.gpus), kind_of(profile), profile.nodes) == ("cuda", gpus, kind, nodes)
    assert profile.gpu_count == gpus * nodes
    assert len(profile.links) == gpus * (gpus - 1) // 2


@pytest.mark.parametrize(
    ("text", "cores"), [("cpu:16", 16), ("16 cores", 16), ("CPU : 8", 8), ("1 core", 1), ("64 cpu cores", 64)]
)
def test_cpus_are_understood(text, cores):
    profile = named_hardware(text)
    assert (profile.device, profile.cpu_cores, profile.gpus) == ("cpu", cores, ())
    assert profile.host_memory_bytes == 4 * cores * GIB
    assert "4 GiB a core" in profile.notes[0]


def test_every_type_and_each_of_its_names_is_understood():
    for kind in TYPES:
        for name in (kind.name, kind.driver, kind.name.lower(), *kind.aliases):
            assert kind_of(named_hardware(f"2x{name}")) == kind.name, name


@pytest.mark.parametrize(
    ("network", "name", "gigabytes"),
    [
        ("IB400", "8xIB400", 400),  # a port a GPU
        ("NDR", "8xIB400", 400),
        ("HDR", "8xIB200", 200),
        ("IB100", "8xIB100", 100),
        ("ib-800", "8xIB800", 800),
        ("RoCE400", "8xROCE400", 400),
        ("8xIB400", "8xIB400", 400),
        ("4xIB200", "4xIB200", 100),
        ("1xIB400", "IB400", 50),
        ("ETH10", "ETH10", 1.25),  # a node's total
        ("ETH25", "ETH25", 3.125),
        ("ethernet 100", "ETH100", 12.5),
        ("2xETH100", "2xETH100", 25),
        ("EFA400", "EFA400", 50),
        ("EFA3200", "EFA3200", 400),
    ],
)
def test_networks_are_a_nodes_total_one_way(network, name, gigabytes):
    fabric = named_hardware(f"8xH100 x 4 nodes {network}").fabric
    assert fabric.name == name
    assert fabric.bytes_per_second == pytest.approx(gigabytes * 1e9)


def test_a_port_a_gpu_is_said():
    profile = named_hardware("4xA100-80G x 2 nodes IB200")
    assert profile.fabric.bytes_per_second == pytest.approx(100e9)
    assert any("IB200 is taken as one port a GPU: 100 GB/s a node" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xA100-80G x 4 nodes", "8xIB200"),
        ("8xH100 x 2 nodes", "8xIB400"),
        ("2xRTX3090 x 2 nodes", "ETH10"),
        ("4xL40S x 2 nodes", "ETH100"),
        ("4xGB200 x 18 nodes", "NVLink"),
        ("4xGB200 x 36 nodes", "4xIB400"),
        ("16 cores x 2 nodes", "ETH10"),
    ],
)
def test_a_network_that_is_not_named_is_assumed_and_said(text, name):
    profile = named_hardware(text)
    assert profile.fabric.name == name
    assert any(f"network between nodes assumed: {name}," in note for note in profile.notes)


def test_one_node_needs_no_network():
    profile = named_hardware("8xH100")
    assert profile.fabric is None
    assert not any("network" in note for note in profile.notes)


def test_links_follow_the_nvlink_domain():
    def kinds(text):
        return {(link.a, link.b): (link.kind, link.nvlinks) for link in named_hardware(text).links}

    assert set(kinds("8xA100-80G").values()) == {("nvlink", 12)}
    pairs = kinds("4xH100-NVL")
    assert pairs[0, 1] == pairs[2, 3] == ("nvlink", 12)
    assert pairs[1, 2] == ("pcie", 0)
    plain = kinds("8xL40S")
    assert plain[0, 3] == ("pcie", 0) and plain[0, 4] == ("system", 0)


def test_the_host_is_assumed_by_the_kind_of_card_and_said():
    gaming, centre = named_hardware("2x4090"), named_hardware("2xH100")
    assert (gaming.host_memory_bytes, centre.host_memory_bytes) == (128 * GIB, 256 * GIB)
    assert any("64 GiB and 8 cores a GPU" in note for note in gaming.notes)
    assert gaming.gpus[0].memory_bytes < 24 * GIB


def test_a_name_that_leaves_the_size_open_takes_the_smaller_and_says_so():
    profile = named_hardware("8xA100")
    assert kind_of(profile) == "A100-40G"
    assert "A100 is taken as A100-40G; there is one with 80 GB too" in profile.notes
    assert not any("taken as" in note for note in named_hardware("8xH100").notes)


def test_the_same_words_give_the_same_profile():
    assert (
        named_hardware("8xH100 x 4 nodes NDR").to_json()
        == named_hardware(" 8XH100 x 4 NODES ib400").to_json()
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xA100-90G", "'a100-90g' is no GPU kind known here; near it are A100-"),
        ("4080 Tii", "near it are RTX4"),
        ("8xH1000", "near it are H100"),
        ("hello", "'hello' is no GPU kind; say .GPUs a node x. kind"),
        ("", "not understood; say .GPUs a node x. kind .x N nodes. .network."),
        ("8x", "is not understood"),
        ("8xH100 x 4", "say '8xH100 x 4 nodes'"),
        ("A100-80G x 8", "say '8xA100-80G' for 8 in one machine, or 'A100-80G x 8 nodes'"),
        ("A100-80G x8 x 2 nodes IB200", "say '8xA100-80G' for 8"),
        ("8xlala x 4", "'lala x 4' is no GPU kind; say"),
        ("cpu", "leaves the cores open; say so many, such as cpu:16"),
        ("MI300X", "AMD cards are not planned"),
        ("8x MI250X x 2 nodes", "AMD cards are not planned"),
        ("M2 Max", "Apple cards are not planned"),
        ("tpu-v4", "Google cards are not planned"),
        ("8xH100 x 0 nodes", "is not understood"),
        ("IB400", "is not understood"),
        ("0xA100", "0 GPUs a node, and a node has 1 to 16"),
        ("64xA100-80G", "such as '8xA100-80G x 8 nodes'"),
        ("cpu:0", "at least 1 core"),
        ("8xH100 x 4 nodes IB300", "IB300 is no network known here; use IB40, IB56, IB100"),
        ("8xH100 x 4 nodes 0xIB400", "0 ports"),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(text, said):
    with pytest.raises(UserError, match=said):
        named_hardware(text)
