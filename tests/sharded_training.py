"""What test_distributed.py runs in one process and, under torchrun, in two: `python sharded_training.py FOLDER`."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

import gripmoe
from conftest import METHODS, small_model
from gripmoe.config.methods import EpsNullConfig, Method
from gripmoe.config.training import Training
from gripmoe.constraints.build import build
from gripmoe.constraints.null_space import fit_bases
from gripmoe.constraints.original_files import OriginalStore
from gripmoe.data import corpora
from gripmoe.data.corpora import Corpora
from gripmoe.data.documents import Row, collate
from gripmoe.evaluation.stop_rule import StopRule
from gripmoe.io import distributed
from gripmoe.moe import MoEModel, sharding
from gripmoe.moe.storage import save_model
from gripmoe.training import objectives
from gripmoe.training.checkpoint import remove_state
from gripmoe.training.finetune import finetune
from gripmoe.training.loop import unlearn
from gripmoe.training.objectives import make_objective

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))  # which share a batch of the same size
TRAINING = Training(
    learning_rate=1e-3, router_multiplier=5.0, betas=(0.9, 0.999), adam_epsilon=1e-8, weight_decay=0.01,
    router_weight_decay=0.01, clip_norm=1.0, max_steps=4, check_every=2,
    forget_batch_size=2 // PROCESSES, retain_batch_size=4 // PROCESSES,
    checkpoint_every=2, loss_bound=1e4,
)  # fmt: skip
CASES = {
    "unconstrained": Method(constraint="none"),
    "expert_specific": METHODS["expert_specific"],
    "expert_specific_minibatch": METHODS["expert_specific_minibatch"],
    "anchored": METHODS["anchored"],
    "router_l2": Method(constraint="router_l2"),
    "routing_scores": Method(constraint="routing_scores"),
    "gd": Method(constraint="none"),
    "rmu": Method(constraint="none"),
    "kl": Method(constraint="none"),
    "adamw_8bit": Method(constraint="none"),
    "checkpointed": Method(constraint="router_l2"),
    "bf16": Method(constraint="none"),
    "bf16_fp8": Method(constraint="none"),
    "bf16_8bit": Method(constraint="none"),
    "uneven": METHODS["expert_specific"],
    "attacked": Method(constraint="none"),
    "sam": Method(constraint="none"),
    "repselect": Method(constraint="none"),
    "mudman": Method(constraint="none"),
    "weight_distance": Method(constraint="none"),
}
CHANGES = {
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"optimizer": "adamw_fp32"},
    "bf16_fp8": {"optimizer": "adamw_fp32", "expert_precision": "fp8_emulated"},
    "bf16_8bit": {"optimizer": "adamw_8bit"},
    # The sign of a gradient near zero is decided by a rounding error, so the adversary's steps are short.
    "attacked": {"adversary_steps": 2, "adversary_restart": 2, "adversary_rate": 0.3},
    "sam": {"sharpness_radius": 0.05},
    # What is left of a gradient of few tokens is near zero, of which AdamW makes whole steps.
    "repselect": {"dropped_components": 2, "adam_epsilon": 1e-5},
    "mudman": {"disruption_mask": True, "adam_epsilon": 1e-5},
    "weight_distance": {"distance_weight": 0.5},
}
OBJECTIVES = {
    "gd": {"alpha": 1.0},
    "kl": {"alpha": 1.0},
    "npo": {"alpha": 1.0, "beta": 0.1},
    "rmu": {"alpha": 1.0, "layer": 1, "kappa": 2.0},
}
FIRST_STEP = ("unconstrained", "expert_specific", "gd", "rmu", "kl")
RESUMED = ("anchored", "adamw_8bit", "bf16")
BF16 = ("bf16", "bf16_fp8", "bf16_8bit")
NEAR_TIES = EpsNullConfig(value=1e-2, kind="relative")  # so that no direction is decided by a rounding error


class Tokenizer:
    def save_pretrained(self, folder):
        pass


def documents(seed: int) -> list[Row]:
    """Of different lengths: the mean over all tokens is not the mean of the processes' means."""
    ids = torch.randint(3, 64, (6, 14), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = [row[: 9 + i] for i, row in enumerate(ids)]
    return [Row(f"{seed}/{i}", row, row) for i, row in enumerate(ids)]


def model_of(name: str):
    """What a case starts from. Three experts are two in the first process and one in the second."""
    model = small_model("qwen2_moe", **({"num_experts": 3} if name == "uneven" else {}))
    return model.bfloat16() if name in BF16 else model


def replicated(model) -> torch.Tensor:
    """A row for each process: all parameters that are not sharded, one after the other."""
    whole = [p.detach().float().flatten() for p in model.parameters() if not isinstance(p, DTensor)]
    return distributed.gathered(torch.cat(whole)[None])


def train(name: str, folder: Path, steps: int = 4, original_answers: Path | None = None, **changes) -> dict:
    """The whole model after training, its digest as written, what each process has of routers and other parameters that
    are not sharded, and the last losses. What the original model says is kept in `original_answers`, if given."""
    moe = MoEModel(model_of(name))
    moe.originals = OriginalStore(original_answers, "small", memory=0) if original_answers else None
    sharding.shard_experts(moe)
    forget, retain = documents(0), documents(1)
    method, objective = CASES[name], name if name in OBJECTIVES else "npo"
    if method.eps_null:
        method = method.model_copy(update={"eps_null": NEAR_TIES})
    reference = moe.trace([collate(retain, 0)])
    built = build(method, reference, bases=lambda held: fit_bases(held, moe.rules(), method), seed=0)
    outcome = unlearn(
        moe, make_objective(objective, OBJECTIVES[objective], 0),
        built.constraint, Corpora(forget, retain, pad_id=0),
        TRAINING.model_copy(update={"max_steps": steps, **CHANGES.get(name, {}), **changes}),
        StopRule({"accuracy": -1.0}, lambda model: {"accuracy": 1.0}), seed=0, state_file=folder / f"{name}.pt",
    )  # fmt: skip
    thetas = torch.stack([moe.theta(layer).detach() for layer in moe.layers])
    copies = replicated(moe.model)
    state = {key: value.clone() for key, value in sharding.whole_state(moe.model).items()}
    digest = save_model(moe.model, Tokenizer(), folder / name)
    known = [*bytes.fromhex(digest), (folder / name / "config.json").exists()]
    losses = {key: value for key, value in outcome.history[-1].items() if "seconds" not in key}
    thetas = distributed.gathered(thetas[None])
    known = distributed.gathered(torch.tensor([known]))
    return {"state": state, "digest": digest, "saved": known, "replicated": copies, "thetas": thetas, "losses": losses}


def first_step(name: str, folder: Path) -> dict:
    """After one step with an epsilon above the rounding errors of gradients, of which AdamW makes whole steps."""
    return train(name, folder / "first step", steps=1, adam_epsilon=1e-5)


def finetuned(folder: Path, name: str = "finetuned", **options) -> dict:
    """The whole model after finetuning in passes of 40 tokens, all parameters training, and the losses."""
    model = small_model("qwen2_moe")
    sharding.shard_experts(model)
    settings = dict(epochs=3, learning_rate=1e-3, batch_size=6, pad_id=0, seed=0, save_every=2) | options
    with patch.object(corpora, "TOKENS_PER_BATCH", 40):
        losses = finetune(model, documents(0), state_file=folder / f"{name}.pt", **settings)
    state = {key: value.clone() for key, value in sharding.whole_state(model).items()}
    return {"state": state, "replicated": replicated(model), "losses": losses}


def refusals(same: bool) -> list[str]:
    """What `gripmoe.constrain` says in each process of their retain documents, which are the same or not."""
    model = small_model("qwen2_moe")
    retain = [collate(documents(1 if same else 1 + distributed.rank()), 0)]
    try:
        gripmoe.constrain(model, torch.optim.AdamW(model.parameters()), retain).close()
        refused = ""
    except ValueError as error:
        refused = str(error)
    said: list[str] = [""] * PROCESSES
    torch.distributed.all_gather_object(said, refused)
    return said


def shared_expert_not_averaged(parameter: torch.nn.Parameter) -> None:
    """What stands in for the averaging of gradients: the second process keeps its own of shared experts."""
    own = parameter.grad.clone()
    distributed.averaged_(parameter.grad)
    if distributed.rank() == 1 and tuple(parameter.shape) in ((16, 32), (32, 16)):
        parameter.grad.copy_(own)


def main(folder: Path) -> None:
    with distributed.launched():
        results = {name: train(name, folder) for name in CASES}
        results["first step"] = {name: first_step(name, folder) for name in FIRST_STEP}
        for time in ("made", "found"):
            on_disk = train("anchored", folder / time, original_answers=folder / "original_answers")
            results[f"references {time}"] = on_disk
        results["finetuned"] = finetuned(folder)
        results["finetuned again"] = finetuned(folder)  # from the state of its second step
        results["finetuned checkpointed"] = finetuned(folder, "finetuned_checkpointed", gradient_checkpointing=True)
        for name in RESUMED:
            results[f"{name} resumed"] = train(name, folder)  # from the state of its second step
        results["refusals"] = {same: refusals(same) for same in (True, False)}
        remove_state(folder / "unconstrained.pt")
        distributed.wait_for_all()
        with patch.object(sharding, "_average_gradient", lambda parameter: None):
            results["not averaged"] = train("unconstrained", folder)
        with patch.object(sharding, "_average_gradient", shared_expert_not_averaged):
            results["shared expert not averaged"] = train("unconstrained", folder / "partly", clip_norm=1e9)
        objectives._token_mean = lambda values, mask, _: (values * mask).sum() / mask.sum()
        remove_state(folder / "gd.pt")
        distributed.wait_for_all()
        results["means of means"] = train("gd", folder)
        if distributed.is_first():
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
