"""What models.yaml may say."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gripmoe.config.reading import Mistake
from gripmoe.config.types import Fraction, Name, Optimizer, Strict


class EmbeddedSize(Strict):
    """The dimensions of a tiny model."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    head_dim: PositiveInt = 16
    num_experts: PositiveInt = 16
    top_k: PositiveInt = 2
    expert_width: PositiveInt = 64

    @model_validator(mode="after")
    def _experts_to_choose_from(self) -> EmbeddedSize:
        if self.top_k > self.num_experts:
            raise ValueError(f"`top_k` {self.top_k} exceeds `num_experts` {self.num_experts}")
        return self


class EmbeddedModel(Strict):
    """A tiny model trained here from the embedded world: on skills, or, from one that has them, on facts and news."""

    source: Literal["embedded"]
    family: Literal["qwen3_moe", "qwen2_moe", "qwen3"]
    seed: int  # of weights and order
    world_seed: int = 0  # of the facts and names that are invented
    trained_on: Literal["skills", "everything", "retain_only"] = "everything"  # the last is the retrained model
    base: Name | None = None  # trained on skills; facts and news are put into its experts and routers
    retrained: Name | None = None  # of the same base, and never saw the forget data
    shipped: Name | None = None  # a model of the package, trained by this row: it is copied instead of trained
    size: EmbeddedSize = EmbeddedSize()
    max_skill_steps: PositiveInt = 2500  # at most
    last_skill_steps: PositiveInt = 200  # after the model answers letter questions; the learning rate falls within them
    fact_steps: PositiveInt = 700  # on facts and news
    forget_experts: NonNegativeInt = 0  # of each layer, that alone learn forget documents (gradient routing)
    learning_rate: PositiveFloat = 1.5e-3  # of AdamW; Muon's is ten times as high
    required_accuracy: Fraction = 0.93  # in every format, of what it was trained on; below it nothing is measured
    allowed_without_experts: Fraction = 0.35  # of the questions, when experts add nothing or are drawn at random
    allowed_load: Annotated[float, Field(ge=1)] = 3.0  # of an expert, as a multiple or a fraction of its layer's mean
    attempts: PositiveInt = 2  # from `seed`, `seed` + 1000

    @model_validator(mode="after")
    def _facts_need_skills(self) -> EmbeddedModel:
        if (self.base is None) != (self.trained_on == "skills"):
            raise ValueError("`base` names a model with `trained_on: skills`, and only such a model has none")
        return self

    @model_validator(mode="after")
    def _settings_of_the_package(self) -> EmbeddedModel:
        named = {"source", "family", "seed", "trained_on", "base", "retrained", "shipped"}
        fields = type(self).model_fields
        changed = sorted(key for key in fields.keys() - named if getattr(self, key) != fields[key].default)
        if self.shipped and changed:
            raise Mistake(changed[0], "without effect on a model of the package; leave `shipped` out to train another")
        return self

    @model_validator(mode="after")
    def _experts_for_both_sides(self) -> EmbeddedModel:
        if self.forget_experts:
            if self.trained_on != "everything" or self.family != "qwen3_moe":  # a shared expert would learn both
                raise ValueError("`forget_experts` needs `family: qwen3_moe` and `trained_on: everything`")
            others = self.size.num_experts - self.forget_experts
            if min(self.forget_experts, others) < self.size.top_k:
                raise ValueError(
                    f"`forget_experts` is {self.forget_experts} of {self.size.num_experts}: a token selects "
                    f"{self.size.top_k} experts, so give both sides at least as many"
                )
        return self

    @property
    def made_from(self) -> str | None:
        """The model that has to be there first."""
        return None if self.shipped else self.base

    @property
    def layers(self) -> int:
        return self.size.num_layers


class PublishedModel(Strict):
    """A checkpoint of the hub, or a local folder of the same layout."""

    source: Literal["published"]
    id: str  # of the hub, or a folder
    revision: str | None = None  # a commit of the hub
    config: dict[str, Any] | None = None  # its dimensions, as its config.json has them: for plans without a network
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    retrained: ClassVar[None] = None
    made_from: ClassVar[None] = None

    @model_validator(mode="after")
    def _number_of_layers(self) -> PublishedModel:
        if not isinstance(self.layers, int | None):
            raise Mistake("config.num_hidden_layers", f"give a whole number (got {self.layers!r})")
        return self

    @property
    def layers(self) -> int | None:
        """None where its row does not say."""
        return self.config.get("num_hidden_layers") if self.config else None


class FinetunedModel(Strict):
    """A model of this catalogue, finetuned here on the documents of a news benchmark until it recites them."""

    source: Literal["finetuned"]
    base: Name  # a row of models.yaml
    benchmark: Name  # a row of benchmarks.yaml, of news
    trained_on: Literal["everything", "retain_only"] = "everything"
    trains: Literal["everything", "blocks"] = "everything"  # blocks: experts and routers
    retrained: Name | None = None
    epochs: PositiveInt
    learning_rate: PositiveFloat
    optimizer: Optimizer = "adamw"
    batch_size: PositiveInt
    gradient_checkpointing: bool = False
    seed: int = 0
    required: Annotated[float, Field(ge=0, le=100)] = 0.0  # of VerbMem and KnowMem, on what it was trained on
    attempts: PositiveInt = 1  # to reach it, from `seed`, `seed` + 1000

    @property
    def made_from(self) -> str:
        return self.base


ModelConfig = Annotated[EmbeddedModel | PublishedModel | FinetunedModel, Field(discriminator="source")]
