"""Every method in every kind of loop: works, or says what to do. docs/library_reference.md has the table."""

import re
import tempfile
import warnings
from pathlib import Path

import accelerate
import peft
import pytest
import torch
from test_trainer import RETAIN, kept, recorded
from transformers import Trainer, TrainingArguments

import gripmoe
from conftest import random_batch, small_model
from gripmoe.moe.adapters import unwrapped

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "library_reference.md").read_text(encoding="utf-8")
FORGET = random_batch(seed=102)
# These keep all selections of original inputs.
HARD = ("expert_specific", "expert_specific_every_10", "full_null_space", "frozen_router")
ERRORS = {
    "a": (RuntimeError, r"looks at the (retain|forget) forward: run it within `with handle\.\1\(\):`"),
    "b": (ValueError, 'adapters leave routers as they are: use method="frozen_router"'),
    "c": (ValueError, r"an adapter changes the routers of layers \[0, 1\].*name modules without routers as"),
    "d": (ValueError, "trains one whole expert, and adapters train in the place of whole weights"),
}


def losses(model, handle):
    """Of a step: retain and forget, marked, with penalties."""
    with handle.retain():
        loss = model(**RETAIN[0].inputs, labels=RETAIN[0].labels).loss
    with handle.forget():
        loss = loss - model(**FORGET.inputs, labels=FORGET.labels).loss
    return loss + handle.penalty()


def plain(method, model=None, prepare=lambda *both: both):
    model = model or small_model()
    rates = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = prepare(model, torch.optim.AdamW(rates, lr=1e-2, weight_decay=0.0))
    with gripmoe.constrain(model, optimizer, RETAIN, method=method, forget=[FORGET]) as handle:
        for _ in range(2):
            optimizer.zero_grad()
            losses(model, handle).backward()
            optimizer.step()
    return model


def adapted(method, **settings):
    targets = {"target_modules": [], "target_parameters": []} | settings
    return plain(method, peft.get_peft_model(small_model(), peft.LoraConfig(r=4, **targets)))


def in_trainer(method, base=Trainer, arguments=TrainingArguments, marked=True, model=None, **settings):
    class Marked(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            handle = next(c.handle for c in self.callback_handler.callbacks if hasattr(c, "handle"))
            return losses(model, handle)

    model = model or small_model()
    callback = gripmoe.trainer_callback(RETAIN, method=method, forget=[FORGET])
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(
            folder, max_steps=2, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, weight_decay=0.0,
            **({"router_aux_loss_coef": 0.0} if hasattr(arguments, "router_aux_loss_coef") else {}),
        )  # fmt: skip
        documents = [{"input_ids": row, "labels": row} for row in FORGET.input_ids]
        settings = {"train_dataset": documents} | settings
        (Marked if marked else base)(model, given, callbacks=[callback], **settings).train()
    return model


def in_trl(method, tokenizer, marked):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    documents = datasets.Dataset.from_dict({"text": [tokenizer.decode(range(5, 12))] * 4})
    model = small_model(vocabulary_size=len(tokenizer))
    settings = dict(train_dataset=documents, processing_class=tokenizer)
    return in_trainer(method, trl.SFTTrainer, trl.SFTConfig, marked, model, **settings)


LOOPS = {
    "plain torch": lambda method, _: plain(method),
    "accelerate": lambda method, _: plain(method, prepare=accelerate.Accelerator(cpu=True).prepare),
    "Trainer": lambda method, _: in_trainer(method),
    "TRL": lambda method, tokenizer: in_trl(method, tokenizer, marked=True),
    "Trainer or TRL, no marks": lambda method, tokenizer: (
        in_trl(method, tokenizer, marked=False) and in_trainer(method, marked=False)
    ),
    "LoRA on attention": lambda method, _: adapted(method, target_modules=["q_proj", "v_proj"]),
    "LoRA on experts": lambda method, _: adapted(method, target_parameters=["mlp.experts.down_proj"]),
    "LoRA, router in `modules_to_save`": lambda method, _: adapted(
        method, target_modules=["q_proj"], modules_to_save=["gate"]
    ),
    "LoRA on all, `all-linear`": lambda method, _: adapted(method, target_modules="all-linear", target_parameters=None),
}


def cells():
    """loop -> method -> "works" or the letter of an error, as the page has them."""
    section = PAGE.split("## Which loops work")[1].split("\n## ")[0]
    header, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if "|" in line)
    return {
        loop: {name: row[column] for row in rows for name in re.findall("`(.+?)`", row[0])}
        for column, loop in enumerate(header[1:], start=1)
    }


def test_the_page_has_these_loops_and_all_its_methods():
    library = (DOCS / "library.md").read_text(encoding="utf-8")
    _, *methods = re.findall("^\\| `(.+?)`", library.split("## Methods")[1].split("\n## ")[0], flags=re.MULTILINE)
    assert list(cells()) == list(LOOPS)
    assert all(set(row) == set(methods) for row in cells().values())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("loop", LOOPS)
def test_every_method_in(loop, tokenizer):
    found = {}
    for method in cells()[loop]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*compiled model")
                model = unwrapped(LOOPS[loop](method, tokenizer))
            found[method] = "works"
            if method in HARD:
                original = small_model(vocabulary_size=model.config.vocab_size)
                assert kept(recorded(original), model) == 1.0, method
        except (ValueError, RuntimeError) as error:
            kinds = [key for key, (kind, text) in ERRORS.items() if type(error) is kind and re.search(text, str(error))]
            found[method] = kinds[0] if kinds else f"{type(error).__name__}: {error}"
    assert found == cells()[loop]


def test_without_a_constraint_these_steps_change_selections():
    """The control of what `HARD` methods keep."""
    assert kept(recorded(small_model()), plain("unconstrained")) < 1.0
