"""Models found, compared and refused before they are loaded; adapters and shards."""

import json
import re
import shutil
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from conftest import small_model
from gripmoe.attacks.restoration import changes
from gripmoe.auditing import models
from gripmoe.config.training import Relearning
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json
from gripmoe.moe import MoEModel
from gripmoe.moe.families import FAMILIES
from gripmoe.moe.storage import save_model, with_pad_token
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.tokenizer import make_tokenizer

pytest_plugins = "audit_pairs"


def changed_config(folder, **changes):
    """Writes other values into a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def copy(pair, tmp_path):
    return shutil.copytree(pair / "unlearned", tmp_path / "copy")


def differ(pair, folder):
    original = models.find(pair / "original", "--original")
    models.compare(original, models.find(folder, "--unlearned", original=original))


def test_models_that_differ_in_weights_alone_are_compared(pair):
    differ(pair, pair / "unlearned")


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_configuration_that_names_no_dtype_leaves_it_to_the_weights(dtype, pair, copy):
    """The control: it names another one."""
    changed_config(copy, dtype=dtype)
    with pytest.raises(ConfigError, match="differ in dtype: float32 and float16") if dtype else nullcontext():
        differ(pair, copy)


OTHERS = {
    "layers": (dict(num_layers=3), "layers: 2 and 3"),
    "experts": (dict(num_experts=4), "experts: 8 and 4"),
    "experts per token": (dict(top_k=1), "experts per token: 2 and 1"),
    "hidden size": (dict(hidden_size=16), "hidden size: 32 and 16"),
    "widths": (dict(expert_width=8), r"model.layers.0.mlp.experts.\w+: \("),
    "family": ("qwen2_moe", "family: qwen3_moe and qwen2_moe"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_models_that_differ_in_more_are_refused_with_what_differs(what, pair, tokenizer, tmp_path):
    other, message = OTHERS[what]
    family, widths = (other, {}) if isinstance(other, str) else ("qwen3_moe", other)
    save_model(small_model(family, len(tokenizer), **widths), tokenizer, tmp_path / "other")
    with pytest.raises(ConfigError, match=f"--original and --unlearned differ in {message}"):
        differ(pair, tmp_path / "other")


def test_another_dtype_is_refused(pair, tokenizer, tmp_path):
    save_model(small_model(vocabulary_size=len(tokenizer)).to(torch.bfloat16), tokenizer, tmp_path / "other")
    with pytest.raises(ConfigError, match="differ in dtype: float32 and bfloat16; save both in one"):
        differ(pair, tmp_path / "other")


def test_another_tokenizer_is_refused(tokenizer):
    models.compare_tokenizers(tokenizer, tokenizer, "these")
    other = make_tokenizer([*all_texts(make_world(0)), "a word of its own"])
    with pytest.raises(ConfigError, match="these differ in their tokenizers"):
        models.compare_tokenizers(tokenizer, other, "these")


def refused(folder, message, capsys, pair, files, tmp_path):
    """In one line, with nothing written."""
    from gripmoe.cli.main import main

    line = ["audit", "--original", pair / "original", "--unlearned", folder, "--questions", files["forget"]]
    line += ["--retain-questions", files["retain"], "--attacks", "forcing", "--output", tmp_path / "audit"]
    assert main(list(map(str, line))) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("gripmoe audit: error: ") and message in told, told
    assert not (tmp_path / "audit").exists()


def test_broken_folders_are_refused(copy, capsys, pair, files, tmp_path):
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    refused(copy, "model.safetensors: cannot be read", capsys, pair, files, tmp_path)
    weights.unlink()
    refused(copy, "no model can be read from here", capsys, pair, files, tmp_path)
    config = read_json(copy / "config.json")
    for wrong in ({"num_hidden_layers": "x"}, {"hidden_size": -1}, {"num_attention_heads": 0}, {"dtype": "float99"}):
        write_json(copy / "config.json", config | wrong)
        refused(copy, "config.json describes no model that transformers knows", capsys, pair, files, tmp_path)
    (copy / "config.json").unlink()
    refused(copy, "config.json is missing", capsys, pair, files, tmp_path)
    refused(tmp_path / "none", "neither a folder nor a model that the hub gives", capsys, pair, files, tmp_path)


def test_weights_that_are_missing_are_not_drawn_at_random(copy, pair, tokenizer, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(copy / "model.safetensors")
    (lost,) = (name for name in state if name.endswith("layers.1.mlp.gate.weight"))
    del state[lost]
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"the weights lack {lost}"):
        models.load(models.find(copy, "--unlearned"))


def test_code_of_a_model_is_not_run_unasked(copy):
    changed_config(copy, auto_map={"AutoConfig": "own.Config"})
    for trusted in (False, True):  # transformers knows the family: its own class is taken
        found = models.find(copy, "--unlearned", trust_remote_code=trusted)
        assert not found.remote and type(found.config).__module__.startswith("transformers.models.")
    changed_config(copy, model_type="nobody_knows")
    with pytest.raises(ConfigError, match="code of its own .auto_map.*--trust-remote-code"):
        models.find(copy, "--unlearned")
    changed_config(copy, auto_map={})
    with pytest.raises(ConfigError, match="describes no model that transformers knows|--trust-remote-code"):
        models.find(copy, "--unlearned", trust_remote_code=True)


def test_an_unknown_family_is_told_before_weights_are_read(copy, monkeypatch):
    (copy / "model.safetensors").unlink()
    models.find(copy, "--unlearned")
    monkeypatch.delitem(FAMILIES, "qwen3_moe")
    with pytest.raises(ConfigError, match="family 'qwen3_moe' .*: missing: "):
        models.find(copy, "--unlearned")


def test_a_model_too_large_is_refused_before_it_is_loaded(pair, tmp_path, monkeypatch):
    """From its config.json, with what would fit."""
    folder = tmp_path / "large"
    folder.mkdir()
    shutil.copy(pair / "original" / "config.json", folder)
    changed_config(folder, vocab_size=10**9)
    found = models.find(folder, "--original")
    assert found.size > 1e11
    with pytest.raises(ConfigError, match=r"--original: too large: 2 models of \d+\.\d GB take .*larger machine"):
        models.check_memory(found, None, 2)
    small = models.find(pair / "original", "--original")
    assert re.search(r"take \d+\.\d MB of \d+\.\d GB", models.check_memory(small, Relearning(learning_rate=1e-3), 2))
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 5 * small.size}[name])
    with pytest.raises(ConfigError, match="choose --attacks without relearning"):
        models.check_memory(small, Relearning(learning_rate=1e-3), 2)
    models.check_memory(small, None, 2)
    monkeypatch.setattr("os.sysconf", lambda name: 2**20)
    group = tmp_path / "system" / "job_1"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/system/job_1/step\n")
    (tmp_path / "system" / "memory.max").write_text("max\n")
    assert models.host_memory(tmp_path / "cgroup", tmp_path) == 2**40, "without a limit"
    (group / "memory.max").write_text("64000\n")
    assert models.host_memory(tmp_path / "cgroup", tmp_path) == 64000


def test_an_adapter_is_merged_into_the_original(pair, tokenizer, tmp_path):
    torch.manual_seed(0)
    adapted = get_peft_model(
        small_model(vocabulary_size=len(tokenizer)), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    original = models.find(pair / "original", "--original")
    found = models.find(tmp_path / "adapter", "--unlearned", original=original)
    models.compare(original, found)
    model, _ = models.load(found)
    before, _ = models.load(original)
    moved = changes(MoEModel(before), MoEModel(model))
    assert moved["changed_attention"] > 0 and moved["changed_experts"] == moved["changed_router"] == 0
    assert sum("lora" in name for name, _ in model.named_parameters()) == 0
    with pytest.raises(ConfigError, match="this is an adapter; give the model that it adapts"):
        models.find(tmp_path / "adapter", "--original")


@pytest.mark.parametrize(
    ("trained_on", "is_named"),
    [("owner/original@v2", False), ("/elsewhere/original/", False), (None, False), ("owner/another", True)],
)
def test_an_adapter_of_another_base_is_named(pair, tmp_path, capsys, trained_on, is_named):
    """Shapes may fit all the same."""
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": trained_on})
    original = models.find(pair / "original", "--original")
    models.find(tmp_path, "--unlearned", original=original)
    printed = capsys.readouterr()
    told = f"the adapter was trained on {trained_on}, and is merged into --original {pair / 'original'}"
    assert (told in printed.out + printed.err) == is_named
    assert is_named or "warning" not in printed.out + printed.err


def test_routers_of_an_adapter_are_not_rounded(tokenizer, tmp_path):
    """Of a model in bf16, `constrain` trains them in fp32, and PEFT saves them so."""
    base = small_model(vocabulary_size=len(tokenizer)).bfloat16()
    save_model(base, tokenizer, tmp_path / "original")
    (tmp_path / "original" / "routers.safetensors").unlink()  # as other programs save it
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"]))
    gates = MoEModel(adapted.get_base_model())
    trained = {layer: gates.theta(layer).detach() * 1.0001 for layer in gates.layers}
    gates.set_thetas(trained)
    adapted.save_pretrained(tmp_path / "adapter")
    original = models.find(tmp_path / "original", "--original")
    found = models.find(tmp_path / "adapter", "--unlearned", original=original)
    loaded = MoEModel(models.load(found)[0])
    assert all(torch.equal(loaded.theta(layer), theta_Ed) for layer, theta_Ed in trained.items())


def test_a_tokenizer_without_special_tokens_pads_with_its_first(tokenizer):
    bare = deepcopy(tokenizer)
    bare.pad_token = bare.eos_token = None
    assert with_pad_token(bare).pad_token_id == 0
    assert with_pad_token(tokenizer).pad_token == tokenizer.pad_token


def test_an_adapter_of_the_hub_is_downloaded_with_its_weights(pair, tokenizer, tmp_path, monkeypatch):
    """`find` reads descriptions alone, into a folder without weights."""
    adapted = get_peft_model(small_model(vocabulary_size=len(tokenizer)), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "whole")
    described = tmp_path / "described"
    described.mkdir()
    (described / "adapter_config.json").write_bytes((tmp_path / "whole" / "adapter_config.json").read_bytes())
    folders = lambda *_, allow_patterns, **__: str(described if allow_patterns else tmp_path / "whole")  # noqa: E731
    monkeypatch.setattr(models, "snapshot_download", folders)
    original = models.find(pair / "original", "--original")
    found = models.find("owner/adapter", "--unlearned", original=original)
    assert found.adapter == described
    model, _ = models.load(found)
    assert sum("lora" in name for name, _ in model.named_parameters()) == 0


def test_a_model_in_shards_is_the_same(pair, tokenizer, tmp_path):
    model, _ = models.load(models.find(pair / "unlearned", "--unlearned"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    tokenizer.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    again, _ = models.load(models.find(tmp_path / "shards", "--unlearned"))
    assert set(changes(MoEModel(model), MoEModel(again)).values()) == {0.0}
    next((tmp_path / "shards").glob("model-*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="no model can be read from here"):
        models.load(models.find(tmp_path / "shards", "--unlearned"))
