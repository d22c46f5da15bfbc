"""Converted checkpoints compute what their architecture says, are planned as such, and pass through little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tasks.commands.plan_model import model_config
from tasks.contracts import BaseModelRef
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.planner.model_spec import model_spec
from tasks.select_strategy import read_config
from tasks.trainer.base_model import ensure_base, weights_folder
from tasks.trainer.legacy.convert import convert
from tasks.trainer.legacy.registry import LEGACY, converts, native_config
from tasks.trainer.loading import load_base
from tests import tiny
from tests.unit import hub, legacy_cases
from tests.unit.legacy_reference import reference
from tests.unit.published_configs import OWN_CODE, published
from tests.unit.test_base_model import ask

IDS = torch.randint(0, 400, (2, 19), generator=torch.Generator().manual_seed(1))


def wanted(folder: Path, trusted: bool = False) -> ModelParams:
    return ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=trusted)


def change(folder: Path, **keys: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


# --- the same numbers ---------------------------------------------------------------------------


FILES = [(1, "safetensors"), (3, "safetensors"), (1, "bin"), (2, "bin")]
# Of the 13B models, which are read like the 7B ones, two.
KEPT_AS = [
    (kind, *files) for kind in legacy_cases.CONFIGS for files in (FILES[::3] if "13b" in kind else FILES)
]


@pytest.mark.parametrize(("kind", "files", "suffix"), KEPT_AS)
def test_logits_equal_the_architectures(kind: str, files: int, suffix: str, tmp_path: Path) -> None:
    weights = legacy_cases.random_weights(kind)
    folder = legacy_cases.write(tmp_path / "model", kind, weights, files, suffix)
    paths = Paths(tmp_path / "w")
    ref = ensure_base(wanted(folder), paths)
    model = load_base(paths, torch.float32)
    assert model.config.model_type == legacy_cases.NATIVE[kind]
    home = "tasks." if legacy_cases.NATIVE[kind] == "llama_alibi" else "transformers."
    assert type(model).__module__.startswith(home), "no code of the model's own"
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    for row, ids in enumerate(IDS):
        expected = reference(kind, weights, ids)
        assert expected.std() > 0.5
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-5)
    assert (ref.weights, weights_folder(ref, paths)) == ("here", paths.base)
    assert ensure_base(wanted(folder), paths) == ref


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    folder = legacy_cases.write(tmp_path / "model", "chatglm3", files=2, suffix="bin")
    for name, limit in (("one", 1 << 30), ("many", 50_000)):
        (tmp_path / name).mkdir()
        convert(LEGACY["chatglm"], folder, "m", tmp_path / name, limit)
    one = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and max(file.stat().st_size for file in files) < 90_000  # an embedding is 81,920
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(value.numel() * 4 for value in one.values())
    many = {name: value for file in files for name, value in load_file(file).items()}
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_half_precision_stays_what_it_is(tmp_path: Path) -> None:
    weights = {name: value.bfloat16() for name, value in legacy_cases.random_weights("baichuan2").items()}
    folder = legacy_cases.write(tmp_path / "model", "baichuan2", weights)
    ensure_base(wanted(folder), Paths(tmp_path / "w"))
    with safe_open(tmp_path / "w" / "data" / "base" / "model.safetensors", "pt") as held:
        assert {held.get_slice(name).get_dtype() for name in held.keys()} == {"BF16"}  # noqa: SIM118
        lengths = held.get_tensor("lm_head.weight").float().norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=4e-3)


def test_what_changes_the_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_base(wanted(legacy_cases.write(tmp_path / "q", "qwen")), Paths(tmp_path / "w1"))
    assert (
        "use_dynamic_ntk and use_logn_attn change nothing up to seq_length=64 tokens"
        in capsys.readouterr().err
    )
    assert read_config(tmp_path / "w1" / "data" / "base" / "config.json")["max_position_embeddings"] == 64
    ensure_base(wanted(legacy_cases.write(tmp_path / "b", "baichuan2")), Paths(tmp_path / "w2"))
    said = capsys.readouterr().err
    assert "converting baichuan to llama, once; its own code is not run" in said
    assert "full tuning trains these rows as they are and does not bring them to length one again" in said


# --- identity and planning ----------------------------------------------------------------------


def test_changed_weights_or_tokenizer_are_another_model(tmp_path: Path) -> None:
    folder = legacy_cases.write(tmp_path / "model", "baichuan", suffix="bin")
    paths = Paths(tmp_path / "w")
    first = ensure_base(wanted(folder), paths)
    legacy_cases.write_sentencepiece(folder / "tokenizer.model", dummy_prefix=False)
    second = ensure_base(wanted(folder), paths)
    assert second.source_hash != first.source_hash
    weights = legacy_cases.random_weights("baichuan")
    weights["model.norm.weight"] += 1
    legacy_cases.write(folder, "baichuan", weights, suffix="bin")
    assert ensure_base(wanted(folder), paths).content_hash != second.content_hash
    change(folder, rms_norm_eps=1e-6)
    assert ensure_base(wanted(folder), paths) == BaseModelRef.read(paths.base_ref)
    assert read_config(paths.base / "config.json")["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("kind", list(legacy_cases.CONFIGS))
def test_the_planner_counts_what_is_converted(kind: str, tmp_path: Path) -> None:
    ensure_base(wanted(legacy_cases.write(tmp_path / "model", kind)), Paths(tmp_path / "w"))
    spec = model_spec(read_config(tmp_path / "w" / "data" / "base" / "config.json"))
    held = load_file(tmp_path / "w" / "data" / "base" / "model.safetensors")
    assert (spec.family, spec.parameters) == (
        legacy_cases.NATIVE[kind],
        sum(value.numel() for value in held.values()),
    )


@pytest.mark.parametrize(
    ("name", "family", "published_as"),
    [
        ("qwen-7b", "qwen2", "qwen-7b"),
        ("chatglm3-6b", "glm", "chatglm3-6b"),
        ("baichuan2-13b", "llama_alibi", "baichuan2-13b"),
    ],
)
def test_plan_takes_a_model_for_what_it_becomes(name: str, family: str, published_as: str | None) -> None:
    spec = model_spec(model_config(name))
    assert spec.family == family
    if published_as:
        assert spec.parameters == OWN_CODE[published_as]
        assert model_spec(native_config(published(published_as), name)) == spec


def test_trusted_code_is_left_to_run_as_it_is(tmp_path: Path) -> None:
    folder = legacy_cases.write(tmp_path / "model", "qwen")
    assert converts(folder, False) is LEGACY["qwen"] and converts(folder, True) is None
    ensure_base(wanted(folder, trusted=True), Paths(tmp_path / "w"))
    assert read_config(tmp_path / "w" / "data" / "base" / "config.json")["model_type"] == "qwen"


@pytest.mark.parametrize(("kind", "suffix"), [("qwen", "safetensors"), ("baichuan", "bin")])
def test_a_hub_id_brings_weights_and_tokenizer_and_no_code(kind: str, suffix: str, tmp_path: Path) -> None:
    folder = legacy_cases.write(tmp_path / "model", kind, files=2, suffix=suffix)
    (folder / "modeling_own.py").write_text("raise SystemExit('run')\n")
    (folder / "training_args.bin").write_bytes(b"no weights")
    with hub.serve() as served:
        commit = served.push(folder)
        ref, held = ask(tmp_path / "w", served.url, trusted=False)
        assert (ref.commit, ref.weights, held) == (commit, "here", Paths(tmp_path / "w").base)
        assert not any(name.endswith(".py") or name == "training_args.bin" for name in served.fetched)
    assert read_config(held / "config.json")["model_type"] == legacy_cases.NATIVE[kind]


# --- host memory --------------------------------------------------------------------------------

MEASURED = """
import sys, threading, time
from pathlib import Path
from tests.unit import legacy_cases
from tasks.trainer.legacy.convert import convert
from tasks.trainer.legacy.registry import LEGACY

def held():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while not done.wait(0.002):
        seen.append(held())

Path(sys.argv[3]).mkdir()
convert(LEGACY["baichuan"], Path(sys.argv[1]), "m", Path(sys.argv[3]))  # whatever loads late is loaded now
Path(sys.argv[4]).mkdir()
done, seen, before = threading.Event(), [], held()
threading.Thread(target=watch, daemon=True).start()
convert(LEGACY["baichuan"], Path(sys.argv[2]), "m", Path(sys.argv[4]), 8 << 20)
done.set()
print(max(seen) - before)
"""


def big(folder: Path, suffix: str) -> Path:
    """150 MB in two files, 64 layers of 2.3 MB."""
    layers, ffn = 64, 6000
    names = legacy_cases.shapes("baichuan")
    weights = {
        name: torch.ones(shape) for name, shape in names.items() if not name.startswith("model.layers.")
    }
    for layer in range(layers):
        own = {name: shape for name, shape in names.items() if name.startswith("model.layers.0.")}
        for name, shape in own.items():
            wide = tuple(ffn if size == legacy_cases.FFN else size for size in shape)
            weights[name.replace(".0.", f".{layer}.", 1)] = torch.ones(wide)
    legacy_cases.write(folder, "baichuan", weights, 2, suffix)
    change(folder, num_hidden_layers=layers, intermediate_size=ffn)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_host_memory_is_one_written_file_not_the_model(suffix: str, tmp_path: Path) -> None:
    folder = big(tmp_path / "big", suffix)
    size = sum(file.stat().st_size for file in folder.glob(f"*model-*.{suffix}"))
    assert size > 140e6
    small = legacy_cases.write(tmp_path / "small", "baichuan")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, small, folder, tmp_path / "out1", tmp_path / "out2"],
        cwd=tiny.REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40e6, f"{done.stdout} of {size}"
