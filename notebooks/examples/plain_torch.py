"""Method A in a plain torch loop: three lines more, and the router keeps its selections on the retain documents."""

import torch

import gripmoe
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.moe import MoEModel
from gripmoe.worlds.models import make_model

model = make_model("qwen3_moe", vocabulary_size=64, seed=0)  # or AutoModelForCausalLM.from_pretrained(...)
generator = torch.Generator().manual_seed(0)
forget, retain = (torch.randint(3, 64, (8, 16), generator=generator) for _ in range(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
original = MoEModel(model).trace([{"input_ids": retain}])

handle = gripmoe.constrain(model, optimizer, retain=[{"input_ids": retain}])  # 1
for _ in range(5):
    optimizer.zero_grad()
    loss = model(input_ids=retain, labels=retain).loss - model(input_ids=forget, labels=forget).loss
    loss.backward()
    optimizer.step()
handle.close()  # 2; or use the handle as a context manager

moe = MoEModel(model)
now = {layer: route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, seen in original.items()}
kept = mean_stability(stability_by_layer(original, now))
print(f"selections of the original retain inputs that the trained router keeps: {kept:.3f}")
