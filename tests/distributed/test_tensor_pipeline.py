"""Tensor and pipeline parallelism, alone and in every mixture, train what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.contracts import Plan
from tests import tiny
from tests.distributed import claims
from tests.distributed.compare import CLIP, assert_same, keep, start_weights, weights, workspace
from tests.distributed.ranks import Trained, run_ranks, train

pytestmark = pytest.mark.distributed

PLANS = {
    "ddp2": tiny.cpu_plan(2, 2, 2),
    "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
    "tp2": tiny.cpu_plan(1, 2, 4, tp=2),
    "tp2sp": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True),
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "pp2-gpipe": tiny.cpu_plan(1, 2, 4, pp=2, schedule="gpipe"),
    "pp2v2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="interleaved1f1b", virtual_stages=2),
    "pp2v2-zerobubble": tiny.cpu_plan(1, 2, 4, pp=2, schedule="zerobubble", virtual_stages=2),
    "tp2pp2": tiny.cpu_plan(1, 2, 4, tp=2, pp=2, schedule="1f1b"),
    "tp2sppp2": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True, pp=2, schedule="1f1b"),
    "dp2tp2": tiny.cpu_plan(2, 2, 2, tp=2),
    "dp2pp2": tiny.cpu_plan(2, 2, 2, pp=2, schedule="1f1b"),
    "fsdp2tp2sp": tiny.cpu_plan(1, 2, 2, shards=2, tp=2, sequence_parallel=True),
    "fsdp2pp2": tiny.cpu_plan(1, 2, 2, shards=2, pp=2, schedule="1f1b"),
    "fsdp2pp2v2": tiny.cpu_plan(1, 2, 2, shards=2, pp=2, schedule="interleaved1f1b", virtual_stages=2),
    "fsdp2pp2v2-zerobubble": tiny.cpu_plan(1, 2, 2, shards=2, pp=2, schedule="zerobubble", virtual_stages=2),
    "pp4": tiny.cpu_plan(1, 1, 8, pp=4, schedule="1f1b"),
    "tp2pp2v2-zerobubble": tiny.cpu_plan(1, 2, 4, tp=2, pp=2, schedule="zerobubble", virtual_stages=2),
}
FULL_ALONE = {name for name, plan in PLANS.items() if plan.schedule == "zerobubble"}
# transformers' BLOOM takes the softmax of attention in float32 always: DDP2 differs by 1e-11 and 2e-6 there.
FLOAT32_INSIDE = (1e-8, 1e-5)
# A head that is the embedding, and biases; a group norm of query and key in qwen3; gate and up in one matrix in glm,
# and two more norms a layer in glm4.
MODELS = {
    "llama": {"family": "llama", "layers": 4},
    "qwen2": {"family": "qwen2", "layers": 4, "tied": True},
    "qwen3": {"family": "qwen3", "layers": 4},
    "mistral": {"family": "mistral", "layers": 4},
    "bloom": {"family": "bloom", "layers": 4, "tied": True},
    "glm": {"family": "glm", "layers": 4},
    "glm4": {"family": "glm4", "layers": 4},
    "llama_alibi": {"family": "llama_alibi", "layers": 4},
}
CLIPS = dict.fromkeys(MODELS, CLIP) | {"bloom": 0.05}  # its adapters' gradients are small
QUICK = {
    ("llama", "full"): ("tp2", "pp2", "pp2-gpipe", "pp2v2", "tp2sppp2", "dp2tp2", "dp2pp2"),
    ("llama", "lora"): ("tp2sp", "pp2", "fsdp2tp2sp", "dp2pp2"),
    ("qwen2", "full"): ("tp2sp", "pp2v2-zerobubble", "fsdp2pp2v2", "tp2sppp2"),
    ("qwen2", "lora"): ("tp2", "pp2v2", "dp2tp2"),
    ("bloom", "full"): ("tp2sp", "pp2"),
    ("bloom", "lora"): ("tp2sppp2",),
    ("glm", "full"): ("fsdp2tp2sp",),
    ("glm", "lora"): ("tp2pp2",),
    ("glm4", "full"): ("tp2sp",),
}
CASES = [
    pytest.param(
        (model, method),
        name,
        marks=() if name in QUICK.get((model, method), ()) else pytest.mark.slow,
        id=f"{model}-{method}-{name}",
    )
    for model in MODELS
    for method in ("full", "lora")
    for name in PLANS
    if method == "full" or name not in FULL_ALONE
]


def recipe(model: str, method: str, root: Path) -> Path:
    changes = {
        "train.finetuning_type": method,
        "train.num_train_epochs": 1,
        "train.max_grad_norm": CLIPS[model],
    }
    if method == "full":
        changes["train.learning_rate"] = 0.003
    return workspace(root, MODELS[model], **changes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Trained]]:
    """Each recipe as one process trains it in float64, trained when first asked for."""
    made: dict[tuple[str, str], tuple[Path, Trained]] = {}

    class Lazily(dict[tuple[str, str], tuple[Path, Trained]]):
        def __missing__(self, key: tuple[str, str]) -> tuple[Path, Trained]:
            root = recipe(*key, tmp_path_factory.mktemp("-".join(key)) / "w")
            one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4), "float64")
            self[key] = root, keep(one, tmp_path_factory)
            return self[key]

    return Lazily(made)


@pytest.mark.parametrize(("case", "name"), CASES)
def test_equals_one_process(
    reference: dict[tuple[str, str], tuple[Path, Trained]], case: tuple[str, str], name: str
) -> None:
    """In float64, where sums in another order differ by 1e-13 and a wrong factor by 1."""
    root, one = reference[case]
    other = train(root, tiny.params(), PLANS[name], "float64", run_key=name)
    loss, moved = FLOAT32_INSIDE if case[0] == "bloom" else (1e-9, 1e-9)
    assert_same(one, other, start_weights(root), loss=loss, moved=moved, clip=CLIPS[case[0]])


@pytest.mark.parametrize(
    "name",
    [pytest.param("tp2sp", marks=pytest.mark.slow), pytest.param("pp2", marks=pytest.mark.slow), "tp2sppp2"],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_in_float32_too(method: str, name: str, request: pytest.FixtureRequest) -> None:
    """Within float32's own tolerance, and with every layer recomputed in the backward pass."""
    root, one = request.getfixturevalue(method), request.getfixturevalue(f"{method}_single")
    plan = PLANS[name].model_copy(update={"activation_checkpointing": "full"})
    assert_same(one, train(root, tiny.params(), plan, run_key=name), start_weights(root))


def test_a_tied_table_is_exported_once(reference: dict[tuple[str, str], tuple[Path, Trained]]) -> None:
    root, one = reference["qwen2", "full"]
    other = train(root, tiny.params(), PLANS["pp2"], "float64", run_key="tied")
    assert "lm_head.weight" not in weights(other)
    assert one.report.total_parameters == other.report.total_parameters
    assert one.report.trainable_parameters == other.report.trainable_parameters


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_resume_is_bit_for_bit(lora: Path, name: str) -> None:
    whole = train(lora, tiny.params(), PLANS[name])
    expected = weights(whole)
    stopped = train(lora, tiny.params(), PLANS[name], stop_at=3)
    assert 3 <= len(stopped.records) < len(whole.records)
    resumed = train(lora, tiny.params(), PLANS[name], fresh=False)
    assert [record.loss for record in resumed.records] == [record.loss for record in whole.records]
    for key, value in weights(resumed).items():
        assert torch.equal(value, expected[key]), key


PAIR = (tiny.cpu_plan(1, 2, 2, tp=2), tiny.cpu_plan(1, 2, 2, pp=2, schedule="1f1b"))


@pytest.mark.parametrize("plan", PAIR, ids=lambda plan: plan.name)
def test_an_overflow_on_one_rank_skips_the_step_on_all(lora: Path, plan: Plan) -> None:
    run_ranks(2, claims.skip_together, str(lora), plan)


@pytest.mark.parametrize("plan", [tiny.cpu_plan(1, 2, 2), *PAIR], ids=lambda plan: plan.name)
def test_the_optimizer_state_matters(full: Path, tmp_path: Path, plan: Plan) -> None:
    run_ranks(plan.world_size, claims.need_the_optimizer, str(full), plan, str(tmp_path))


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_and_their_backward_passes(ranks: int) -> None:
    run_ranks(ranks, claims.hand_tokens_over)


@pytest.mark.parametrize(("ranks", "width"), [(2, 10), (3, 10)])
def test_the_loss_over_a_cut_vocabulary(ranks: int, width: int) -> None:
    run_ranks(ranks, claims.sum_over_a_cut_vocabulary, width)


TIED = {"family": "qwen2", "layers": 4, "tied": True}


def test_adapters_on_a_tied_head_in_a_pipeline(tmp_path: Path) -> None:
    changes = {"train.lora.targets": ["lm_head", "q_proj"], "train.num_train_epochs": 1}
    root = workspace(tmp_path / "w", TIED, **changes)
    one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4), "float64", run_key="one")
    two = train(root, tiny.params(), PLANS["pp2"], "float64", run_key="two")
    assert_same(one, two, start_weights(root), loss=1e-9, moved=1e-9)


def test_a_stage_without_an_adapter_is_named(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", TIED, **{"train.lora.targets": ["layers.0.self_attn.q_proj"]})
    with pytest.raises(AssertionError, match="leave pipeline stage 2 of 2 x 1 without an adapter"):
        train(root, tiny.params(), PLANS["pp2"])


def test_a_checkpoint_before_any_step_was_taken(lora: Path, tmp_path: Path) -> None:
    run_ranks(1, claims.resume_after_an_overflow, str(lora), tiny.cpu_plan(1, 2, 2), str(tmp_path))
