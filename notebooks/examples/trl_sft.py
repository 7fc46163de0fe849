"""Method A in a TRL trainer: the callback of the Trainer example, in supervised finetuning."""

import tempfile

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import gripmoe
from gripmoe.geometry.routing import mean_stability, route, stability_by_layer
from gripmoe.moe import MoEModel
from gripmoe.worlds.documents import all_texts, make_world
from gripmoe.worlds.models import make_model
from gripmoe.worlds.tokenizer import make_tokenizer

texts = list(all_texts(make_world(0)))
tokenizer = make_tokenizer(texts)
model = make_model("qwen3_moe", vocabulary_size=len(tokenizer), seed=0)
retain = texts[100:110]
original = MoEModel(model).trace(tokenizer([text], return_tensors="pt") for text in retain)

with tempfile.TemporaryDirectory() as folder:
    SFTTrainer(
        model,
        SFTConfig(
            folder,
            max_steps=5,
            learning_rate=1e-2,
            max_length=64,
            use_cpu=True,
            report_to=[],
            bf16=False,
            router_aux_loss_coef=0.0,  # the load-balancing loss would pull at the routing that is to stay
        ),
        train_dataset=Dataset.from_dict({"text": texts[:100]}),
        processing_class=tokenizer,
        callbacks=[gripmoe.trainer_callback(retain)],
    ).train()

moe = MoEModel(model)
now = {layer: route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer)) for layer, seen in original.items()}
kept = mean_stability(stability_by_layer(original, now))
print(f"selections of the original retain inputs that the trained router keeps: {kept:.3f}")
