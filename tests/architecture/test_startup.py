"""What a command imports before its first line; what only some of its paths need is imported there."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gripmoe.cli.main import COMMANDS
from gripmoe.io.imports import EXTRAS

ROOT = Path(__file__).parents[2]

HEAVY = (
    "accelerate",
    "datasets",
    "lm_eval",
    "matplotlib",
    "pandas",
    "rouge_score",
    "scipy",
    "sklearn",
    "sympy",  # which torch.distributed.tensor imports
    "torch",
    "torch._dynamo",
    "torchao",
    "transformers",
    "transformers.modeling_utils",  # what every model is built on; imports scipy, sympy and torchao
)
MODELS = {"torch", "transformers"}  # whose classes are imported when one of them is named
TABLES = {"pandas"}
MAY_IMPORT = {
    "attack": MODELS,
    "audit": MODELS,
    "collect": TABLES,
    "edit_weights": MODELS,
    "evaluate": MODELS,
    "finetune_model": MODELS,
    "fit_basis": {"torch"},
    "import_checkpoint": MODELS,
    "manifest": TABLES,
    "prepare_model": MODELS,
    "realign": MODELS,
    "rewrite": MODELS,
    "trace_routing": MODELS,
    "unlearn": MODELS,
    "verify": TABLES,
}


def heavy_after(code: str) -> set[str]:
    """Which of HEAVY a fresh interpreter holds when it has run `code`."""
    told = f"{code}; import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("allowed", [set(), {"torch"}, MODELS, TABLES], ids=lambda allowed: "+".join(sorted(allowed)))
def test_a_command_imports_late_what_one_path_needs(allowed):
    """All commands that may import the same, in one interpreter."""
    commands = [name.replace("-", "_") for names in COMMANDS.values() for name in names]
    alike = [command for command in commands if MAY_IMPORT.get(command, set()) == allowed]
    assert alike and heavy_after("; ".join(f"import gripmoe.cli.{command}" for command in alike)) <= allowed


def test_importing_the_package_imports_nothing_heavy():
    assert heavy_after("import gripmoe") == set()


def test_a_heavy_import_would_be_seen():
    assert heavy_after("from scipy import stats; import sklearn, torch") >= {"scipy", "sklearn", "torch"}
    assert all(importlib.util.find_spec(name) for name in HEAVY)


LEFT_OUT = ("datasets", "lm_eval", "matplotlib", "pandas", "peft", "rouge_score", "scipy", "sklearn", "trl")
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Absent(PathFinder):
    @classmethod
    def find_spec(cls, name, *where):
        return None if name.partition(".")[0] in {LEFT_OUT} else super().find_spec(name, *where)

sys.meta_path = [Absent if finder is PathFinder else finder for finder in sys.meta_path]
"""
ONE_STEP = """
import importlib, torch, gripmoe
for name in gripmoe.__all__:
    getattr(gripmoe, name)
from gripmoe.worlds.models import make_model
model = make_model("qwen3_moe", vocabulary_size=64, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
batch = {"input_ids": torch.randint(3, 64, (4, 16))}
before = model.lm_head.weight.detach().clone()
with gripmoe.constrain(model, optimizer, [batch]):
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
assert not torch.equal(before, model.lm_head.weight)
from transformers import Trainer, TrainingArguments
gripmoe.trainer_callback([batch])
"""


def run_without(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)


def test_the_library_needs_no_extra():
    """All public names, and a constrained step; the control: what has been left out cannot be imported."""
    result = run_without(ONE_STEP)
    assert result.returncode == 0, result.stderr
    tried = [
        f"""
try:
    import {name}
except ModuleNotFoundError as error:
    print(error.name)
"""
        for name in LEFT_OUT
    ]
    assert run_without("".join(tried)).stdout.split() == list(LEFT_OUT)


@pytest.mark.parametrize("arguments, module, extra", [(["collect", "--help"], "pandas", "report")])
def test_a_command_names_the_extra_that_it_lacks(arguments, module, extra):
    result = run_without(f"from gripmoe.cli.main import main; sys.exit(main({arguments}))")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"needs {module}, which is not installed: pip install 'gripmoe[{extra}]'" in result.stderr


def test_an_audit_in_python_names_the_extra_that_it_lacks_before_it_begins():
    result = run_without("import gripmoe; gripmoe.audit('no model', 'none either', forget='wmdp_tiny')")
    assert "ModuleNotFoundError: needs datasets, which is not installed: pip install 'gripmoe[eval]'" in result.stderr


def test_extras_are_those_of_the_package():
    """Errors name the extras of pyproject.toml, and the lock files pin them all; what two pin would differ one day."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {extra: set(map(distribution, listed)) for extra, listed in project["optional-dependencies"].items()}
    modules = {"lm-eval": "lm_eval", "rouge-score": "rouge_score", "scikit-learn": "sklearn", "pillow": "PIL"}
    assert EXTRAS == {extra: {modules.get(name, name) for name in names[extra]} for extra in EXTRAS}
    library = set(map(distribution, project["dependencies"]))
    assert not library & (names["eval"] | names["report"])
    locked = {distribution(line) for line in (ROOT / "envs" / "requirements.lock").read_text().splitlines() if line}
    everything = library.union(*(names[extra] for extra in ("eval", "report", "workflow", "dev")))
    assert everything - {"gripmoe", "torch"} <= locked, "the Makefile installs torch by itself"
    for extra in ("docs", "gpu"):
        lines = (ROOT / "envs" / f"{extra}.lock").read_text().splitlines()
        pinned = {distribution(line) for line in lines if not line.startswith("#")}
        assert names[extra] - {"gripmoe"} <= pinned and not pinned & locked


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=,;]", requirement)[0].lower().replace("_", "-")
