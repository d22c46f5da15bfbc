"""What any plan trained, as a folder that plain transformers or PEFT opens, with all that belongs to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tasks.commands import export as export_module
from tasks.commands.export import export
from tasks.contracts import FinetuningType, TrainReport
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.trainer.adapters import attach_adapters
from tasks.trainer.base_model import ensure_base
from tasks.trainer.checkpoint import complete_checkpoints
from tasks.trainer.loading import load_base_of
from tasks.trainer.training_state import read_weights
from tests import tiny
from tests.distributed.compare import workspace
from tests.distributed.ranks import train

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("one_thread")]

PLANS = {
    "single": tiny.cpu_plan(1, 2, 4),
    "ddp2": tiny.cpu_plan(2, 2, 2),
    "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
    "tp2": tiny.cpu_plan(1, 2, 4, tp=2),
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "tp2pp2": tiny.cpu_plan(1, 2, 4, tp=2, pp=2, schedule="1f1b"),
}
METHODS: tuple[FinetuningType, ...] = ("full", "lora", "qlora")
QUICK = {("pp2", "full"), ("fsdp2", "lora"), ("tp2pp2", "qlora")}
CASES = [
    pytest.param(
        plan, method, marks=() if (plan, method) in QUICK else pytest.mark.slow, id=f"{plan}-{method}"
    )
    for plan in PLANS
    for method in METHODS
]
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5], "pad_token_id": 0}
IDS = torch.arange(3, 35)[None]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Place:
    """A workspace with a tied qwen2 whose weights are ten times as large as drawn, so that text depends on them."""

    paths: Paths

    @property
    def params(self) -> Params:
        return read_params(self.paths.params)

    @property
    def model(self) -> Path:
        return self.paths.root / "model"

    def trained(self, plan: str) -> Path:
        """Trains two steps under a plan; the result is `checkpoints/final/`, the run's folder is returned."""
        run = train(self.paths.root, tiny.params(), PLANS[plan], run_key=plan).run
        assert len(complete_checkpoints(run)) and complete_checkpoints(run)[-1][1].step == 2
        shutil.rmtree(self.paths.final, ignore_errors=True)
        shutil.copytree(run / "finished" / "final", self.paths.final)
        return run


def place(root: Path, method: str) -> Place:
    changes = {"train.finetuning_type": method, "train.num_train_epochs": 0.5}
    model = {"family": "qwen2", "layers": 2, "hidden": 128, "tied": True}
    workspace(root, model, **changes)
    folder = root / "model"
    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in base.parameters():
            if weight.dim() == 2:
                weight.mul_(10)
    base.save_pretrained(folder)
    add_keys(folder / "config.json", attention_dropout=0.25)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    found = Place(Paths(root))
    ensure_base(found.params.model, found.paths)
    return found


def add_keys(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    class Lazily(dict[str, Place]):
        def __missing__(self, method: str) -> Place:
            self[method] = place(tmp_path_factory.mktemp(method) / "w", method)
            return self[method]

    return Lazily()


# --- the round trip -----------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "method"), CASES)
def test_round_trip(
    places: dict[str, Place],
    plan: str,
    method: FinetuningType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = places[method]
    live = from_checkpoint(here, method, here.trained(plan))
    merged_folder = export(here.params, here.paths, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(merged_folder).eval()
    close(logits(merged), logits(live), 1e-4)
    assert not torch.allclose(logits(merged), logits(base_of(here, method)), rtol=1e-2), "it was trained"
    holds_a_tied_model(here, merged_folder)
    goes_with_its_base(here, merged_folder)
    told = answer(merged, merged_folder)
    assert told == answer(live, merged_folder)
    if method == "full":
        return
    adapter_folder = export(here.params, here.paths, tmp_path / "adapter", merge=False)
    goes_with_its_base(here, adapter_folder)
    names = json.loads((adapter_folder / "adapter_config.json").read_text())
    assert names["base_model_name_or_path"] == str(here.model)
    assert names["target_modules"] == sorted(names["target_modules"])
    adapted = PeftModel.from_pretrained(base_of(here, method), adapter_folder).eval()
    if method == "lora":
        close(logits(adapted), logits(live), 1e-4)
        assert answer(adapted, adapter_folder) == told
    else:  # bitsandbytes' own scales are a step off here and there, which this model magnifies
        close(logits(adapted), logits(live), 0.1)
        assert "in 4 bits (BitsAndBytesConfig with load_in_4bit" in capsys.readouterr().err


def from_checkpoint(here: Place, method: FinetuningType, run: Path) -> Any:
    """The trained model without an export: base and adapters as training makes them, numbers from the checkpoint."""
    paths, params = here.paths, here.params
    model = attach_adapters(load_base_of(method, paths, torch.float32), params.train, params.seed)
    weights = read_weights(complete_checkpoints(run)[-1][0], None)
    found = model.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert weights.keys() == trained
    return model.eval()


def base_of(here: Place, method: str) -> Any:
    """The base as a user of an adapter opens it."""
    if method != "qlora":
        return AutoModelForCausalLM.from_pretrained(here.model).eval()
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    options: dict[str, Any] = {"quantization_config": four_bits, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(here.model, **options).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def close(one: torch.Tensor, other: torch.Tensor, share: float) -> None:
    assert (one - other).abs().max() <= share * other.abs().max()


def answer(model: Any, folder: Path) -> list[int]:
    """Greedy, by plain transformers and the exported tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say it."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "pad_token_id": 0}
    told = model.generate(**prompt, max_new_tokens=12, **greedy)[0, prompt["input_ids"].shape[1] :]
    assert len(set(told.tolist())) > 1
    return told.tolist()


def holds_a_tied_model(here: Place, folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.float32}
    with safe_open(here.model / "model.safetensors", "pt") as file:
        assert names == set(file.keys()), "no second copy of the table, and no other names than the base's"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config, base = (json.loads((place / "config.json").read_text()) for place in (folder, here.model))
    assert config == base, "dropout too"


def goes_with_its_base(here: Place, folder: Path) -> None:
    """Tokenizer, template and generation config are the base's; nothing is there that a user did not ask for."""
    for name in (*TOKENIZER, "generation_config.json"):
        assert (folder / name).read_bytes() == (here.model / name).read_bytes(), name
    one, other = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(here.model)
    assert one.chat_template == other.chat_template
    text = "<|im_start|>user\nNaïve 東京, 3 tests!<|im_end|>\n"
    assert one(text)["input_ids"] == other(text)["input_ids"]
    weights = {"model.safetensors", "config.json"}
    if (folder / "adapter_config.json").is_file():
        weights = {"adapter_model.safetensors", "adapter_config.json"}
    assert {file.name for file in folder.iterdir()} == {*TOKENIZER, "generation_config.json", *weights}
    for file in folder.iterdir():
        assert file.stat().st_mode & 0o044 == 0o044, "others may read it"
        if file.suffix != ".safetensors" and file.name != "adapter_config.json":
            assert str(here.paths.root) not in file.read_text()


# --- what else an export promises ---------------------------------------------------------------


@pytest.fixture(scope="module")
def lora(places: dict[str, Place]) -> Place:
    here = places["lora"]
    here.trained("single")
    return here


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_merged_weights_have_the_precision_of_the_run(lora: Place, precision: Any, tmp_path: Path) -> None:
    """Also where they are merged on a CPU, which computes in float32."""
    file = lora.paths.final / "train_report.json"
    report = TrainReport.read(file)
    report.model_copy(update={"precision": precision}).write(file)
    try:
        folder = export(lora.params, lora.paths, tmp_path / "out", merge=True)
    finally:
        report.write(file)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        kinds = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118 - no mapping
    assert kinds == {getattr(torch, precision)}
    assert json.loads((folder / "config.json").read_text())["dtype"] == precision
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == getattr(torch, precision)


@pytest.mark.parametrize("merge", [True, False])
def test_an_export_that_says_something_else_is_not_left_behind(
    lora: Place, merge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "_reopened", lambda *given: base_of(lora, "lora"))
    with pytest.raises(RuntimeError, match="the export's logits differ from the tuned model's by"):
        export(lora.params, lora.paths, tmp_path / "out", merge=merge)
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_taken_and_a_full_one_is_not(lora: Place, tmp_path: Path) -> None:
    from tasks.errors import UserError

    taken = tmp_path / "taken"
    taken.mkdir()
    assert export(lora.params, lora.paths, taken, merge=False) == taken
    before = sorted(file.name for file in taken.iterdir())
    with pytest.raises(UserError, match="is there and not empty, and export overwrites nothing"):
        export(lora.params, lora.paths, taken, merge=True)
    assert sorted(file.name for file in taken.iterdir()) == before
