"""The unlearning objectives (App. A.2): a forget loss plus `alpha` times a retain loss.

Losses are means over scored tokens unless said otherwise; padding never counts. An objective asks the original model
once, in `start`. Other code (wmdp: rmu/unlearn.py; open-unlearning: src/trainer; muse_bench: baselines/iterative.py)
differs:

- RMU in wmdp counts padding, takes an absolute c alone, and alternates between corpora with a vector, alpha and c each.
- RMU in open-unlearning averages over each document's scored tokens, then over documents, without prompts and first
  tokens; here all tokens of a batch count alike.
- KL in open-unlearning averages over all positions, padding too, in the model's dtype; here over scored tokens in fp32.
  KL in muse_bench takes logits for log-probabilities, and sums over positions.
- NPO in muse_bench averages over the logits of all positions. In open-unlearning it is as here.
- GD in open-unlearning is as here; in muse_bench the padding of texts from a JSON file is scored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from gripmoe.config.training import OBJECTIVES
from gripmoe.constraints.original import OriginalCache
from gripmoe.data.documents import IGNORED, Batch
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.imports import make_object
from gripmoe.moe import MoEModel
from gripmoe.moe.families import logits_of
from gripmoe.moe.states import final_hidden_states, hidden_states

Batches = Sequence[Batch]
TOKENS_PER_CHUNK = 1024  # of KL divergences
EPSILON = 1e-2  # of unlikelihood: log(1 - p) of a certain token is not finite
INTERFACE = ("alpha", "monitor", "last_layer", "start", "forget_loss", "retain_loss")  # of Objective


class Objective(Protocol):
    """`start` sees the original model and the documents that training will use. `monitor` holds numbers of the last
    step for the history; `last_layer` is the last layer that the losses look at, or None for the head."""

    alpha: float
    monitor: dict[str, float]
    last_layer: int | None

    def start(self, model: MoEModel, forget: Batches, retain: Batches) -> None: ...

    def forget_loss(self, model: MoEModel, batch: Batch) -> Tensor: ...

    def retain_loss(self, model: MoEModel, batch: Batch) -> Tensor: ...


class GradientDifference:
    """GD: ascend on forget tokens, descend on retain tokens."""

    last_layer = None

    def __init__(self, alpha: float):
        self.alpha = alpha
        self.monitor: dict[str, float] = {}

    def start(self, model, forget, retain) -> None:
        pass

    def forget_loss(self, model, batch) -> Tensor:
        return -cross_entropy(model, batch)

    def retain_loss(self, model, batch) -> Tensor:
        return cross_entropy(model, batch)


class OriginalPredictions:
    """What `model` predicts of the documents in `batches` before it trains: its final hidden states, and its head.
    `name` names them, as in `OriginalCache.fill`."""

    def __init__(self, model: MoEModel, batches: Batches, name: str):
        self._hidden = OriginalCache(model.originals)
        self._hidden.fill(batches, lambda batch: final_hidden_states(model, batch), name)
        head = model.model.lm_head
        self._head = copy.deepcopy(head).requires_grad_(False) if head.weight.requires_grad else head

    def divergence(self, model: MoEModel, batch: Batch) -> Tensor:
        """Mean over scored tokens of KL(original || current)."""
        scored = batch.labels[:, 1:] != IGNORED
        wanted_Td = self._hidden.of(**batch.inputs)[:, :-1][scored]
        hidden_Td = final_hidden_states(model, batch)[:, :-1][scored]

        def of_chunk(wanted_Cd: Tensor, hidden_Cd: Tensor) -> Tensor:
            wanted_CV = logits_of(model.model, wanted_Cd, self._head).log_softmax(dim=-1)
            current_CV = logits_of(model.model, hidden_Cd).log_softmax(dim=-1)
            return F.kl_div(current_CV, wanted_CV, log_target=True, reduction="none").sum(dim=-1)

        # In chunks, whose logits the backward pass computes again: memory does not grow with the batch.
        chunks = zip(wanted_Td.split(TOKENS_PER_CHUNK), hidden_Td.split(TOKENS_PER_CHUNK), strict=True)
        divergence_T = torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])
        return _token_mean(divergence_T, torch.ones_like(divergence_T), batch.scored_per_pass)


class KullbackLeibler(GradientDifference):
    """KL: ascend on forget tokens, and KL(original || current) of the predictions of retain tokens."""

    def start(self, model, forget, retain) -> None:
        self._original = OriginalPredictions(model, retain, "KL original")

    def retain_loss(self, model, batch) -> Tensor:
        return self._original.divergence(model, batch)


class Unlikelihood(GradientDifference):
    """Unlikelihood (Welleck et al. 2020): -log(1 + EPSILON - p) of each scored forget token, and cross-entropy on
    retain tokens. The gradient is that of ascent times p / (1 + EPSILON - p): it ends where a token has become
    unlikely."""

    def forget_loss(self, model, batch) -> Tensor:
        logprobs, scored = token_logprobs(model, batch), batch.labels[:, 1:] != IGNORED
        return _token_mean(-torch.log1p(EPSILON - logprobs.exp()), scored, batch.scored_per_pass)


class NegativePreference(GradientDifference):
    """NPO (App. A.2): 2/beta softplus(beta (log pi - log pi_ref)) with log-probabilities summed over a document's
    scored tokens, and cross-entropy on retain tokens.

    The gradient is that of ascent times 2 sigmoid(beta (log pi - log pi_ref)), the weight that `monitor` keeps: it dies
    on documents that are long or already unlikely.
    """

    def __init__(self, alpha: float, beta: float):
        super().__init__(alpha)
        self.beta = beta

    @torch.no_grad()
    def start(self, model, forget, retain) -> None:
        self._original: dict[str, Tensor] = {}  # by row id
        for batch in tqdm(forget, desc="NPO original", leave=False):
            self._original.update(zip(batch.row_ids, sequence_logprobs(model, batch), strict=True))

    def forget_loss(self, model, batch) -> Tensor:
        original = torch.stack([self._original[row] for row in batch.row_ids])
        ratio = self.beta * (sequence_logprobs(model, batch) - original)
        self.monitor["npo_weight"] = 2 * ratio.detach().sigmoid().mean().item()
        return 2 / self.beta * F.softplus(ratio).mean()


class RepresentationMisdirection:
    """RMU: move one layer's hidden states of forget tokens to a fixed random vector, keep those of retain tokens.

    The vector's direction is drawn uniformly from [0, 1)^d as in the official code. Squares are averaged over d and all
    tokens but padding. The vector's length is c (`steering`), or `kappa` times the mean length of the layer's hidden
    states of retain tokens, since a fixed c means something else in every model. Layers above `layer` get no gradient.
    """

    def __init__(
        self, *, layer: int, alpha: float, seed: int, kappa: float | None = None, steering: float | None = None
    ):
        if (kappa is None) == (steering is None):
            raise ConfigError("rmu: give one of `kappa` (relative) and `steering` (the absolute c)")
        self.layer = self.last_layer = layer
        self.alpha, self.seed = alpha, seed
        self.kappa, self.steering = kappa, steering
        self.monitor: dict[str, float] = {}

    def start(self, model, forget, retain) -> None:
        if self.layer >= (number := len(model.model.model.layers)):
            raise ConfigError(f"rmu: `layer` {self.layer}: the model has layers 0 to {number - 1}")
        self._hidden = OriginalCache(model.originals)
        name = f"RMU original {self.layer}"
        with model.only_layers(self.layer + 1):
            self._hidden.fill(retain, lambda batch: hidden_states(model, self.layer, batch), name)
        length = self.steering
        if length is None:
            norms = [self._hidden.of(**batch.inputs).norm(dim=-1)[batch.attention_mask.bool()] for batch in retain]
            length = self.kappa * torch.cat(norms).mean().item()
        direction_d = torch.rand(model.hidden_size, generator=torch.Generator().manual_seed(self.seed))
        self.target_d = length * direction_d / direction_d.norm()
        self.monitor["steering"] = length

    def forget_loss(self, model, batch) -> Tensor:
        hidden = hidden_states(model, self.layer, batch)
        distances = (hidden - self.target_d.to(hidden)).square().mean(dim=-1)
        return _token_mean(distances, batch.attention_mask, batch.tokens_per_pass)

    def retain_loss(self, model, batch) -> Tensor:
        moved = hidden_states(model, self.layer, batch) - self._hidden.of(**batch.inputs)
        return _token_mean(moved.square().mean(dim=-1), batch.attention_mask, batch.tokens_per_pass)


def make_objective(name: str, settings: dict, seed: int) -> Objective:
    """The objective of a run, by its name or as "module:Class", from its own hyperparameters and, if the class takes
    one, the seed. Raises ConfigError for an unknown name, class or setting, and for a class that is no objective."""
    if name not in OBJECTIVES and ":" not in name:
        raise ConfigError(f"unknown objective {name!r}; one of {', '.join(OBJECTIVES)}, or module:Class")
    objective = make_object(
        OBJECTIVES[name].path if name in OBJECTIVES else name, settings, seed, f"objective {name!r}"
    )
    if lacking := [each for each in INTERFACE if not hasattr(objective, each)]:
        raise ConfigError(
            f"objective {name!r} has no {', '.join(map(repr, lacking))}; derive its class from "
            "gripmoe.training.objectives:GradientDifference, which has them"
        )
    return objective


def token_logprobs(model: MoEModel, batch: Batch) -> Tensor:
    """Log-probability of each next token, (rows, positions - 1), 0 where it is not scored."""
    wanted = batch.labels[:, 1:]
    scored = wanted != IGNORED
    hidden_Td = final_hidden_states(model, batch)[:, :-1][scored]  # most documents are prompts, which need no logits
    losses_T = F.cross_entropy(logits_of(model.model, hidden_Td), wanted[scored], reduction="none")
    return losses_T.new_zeros(wanted.shape).masked_scatter(scored, -losses_T)


def sequence_logprobs(model: MoEModel, batch: Batch) -> Tensor:
    """Summed log-probability of each document's scored tokens, (rows,)."""
    return token_logprobs(model, batch).sum(dim=1)


def cross_entropy(model: MoEModel, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the scored tokens."""
    return _token_mean(-token_logprobs(model, batch), batch.labels[:, 1:] != IGNORED, batch.scored_per_pass)


def _token_mean(values: Tensor, mask: Tensor, per_pass: float | None) -> Tensor:
    """The sum of the values that `mask` counts, divided by `per_pass`, the mean number of such tokens in a pass.
    Averaged gradients are then those of a mean over all tokens of the step. Without `per_pass` the divisor is the mean
    number over processes."""
    count = distributed.averaged_(mask.sum().float()) if per_pass is None else per_pass
    return (values * mask).sum() / count
