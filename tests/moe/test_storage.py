"""Bases on disk: whose they are, and how many of them are kept in memory; routers that are not rounded there."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import gripmoe
from conftest import random_batch, small_model
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import aside
from gripmoe.moe import MoEModel, storage
from gripmoe.moe import bases as stored_bases
from gripmoe.moe.adapters import unwrapped
from gripmoe.moe.bases import StoredBases, save_bases
from gripmoe.moe.storage import weights_digest


def test_the_first_bases_that_fit_stay_the_next_lie_in_host_memory_and_the_others_are_read(tmp_path, monkeypatch):
    bases = {layer: RetainBasis(torch.randn(4, 8, 3)) for layer in (1, 3, 10)}
    file = tmp_path / "bases.safetensors"
    save_bases(file, bases, {"model": "a"})
    each, reads = 4 * 8 * 3 * 8, []  # bytes, in fp64
    half = each // 2  # as it is stored
    opened = stored_bases.safe_open
    for memory, host, read in (
        *((3 * each, 0, 0), (3 * each - 1, 0, 1), (each, 0, 2), (0, 0, 3)),
        *((each, half, 1), (each, 2 * half, 0), (0, 2 * half, 1), (0, half - 1, 3)),
    ):
        stored = StoredBases(file, {"model": "a"}, memory=memory, host_memory=host)
        assert list(stored) == [1, 3, 10] and len(stored) == 3, "in the order of layers"
        with monkeypatch.context() as patched:
            patched.setattr(stored_bases, "safe_open", lambda *args, **kw: reads.append(1) or opened(*args, **kw))
            assert all(
                torch.equal(stored[layer].columns_Edr, basis.columns_Edr.double()) for layer, basis in bases.items()
            )
        assert len(reads) == read
        reads.clear()
    with pytest.raises(KeyError):
        stored[2]
    with pytest.raises(ValueError, match="model is 'a', expected 'b'"):
        StoredBases(file, {"model": "b"})
    file.write_bytes(file.read_bytes()[:-8])
    refused(lambda folder: StoredBases(folder / file.name, {"model": "a"}), tmp_path, file.name, "cannot be read")


def test_a_constrained_model_in_bf16_keeps_its_selections_on_disk(tmp_path, tokenizer):
    """The control is what plain transformers makes of it, which rounds its routers."""
    model = small_model(vocabulary_size=len(tokenizer)).to(torch.bfloat16)
    retain, forget = random_batch(rows=6, seed=1), random_batch(seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    moe = MoEModel(model)
    original, rules = moe.trace([retain]), moe.rules()
    with gripmoe.constrain(model, optimizer, [retain]):
        for _ in range(5):
            optimizer.zero_grad()
            (-model(**forget.inputs, labels=forget.labels).loss).backward()
            optimizer.step()
    saved = MoEModel(model).thetas()
    digest = gripmoe.save_model(model, tokenizer, tmp_path / "exact")
    model.save_pretrained(tmp_path / "plain")
    loaded, _ = gripmoe.load_model(tmp_path / "exact")
    kept = {}
    for name, again in (("exact", loaded), ("plain", AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))):
        assert again.lm_head.weight.dtype == torch.bfloat16
        thetas = MoEModel(again).thetas()
        now = {layer: route(seen.x_Nd, thetas[layer], rules[layer]) for layer, seen in original.items()}
        kept[name] = mean_stability(stability_by_layer(original, now))
        assert all(torch.equal(thetas[layer], saved[layer]) for layer in saved) == (name == "exact")
    assert kept["exact"] == 1.0 > kept["plain"], kept
    assert storage.weights_digest(loaded) == digest
    alone, _ = storage.load_routers(tmp_path / "exact", MoEModel(small_model(vocabulary_size=len(tokenizer))))
    assert all(torch.equal(alone[layer], saved[layer]) for layer in saved)


def test_a_folder_of_other_things_is_not_replaced(tmp_path, tokenizer):
    """Names as text do; a model that was there gives way."""
    folder, model = tmp_path / "saved", small_model(vocabulary_size=len(tokenizer))
    digest = gripmoe.save_model(model, tokenizer, str(folder))
    assert gripmoe.save_model(model, tokenizer, str(folder)) == digest
    (folder / "optimizer.pt").write_text("hours")
    (folder / "metrics.json").write_text("{}")
    with pytest.raises(
        ValueError, match="saved holds metrics.json, optimizer.pt, which would be lost: save to a folder"
    ):
        gripmoe.save_model(model, tokenizer, folder)
    assert (folder / "optimizer.pt").read_text() == "hours" and (folder / "metrics.json").read_text() == "{}"
    assert weights_digest(gripmoe.load_model(str(folder))[0]) == digest


@pytest.mark.parametrize("kind", ["current", "mount"])
def test_a_folder_that_cannot_be_replaced_is_refused(kind, tmp_path, tokenizer, monkeypatch):
    """The process would stand in a deleted folder."""
    (tmp_path / "here").mkdir()
    if kind == "current":
        monkeypatch.chdir(tmp_path / "here")
    else:
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "here")
    model = small_model(vocabulary_size=len(tokenizer))
    with pytest.raises(ValueError, match="here: a save replaces its folder, and this is a mount or the current one"):
        gripmoe.save_model(model, tokenizer, "." if kind == "current" else tmp_path / "here")
    digest = gripmoe.save_model(model, tokenizer, tmp_path / "here" / "model")
    assert weights_digest(gripmoe.load_model(tmp_path / "here" / "model")[0]) == digest


def test_a_link_stays_and_others_may_read_as_the_umask_says(tmp_path, tokenizer):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "scratch")
    old = os.umask(0o002)
    try:
        gripmoe.save_model(small_model(vocabulary_size=len(tokenizer)), tokenizer, tmp_path / "saved")
    finally:
        os.umask(old)
    assert (tmp_path / "saved").is_symlink()
    weights = [tmp_path / "scratch" / name for name in ("model.safetensors", storage.ROUTERS)]
    assert {file.stat().st_mode & 0o777 for file in weights} == {0o664}


def test_weights_of_other_shapes_than_the_configuration_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 24}))
    refused(gripmoe.load_model, folder, "", "no model can be read from here")


def test_what_is_no_whole_model_is_not_saved(tmp_path, tokenizer):
    model = small_model(vocabulary_size=len(tokenizer))
    with pytest.raises(ValueError, match="`tokenizer` is None: give the tokenizer"):
        gripmoe.save_model(model, None, tmp_path / "model")
    with pytest.raises(ValueError, match="`model` is a .*Tokenizer.*: give the transformers model"):
        gripmoe.save_model(tokenizer, model, tmp_path / "model")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"`model` is a PeftModel: .*`model.merge_and_unload\(\)`"):
        gripmoe.save_model(adapted, tokenizer, tmp_path / "model")
    with pytest.raises(ValueError, match=r"of PEFT, `model.merge_and_unload\(\)`"):  # the adapters are within it
        gripmoe.save_model(adapted.get_base_model(), tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    gripmoe.save_model(adapted.merge_and_unload(), tokenizer, tmp_path / "model")


def test_a_save_leaves_the_model_as_it_is(tmp_path, tokenizer):
    """So that a loop without a constraint goes on: AdamW's states have the dtype of their weights."""
    model = small_model(vocabulary_size=len(tokenizer)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(**random_batch().inputs, labels=random_batch().input_ids).loss.backward()
        optimizer.step()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        gripmoe.save_model(model, tokenizer, tmp_path / "model")
        now = model.state_dict()
        assert all(
            torch.equal(now[name], tensor) and now[name].dtype == tensor.dtype for name, tensor in before.items()
        )
        assert not model.model.layers[0].mlp.gate._forward_hooks


def test_what_torch_compile_wraps_is_not_saved_under_its_names(tmp_path, tokenizer):
    model = small_model(vocabulary_size=len(tokenizer))
    wrapped = torch.nn.Module()  # as torch.compile wraps, which is turned off in tests
    wrapped._orig_mod = model
    assert unwrapped(wrapped) is model
    with pytest.raises(ValueError, match="of torch.compile, `model._orig_mod`"):
        gripmoe.save_model(wrapped, tokenizer, tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routers_in_fp32_of_an_earlier_save_are_not_taken_for_those_of_a_later_one(dtype, tmp_path, tokenizer):
    """Plain `save_pretrained` writes beside them. A save of the same weights changes nothing."""
    folder, model = tmp_path / "model", small_model(vocabulary_size=len(tokenizer)).to(dtype)
    gripmoe.save_model(model, tokenizer, folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    gripmoe.load_model(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        plain.model.layers[1].mlp.gate.weight[0, 0] *= 1.02
    plain.save_pretrained(folder)
    refused(gripmoe.load_model, folder, storage.ROUTERS, f"{ROUTER}: the other files of the folder have another router")
    (folder / storage.ROUTERS).unlink()
    again, _ = gripmoe.load_model(folder)
    assert torch.equal(again.model.layers[1].mlp.gate.weight, plain.model.layers[1].mlp.gate.weight)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("saved") / "model"
    gripmoe.save_model(small_model(vocabulary_size=len(tokenizer)), tokenizer, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A model of its own to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refused(read, folder, file, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(str(folder / file))}: {said}.*; (save|rerun|give|rename) "):
        read(folder)


def test_a_file_is_not_replaced_by_a_folder(tmp_path, tokenizer, monkeypatch):
    notes, model = tmp_path / "notes.txt", small_model(vocabulary_size=len(tokenizer))
    notes.write_text("mine")
    monkeypatch.setattr(model, "save_pretrained", lambda *_, **__: pytest.fail("something was written"))
    with pytest.raises(ConfigError, match="notes.txt: this is a file; save to a folder of its own"):
        gripmoe.save_model(model, tokenizer, str(notes))
    assert notes.read_text() == "mine" and list(tmp_path.iterdir()) == [notes]


ROUTER = "1.weight"
SPOILED = {
    "one row": (
        lambda routers: routers | {ROUTER: routers[ROUTER][:1]},
        rf"{ROUTER}: the file has \(1, 32\), the model \(8, 32\)",
    ),
    "not a number": (
        lambda routers: routers | {ROUTER: routers[ROUTER] * torch.nan},
        f"{ROUTER}: holds NaN or infinity",
    ),
    "another layer": (
        lambda routers: routers | {"7.weight": routers[ROUTER].clone()},
        r"7.weight: the file has \(8, 32\), the model no such router",
    ),
    "a layer less": (
        lambda routers: {"0.weight": routers["0.weight"]},
        f"{ROUTER}: the file has no such router",
    ),
}


@pytest.mark.parametrize("read", ["load_model", "load_routers"])
@pytest.mark.parametrize("what", SPOILED)
def test_routers_of_another_model_are_refused(what, read, folder, saved):
    """Where they would have been broadcast, or ignored. The control is the folder as it was."""
    moe = MoEModel(gripmoe.load_model(saved)[0])
    of = {"load_model": gripmoe.load_model, "load_routers": lambda folder: storage.load_routers(folder, moe)}[read]
    spoil, said = SPOILED[what]
    of(folder)
    save_file(spoil(load_file(folder / storage.ROUTERS)), folder / storage.ROUTERS)
    refused(of, folder, storage.ROUTERS, said)


@pytest.mark.parametrize("file", [storage.ROUTERS, "model.safetensors"])
def test_a_truncated_file_is_named(file, folder):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-8])
    refused(gripmoe.load_model, folder, file, "cannot be read .*not fully covered")


def test_a_model_without_a_tokenizer_is_refused(folder):
    """transformers makes one up that knows its special tokens alone, and encodes every text to nothing."""
    for file in folder.glob("*token*"):
        file.unlink()
    assert AutoTokenizer.from_pretrained(folder)("a text").input_ids == []
    refused(gripmoe.load_model, folder, "", "the tokenizer is missing")


@pytest.mark.parametrize("there", ["a file", "nothing", "a folder without a model", "no weights"])
def test_what_holds_no_model_is_named(there, folder):
    if there == "no weights":
        (folder / "model.safetensors").unlink()
        return refused(gripmoe.load_model, folder, "", "no model can be read from here .*model.safetensors")
    shutil.rmtree(folder)
    if there == "a file":
        folder.write_text("a model")
    elif there == "a folder without a model":
        folder.mkdir()
    refused(gripmoe.load_model, folder, "", "no model is here, config.json is missing")


def test_a_model_that_an_interrupted_save_has_moved_aside_is_named(folder):
    folder.rename(aside(folder))
    left = f"no model is here.*; an interrupted save has left the model as {re.escape(str(aside(folder)))}"
    refused(gripmoe.load_model, folder, "", left)
