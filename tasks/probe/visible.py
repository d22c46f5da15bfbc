"""What CUDA_VISIBLE_DEVICES leaves of the cards and MIG slices that NVML lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A card as NVML lists it: its UUID ("" if it tells none) and, in MIG mode, the UUIDs of its slices."""

    uuid: str
    mig: bool = False
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """A visible device: the card's index in NVML's list and, of a card in MIG mode, the slice's index on it."""

    card: int
    slice: int | None = None


@dataclass(frozen=True)
class Hidden:
    """Why an entry shows nothing."""

    why: str


def visible(wish: str | None, cards: Sequence[Card]) -> tuple[tuple[Shown, ...], tuple[str, ...]]:
    """The devices that CUDA_VISIBLE_DEVICES=`wish` leaves, in its order, and notes.

    As CUDA reads it: indices, or beginnings of UUIDs of cards or MIG slices; the first entry that names nothing ends
    the list; a device named twice leaves none. A UUID that NVML does not list stands for one of the devices that no
    entry names, since NVML may be told less than CUDA. Of MIG slices CUDA shows a process one only.
    """
    if wish is None:
        return _one_slice(_all(cards))
    entries = [part.strip() for part in wish.split(",")]
    chosen: list[Shown] = []
    notes: list[str] = []
    named = [found for entry in entries if isinstance(found := _listed(entry, cards), Shown)]
    for entry in entries:
        found = _listed(entry, cards)
        if found is None:
            found = _stand_in(entry, cards, [*named, *chosen])
            if isinstance(found, Shown):
                notes.append(
                    f"CUDA_VISIBLE_DEVICES={wish}: NVML lists no {entry}; a device that is left is taken for it"
                )
        if isinstance(found, Hidden):
            if entry not in ("", "-1"):
                notes.append(
                    f"CUDA_VISIBLE_DEVICES={wish}: {entry} {found.why}; it and what follows is hidden"
                )
            break
        chosen.append(found)
    if len(set(chosen)) < len(chosen):
        return (), (f"CUDA_VISIBLE_DEVICES={wish} names a GPU twice, and CUDA then shows none",)
    if not chosen and not notes:
        notes.append(f"CUDA_VISIBLE_DEVICES={wish!r} hides all {len(cards)} GPUs")
    shown, more = _one_slice(tuple(chosen))
    return shown, (*notes, *more)


def _all(cards: Sequence[Card]) -> tuple[Shown, ...]:
    """Without a wish: the whole cards; where all are in MIG mode, their slices."""
    whole = tuple(Shown(index) for index, card in enumerate(cards) if not card.mig)
    return whole or tuple(
        Shown(index, part) for index, card in enumerate(cards) for part in range(len(card.slices))
    )


def _listed(entry: str, cards: Sequence[Card]) -> Shown | Hidden | None:
    """The device an entry names; None for a UUID that NVML does not list."""
    if entry.isdigit():
        return _of_card(int(entry), cards) if int(entry) < len(cards) else Hidden("names no GPU here")
    if entry.startswith("MIG-"):
        found = [
            Shown(index, part)
            for index, card in enumerate(cards)
            for part, uuid in enumerate(card.slices)
            if uuid.startswith(entry)
        ]
    elif entry.startswith("GPU-"):
        found = [Shown(index) for index, card in enumerate(cards) if card.uuid.startswith(entry)]
    else:
        return Hidden("names no GPU here")
    if len(found) > 1:
        return Hidden("names several GPUs")
    if not found:
        return None
    return found[0] if found[0].slice is not None else _of_card(found[0].card, cards)


def _of_card(index: int, cards: Sequence[Card]) -> Shown | Hidden:
    """The card, or its first slice in MIG mode."""
    if not cards[index].mig:
        return Shown(index)
    return Shown(index, 0) if cards[index].slices else Hidden("is in MIG mode and has no slices")


def _stand_in(entry: str, cards: Sequence[Card], taken: Sequence[Shown]) -> Shown | Hidden:
    kind_is_slice = entry.startswith("MIG-")
    left = [
        device
        for index, card in enumerate(cards)
        for device in (
            [Shown(index, part) for part in range(len(card.slices))] if kind_is_slice else [Shown(index)]
        )
        if device not in taken and (kind_is_slice or not card.mig)
    ]
    return left[0] if left else Hidden("names no GPU here")


def _one_slice(devices: tuple[Shown, ...]) -> tuple[tuple[Shown, ...], tuple[str, ...]]:
    """The devices that one process sees: whole cards up to the first slice, or that slice alone.

    NVIDIA's MIG guide (CUDA device enumeration): a process can enumerate a single MIG device. NCCL refuses two ranks
    on one card besides.
    """
    first = next((number for number, device in enumerate(devices) if device.slice is not None), None)
    if first is None or len(devices) == 1:
        return devices, ()
    shown = devices[: first or 1]
    parents = len({device.card for device in devices if device.slice is not None})
    slices = sum(device.slice is not None for device in devices)
    return shown, (
        f"{slices} MIG slice(s) of {parents} card(s) are visible, and CUDA shows a process one of them, NCCL takes "
        f"one rank a card: {len(shown)} device(s) used, so 1 rank a card",
    )
