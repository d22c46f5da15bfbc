"""How much of a card's data-sheet rates a training step reaches: at most twelve constants a GPU type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Fitted constants of one GPU type; a probe's measurements replace those it can measure.

    A matmul of M x K by K x N reaches `matmul` x M/(M+rows) x N/(N+width) x K/(K+width) of the peak. Attention
    reaches `attention` of the peak, memory-bound work `bandwidth` of the memory rate. `link` is the reached share of
    NVLink or PCIe, `network` of the fabric, by messages much larger than `half_size` bytes, which get half of it.
    Every collective takes `latency` seconds a hop inside a node and `network_latency` between nodes. `contention` is
    how much slower computing gets by hidden traffic, `step` seconds are spent once a step outside the model.
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
    half_size: float


# Fitted to published runs by `python -m benchmarks.planner_accuracy.fit`, which prints these numbers. A100 and H100
# have hundreds of rows each; other types take those of the nearest generation, and consumer cards are not fitted.
A100 = Calibration(
    matmul=0.862,
    rows=327,
    width=10.7,
    attention=0.34,
    bandwidth=0.55,
    link=0.492,
    network=0.3,
    latency=4e-6,
    network_latency=10e-6,
    contention=0.3,
    step=0.0042,
    half_size=1e6,
)
H100 = Calibration(
    matmul=0.802,
    rows=1560,
    width=271,
    attention=0.184,
    bandwidth=0.724,
    link=0.875,
    network=0.384,
    latency=4.07e-6,
    network_latency=230e-6,
    contention=0.0151,
    step=0.03,
    half_size=26.4e6,
)
CONSUMER = Calibration(
    matmul=0.8,
    rows=300,
    width=50,
    attention=0.35,
    bandwidth=0.7,
    link=0.5,
    network=0.5,
    latency=20e-6,
    network_latency=50e-6,
    contention=0.2,
    step=0.01,
    half_size=1e6,
)


def calibration_of(capability: tuple[int, int], consumer: bool) -> Calibration:
    """The constants of a card's generation."""
    if consumer:
        return CONSUMER
    return H100 if capability >= (9, 0) else A100
