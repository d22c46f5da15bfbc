"""How much of a card's data-sheet rates a training step reaches: at most twelve constants a GPU type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Fitted constants of one GPU type; a probe's measurements replace those it can measure.

    A matmul of M x K by K x N reaches `matmul` x M/(M+rows) x N/(N+width) x K/(K+width) of the peak. Attention
    reaches `attention` of the peak, memory-bound work `bandwidth` of the memory rate. `link` is the reached share of
    NVLink or PCIe, `network` of the fabric. Every collective takes `latency` seconds a hop inside a node and
    `network_latency` between nodes. `contention` is how much slower computing gets by hidden traffic, `step` seconds
    are spent once a step outside the model.
    """

    matmul: float
    rows: float
    width: float
    attention: float
    bandwidth: float
    link: float
    network: float
    latency: float
    network_latency: float
    contention: float
    step: float


# Fitted by benchmarks/planner_fit.py on published runs; A100 and H100 have hundreds of rows each, other types take
# those of the nearest generation.
A100 = Calibration(
    matmul=0.85,
    rows=300,
    width=500,
    attention=0.45,
    bandwidth=0.8,
    link=0.65,
    network=0.8,
    latency=12e-6,
    network_latency=30e-6,
    contention=0.1,
    step=0.02,
)
H100 = Calibration(
    matmul=0.72,
    rows=500,
    width=800,
    attention=0.35,
    bandwidth=0.8,
    link=0.65,
    network=0.8,
    latency=12e-6,
    network_latency=30e-6,
    contention=0.1,
    step=0.02,
)
CONSUMER = Calibration(
    matmul=0.8,
    rows=200,
    width=300,
    attention=0.4,
    bandwidth=0.8,
    link=0.4,
    network=0.8,
    latency=30e-6,
    network_latency=50e-6,
    contention=0.1,
    step=0.02,
)


def calibration_of(capability: tuple[int, int], consumer: bool) -> Calibration:
    """The constants of a card's generation."""
    if consumer:
        return CONSUMER
    return H100 if capability >= (9, 0) else A100
