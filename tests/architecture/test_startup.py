"""What a command imports before its first line; what only some of its paths need is imported there."""

import importlib.util
import subprocess
import sys

import pytest

from gripmoe.cli.main import COMMANDS

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
    "collect": TABLES,
    "evaluate": MODELS,
    "finetune_model": MODELS,
    "fit_basis": {"torch"},
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


@pytest.mark.parametrize("command", [name.replace("-", "_") for names in COMMANDS.values() for name in names])
def test_a_command_imports_late_what_one_path_needs(command):
    assert heavy_after(f"import gripmoe.cli.{command}") <= MAY_IMPORT.get(command, set())


def test_importing_the_package_imports_nothing_heavy():
    assert heavy_after("import gripmoe") == set()


def test_a_heavy_import_would_be_seen():
    assert heavy_after("from scipy import stats; import sklearn, torch") >= {"scipy", "sklearn", "torch"}
    assert all(importlib.util.find_spec(name) for name in HEAVY)
