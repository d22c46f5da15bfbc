"""Models with code of their own, and hub ids: what is fetched, at which commit, and what is run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks.contracts import BaseModelRef
from tasks.data.templates import load_tokenizer
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.trainer import loading
from tasks.trainer.base_model import ensure_base, weights_folder
from tasks.trainer.loss import TokenLossSum
from tests import tiny
from tests.unit import hub

CODE = {
    "configuration_own.py": (
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    ),
    "modeling_own.py": (
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "    def forward(self, *args, **kwargs):\n"
        "        out = super().forward(*args, **kwargs)\n        out.logits = out.logits * 0 + 7\n        return out\n"
    ),
    "tokenization_own.py": (
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    ),
}


def add_keys(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that no library knows, with the code that makes it one."""
    folder = tiny.write_model(tmp_path_factory.mktemp("own") / "model")
    for name, text in CODE.items():
        (folder / name).write_text(text)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    add_keys(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=classes)
    tokenizer = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    add_keys(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer)
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def wanted(folder: Path | str, trusted: bool) -> ModelParams:
    return ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=trusted)


# --- code of its own ----------------------------------------------------------------------------


def test_code_is_neither_copied_nor_run_unasked(own: Path, tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    ensure_base(wanted(own, False), paths)
    assert not list(paths.base.glob("*.py"))
    with pytest.raises(
        UserError, match=r"own, and that is not run unasked; .*model\.trust_remote_code: true"
    ):
        load_tokenizer(paths.base, "mine", False)


def test_trusted_code_is_run_and_said_and_travels(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = Paths(tmp_path)
    ensure_base(wanted(own, True), paths)
    said = "running the code that comes with"
    assert (
        f"{said} {own} (configuration_own.py, modeling_own.py, tokenization_own.py)"
        in capsys.readouterr().err
    )
    assert type(load_tokenizer(paths.base, "mine", True)).__name__ == "OwnTokenizer"
    assert type(loading.load_tokenizer(paths)).__name__ == "OwnTokenizer"
    model = loading.load_base(paths, torch.float32)
    assert said in capsys.readouterr().err
    with torch.no_grad():
        assert (model(input_ids=torch.tensor([[5, 6]])).logits == 7).all()
    loading.open_base(paths, torch.float32)
    assert (
        "every rank loads the whole model into host memory first: its own code makes it"
        in capsys.readouterr().err
    )
    # What full tuning and an export write.
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(saved).__name__ == "OwnModel"


def test_changed_code_is_another_model(own: Path, tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    ref = ensure_base(wanted(own, True), paths)
    unread = ensure_base(wanted(own, False), Paths(tmp_path / "untrusting"))
    (own / "modeling_own.py").write_text(CODE["modeling_own.py"] + "# changed\n")
    with pytest.raises(UserError, match=r"weights or code of .* are not those the data was prepared for"):
        weights_folder(ref, paths)
    assert weights_folder(unread, Paths(tmp_path / "untrusting")) == own, (
        "code that is not run does not matter"
    )
    assert ensure_base(wanted(own, True), paths).content_hash != ref.content_hash


def test_code_of_another_repository_is_refused(own: Path, tmp_path: Path) -> None:
    add_keys(own / "config.json", auto_map={"AutoConfig": "other/repo--configuration_own.OwnConfig"})
    with pytest.raises(
        UserError, match=r"takes configuration_own\.OwnConfig from another repository \(other/repo\)"
    ):
        ensure_base(wanted(own, True), Paths(tmp_path))


def test_only_a_familys_own_class_has_a_plain_head() -> None:
    class Scaled(LlamaForCausalLM):
        pass

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    for kind, plain in ((LlamaForCausalLM, True), (Scaled, False)):
        model = kind(config)
        assert TokenLossSum(model, model, "float32").plain_head is plain


# --- hub ids ------------------------------------------------------------------------------------


def ask(root: Path, url: str, trusted: bool) -> tuple[BaseModelRef, Path]:
    """prepare_data's and then train's look at the hub id, in a process of its own that may ask `url`."""
    code = (
        "import sys; from pathlib import Path; from tasks.params import ModelParams; from tasks.paths import Paths; "
        "from tasks.trainer.base_model import ensure_base, weights_folder\n"
        f"model = ModelParams(name_or_path={hub.REPOSITORY!r}, revision=None, trust_remote_code={trusted})\n"
        "paths = Paths(Path(sys.argv[1])); print(weights_folder(ensure_base(model, paths), paths))"
    )
    environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(root.parent / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        env={**os.environ, **environment},
        cwd=tiny.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return BaseModelRef.read(Paths(root).base_ref), Path(done.stdout.strip())


def test_a_hub_id_stays_at_its_commit_and_brings_code_only_when_trusted(own: Path, tmp_path: Path) -> None:
    with hub.serve() as served:
        first = served.push(own)
        ref, folder = ask(tmp_path / "w", served.url, trusted=False)
        assert (ref.revision, ref.commit, folder.name) == (None, first, first)
        assert {"model.safetensors", "config.json"} <= served.fetched
        assert not any(name.endswith(".py") for name in served.fetched)

        second = served.push(tiny.write_model(tmp_path / "newer", seed=1))
        again, folder = ask(tmp_path / "w", served.url, trusted=False)
        assert (again, folder.name) == (ref, first), "the branch moved on, this workspace did not"
        assert ask(tmp_path / "another", served.url, trusted=False)[0].commit == second

        trusting, _ = ask(tmp_path / "w", served.url, trusted=True)
        assert trusting.commit == first
        assert CODE.keys() <= served.fetched
        assert CODE.keys() <= {file.name for file in Paths(tmp_path / "w").base.iterdir()}


def test_the_planner_cuts_the_families_that_the_trainer_can() -> None:
    from tasks.planner.capabilities import TRAINABLE_NOW
    from tasks.trainer.families import FAMILIES

    assert TRAINABLE_NOW.split_families == set(FAMILIES)
