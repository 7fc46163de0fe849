"""Updates of experts outside the span of their retain inputs, as MoEEdit has it for edits: Method A's Stage 1, applied
to experts in the place of routers.

N tokens, d inputs and m outputs of a matrix, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gripmoe.config.methods import EpsNullConfig
from gripmoe.constraints.null_space import eps_by_layer
from gripmoe.data.documents import Batch
from gripmoe.geometry.nullspace import RetainBasis, RetainStatistics
from gripmoe.geometry.routing import selection_mask
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.modes import freeze


@dataclass(frozen=True)
class _Held:
    """A matrix of all experts of a layer, (E, m, d) or, `transposed`, (E, d, m), its first values, and the basis of its
    inputs."""

    weight: nn.Parameter
    original: Tensor
    basis: RetainBasis
    transposed: bool

    def project(self) -> None:
        moved_Emd = (self.weight - self.original).to(self.basis.columns_Edr)
        moved_Emd = moved_Emd.transpose(1, 2) if self.transposed else moved_Emd
        kept_Emd = self.basis.remainder(self.basis.remainder(moved_Emd))  # twice: a basis is orthonormal up to rounding
        kept_Emd = kept_Emd.transpose(1, 2) if self.transposed else kept_Emd
        self.weight.copy_(self.original + kept_Emd.to(self.original))


class ExpertNullSpace:
    """Keeps what each expert of the original model computes of the retain tokens that it serves: both of its matrices
    move outside the span of their inputs there, up to directions that `eps_null` counts as none.

    The fit holds an fp64 factor for each matrix of all layers at once, and training a basis and a copy of each: this is
    for models whose experts fit in memory several times.

    Raises ConfigError for several processes, for a dense model, for experts of another layout than transformers', and
    for experts in lower precision than fp32.
    """

    def __init__(self, model: MoEModel, retain: Iterable[Batch], eps_null: EpsNullConfig):
        if distributed.processes() > 1:
            raise ConfigError("`experts: null_space` reads whole experts, which processes share: start one process")
        modules = {layer: model.block(layer).experts for layer in model.layers}
        if not modules or not all(hasattr(module, "is_transposed") for module in modules.values()):
            raise ConfigError(f"`experts: null_space` needs fused experts, and {type(model.model).__name__} has none")
        if any(p.dtype != torch.float32 for layer in model.layers for p in model.expert_parameters(layer)):
            raise ConfigError(
                "`experts: null_space` needs weights in fp32: in lower precision the projection is rounded away"
            )
        self._matrices: list[_Held] = []
        statistics = {layer: _Statistics(module, model.num_experts) for layer, module in modules.items()}
        for trace in model.traced(retain):
            for layer, seen in trace.items():
                x_Nl = model.expert_inputs(layer, seen.x_Nd)
                statistics[layer].update(x_Nl, selection_mask(seen.top_k_Nk, model.num_experts))
        for layer, eps in eps_by_layer(eps_null, model.layers).items():
            for weight, of_inputs in statistics[layer].matrices():
                bases = [each.basis(eps).columns_Edr.float() for each in of_inputs]
                width = max(basis.shape[-1] for basis in bases)
                basis = torch.cat([F.pad(basis, (0, width - basis.shape[-1])) for basis in bases])
                original = weight.detach().clone()
                self._matrices.append(_Held(weight, original, RetainBasis(basis), modules[layer].is_transposed))

    def freeze_others(self, parameters: Iterable[nn.Parameter]) -> None:
        """Freezes those of `parameters` that are not held: biases and shared experts, which have other inputs."""
        held = {id(matrix.weight) for matrix in self._matrices}
        freeze(parameter for parameter in parameters if id(parameter) not in held)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept beside the model."""
        return sum(matrix.original.nbytes + matrix.basis.columns_Edr.nbytes for matrix in self._matrices)

    @torch.no_grad()
    def project(self) -> None:
        """After a step of an optimizer: what was moved since the start is projected."""
        for matrix in self._matrices:
            matrix.project()


class _Statistics:
    """The inputs of both matrices of the experts of a layer: tokens, and what an expert makes of them in between."""

    def __init__(self, module: nn.Module, num_experts: int):
        self._module = module
        self._first = module.gate_up_proj if module.has_gate else module.up_proj
        widths = [w.shape[1 if module.is_transposed else 2] for w in (self._first, module.down_proj)]
        self._tokens = RetainStatistics(num_experts, widths[0])
        self._between = [RetainStatistics(1, widths[1]) for _ in range(num_experts)]

    @torch.no_grad()
    def update(self, x_Nd: Tensor, selected_NE: Tensor) -> None:
        self._tokens.update(x_Nd, selected_NE)
        for expert, statistics in enumerate(self._between):
            h_Nm = self._in_between(expert, x_Nd[selected_NE[:, expert]])
            statistics.update(h_Nm, torch.ones(len(h_Nm), 1, dtype=torch.bool, device=h_Nm.device))

    def matrices(self) -> list[tuple[nn.Parameter, list[RetainStatistics]]]:
        return [(self._first, [self._tokens]), (self._module.down_proj, self._between)]

    def _in_between(self, expert: int, x_Nd: Tensor) -> Tensor:
        module, weight = self._module, self._first[expert]
        y_Nm = x_Nd.to(weight) @ (weight if module.is_transposed else weight.T)
        if module.has_bias:
            y_Nm = y_Nm + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
        return (module._apply_gate(y_Nm) if module.has_gate else module.act_fn(y_Nm)).float()
