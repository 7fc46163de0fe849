"""A small pair of models and questions of one's own, for an audit of seconds."""

from types import SimpleNamespace

import pytest
import torch

from conftest import small_model
from gripmoe.io.files import write_jsonl
from gripmoe.moe.storage import save_model
from gripmoe.worlds.benchmark import wmdp_files


@pytest.fixture(scope="session")
def asked(world):
    """Rows of questions and documents, as a user has them."""
    files = wmdp_files(world, 0)
    keys = ("question", "choices", "answer", "subject")
    rows = {
        name: [{key: row[key] for key in keys} for row in files[f"{name}_questions"][::12]]
        for name in ("forget", "retain")
    }
    for row in rows["forget"]:
        row["subject"] = "one subject"
    texts = {name: [{"text": row["prompt"] + row["text"]} for row in files[f"{name}_corpus"][:60]] for name in rows}
    return SimpleNamespace(**rows, forget_text=texts["forget"], retain_text=texts["retain"])


@pytest.fixture(scope="session")
def pair(tmp_path_factory, tokenizer):
    """Folders of a random model, and of two with other routers."""
    root = tmp_path_factory.mktemp("pair")
    for name, seed in (("original", 0), ("unlearned", 1), ("retrained", 2)):
        model = small_model(vocabulary_size=len(tokenizer))
        if seed:
            generator = torch.Generator().manual_seed(seed)
            for layer in model.model.layers:
                with torch.no_grad():
                    layer.mlp.gate.weight.copy_(torch.randn(layer.mlp.gate.weight.shape, generator=generator))
        save_model(model, tokenizer, root / name)
    return root


@pytest.fixture
def files(asked, tmp_path):
    """The same as files, by the keyword of `audit`."""
    names = ("forget", "retain", "forget_text", "retain_text")
    for name in names:
        write_jsonl(tmp_path / f"{name}.jsonl", getattr(asked, name))
    return {name: tmp_path / f"{name}.jsonl" for name in names}
