"""Ours: a penalty on drift of what routers see; the wanted routing stability sets its weight. The loop marks
retain passes."""

import torch

import gripmoe
from gripmoe.worlds.models import make_model

model = make_model("qwen3_moe", vocabulary_size=64, seed=0)
generator = torch.Generator().manual_seed(0)
forget, retain = (torch.randint(3, 64, (8, 16), generator=generator) for _ in range(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
before = gripmoe.routed_experts(model, retain)

with gripmoe.constrain(model, optimizer, retain=[{"input_ids": retain}], method="anchored") as handle:
    for _ in range(40):
        optimizer.zero_grad()
        (-model(input_ids=forget, labels=forget).loss).backward()
        with handle.retain():
            loss = model(input_ids=retain, labels=retain).loss
        (loss + handle.penalty()).backward()
        optimizer.step()

kept = gripmoe.routing_stability(before, gripmoe.routed_experts(model, retain))
print(f"routing stability on the retain documents: {kept:.3f}")
