"""The cache of measured rates: one file a machine, outside every workspace."""

from __future__ import annotations

from tasks.contracts import HardwareProfile, Rates
from tasks.errors import UserError
from tasks.paths import rates_file
from tasks.probe.driver import torch_version


def cached_rates(profile: HardwareProfile) -> Rates | None:
    """What was measured on this very machine with this torch; None if nothing was, or by another version."""
    path = rates_file(profile.identity)
    if not path.is_file():
        return None
    try:
        rates = Rates.read(path)
    except UserError:  # written by another version of the contract: as good as not measured
        return None
    return rates if (rates.identity, rates.torch) == (profile.identity, torch_version()) else None
