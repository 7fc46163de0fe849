"""What a step is said to take, beside what the process takes that really makes it: of a model of the embedded kind,
large enough for its step to stand out of what else a process holds."""

import json
import subprocess
import sys

import pytest

from gripmoe.planning.fake import measure

CONFIG = dict(
    model_type="qwen3_moe", vocab_size=1024, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, head_dim=64, intermediate_size=512, moe_intermediate_size=512, num_experts=32,
    num_experts_per_tok=4,
)  # fmt: skip
TRAINING = dict(
    learning_rate=1e-4, router_multiplier=1.0, betas=(0.9, 0.999), adam_epsilon=1e-8, optimizer="adamw",
    weight_decay=0.0, router_weight_decay=0.0, clip_norm=1.0, forget_batch_size=2, retain_batch_size=2, max_steps=1,
    check_every=1, checkpoint_every=1, loss_bound=1e9, objective={"alpha": 1.0},
)  # fmt: skip
STEP = """
import json, resource, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from gripmoe.moe import MoEModel
from gripmoe.planning.fake import STEPS
from gripmoe.training import steps

def step(**changes):
    config = AutoConfig.for_model(**{**workload["model"]["config"], **changes})
    STEPS["unlearn"](MoEModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)), workload, dict)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
steps.TIMED_PAIRS = 0
workload = json.loads(sys.argv[1])
before = step(num_hidden_layers=1, num_experts=4)  # with what is loaded on the way
print(step() - before)
"""


@pytest.mark.parametrize(("method", "checkpointing"), [("none", False), ("none", True), ("anchor", False)])
def test_a_step_takes_what_is_said(method, checkpointing, benchmark):
    rows = 32 if checkpointing else 2  # activations that stay would show
    workload = {
        "model": {"id": "nobody/nothing", "revision": None, "config": CONFIG, "dtype": "bfloat16"},
        "layers": 4,
        "processes": 1,
        "what": "unlearn",
        "rows": [rows, rows],
        "length": 128,
        "traced": 1,
        "objective": "gd",
        "method": {"constraint": method},
        "training": {
            **TRAINING,
            "gradient_checkpointing": checkpointing,
            "forget_batch_size": rows,
            "retain_batch_size": rows,
        },
    }
    found = measure(workload)
    said = max(found["passes"], found["update"])
    command = [sys.executable, "-c", STEP, json.dumps(workload)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    taken = int(result.stdout.split()[-1])
    benchmark.extra_info["said over taken"] = said / taken
    benchmark.pedantic(lambda: None)
    step = f"{method}, {rows} rows"
    print(f"\n{step}: {said / 1e6:.0f} MB said, {taken / 1e6:.0f} MB taken, {said / taken:.2f} of it")
    assert 0.8 < said / taken < 1.25
