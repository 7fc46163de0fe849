"""Tiny random models of the published families: two mixtures of experts and a dense twin of the same active width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gripmoe.config.models import EmbeddedSize
from gripmoe.io.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_FAMILIES = ("qwen3_moe", "qwen2_moe", "qwen3")
# With wide heads and small experts, attention and embeddings learn every fact, and the model loses nothing without its
# blocks. Published models have the opposite proportions: nearly all parameters are experts.
FEED_FORWARD_GAIN = 2.0  # scales the initial weights before the nonlinearity of experts and MLPs


def make_model(family: str, vocabulary_size: int, *, seed: int, **widths: int) -> PreTrainedModel:
    """A random fp32 model of a family in TINY_FAMILIES, with `widths` as in `EmbeddedSize`.

    `qwen2_moe` has a shared expert and does not renormalise its routing weights, like the published Qwen1.5-MoE.
    `qwen3` is dense, and as wide as all experts together that one token uses.
    """
    # The imports take two seconds, and only this function needs them.
    from transformers import (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    size = EmbeddedSize(**widths)
    shared = dict(
        vocab_size=vocabulary_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        head_dim=size.head_dim,
    )
    experts = dict(
        num_experts=size.num_experts, num_experts_per_tok=size.top_k, moe_intermediate_size=size.expert_width
    )
    torch.manual_seed(seed)
    if family == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts, norm_topk_prob=True, intermediate_size=64))
    elif family == "qwen2_moe":
        inner = dict(intermediate_size=64, shared_expert_intermediate_size=size.expert_width)
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**shared, **experts, **inner, norm_topk_prob=False))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shared, intermediate_size=size.top_k * size.expert_width))
    else:
        raise ConfigError(f"unknown tiny family {family!r}; one of {', '.join(TINY_FAMILIES)}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "gate_proj.weight", "up_proj.weight")):
                parameter.mul_(FEED_FORWARD_GAIN)
    return model
