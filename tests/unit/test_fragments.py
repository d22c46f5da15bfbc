"""A run of a parameter's numbers is the boxes that a checkpoint writes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.trainer.fragments import Fragment, boxes_of_run


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_boxes_are_the_run_in_order(dims: list[int], data: st.DataObject) -> None:
    shape = torch.Size(dims)
    whole = torch.arange(shape.numel()).view(shape)
    start = data.draw(st.integers(0, shape.numel()))
    size = data.draw(st.integers(0, shape.numel() - start))
    found = []
    for chunk in boxes_of_run(shape, start, size):
        box = whole[tuple(slice(at, at + wide) for at, wide in zip(chunk.offsets, chunk.sizes, strict=True))]
        assert box.shape == chunk.sizes
        found += box.flatten().tolist()
    assert found == list(range(start, start + size))


def test_a_run_across_rows_is_three_boxes_and_views_of_the_buffer() -> None:
    flat = torch.arange(20.0)
    box = Fragment("w", torch.Size([4, 4]), 3, 10, 0, 5).box(flat)
    assert {tuple(at): view.tolist() for at, view in box.inside.items()} == {
        (0, 3): [[5.0]],
        (1, 0): [[6.0, 7.0, 8.0, 9.0], [10.0, 11.0, 12.0, 13.0]],
        (3, 0): [[14.0]],
    }
    box.inside[torch.Size([0, 3])].zero_()
    assert flat[5] == 0 and flat[4] == 4
