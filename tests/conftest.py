"""Small random models and data that every test may share."""

import copy
import gc
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step, which takes longer than all else

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from gripmoe.config.methods import method_table
from gripmoe.data.documents import Row, collate
from gripmoe.io.files import write_jsonl
from gripmoe.moe import MoEModel
from gripmoe.training import steps
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.models import make_model
from gripmoe.worlds.tokenizer import make_tokenizer

steps.TIMED_PAIRS = 1  # a longer look at a step takes longer than the few steps that tests train
MOE_FAMILIES = ("qwen3_moe", "qwen2_moe")
METHODS = {  # one row of each kind that a loop of one's own can have
    name: method_table()[name]
    for name in (
        "frozen_router", "expert_specific", "full_null_space", "expert_specific_minibatch",
        "expert_specific_paper", "anchored", "seuf",
    )
}  # fmt: skip
SMALL = dict(hidden_size=32, num_layers=2, num_heads=2, num_experts=8, top_k=2, expert_width=16)


ASKED_FOR = {"slow": "GRIPMOE_TEST_SLOW", "nightly": "GRIPMOE_TEST_NIGHTLY"}  # by marker


def pytest_collection_modifyitems(items):
    # Files with the longest tests begin first, or the last one would keep one process busy and the others idle.
    items.sort(key=lambda item: (item.get_closest_marker("workflow") is None, item.path.parent.name != "workflow"))
    for marker, variable in ASKED_FOR.items():
        for item in items if os.environ.get(variable) != "1" else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"not run: takes minutes more; {variable}=1 runs it"))


def pytest_collection_finish():
    gc.freeze()  # Trainer collects garbage in every run, which takes half a second if it looks at all that is imported


HANGS = 1800  # seconds after which a process that trains a tiny model hangs, whatever else the machine does


HOLDER = """
import sys, time
from pathlib import Path
from gripmoe.io.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def held(folder):
    """Within the block another process works in `folder`; yields its id, and kills it afterwards."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world():
    return make_world(0)


@pytest.fixture(scope="session")
def tokenizer(world):
    return make_tokenizer(all_texts(world))


@pytest.fixture(scope="session")
def bos_tokenizer(tokenizer):
    """The same that begins every text with <bos>, as those of Llama and Gemma do."""
    begins = copy.deepcopy(tokenizer)
    bos = (begins.bos_token, begins.bos_token_id)
    begins.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return begins


def small_model(family: str = "qwen3_moe", vocabulary_size: int = 64, seed: int = 0, **widths):
    """A random model whose routers differ visibly between tokens."""
    model = make_model(family, vocabulary_size, seed=seed, **SMALL | widths).eval()
    if family in MOE_FAMILIES:
        generator = torch.Generator().manual_seed(seed)
        for layer in model.model.layers:
            with torch.no_grad():
                layer.mlp.gate.weight.copy_(torch.randn(layer.mlp.gate.weight.shape, generator=generator))
    return model


@pytest.fixture(params=MOE_FAMILIES)
def moe(request):
    return MoEModel(small_model(request.param))


def random_batch(rows: int = 4, length: int = 12, vocabulary_size: int = 64, seed: int = 0):
    """Rows of different lengths, right-padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length - i % 3 for i in range(rows)]
    documents = [torch.randint(3, vocabulary_size, (n,), generator=generator).tolist() for n in lengths]
    return collate([Row(str(i), ids, ids) for i, ids in enumerate(documents)], pad_id=0)


@pytest.fixture
def batch():
    return random_batch()


@pytest.fixture
def chromium():
    """A page of the system's Chromium, and lists for what it asks for and what goes wrong; skips, and so is reported as
    not run, where there is none and none may be installed."""
    browsers = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, browsers)) and os.environ.get("GRIPMOE_TEST_BROWSER") == "1" and os.geteuid() == 0:
        apt = ["apt-get", "-o", "DPkg::Lock::Timeout=600", "-qq"]  # SLURM may be being installed
        subprocess.run([*apt, "update"], check=False)
        subprocess.run([*apt, "install", "-y", "--no-install-recommends", "chromium"], check=False)
    executable = next(filter(None, map(shutil.which, browsers)), None)
    if not executable:
        pytest.skip("not run: no Chromium; as root, with GRIPMOE_TEST_BROWSER=1, this installs one")
    api = pytest.importorskip("playwright.sync_api", reason="not run: envs/test.lock is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1400, "height": 900}), [], []
        browser.close()


def clone(folder, config, split, rows, **others):
    """A data set repository as `git clone` leaves it: a card that maps configurations to files; `others` are rows of
    further splits."""
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for name, kept in {split: rows, **others}.items():
        write_jsonl(folder / f"{config}.{name}.jsonl", kept)
        card += f"  - split: {name}\n    path: {config}.{name}.jsonl\n"
    (folder / "README.md").write_text(f"{card}---\n")
    return str(folder)
