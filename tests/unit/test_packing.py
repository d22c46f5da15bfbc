"""Packing: the fewest rows, nothing lost, the same packs each time; and what a packed split serves."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import BaseModelRef, DataManifest, PackCounts
from tasks.data.order import MicroBatch
from tasks.data.packing import PackedSplit, best_fit, training_rows, width, write_packs
from tasks.data.prepared import Split
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.planner.capabilities import TRAINABLE_NOW
from tasks.planner.compute import attention_seconds, model_flops
from tasks.planner.families import FAMILIES
from tasks.planner.machine import Machine, machine
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import ELASTANE, Workload, uses_block_mask, workload
from tasks.prepare_data import prepare_data
from tasks.run_key import run_key
from tasks.select_strategy import as_problem, run_steps
from tasks.trainer.engine import Batch
from tasks.trainer.loop import collate, restarting
from tasks.trainer.trial import _batch
from tests import tiny
from tests.unit.planner_cases import gpus
from tests.unit.planner_cases import manifest as a_manifest

# --- best fit -----------------------------------------------------------------------------------


def by_the_definition(lengths: list[int], room: int) -> list[int]:
    """Room left in each pack, ascending: row by row, the longest first, into the pack that it fits into best."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        left = (rooms.pop(place) if place < len(rooms) else room) - length
        insort(rooms, left)
    return rooms


@given(st.data(), st.integers(1, 80))
@settings(deadline=None)
def test_packs_are_those_of_best_fit_decreasing(data: st.DataObject, room: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, room), max_size=200))
    packs = best_fit(np.array(lengths, dtype=np.int64), room)
    assert sorted(packs.rows.tolist()) == list(range(len(lengths))), "nothing lost, nothing twice"
    held = packs.sums(np.array(lengths, dtype=np.int64))
    assert sorted((room - held).tolist()) == by_the_definition(lengths, room)
    again = best_fit(np.array(lengths, dtype=np.int64), room)
    assert np.array_equal(packs.rows, again.rows) and np.array_equal(packs.offsets, again.offsets)


@pytest.mark.parametrize("seed", range(3))
def test_long_tails_fill_more_than_99_percent(seed: int) -> None:
    lengths = np.random.RandomState(seed).lognormal(5, 1, 40_000).clip(8, 4096).astype(np.int64)
    packs = best_fit(lengths, 4096)
    assert len(packs) > 1000
    assert len(packs) <= 1.01 * -(-int(lengths.sum()) // 4096)


@pytest.mark.parametrize("wrong", [[3, 0], [3, 9]])
def test_rows_that_cannot_be_packed_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="1 to 8 tokens"):
        best_fit(np.array(wrong), 8)


# --- a packed split -----------------------------------------------------------------------------


def packed(folder: Path, rows: list[list[int]], learnt: list[list[int]], room: int) -> PackedSplit:
    kind = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(rows, kind), "labels": pa.array(learnt, kind)})
    with pa.ipc.new_file(folder / "train.arrow", table.schema) as writer:
        writer.write_table(table)
    counts = write_packs(folder, Split.open(folder, "train").lengths(), room)
    found = training_rows(folder)
    assert isinstance(found, PackedSplit)
    assert counts.packs == len(found)
    assert counts.fill == pytest.approx(sum(map(len, rows)) / (len(found) * room), abs=1e-6)
    return found


ROWS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17]]
LEARNT = [[3, 4, 5], [-100, 7], [-100, -100, 10, 11, 12], [13], [14, -100, 16, 17]]


def test_the_first_token_of_a_document_is_never_learnt(tmp_path: Path) -> None:
    split = packed(tmp_path, ROWS, LEARNT, 8)
    assert split.lengths().tolist() == [8, 7]
    for number in range(2):
        members = split.packs.of(number).tolist()
        ids, labels = split.tokens(number)
        assert ids.tolist() == [token for row in members for token in ROWS[row]]
        assert labels.tolist() == [label for row in members for label in (-100, *LEARNT[row][1:])]
        assert split.documents(number).tolist() == [len(ROWS[row]) for row in members]
        assert split.target_counts()[number] == (labels != -100).sum()
    assert split.attended() == pytest.approx((9 + 4 + 25 + 1 + 16) / 15)


def test_a_batch_says_where_documents_begin(tmp_path: Path) -> None:
    split = packed(tmp_path, ROWS, LEARNT, 8)
    batch = collate(split, MicroBatch((0, 1), True))
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 1, 0, 0]]
    wider = batch.padded(3, 9, 2)
    assert wider.positions is not None
    assert wider.positions.tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 0, 1],
        [0, 1, 2, 3, 0, 1, 0, 0, 0, 1],
        list(range(10)),
    ]
    assert wider.positions.shape == wider.input_ids.shape == wider.labels.shape
    assert batch.padded(2, 8, 1) is batch
    assert batch.unlearnt().positions is batch.positions
    assert restarting(np.array([2, 3]), 5).tolist() == [0, 1, 0, 1, 2]


def test_rows_that_are_not_packed_have_no_positions(tmp_path: Path) -> None:
    packed(tmp_path, ROWS, LEARNT, 8)
    plain = Split.open(tmp_path, "train")
    batch = collate(plain, MicroBatch((0, 2), True))
    assert batch.positions is None
    wider = batch.padded(3, 9, 1)
    assert wider == Batch(wider.input_ids, wider.labels, None)


def test_widths_return_and_never_pass_max_length() -> None:
    assert [width(longest, 500) for longest in (1, 64, 65, 449, 500)] == [64, 64, 128, 500, 500]
    assert width(40, 40) == 40


# --- the stage ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "m")


def prepared(root: Path, model: Path, packing: str) -> DataManifest:
    tiny.write_rows(root / "data" / "raw" / "rows.json", rows=80)
    wanted = tiny.params(
        **{
            "model.name_or_path": str(model),
            "prepare_data.source": "data/raw/rows.json",
            "prepare_data.packing": packing,
        }
    )
    return prepare_data(wanted, Paths(root))


def test_the_stage_packs_what_is_trained_on_alone(tmp_path: Path, model: Path) -> None:
    plain, full = prepared(tmp_path / "a", model, "none"), prepared(tmp_path / "b", model, "best_fit")
    assert plain.packed is None and full.packed is not None
    assert plain.content_hash == full.content_hash, "of the rows, which are the same"
    assert plain.samples == plain.train.rows > full.samples == full.packed.packs
    folder = Paths(tmp_path / "b").prepared
    rows = training_rows(folder)
    assert isinstance(rows, PackedSplit)
    assert int(rows.lengths().sum()) == full.train.tokens
    assert int(rows.target_counts().sum()) == full.train.target_tokens
    assert full.packed.attended == pytest.approx(rows.attended(), abs=1e-3)
    assert (folder / "train_packs.arrow").is_file() and not list(folder.glob("validation_packs*"))
    first = (folder / "train_packs.arrow").read_bytes()
    assert prepared(tmp_path / "b", model, "best_fit") == full
    assert (folder / "train_packs.arrow").read_bytes() == first
    base = Paths(tmp_path / "b")
    ref = BaseModelRef.read(base.base_ref)
    assert run_key(tiny.params(), plain, ref) != run_key(tiny.params(), full, ref)
    prepared(tmp_path / "b", model, "none")
    assert isinstance(training_rows(folder), Split), "packs go with the data that they were made from"


def test_packing_is_refused_where_documents_would_mix(tmp_path: Path, model: Path) -> None:
    manifest = prepared(tmp_path, model, "best_fit")
    params, hardware = tiny.params(), tiny.cpu_hardware()
    refused = []
    for family in FAMILIES:
        try:
            spec = model_spec({"model_type": family})
        except UserError:
            continue
        try:
            problem = as_problem(params, manifest, hardware, spec, "float32", TRAINABLE_NOW)
            assert problem.work.attended is not None
        except UserError as error:
            assert "packing: none" in str(error) and family in str(error)
            refused.append(family)
    assert {"mpt", "opt", "falcon"} <= set(refused)
    assert not {"llama", "mistral", "qwen2", "qwen3", "glm", "glm4", "bloom"} & set(refused)


# --- the planner --------------------------------------------------------------------------------

PACKED = PackCounts(packs=100, fill=0.99, longest=4096, attended=512.0, content_hash="p")


def test_the_planner_counts_packs_and_attends_within_documents() -> None:
    train = tiny.params().train
    plain = a_manifest(longest=1000)
    full = plain.model_copy(update={"packed": PACKED})
    work, without = workload(train, full, "bfloat16"), workload(train, plain, "bfloat16")
    assert work.sequence == 4096 and work.mean_row == plain.train.tokens / 100
    assert without.attended is None and without.sequence == 1000
    here = tiny.cpu_hardware()
    endless = train.model_copy(update={"token_budget": None})
    assert run_steps(endless, full, 16, here) == 7
    assert run_steps(endless, plain, 16, here) == -(-plain.train.rows // 16)
    by_length = train.model_copy(update={"sample_order": "by_length"})
    assert without.padded and not workload(by_length, plain, "bfloat16").padded


def test_attention_costs_what_is_computed() -> None:
    spec = model_spec({"model_type": "llama"})
    plan = tiny.cpu_plan(1, 2, 2).model_copy(update={"device": "cuda", "backend": "nccl"})
    alone = workload(tiny.params().train, a_manifest(longest=4096), "bfloat16")
    packs = replace(alone, attended=512.0, mean_row=4096.0)
    here = machine(gpus(1), "bfloat16", None)

    def seconds(work: Workload, at: Machine) -> float:
        return attention_seconds(spec, plan, at, 2 * 4096, work, ELASTANE)

    assert seconds(packs, here) == pytest.approx(seconds(alone, here) / 8)
    single = replace(packs, precision="float32")
    assert uses_block_mask(single, "cuda") and not uses_block_mask(packs, "cuda")
    assert seconds(single, here) == pytest.approx(2 * seconds(replace(single, attended=None), here))
    assert uses_block_mask(packs, "cpu") and not uses_block_mask(alone, "cpu")
    assert model_flops(spec, packs) < model_flops(spec, replace(packs, attended=None))


def test_a_trial_has_documents_too() -> None:
    assert _batch(2, 10, 50, None).positions is None
    positions = _batch(2, 10, 50, 4).positions
    assert positions is not None
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]] * 2
