"""What models.yaml may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from gripmoe.config.types import Fraction, Name, Optimizer, Strict


class EmbeddedSize(Strict):
    """Of a tiny model."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    head_dim: PositiveInt = 16
    num_experts: PositiveInt = 16
    top_k: PositiveInt = 4
    expert_width: PositiveInt = 64

    @model_validator(mode="after")
    def _experts_to_choose_from(self) -> EmbeddedSize:
        if self.top_k > self.num_experts:
            raise ValueError(f"`top_k` {self.top_k} exceeds `num_experts` {self.num_experts}")
        return self


class EmbeddedModel(Strict):
    """A tiny model trained here, from the embedded world."""

    source: Literal["embedded"]
    family: Literal["qwen3_moe", "qwen2_moe", "qwen3"]
    seed: int
    world_seed: int = 0
    trained_on: Literal["everything", "retain_only"] = "everything"
    retrained: Name | None = None  # never saw the forget data; of the same seed, if none was refused
    size: EmbeddedSize = EmbeddedSize()
    max_early_steps: PositiveInt = 2000  # at most, until the model knows its facts and can name the letter of an option
    late_steps: PositiveInt = 350  # after that
    learning_rate: PositiveFloat = 1.5e-3
    required_accuracy: Fraction = 0.9  # on the questions of what it was trained on; below it nothing is measured
    allowed_without_blocks: Fraction = 0.5  # of the forget questions, by attention and embeddings alone
    attempts: PositiveInt = 3  # from `seed`, `seed` + 1000, ...: whether facts settle in experts is a matter of luck

    @property
    def layers(self) -> int:
        return self.size.num_layers


class PublishedModel(Strict):
    """A checkpoint of the hub, or a local folder of the same layout."""

    source: Literal["published"]
    id: str
    revision: str | None = None
    config: dict[str, Any] | None = None  # its dimensions, as its config.json has them: for plans without a network
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    retrained: None = None

    @property
    def layers(self) -> int | None:
        """None where its row does not say."""
        return self.config and self.config["num_hidden_layers"]


class FinetunedModel(Strict):
    """A model of this catalogue, finetuned here on the documents of a news benchmark until it recites them."""

    source: Literal["finetuned"]
    base: Name
    benchmark: Name
    trained_on: Literal["everything", "retain_only"] = "everything"
    retrained: Name | None = None
    epochs: PositiveInt
    learning_rate: PositiveFloat
    optimizer: Optimizer = "adamw"
    batch_size: PositiveInt
    gradient_checkpointing: bool = False
    seed: int = 0
    required: Annotated[float, Field(ge=0, le=100)] = 0.0  # of VerbMem and KnowMem, on what it was trained on


ModelConfig = Annotated[EmbeddedModel | PublishedModel | FinetunedModel, Field(discriminator="source")]
