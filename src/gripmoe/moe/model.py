"""Record what routers do, force them to do otherwise, and restrict which experts may change.

Hooks live inside context managers only. Where layers lie on several devices, what is recorded comes to that of the
model, and what is forced goes to the layer's.

Shapes: T tokens of a forward pass in row-major order (rows x positions), d hidden size, E experts, k experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gripmoe.data.documents import Batch, as_batch
from gripmoe.geometry.routing import LayerRouting, RoutingTrace, SelectionRule
from gripmoe.io.errors import ConfigError
from gripmoe.moe.families import DENSE, family_of, router_class
from gripmoe.moe.fp32 import compute_in_fp32, release
from gripmoe.moe.placement import devices_of, place
from gripmoe.moe.recording import RoutingRecorder, hooked, in_recomputation, routed_tokens

# By layer: top_k_Tk for every token of one forward pass, or a pair of it and weights_Tk to use with it.
Routes = dict[int, Tensor | tuple[Tensor, Tensor]]


class MoEModel:
    """A transformers causal language model of a known MoE family.

    `layers` are the decoder layers that have a router; a dense model, which serves as a baseline, has none. Routers
    compute in fp32 whatever the model's dtype: in bf16 most router coordinates never move at a usual learning rate, and
    near ties blur every measure of routing.
    """

    def __init__(self, model: nn.Module):
        from torch.distributed.tensor import DTensor  # which imports sympy: a second

        self.model = model
        self.family = family_of(model)
        self.originals = None  # a `OriginalStore`, where what this model says of documents shall be kept
        self._blocks: dict[int, nn.Module] = {}
        self._routers: dict[int, nn.Module] = {}
        self._converted: list[nn.Module] = []
        if self.family is DENSE:
            self._blocks = {number: layer.mlp for number, layer in enumerate(model.model.layers)}
            self.num_experts, self.top_k, self.hidden_size = 0, 0, model.config.hidden_size
            return
        target = router_class(model)
        for number, layer in enumerate(model.model.layers):
            for block in layer.children():
                for router in block.children():
                    if isinstance(router, target):
                        self._blocks[number], self._routers[number] = block, router
        if not self._routers:
            raise ConfigError(f"{type(model).__name__}: no decoder layer has a {target.__name__} in a block of its own")
        first = next(iter(self._routers.values()))
        if isinstance(first.weight, DTensor) or first.weight.dim() != 2:
            raise ValueError(
                f"the routers of this {type(model).__name__} are sharded, and a constraint is on whole ones: shard it "
                "by gripmoe.shard_experts, which leaves them whole"
            )
        self._converted = [router for router in self._routers.values() if compute_in_fp32(router)]
        self.num_experts, self.hidden_size = first.weight.shape
        self.top_k: int = first.top_k

    def release(self, *, rounded: bool = False) -> None:
        """Takes the hooks off the routers that were in fp32 before this object was made; what was of lower precision
        stays in fp32, with its hooks, or is `rounded` to what it was. What an earlier `MoEModel` of the same model has
        changed stays."""
        for router in self._converted:
            release(router, rounded=rounded)

    @contextmanager
    def rounded_routers(self) -> Iterator[None]:
        """Within the block routers have the precision of the model, as when plain transformers has reloaded it."""
        exact = {router: copy.deepcopy(router.state_dict()) for router in self._routers.values()}
        for router in exact:
            release(router, rounded=True)
        try:
            yield
        finally:
            for router, state in exact.items():
                compute_in_fp32(router)
                router.load_state_dict(state)

    @property
    def layers(self) -> list[int]:
        return list(self._routers)

    @property
    def all_layers(self) -> list[int]:
        """`layers`, or of a dense model every layer."""
        return list(self._blocks)

    def block(self, layer: int) -> nn.Module:
        """The whole MoE block of a layer: router, experts, shared expert where there is one; of a dense model its
        feed-forward block."""
        return self._blocks[layer]

    def router(self, layer: int) -> nn.Module:
        return self._routers[layer]

    def rule(self, layer: int) -> SelectionRule:
        """How this router turns scores into sets."""
        return self.family.rule(self._routers[layer])

    def rules(self) -> dict[int, SelectionRule]:
        return {layer: self.rule(layer) for layer in self.layers}

    def theta(self, layer: int) -> nn.Parameter:
        """Router weight of a layer, (E, d), fp32."""
        return self.router(layer).weight

    def freeze_router_biases(self) -> list[nn.Parameter]:
        """What a router has besides its weight (GPT-OSS adds a bias to its logits) stays as it is from now on. Returns
        what this has frozen."""
        biases = [p for r in self._routers.values() for p in r.parameters() if p is not r.weight and p.requires_grad]
        for parameter in biases:
            parameter.requires_grad_(False)
        return biases

    def thetas(self) -> dict[int, Tensor]:
        """A detached copy of every router weight, on the model's device."""
        return {layer: self.theta(layer).detach().to(self.model.device, copy=True) for layer in self.layers}

    @torch.no_grad()
    def set_thetas(self, thetas: Mapping[int, Tensor]) -> None:
        for layer, theta_Ed in thetas.items():
            self.theta(layer).copy_(theta_Ed)

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        """The fused expert tensors of a layer, each with the experts along dimension 0."""
        return list(self._blocks[layer].experts.parameters())

    @torch.no_grad()
    def expert_output(self, layer: int, expert: int, x_Nd: Tensor) -> Tensor:
        """What one expert by itself makes of its layer's router inputs, whoever is selected, (N, d), fp32."""
        experts = self._blocks[layer].experts
        x_Nd = x_Nd.to(next(experts.parameters()))
        chosen_N1 = torch.full((len(x_Nd), 1), expert, device=x_Nd.device)
        return experts(x_Nd, chosen_N1, torch.ones_like(chosen_N1, dtype=x_Nd.dtype)).float()

    @contextmanager
    def record_routing(self) -> Iterator[RoutingRecorder]:
        """Within the block every forward pass is recorded, with its graph: detach what you keep."""
        recorder = RoutingRecorder()

        def hook_for(layer: int):
            def hook(router, args, output):
                if not in_recomputation():
                    x_Td = args[0].reshape(-1, self.hidden_size)
                    recorder._add(layer, LayerRouting(x_Td, output[0], output[2]).to(self.model.device))

            return hook

        with hooked((self.router(layer), hook_for(layer)) for layer in self.layers):
            yield recorder

    @contextmanager
    def before_routers(self, function: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
        """Within the block `function(layer, x_Td)` sees the inputs of every router before the router does, layer by
        layer in one forward pass. What it changes in the router's weight takes effect at once; a router that it
        returns, (E, d), stands in for the weight in this pass alone. The weight is then not written, so that passes
        whose backward pass is still to come keep what they were made with."""
        weights: dict[int, nn.Parameter] = {}

        def enter(layer: int, router: nn.Module, args) -> None:
            x_Td = args[0].detach().reshape(-1, self.hidden_size).to(self.model.device, torch.float32)
            theta_Ed = function(layer, x_Td)
            if theta_Ed is not None:
                weights.setdefault(layer, router.weight)
                router._parameters["weight"] = theta_Ed.to(router.weight)

        def leave(layer: int, router: nn.Module, args, output) -> None:
            if layer in weights:
                router._parameters["weight"] = weights.pop(layer)

        handles = []
        for layer, router in self._routers.items():
            handles.append(router.register_forward_pre_hook(partial(enter, layer)))
            handles.append(router.register_forward_hook(partial(leave, layer), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in list(weights):  # of a pass that was interrupted
                leave(layer, self._routers[layer], (), None)

    @torch.no_grad()
    def trace(
        self,
        batches: Iterable[Batch | Mapping[str, Tensor]],
        skip_positions: int = 1,
        device: torch.device | str | None = None,
    ) -> RoutingTrace:
        """The routing of all batches, with padding and the first `skip_positions` positions (BOS, attention sink) left
        out. A batch is a `Batch`, or a mapping with input_ids and, if rows are padded, attention_mask. Runs in eval
        mode and restores the mode. What is recorded goes to `device`, or stays on the model's. Raises ValueError if
        there are no batches, or one is no batch."""
        parts = [
            {layer: routing.to(device) for layer, routing in seen.items()} if device else seen
            for seen in self.traced(batches, skip_positions)
        ]
        return {layer: LayerRouting.joined([part.pop(layer) for part in parts]) for layer in self.layers}

    @torch.no_grad()
    def traced(
        self, batches: Iterable[Batch | Mapping[str, Tensor]], skip_positions: int = 1
    ) -> Iterator[dict[int, LayerRouting]]:
        """The same batch by batch."""
        nothing = True
        with self.evaluating(), self.record_routing() as recorder:
            for batch in batches:
                nothing = False
                inputs = as_batch(batch, self.model.device).inputs
                self.model.model(**inputs)
                yield recorder.take(routed_tokens(inputs["attention_mask"], skip_positions))
        if nothing:
            raise ValueError("nothing to trace: no batches were given")

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the block the model is in eval mode; then each of its modules in the mode it was in."""
        return evaluating(self.model)

    @contextmanager
    def brought_beside(self, other: MoEModel) -> Iterator[None]:
        """Within the block every layer is where that of `other` is; then where it was."""
        home = devices_of(self.model)
        place(self.model, devices_of(other.model))
        try:
            yield
        finally:
            place(self.model, home)

    @contextmanager
    def force_routing(self, routes: Routes | Callable[..., Routes | None]) -> Iterator[None]:
        """Within the block every router selects the given experts instead of its own, weighted as its family weighs
        (for most: softmax over all experts, gathered, renormalised) or with the weights given. Forcing a model's own
        sets changes no bit.

        `routes` is a trace's top_k by layer for the tokens of each forward pass, or a function that yields it from the
        pass's input_ids and attention_mask (rows, positions; None where none was given), or None for a pass that
        is left alone. Raises ValueError if the number of tokens does not match or a function is asked about a pass
        without input_ids, and RuntimeError where gradient checkpointing asks for the routes of a pass that was not the
        last one.
        """
        current: Routes | None = None if callable(routes) else routes
        asking = False  # a model forced to its own sets is asked for them unforced
        passes, recomputed = 0, False  # with a graph, since the backward pass before

        def read_inputs(module, args, kwargs):
            nonlocal current, asking, passes, recomputed
            if not asking:
                passes = (0 if recomputed else passes) + torch.is_grad_enabled()
                recomputed = False
                input_ids = args[0] if args else kwargs.get("input_ids")
                if input_ids is None:
                    raise ValueError("forced routing finds the routes of a pass by its tokens: give `input_ids`")
                asking = True
                try:
                    current = routes(input_ids, kwargs.get("attention_mask"))
                finally:
                    asking = False

        def hook_for(layer: int):
            def hook(router, args, output):
                nonlocal recomputed
                if in_recomputation():
                    recomputed = True
                    if passes > 1:
                        raise RuntimeError("forced routing with gradient checkpointing: one backward pass per forward")
                if asking or current is None:
                    return None
                scores_TE, route = output[0], current[layer]
                top_k_Tk, weights_Tk = route if isinstance(route, tuple) else (route, None)
                if len(scores_TE) != len(top_k_Tk):
                    raise ValueError(f"layer {layer}: routes for {len(top_k_Tk)} tokens, the pass has {len(scores_TE)}")
                top_k_Tk = top_k_Tk.to(scores_TE.device)
                if weights_Tk is None:
                    weights_Tk = self.family.weigh(router, scores_TE, top_k_Tk)
                return scores_TE, weights_Tk.to(output[1]), top_k_Tk

            return hook

        reader = self.model.model.register_forward_pre_hook(read_inputs, with_kwargs=True) if callable(routes) else None
        try:
            with hooked((self.router(layer), hook_for(layer)) for layer in self.layers):
                yield
        finally:
            if reader:
                reader.remove()

    @contextmanager
    def only_layers(self, count: int) -> Iterator[None]:
        """Within the block a forward pass ends after the first `count` decoder layers (and the last norm): all that a
        loss on an earlier hidden state needs."""
        decoder = self.model.model
        layers = decoder.layers
        decoder.layers = layers[:count]
        try:
            yield
        finally:
            decoder.layers = layers

    @contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Within the block every MoE block adds nothing: what attention and embeddings know by themselves."""

        def hook(block, args, output):
            return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

        with hooked((self.block(layer), hook) for layer in self.layers):
            yield

    @torch.no_grad()
    def routes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The sets this model itself selects on `input_ids`, every position included: what `force_routing` takes."""
        with self.record_routing() as recorder:
            self.model.model(input_ids=input_ids, attention_mask=attention_mask)
            return {layer: routing.top_k_Nk for layer, routing in recorder.take().items()}

    def weighted_routes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The same sets with the weights that this model gives them."""
        with torch.no_grad(), self.record_routing() as recorder:
            self.model.model(input_ids=input_ids, attention_mask=attention_mask)
            trace = recorder.take()
        return {
            layer: (r.top_k_Nk, self.family.weigh(self.router(layer), r.scores_NE, r.top_k_Nk))
            for layer, r in trace.items()
        }

    @contextmanager
    def record_hidden(self, layer: int) -> Iterator[list[Tensor]]:
        """Within the block the output of decoder layer `layer`, (rows, positions, d), is appended at every pass."""
        outputs: list[Tensor] = []

        def hook(module, args, output):
            if not in_recomputation():
                outputs.append((output[0] if isinstance(output, tuple) else output).to(self.model.device))

        with hooked([(self.model.model.layers[layer], hook)]):
            yield outputs

    @contextmanager
    def restrict_experts(self, scope: Mapping[int, Iterable[int]], optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within the block only the experts of `scope` (by layer) change: the gradients of all others are zeroed, and
        what weight decay or momentum does to them is undone after each step."""
        masks: list[tuple[nn.Parameter, Tensor]] = []
        for layer in self.layers:
            for parameter in self.expert_parameters(layer):
                if parameter.requires_grad:
                    chosen = torch.zeros(self.num_experts, dtype=torch.bool, device=parameter.device)
                    chosen[list(scope.get(layer, ()))] = True
                    masks.append((parameter, chosen.view(-1, *[1] * (parameter.ndim - 1))))
        before: list[Tensor] = []

        def snapshot(*_):
            before[:] = [parameter.detach().clone() for parameter, _ in masks]

        @torch.no_grad()
        def restore(*_):
            for (parameter, chosen), old in zip(masks, before, strict=True):
                parameter.copy_(torch.where(chosen, parameter, old))

        handles = [p.register_hook(lambda grad, m=m: grad * m) for p, m in masks]
        handles += [optimizer.register_step_pre_hook(snapshot), optimizer.register_step_post_hook(restore)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block a model is in eval mode; then each of its modules in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, below what accelerate, data parallelism or PEFT wrap around it."""
    inner = getattr(model, "module", None)
    if isinstance(inner, nn.Module):
        return unwrapped(inner)
    return model.get_base_model() if hasattr(model, "get_base_model") else model
