"""Every mixture of experts of the installed transformers: which work, and why others are refused.

`architectures.json` holds the answer for each class. Where a new version of transformers has other classes, the test
prints what is to be added: a row of `gripmoe.moe.families`, or the reason.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from gripmoe.moe import MoEModel
from gripmoe.moe.families import DENSE, FAMILIES

PINNED = json.loads(Path(__file__).with_name("architectures.json").read_text())
EXPERTS = re.compile(r"(num|n|moe_num|num_local|num_moe|n_routed|num_routed)_experts")
LANGUAGE_MODEL = re.compile(r"For(CausalLM|ConditionalGeneration)$")
FIELDS = {  # of classes whose default configuration has no experts or builds no model
    "DbrxForCausalLM": dict(attn_config={"rope_theta": 1e4}),
    "Dots1ForCausalLM": dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1),
    "Gemma4ForCausalLM": dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64),
    "HunYuanMoEV1ForCausalLM": dict(head_dim=128),
    "Lfm2MoeForCausalLM": dict(layer_types=["full_attention"] * 4, num_hidden_layers=4),
    "Qwen4ExpForCausalLM": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=16, indexer_compress_ratio=4
    ),
}


def expert_fields(config, depth=0) -> bool:
    own = {*vars(config), *getattr(config, "attribute_map", {})}
    if any(EXPERTS.fullmatch(name) and getattr(config, name, None) for name in own):
        return True
    parts = [value for value in vars(config).values() if hasattr(value, "model_type")]
    return depth < 3 and any(expert_fields(part, depth + 1) for part in parts)


def answer(cls) -> str | None:
    """ "works" or what is missing; None for a class without experts."""
    try:
        config = cls.config_class(**FIELDS.get(cls.__name__, {}))
        if not expert_fields(config):
            return None
        with torch.device("meta"):
            model = cls(config)
    except Exception as error:
        return f"its default configuration builds no model: {type(error).__name__}"
    try:
        moe = MoEModel(model)
        moe.rules()
        return "works" if moe.layers else None
    except ValueError as error:
        return re.search("missing: (.*); write: ", str(error))[1]


def walk() -> dict[str, str]:
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "xpert" in file.read_text(encoding="utf-8"):
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            for name, cls in inspect.getmembers(module, inspect.isclass):
                own = cls.__module__ == module.__name__ and issubclass(cls, PreTrainedModel)
                if own and LANGUAGE_MODEL.search(name) and (said := answer(cls)):
                    found[name] = said
    return found


def test_every_mixture_of_experts_of_transformers_works_or_is_refused_for_the_known_reason():
    found = walk()
    changed = {name: said for name, said in found.items() if PINNED.get(name) != said}
    gone = sorted(PINNED.keys() - found.keys())
    told = json.dumps(changed, indent=2)
    assert not changed and not gone, f"transformers {transformers.__version__}: new or changed {told}; gone {gone}"
    rows = [row for row in FAMILIES.values() if row is not DENSE and not row.checked]
    assert sum(said == "works" for said in found.values()) == len(rows), "a row without a class"


if __name__ == "__main__":
    Path(__file__).with_name("architectures.json").write_text(json.dumps(walk(), indent=2) + "\n")
