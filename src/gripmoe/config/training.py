"""Hyperparameters of unlearning runs and of the relearning attack."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, create_model, model_validator

from gripmoe.config.reading import Mistake
from gripmoe.config.types import BelowOne, CodePath, Names, NonNegative, Optimizer, Strict

Precision = Literal["native", "fp8", "fp8_emulated"]  # fp8: on Hopper GPUs; emulated: anywhere, slowly
LinearPrecision = Literal["native", "te_fp8"]  # te_fp8: by TransformerEngine, on Ada or Hopper GPUs


class RetainWeight(Strict):
    """Settings of GD and KL: the weight of the retain loss."""

    alpha: NonNegative  # of the retain loss, beside 1 of the forget loss


class PreferenceSettings(RetainWeight):
    """Settings of NPO."""

    beta: PositiveFloat  # inverse temperature


class RepresentationSettings(RetainWeight):
    """Settings of RMU: the layer, and the length of the target, relative to retain states or absolute."""

    layer: Annotated[int, Field(ge=0)]  # whose hidden states are steered
    kappa: PositiveFloat | None = None  # length of the target, as a multiple of the mean norm of retain states
    steering: PositiveFloat | None = None  # length of the target, RMU's c

    @model_validator(mode="after")
    def _one_length(self) -> RepresentationSettings:
        if (self.kappa is None) == (self.steering is None):
            raise ValueError("give one of `kappa` (relative) and `steering` (the absolute c)")
        return self


class ObjectiveEntry(NamedTuple):
    """Where the class of an objective is, "module:Class", and what a world may set of it."""

    path: str
    settings: type[Strict]


OBJECTIVES = {
    "gd": ObjectiveEntry("gripmoe.training.objectives:GradientDifference", RetainWeight),
    "kl": ObjectiveEntry("gripmoe.training.objectives:KullbackLeibler", RetainWeight),
    "npo": ObjectiveEntry("gripmoe.training.objectives:NegativePreference", PreferenceSettings),
    "rmu": ObjectiveEntry("gripmoe.training.objectives:RepresentationMisdirection", RepresentationSettings),
    "unlikelihood": ObjectiveEntry("gripmoe.training.objectives:Unlikelihood", RetainWeight),
}


class OwnObjective(Strict):
    """A row of a configuration folder's objectives.yaml: a class on PYTHONPATH, and the names of its settings, numbers
    that a world gives and the class checks. One of them is `alpha`, the weight of the retain loss."""

    path: Annotated[CodePath, Field(alias="class")]
    settings: Names  # arguments of the class

    @model_validator(mode="after")
    def _free_names(self) -> OwnObjective:
        for name in self.settings:
            if hasattr(Strict, name):
                raise Mistake("settings", f"pydantic has {name!r} for itself; give the argument another name")
        return self

    def registered(self) -> ObjectiveEntry:
        fields: dict[str, Any] = dict.fromkeys(self.settings, (int | float, ...))
        return ObjectiveEntry(self.path, create_model("Settings", __base__=Strict, **fields))


class Training(Strict):
    """Every hyperparameter of an unlearning run; provenance of each value stands beside it in the world file."""

    learning_rate: PositiveFloat  # constant over the run
    router_multiplier: NonNegative  # learning rate of the routers, as a multiple
    betas: tuple[BelowOne, BelowOne]  # of AdamW; [0, 0] makes it step by the sign of each gradient
    adam_epsilon: PositiveFloat  # of AdamW
    optimizer: Optimizer = "adamw"  # for bf16 weights: adamw_8bit (stochastic rounding) or adamw_fp32
    weight_decay: NonNegative  # of all parameters but the routers
    router_weight_decay: NonNegative
    clip_norm: PositiveFloat  # the norm above which gradients are scaled down
    forget_batch_size: PositiveInt  # of each process, in each pass
    retain_batch_size: PositiveInt  # likewise
    gradient_accumulation: PositiveInt = 1  # passes of a step
    max_steps: PositiveInt  # a multiple of `check_every`
    check_every: PositiveInt  # steps between checks of the stop rule
    checks_to_stop: PositiveInt = 1  # in a row, that meet the forget target
    # Steps, a multiple of `check_every`. Absent in run.yaml, because it changes no result: `--checkpoint-every`.
    checkpoint_every: Annotated[PositiveInt | None, Field(exclude_if=lambda steps: steps is None)] = None
    gradient_checkpointing: bool = False  # activations are computed again in the backward pass, for large models
    expert_precision: Precision = "native"  # of the experts' products in training steps; the paper: fp8
    linear_precision: LinearPrecision = "native"  # of nn.Linear layers in training steps; the paper: te_fp8
    loss_bound: PositiveFloat  # a retain loss that is higher, or not finite, ends the run as diverged
    trained_layers: PositiveInt | None = None  # train only the last n MoE blocks that the losses reach; all if absent
    objective: dict[str, int | float] = {}  # settings of the objective, such as `alpha`
    alpha_multiplier: PositiveFloat = 1.0  # of the objective's retain weight
    adversary_steps: Annotated[int, Field(ge=0)] = 0  # of relearning, before each forget pass; 0: no adversary
    adversary_rate: PositiveFloat = 1.0  # by which multiple of the learning rate a step of the adversary moves a weight
    adversary_restart: PositiveInt = 10  # steps after which the adversary starts from the model again
    sharpness_radius: NonNegative = 0.0  # SAM's rho: how far up the forget loss its gradient is taken; 0: not moved
    disruption_mask: bool = False  # MUDMAN: a forget gradient counts only where the retain gradient has its sign
    dropped_components: Annotated[int, Field(ge=0)] = 0  # RepSelect: principal components that gradients lose
    distance_weight: NonNegative = 0.0  # of a reward for the relative distance from the original weights
    average_decay: BelowOne = 0.0  # of a moving average of the weights, which is checked and saved; 0: no average

    @model_validator(mode="after")
    def _checkpoints_at_checks(self) -> Training:
        saved = self.checkpoint_every or 0
        if saved % self.check_every:
            raise ValueError("`checkpoint_every` must be a multiple of `check_every`")
        if self.adversary_steps and saved % self.adversary_restart:
            raise ValueError("`checkpoint_every` must be a multiple of `adversary_restart`: resumed runs restart there")
        if self.adversary_steps and self.sharpness_radius:
            raise ValueError(
                "give one of `adversary_steps` and `sharpness_radius`: both say where the gradient is taken"
            )
        if self.disruption_mask and self.objective.get("alpha") == 0:
            raise ValueError("`disruption_mask` drops the whole forget gradient without a retain loss: raise `alpha`")
        if self.max_steps % self.check_every:
            raise ValueError("`max_steps` must be a multiple of `check_every`: the last steps are to be checked too")
        return self


class Finetuning(Strict):
    """Settings of finetuning."""

    learning_rate: PositiveFloat
    optimizer: Optimizer = "adamw"
    batch_size: PositiveInt = 16
    gradient_checkpointing: bool = False


class Relearning(Finetuning):
    """Finetuning as an attack, of all parameters or of a part."""

    steps: Annotated[list[PositiveInt], Field(min_length=1)] = [5, 10, 20]  # after which the questions are asked
