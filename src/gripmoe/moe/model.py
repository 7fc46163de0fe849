"""A model seen as routers and experts: record what routers select, and force it.

Routers compute in fp32 by hooks (fp32.py) until `release`. The hooks that record and force exist only inside their
context managers. If layers are on several devices, recorded tensors move to the device of the
model, and forced ones to the device of the layer.

Shapes: T tokens of a forward pass in row-major order (rows x positions), N of them that count, d hidden size, E experts
of a layer, k experts per token.
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
from gripmoe.moe.adapters import below_adapters
from gripmoe.moe.families import DENSE, LOOPED, family_of, router_class, unfit
from gripmoe.moe.forcing import Forcing, Routes
from gripmoe.moe.fp32 import compute_in_fp32, release
from gripmoe.moe.modes import evaluating, freeze
from gripmoe.moe.placement import devices_of, place
from gripmoe.moe.recording import RoutingRecorder, counted_tokens, hooked, in_recomputation
from gripmoe.moe.unpadded import Padding, padding_of, unpadded_passes


class MoEModel:
    """A transformers causal language model of a known MoE family. Raises ValueError for any other model.

    `layers` are the decoder layers that have a router. A dense model, which serves as a baseline, has none. Routers
    compute in fp32 whatever the model's dtype: in bf16 most router weights do not change at a usual learning rate, and
    rounding decides between nearly equal scores.
    """

    def __init__(self, model: nn.Module):
        from torch.distributed.tensor import DTensor  # imports sympy, which takes a second

        self.model = model
        self.family = family_of(model)
        self.originals = None  # set by `gripmoe unlearn`: an `OriginalStore` for outputs of the original model, or None
        self._blocks: dict[int, nn.Module] = {}
        self._routers: dict[int, nn.Module] = {}
        self._outer: dict[int, nn.Module] = {}  # routers with the adapters around them
        self._converted: list[nn.Module] = []
        if self.family is DENSE:
            self._blocks = {number: layer.mlp for number, layer in enumerate(model.model.layers)}
            self.num_experts, self.top_k, self.hidden_size = 0, 0, model.config.hidden_size
            return
        target = router_class(model)
        for number, layer in enumerate(model.model.layers):
            for block in layer.children():
                for child in block.children():
                    router = below_adapters(child)
                    if isinstance(router, target):
                        self._blocks[number], self._routers[number], self._outer[number] = block, router, child
        if not self._routers:
            raise unfit(model, f"a {target.__name__} in a block of some decoder layer", "a configuration with experts")
        weight = next(iter(self._routers.values())).weight
        if isinstance(weight, DTensor) or weight.dim() != 2:
            raise ValueError(
                f"the routers of this {type(model).__name__} are sharded, and a constraint is on whole ones: shard it "
                "by gripmoe.shard_experts, which leaves them whole"
            )
        if len(counts := {len(router.weight) for router in self._routers.values()}) > 1:
            raise unfit(model, f"one number of experts; its layers have {sorted(counts)}", "a configuration with one")
        self._converted = [router for router in self._routers.values() if compute_in_fp32(router)]
        self.num_experts, self.hidden_size = weight.shape
        self.top_k: int = next(iter(self._routers.values())).top_k

    def release(self, *, to_own_dtype: bool = False) -> None:
        """Removes the fp32 hooks that this object has added to routers. Routers that were in lower precision before
        stay in fp32 with their hooks; `to_own_dtype` rounds them to their dtype."""
        for router in self._converted:
            release(router, to_own_dtype=to_own_dtype)

    @contextmanager
    def rounded_routers(self) -> Iterator[None]:
        """Within the block, routers have the model's precision, as after a reload by plain transformers."""
        exact = {router: copy.deepcopy(router.state_dict()) for router in self._routers.values()}
        for router in exact:
            release(router, to_own_dtype=True)
        try:
            yield
        finally:
            for router, state in exact.items():
                compute_in_fp32(router)
                router.load_state_dict(state)

    @property
    def layers(self) -> list[int]:
        return list(self._routers)

    def require_routers(self, purpose: str) -> None:
        """Raises ValueError for a dense model."""
        if not self.layers:
            raise ValueError(f"{type(self.model).__name__} is dense: it has no routers {purpose}")

    @property
    def all_layers(self) -> list[int]:
        """`layers`, or every layer of a dense model."""
        return list(self._blocks)

    def block(self, layer: int) -> nn.Module:
        """The MoE block of a layer (router, experts and shared expert), or the feed-forward block of a dense model."""
        return self._blocks[layer]

    def router(self, layer: int) -> nn.Module:
        return self._routers[layer]

    def outer_router(self, layer: int) -> nn.Module:
        """The router of a layer with the adapters around it."""
        return self._outer[layer]

    def router_parameters(self, layer: int | None = None) -> list[nn.Parameter]:
        """The parameters of a layer's router and of the adapters around it, or those of all layers."""
        layers = self.layers if layer is None else [layer]
        return [parameter for each in layers if each in self._outer for parameter in self._outer[each].parameters()]

    def feed_forward(self, layer: int) -> list[nn.Module]:
        """The block of a layer, and the shared experts that Granite has beside it."""
        beside = getattr(self.model.model.layers[layer], "shared_mlp", None)
        return [self.block(layer)] if beside is None else [self.block(layer), beside]

    def other_parameters(self, layer: int) -> list[nn.Parameter]:
        """The parameters of a layer's feed-forward part outside its router: of experts, shared ones too, or of a dense
        feed-forward block."""
        of_router = set(map(id, self.router_parameters(layer)))
        parameters = [parameter for module in self.feed_forward(layer) for parameter in module.parameters()]
        return [parameter for parameter in parameters if id(parameter) not in of_router]

    def rule(self, layer: int) -> SelectionRule:
        """How the router of a layer selects experts from scores."""
        return self.family.rule(self._routers[layer], self._blocks[layer])

    def rules(self) -> dict[int, SelectionRule]:
        return {layer: self.rule(layer) for layer in self.layers}

    def theta(self, layer: int) -> nn.Parameter:
        """Router weight of a layer, (E, d), fp32."""
        return self.router(layer).weight

    def freeze_router_biases(self) -> None:
        """Freezes all router parameters but the weight, such as GPT-OSS's logit bias or a PEFT adapter."""
        weights = {id(self.theta(layer)) for layer in self.layers}
        freeze(p for p in self.router_parameters() if id(p) not in weights)

    def thetas(self) -> dict[int, Tensor]:
        """A detached copy of every router weight, on the model's device."""
        return {layer: self.theta(layer).detach().to(self.model.device, copy=True) for layer in self.layers}

    @torch.no_grad()
    def set_thetas(self, thetas: Mapping[int, Tensor]) -> None:
        for layer, theta_Ed in thetas.items():
            self.theta(layer).copy_(theta_Ed)

    def router_biases(self) -> dict[int, dict[str, Tensor]]:
        """A detached copy of the routers' own parameters but the weights, by layer and name."""
        return {layer: {name: bias.detach().clone() for name, bias in self._biases(layer)} for layer in self.layers}

    @torch.no_grad()
    def set_router_biases(self, biases: Mapping[int, Mapping[str, Tensor]]) -> None:
        for layer, named in biases.items():
            for name, bias in self._biases(layer):
                bias.copy_(named[name])

    def _biases(self, layer: int) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.router(layer).named_parameters() if p is not self.theta(layer)]

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        """The fused expert tensors of a layer, experts along dimension 0."""
        return list(self._blocks[layer].experts.parameters())

    @torch.no_grad()
    def expert_output(self, layer: int, expert: int, x_Nd: Tensor) -> Tensor:
        """The output of one expert for any router inputs of its layer, selected or not, (N, d), fp32."""
        experts, to_d = self._blocks[layer].experts, self._latent(layer, "fc2_latent_proj")
        x_Nl = self.expert_inputs(layer, x_Nd)
        chosen_N1 = torch.full((len(x_Nl), 1), expert, device=x_Nl.device)
        return to_d(experts(x_Nl, chosen_N1, torch.ones_like(chosen_N1, dtype=x_Nl.dtype))).float()

    def expert_inputs(self, layer: int, x_Nd: Tensor) -> Tensor:
        """What experts get for router inputs of their layer, (N, l): the same, or a projection of Nemotron-H's block to
        l dimensions."""
        return self._latent(layer, "fc1_latent_proj")(x_Nd.to(next(self._blocks[layer].experts.parameters())))

    def _latent(self, layer: int, name: str) -> Callable[[Tensor], Tensor]:
        return getattr(self._blocks[layer], name, nn.Identity())

    def require_free(self) -> None:
        """Raises ValueError if an open handle holds the model, or `gripmoe.replay_experts` the selections of its
        routers."""
        if getattr(self.model, "_replaying", None) == id(self.model):  # a copy of a held model has another id
            raise ValueError("`gripmoe.replay_experts` replaces what routers select: leave its block first")
        if getattr(self.model, "_constrained", None) == id(self.model):
            raise ValueError(
                "another handle holds this model: `close()` it first, of a Trainer `callback.handle.close()`; if it is "
                "lost, load the model again"
            )

    def unpadded(self) -> AbstractContextManager[None]:
        """Within the block, passes compute nothing for padding, where the family allows that. The methods below still
        see and take the tokens of the padded batch, with zeros for padding. A hook of another kind sees no padding."""
        return unpadded_passes(self.model)

    @property
    def _padding(self) -> Padding | None:
        return padding_of(self.model)

    def _padded(self, tokens: Tensor) -> Tensor:
        return self._padding.added(tokens) if self._padding else tokens

    @contextmanager
    def record_routing(self) -> Iterator[RoutingRecorder]:
        """Within the block, the routing of every forward pass is recorded with its graph: detach what you keep."""
        recorder = RoutingRecorder()

        def record(layer: int, router, args, output):
            if not in_recomputation():
                routing = LayerRouting(args[0].reshape(-1, self.hidden_size), output[0], output[2])
                recorder._add(layer, routing.to(self.model.device), self._padding)

        with hooked(r.register_forward_hook(partial(record, layer)) for layer, r in self._routers.items()):
            yield recorder

    def before_routers(self, function: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Within the block, `function(layer, x_Td)` is called with the inputs of every router before the router runs. A
        change of the router's weight takes effect at once."""

        def enter(layer: int, router: nn.Module, args) -> None:
            x_Td = args[0].detach().reshape(-1, self.hidden_size).to(self.model.device, torch.float32)
            function(layer, self._padded(x_Td))

        return hooked(r.register_forward_pre_hook(partial(enter, layer)) for layer, r in self._routers.items())

    def trace(self, batches: Iterable[Batch | Mapping[str, Tensor]]) -> RoutingTrace:
        """The routing of all batches in eval mode, without padding and without the first position of each row (BOS, an
        attention sink). A batch is a `Batch`, or a mapping with `input_ids` and, if rows are padded, `attention_mask`.
        Raises ValueError without batches, or for anything else."""
        parts = list(self.traced(batches))
        return {layer: LayerRouting.joined([part.pop(layer) for part in parts]) for layer in self.layers}

    @torch.no_grad()
    def traced(self, batches: Iterable[Batch | Mapping[str, Tensor]]) -> Iterator[dict[int, LayerRouting]]:
        """Like `trace`, but yields the routing of one batch after the other."""
        nothing = True
        with self.evaluating(), self.record_routing() as recorder:
            for batch in batches:
                nothing = False
                inputs = as_batch(batch, self.model.device).inputs
                self.model.model(**inputs)
                if any(count > 1 for count in recorder.passes().values()):
                    raise unfit(self.model, *LOOPED)
                trace = recorder.take(counted_tokens(inputs["attention_mask"]))
                if self.family.checked:
                    self._check(trace)
                yield trace
        if nothing:
            raise ValueError("nothing to trace: no batches were given")

    def _check(self, trace: RoutingTrace) -> None:
        for layer, seen in trace.items():
            selected = self.rule(layer).select(seen.scores_NE)
            if not torch.equal(selected.sort().values, seen.top_k_Nk.sort().values):
                raise unfit(self.model, f"a rule that selects what the router of layer {layer} has selected")

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.model)

    @contextmanager
    def brought_beside(self, other: MoEModel) -> Iterator[None]:
        """Within the block, every layer is on the device of the same layer of `other`."""
        home = devices_of(self.model)
        try:
            place(self.model, devices_of(other.model))
            yield
        finally:
            place(self.model, home)

    @contextmanager
    def force_routing(self, routes: Routes | Callable[..., Routes | None]) -> Iterator[list]:
        """Within the block, every router selects the given experts instead of its own, with the given weights or those
        of its family. A token with a negative expert keeps its own experts. Forcing a model's own sets changes no bit.

        `routes` are the experts of a forward pass by layer; or a function that returns them for `input_ids` and
        `attention_mask` (rows, positions; or None) of the pass, or None to leave the pass alone. Gradient checkpointing
        recomputes each pass under its own routes. For this, the yielded list keeps all passes; a loop of many steps
        under a function clears the list after each step. Raises ValueError if the number of tokens differs, or if a
        function is given and the pass has no `input_ids`.
        """
        forcing = Forcing(None, routes) if callable(routes) else Forcing(routes, None)

        # A copy of the model that is made within the block has copies of these hooks, and is left alone.
        def begin(decoder, *given):
            if decoder is self.model.model:
                forcing.begin_pass(*given)

        def force(layer: int, router, args, output):
            if router is not self._routers[layer]:
                return None
            scores_TE, own_weights_Tk, own_Tk = output
            if (forced := forcing.of_layer(layer, own_Tk, self._padding)) is None:
                return None
            top_k_Tk, weights_Tk = forced
            keeps_T1 = (top_k_Tk < 0).any(dim=1, keepdim=True)
            top_k_Tk = torch.where(keeps_T1, own_Tk, top_k_Tk)
            if weights_Tk is None:
                weights_Tk = self.family.weigh(router, scores_TE, top_k_Tk)
            return scores_TE, torch.where(keeps_T1, own_weights_Tk, weights_Tk.to(own_weights_Tk)), top_k_Tk

        def handles():
            if callable(routes):
                yield self.model.model.register_forward_pre_hook(begin, with_kwargs=True)
            for layer, router in self._routers.items():
                yield router.register_forward_hook(partial(force, layer))

        with hooked(handles()):
            yield forcing.passes

    @contextmanager
    def only_layers(self, count: int) -> Iterator[None]:
        """Within the block, a forward pass runs only the first `count` decoder layers and the final norm. A loss on an
        earlier hidden state needs no more."""
        decoder = self.model.model
        layers = decoder.layers
        decoder.layers = layers[:count]
        try:
            yield
        finally:
            decoder.layers = layers

    @contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Within the block, experts output zero, shared ones too: what attention and embeddings know alone."""

        def zeros(block, args, output):
            return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

        modules = [module for layer in self.layers for module in self.feed_forward(layer)]
        with hooked(module.register_forward_hook(zeros) for module in modules):
            yield

    @torch.no_grad()
    def _routing(self, input_ids: Tensor, attention_mask: Tensor | None) -> RoutingTrace:
        with self.record_routing() as recorder:
            self.model.model(input_ids=input_ids, attention_mask=attention_mask)
            return recorder.take()

    def routes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The sets that this model selects at every position, in the form that `force_routing` takes."""
        return {layer: r.top_k_Nk for layer, r in self._routing(input_ids, attention_mask).items()}

    def weighted_routes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Routes:
        """The sets of `routes`, with the weights that this model gives them."""
        return {
            layer: (r.top_k_Nk, self.family.weigh(self.router(layer), r.scores_NE, r.top_k_Nk))
            for layer, r in self._routing(input_ids, attention_mask).items()
        }

    @contextmanager
    def record_hidden(self, layer: int) -> Iterator[list[Tensor]]:
        """Within the block, every pass appends the output of decoder layer `layer`, (rows, positions, d), to the
        yielded list."""
        outputs: list[Tensor] = []

        def record(module, args, output):
            if not in_recomputation():
                hidden = output[0] if isinstance(output, tuple) else output
                if self._padding:
                    hidden = self._padding.added(hidden[0]).unflatten(0, self._padding.shape)
                outputs.append(hidden.to(self.model.device))

        with hooked([self.model.model.layers[layer].register_forward_hook(record)]):
            yield outputs
