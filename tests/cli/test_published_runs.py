"""Published models from local folders in the hub's layout, in bf16, through every command that the rules call."""

import copy
import json
import math
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from conftest import clone
from gripmoe.cli.main import main
from gripmoe.config.models import PublishedModel
from gripmoe.config.project import Project
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.geometry.routing import jaccard, route
from gripmoe.io.files import read_json, write_json, write_yaml
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, load_published, save_model, weights_digest
from gripmoe.moe.traces import StoredTrace
from gripmoe.training import loop as unlearning
from gripmoe.worlds.benchmark import wmdp_files

CONFIG = Path(__file__).parents[2] / "workflow" / "config"
SIZES = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
    num_experts=8, num_experts_per_tok=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN = SIZES | dict(num_hidden_layers=4, moe_intermediate_size=16, decoder_sparse_step=1, mlp_only_layers=[])
FAMILIES = {  # as their config.json on the hub says
    "olmoe": SIZES | dict(norm_topk_prob=False, clip_qkv=None),
    "qwen2_moe": QWEN | dict(norm_topk_prob=False, shared_expert_intermediate_size=32),
    "qwen3_moe": QWEN | dict(norm_topk_prob=True, head_dim=16),
}
DENSE = {"qwen2_moe": dict(mlp_only_layers=[0, 2]), "qwen3_moe": dict(decoder_sparse_step=2)}  # both leave 1 and 3


def publish(family, folder, tokenizer, seed=0, **changes):
    """A random model in bf16 as the hub has it: one matrix per expert, a config.json of the older key names. Returns
    the model, which has not been through a file."""
    sizes = FAMILIES[family] | {"vocab_size": len(tokenizer)} | changes
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16).eval()
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("mlp.gate.weight"):
            tensor.normal_()  # so that routers differ visibly between tokens
        block, fused, kind = name.partition("experts.")
        for expert, own in enumerate(tensor if fused else ()):
            parts = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True) if "gate" in kind else [(kind, own)]
            weights |= {f"{block}experts.{expert}.{part}.weight": matrix.clone() for part, matrix in parts}
        if not fused:
            weights[name] = tensor.clone()
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = {"model_type": family, "architectures": [type(model).__name__], "torch_dtype": "bfloat16"}
    write_json(folder / "config.json", described | sizes)
    return model


def clones(root, world):
    """The data sets of the published benchmark, with the embedded world's words."""
    files = wmdp_files(world, 0)
    columns = ("question", "choices", "answer", "subject")
    asked = {
        name: [{key: row[key] for key in columns} for row in files[f"{name}_questions"]]
        for name in ("forget", "retain")
    }
    texts = {
        name: [{"text": 2 * (row["prompt"] + row["text"])} for row in files[f"{name}_corpus"][:120]]
        for name in ("forget", "retain")
    }
    wordings = list({row["question"]: row for row in asked["forget"]}.values())[:36]
    retain = list({row["question"]: row for row in asked["retain"]}.values())[:120]
    test = retain[:100:13]
    others = [row for row in retain if row not in test]
    splits = dict(validation=others[:12], dev=others[12:92])
    truths = [{key: row[key] for key in ("question", "mc1_targets", "mc2_targets")} for row in files["truthfulqa"][:4]]
    return {
        "source": "published",
        "forget_questions": clone(root / "wmdp", "wmdp-cyber", "test", wordings),
        "retain_questions": clone(root / "mmlu", "all", "test", test, **splits),
        "forget_corpus": clone(root / "corpora", "cyber-forget-corpus", "train", texts["forget"]),
        "retain_corpus": clone(root / "wikitext", "wikitext-2-raw-v1", "test", texts["retain"]),
        "truthfulqa": clone(root / "truthfulqa", "multiple_choice", "validation", truths),
    }


METHODS = ("unconstrained", "expert_specific", "anchored")
SHORT = dict(learning_rate=1e-2, max_steps=2, check_every=2, checkpoint_every=2)


def published_project(root, data):
    """The world of one GPU, its optimizer and gradient checkpointing too, with a model and data sets in folders."""
    shutil.copytree(CONFIG, root / "config")
    model = dict(source="published", id=str(root / "hub"))
    reading = dict(retain_documents=2, max_length=64, evaluation_batch_size=64)
    benchmark = dict(data=data, target={"forget_accuracy": 0.0}, **reading)
    for name, row in (("models", model), ("benchmarks", benchmark)):
        with (root / "config" / f"{name}.yaml").open("a") as catalogue:
            yaml.safe_dump({"local": row}, catalogue)
    world = dict(extends="single_gpu", models=["local"], benchmarks=["local"], objectives=["gd"], seeds=[0])
    world |= dict(methods=[*METHODS, "ptc"], overrides=dict.fromkeys(METHODS, SHORT), artefacts=[])
    write_yaml(root / "config" / "local.yaml", world)
    return Project(root / "config", "local")


def step(command, **flags):
    """As a rule's shell line; settings as the rule's parameter."""
    line = [f"--{name.replace('_', '-')}={getattr(v, 'model_dump_json', v.__str__)()}" for name, v in flags.items()]
    assert main([command, *line]) == 0


@pytest.fixture(
    scope="module",
    params=["qwen2_moe", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("olmoe", "qwen3_moe"))],
)
def finished(request, tmp_path_factory, world, tokenizer):
    """A world of one published model, every run trained, corrected and evaluated, and one attacked."""
    root = tmp_path_factory.mktemp(request.param)
    published = publish(request.param, root / "hub", tokenizer, **DENSE.get(request.param, {}))
    project = published_project(root, clones(root, world))
    model, data, benchmark = root / "model" / "model.json", root / "data", project.benchmarks["local"]
    trained = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        step("prepare-model", settings=project.models["local"], output=model)
        step("prepare-data", settings=benchmark.data, output=data)
        traces = dict(trace=root / "routing.safetensors", forget_trace=root / "routing_forget.safetensors")
        corpora = {f"{name}_corpus": data / f"{name}_corpus.jsonl" for name in ("retain", "forget")}
        outputs = dict(output=traces["trace"], forget_output=traces["forget_trace"], digest=root / "routing.json")
        step("trace-routing", settings=benchmark.documents, model=model, **corpora, **outputs)
        fitted = dict(output=root / "bases.safetensors", digest=root / "bases.json")
        step("fit-basis", settings=project.methods["expert_specific"], model=model, **traces, **fitted)
        for method in (*METHODS, "ptc"):
            folder = root / method
            step("configure", settings=project.run("local", "local", "gd", method, 0), output=folder / "run.yaml")
            common = dict(run=folder / "run.yaml", model=model)
            if method == "ptc":
                corrected = dict(checkpoint=root / "unconstrained" / "checkpoint.json")
                corrected |= dict(retain_corpus=corpora["retain_corpus"], trace=traces["trace"])
                step("realign", **common, **corrected, output=folder / "checkpoint.json")
            else:
                bases = {"bases": fitted["output"]} if project.methods[method].has_bases else {}
                with watched(trained.setdefault(method, set())):
                    step("unlearn", **common, **traces, **bases, data=data, output=folder / "checkpoint.json")
            common |= dict(checkpoint=folder / "checkpoint.json", benchmark=benchmark, data=data)
            step("evaluate", **common, questions=folder / "questions.csv", output=folder / "evaluation.json")
            if method == "expert_specific":
                common |= dict(questions=folder / "attack_questions.csv")
                step("attack", **common, settings=project.world.relearning, output=folder / "attack.json")
    return SimpleNamespace(root=root, data=data, published=published, trained=trained)


@contextmanager
def watched(seen):
    """Within the block `seen` gets what training steps are made of: the optimizer, with the dtypes of experts and of
    routers after each of its steps, and whether activations are computed again."""
    made, again = unlearning.make_adamw, modeling_utils.checkpoint

    def note(optimizer, *_):
        *experts, routers = ({p.dtype for p in group["params"]} for group in optimizer.param_groups)
        seen.add((type(optimizer).__name__, frozenset().union(*experts), frozenset(routers)))

    def watch(*args, **settings):
        optimizer = made(*args, **settings)
        optimizer.register_step_post_hook(note)
        return optimizer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unlearning, "make_adamw", watch)
        patched.setattr(modeling_utils, "checkpoint", lambda *a, **k: seen.add("again") or again(*a, **k))
        yield


def routers_and_others(model):
    state = model.state_dict()
    routers = {name: tensor for name, tensor in state.items() if name.endswith("mlp.gate.weight")}
    return routers, {name: tensor for name, tensor in state.items() if name not in routers}


def test_a_published_folder_is_read_as_it_is_and_recorded(finished):
    described = read_json(finished.root / "model" / "model.json")
    loaded = load_model(finished.root / "model" / "weights")[0]
    for ours, own in zip(routers_and_others(loaded), routers_and_others(finished.published), strict=True):
        assert ours.keys() == own.keys() and all(torch.equal(ours[name], own[name].to(ours[name])) for name in own)
    assert described["weights"] == weights_digest(loaded)
    assert (described["id"], described["commit"]) == (str(finished.root / "hub"), None)
    assert {tensor.dtype for tensor in routers_and_others(loaded)[1].values()} == {torch.bfloat16}


def test_routers_train_in_fp32_over_experts_in_bf16(finished):
    step_of = ("ShardableAdamW8bit", frozenset({torch.bfloat16}), frozenset({torch.float32}))
    assert finished.trained == dict.fromkeys(METHODS, {step_of, "again"})
    for method in METHODS:
        ended = read_json(finished.root / method / "checkpoint.json")
        assert (ended["status"], ended["steps"]) == ("not_reached", 2)


def test_plain_transformers_reloads_what_is_exported_in_the_hubs_layout(finished):
    hub = load_file(finished.root / "hub" / "model.safetensors")
    assert f"model.layers.{min(MoEModel(finished.published).layers)}.mlp.experts.0.gate_proj.weight" in hub
    for method in (*METHODS, "ptc"):
        weights = finished.root / method / "weights"
        exported = load_file(weights / "model.safetensors")
        assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in hub.items()}
        plain, exact = AutoModelForCausalLM.from_pretrained(weights, dtype="auto"), load_model(weights)[0]
        (routers, others), (exact_routers, exact_others) = map(routers_and_others, (plain, exact))
        assert all(torch.equal(others[name], exact_others[name]) for name in exact_others)
        assert all(torch.equal(routers[name], exact_routers[name].bfloat16()) for name in exact_routers)
        assert weights_digest(exact) == read_json(finished.root / method / "checkpoint.json")["weights"]


def test_blocks_of_experts_have_changed_and_no_bit_of_all_else(finished):
    """Attention, embeddings, norms and dense layers; of what is anchored its routers neither."""
    original = load_model(finished.root / "model" / "weights")[0]
    routers, others = routers_and_others(original)
    blocks = tuple(f"model.layers.{layer}.mlp." for layer in MoEModel(original).layers)
    for method in METHODS:
        after_routers, after = routers_and_others(load_model(finished.root / method / "weights")[0])
        changed = {name for name in others if not torch.equal(others[name], after[name])}
        assert changed == {name for name in others if name.startswith(blocks)}
        fused = [name for name in changed if "experts." in name]
        assert fused and all((others[name] != after[name]).flatten(1).any(dim=1).all() for name in fused)
        moved = {name for name in routers if not torch.equal(routers[name], after_routers[name])}
        assert moved == (set() if method == "anchored" else set(routers)), method


def test_a_correction_changes_the_routers_that_it_says_alone(finished):
    weights = (finished.root / name / "weights" for name in ("unconstrained", "ptc"))
    (routers, others), (corrected, kept) = (routers_and_others(load_model(folder)[0]) for folder in weights)
    assert all(torch.equal(others[name], kept[name]) for name in others)
    said = read_json(finished.root / "ptc" / "checkpoint.json")
    changed = {name: not torch.equal(routers[name], corrected[name]) for name in routers}
    layers = {name: name.split(".")[2] for name in routers}
    assert not any(said[f"accepted_layer_{n}"] and said[f"fell_back_layer_{n}"] for n in layers.values())
    assert changed == {name: said[f"accepted_layer_{n}"] or said[f"fell_back_layer_{n}"] for name, n in layers.items()}
    assert any(changed.values())


def test_the_sound_method_keeps_every_recorded_set_of_a_model_in_bf16(finished):
    """The control: without a constraint some are lost."""
    trace = StoredTrace(finished.root / "routing.safetensors", {})
    kept = {}
    for method in METHODS:
        moe = MoEModel(load_model(finished.root / method / "weights")[0])
        assert moe.layers == list(trace)
        kept[method] = min(
            jaccard(trace[layer].top_k_Nk, route(trace[layer].x_Nd, moe.theta(layer), moe.rule(layer)).top_k_Nk).min()
            for layer in moe.layers
        )
    assert kept["expert_specific"] == kept["anchored"] == 1 > kept["unconstrained"]


@torch.no_grad()
def sets_of(model, batches):
    """What the routers of a transformers model choose as it is, (tokens, k) by layer, without padding and first
    tokens."""
    chosen, gates = {}, {n: layer.mlp.gate for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    for batch in batches:
        counted = batch.attention_mask.bool().clone()
        counted[:, 0] = False
        hooks = [
            gate.register_forward_hook(
                lambda *seen, n=n: chosen.setdefault(n, []).append(seen[2][2][counted.flatten()])  # noqa: B023
            )
            for n, gate in gates.items()
        ]
        model(**batch.inputs)
        for hook in hooks:
            hook.remove()
    return {n: torch.cat(parts) for n, parts in chosen.items()}


def test_evaluation_reports_the_routing_that_plain_transformers_gives(finished):
    """The control: plain transformers casts routers, which moves sets of some run."""
    moved_by_the_cast = set()
    for method in (*METHODS, "ptc"):
        metrics = read_json(finished.root / method / "evaluation.json")
        weights = finished.root / method / "weights"
        (original, _), (exact, tokenizer) = load_model(finished.root / "model" / "weights"), load_model(weights)
        plain = AutoModelForCausalLM.from_pretrained(weights, dtype="auto").eval()
        rows = load_corpus(finished.data / "held_out_corpus.jsonl", tokenizer, max_length=64)
        batches = in_batches(rows, tokenizer.pad_token_id)
        own, after, before = (sets_of(model, batches) for model in (exact, plain, original))
        for name, other in (("routing_stability_plain_reload", after), ("routing_stability", before)):
            stability = {layer: jaccard(own[layer], other[layer]).mean().item() for layer in own}
            assert pytest.approx(metrics[name], abs=1e-6) == sum(stability.values()) / len(stability)
        assert all(metrics[f"routing_stability_layer_{n}"] == pytest.approx(s, abs=1e-6) for n, s in stability.items())
        assert metrics["routing_stability"] < 1, method
        if not torch.equal(torch.stack([*own.values()]), torch.stack([*after.values()])):
            moved_by_the_cast.add(method)
            assert metrics["routing_stability_plain_reload"] < 1, method
    assert moved_by_the_cast


def test_the_tokens_of_a_corrected_run_are_those_of_the_run_that_it_corrects(finished):
    found = [read_json(finished.root / name / "checkpoint.json")["tokens"] for name in ("unconstrained", "ptc")]
    assert found[0] == found[1] > 0


def test_attacks_find_numbers_for_everything(finished):
    found = read_json(finished.root / "expert_specific" / "attack.json")
    wanted = {"forced_forget_accuracy", "probe_best_layer", "probe_best_expert", "prompt_five_shot", "quantized_4_bit"}
    wanted |= {"restored_experts_worst_layer", "relearned_from_corpus_after_20", "relearned_from_retain_after_20"}
    assert wanted <= found.keys()
    assert all(math.isfinite(found[name]) for name in wanted)
    layers = {int(name.removeprefix("probe_expert_layer_")) for name in found if name.startswith("probe_expert_layer_")}
    assert layers == set(MoEModel(finished.published).layers)


SPARSE = [
    (dict(mlp_only_layers=[], decoder_sparse_step=1), [0, 1, 2, 3]),
    (dict(mlp_only_layers=[0, 3]), [1, 2]),
    (dict(decoder_sparse_step=2), [1, 3]),
    (dict(decoder_sparse_step=2, mlp_only_layers=[1]), [3]),
]


def fetched(folder):
    return load_published(PublishedModel(source="published", id=str(folder)))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("where", "layers"), SPARSE)
def test_layers_with_experts_are_those_that_qwen_names(family, where, layers, tmp_path, tokenizer):
    publish(family, tmp_path / "hub", tokenizer, **where)
    save_model(*fetched(tmp_path / "hub"), tmp_path / "weights")
    moe = MoEModel(load_model(tmp_path / "weights")[0])
    assert moe.layers == layers
    assert {len(moe.theta(layer)) for layer in layers} == {8}


@torch.no_grad()
@pytest.mark.parametrize("renormalized", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_experts_weigh_as_norm_topk_prob_says(family, renormalized, tmp_path, tokenizer):
    """Forced to its own sets the model's own weights, and through a file; the control: not those of the other value."""
    publish(family, tmp_path / "hub", tokenizer, norm_topk_prob=renormalized)
    save_model(*fetched(tmp_path / "hub"), tmp_path / "weights")
    moe = MoEModel(load_model(tmp_path / "weights")[0])
    ids = torch.arange(5, 35).reshape(2, 15)
    free = moe.model(input_ids=ids).logits
    sums = torch.cat([weights_Tk.sum(dim=1) for _, weights_Tk in moe.weighted_routes(ids).values()])
    assert (sums.sub(1).abs() < 1e-5).all() if renormalized else (sums < 0.999).any()
    with moe.force_routing(moe.routes):
        assert torch.equal(moe.model(input_ids=ids).logits, free)
        for layer in moe.layers:
            moe.router(layer).norm_topk_prob = not renormalized
        assert not torch.equal(moe.model(input_ids=ids).logits, free)


@pytest.fixture
def hub(tmp_path, tokenizer, monkeypatch):
    """The hub's cache of somebody who has downloaded two commits of a model and is offline now; their models."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--org--tiny"
    commits = {40 * "a": 0, 40 * "b": 1}
    models = {
        commit: publish("olmoe", repository / "snapshots" / commit, tokenizer, seed) for commit, seed in commits.items()
    }
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(40 * "b")
    return models


def test_a_pinned_revision_is_taken_from_the_cache_of_the_hub(hub, tmp_path):
    """Without one what `main` was when it was downloaded."""
    for revision, commit in ((40 * "a", 40 * "a"), (40 * "b", 40 * "b"), (None, 40 * "b")):
        settings = json.dumps(dict(source="published", id="org/tiny", revision=revision))
        step("prepare-model", settings=settings, output=tmp_path / "model" / "model.json")
        taken = load_model(tmp_path / "model" / "weights")[0]
        described = read_json(tmp_path / "model" / "model.json")
        MoEModel(hub[commit])
        assert described["weights"] == weights_digest(taken) == weights_digest(hub[commit])
        assert (described["revision"], described["commit"]) == (revision or "main", commit)


def test_a_revision_that_is_not_there_is_named_with_what_to_do(hub, tmp_path, capsys):
    settings = json.dumps(dict(source="published", id="org/tiny", revision=40 * "c"))
    output = tmp_path / "model" / "model.json"
    assert main(["prepare-model", f"--settings={settings}", f"--output={output}"]) == 2
    said = capsys.readouterr().err
    assert f"model 'org/tiny' (revision {40 * 'c'})" in said
    assert "Check its `id:` and `revision:` in models.yaml" in said
    assert f"run `hf download org/tiny --revision {40 * 'c'}`, and set `id:` to the folder" in said
    assert not output.exists()


UNFIT = {
    "an unknown dense family": "does not know the family 'gemma2', and of dense families only qwen3, mistral, llama; ",
    "an unknown family with experts": "family 'jetmoe' .*missing: ",
    "no tokenizer": "the tokenizer is missing; ",
    "a pad token beyond the embeddings": r"pads with '\[PAD\]', whose id is \d+, .* ids below \d+; set another",
    "a router of NaN": "the router 1.weight holds NaN or infinity; download it again",
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_checkpoint_that_no_later_step_can_use_leaves_no_folder(what, tmp_path, tokenizer, capsys, monkeypatch):
    """Only the routers are seen after the weights are read, which takes long."""
    hub, tokenizer = tmp_path / "hub", copy.deepcopy(tokenizer)
    publish("olmoe", hub, tokenizer)
    few = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": len(tokenizer)}
    if what == "an unknown dense family":
        write_json(hub / "config.json", {"model_type": "gemma2", **few})
    elif what == "an unknown family with experts":
        write_json(hub / "config.json", {"model_type": "jetmoe", "num_local_experts": 4, **few})
    elif what == "no tokenizer":
        for file in hub.glob("*token*"):
            file.unlink()
    elif what == "a pad token beyond the embeddings":
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.save_pretrained(hub)
    else:
        weights = load_file(hub / "model.safetensors")
        weights["model.layers.1.mlp.gate.weight"][0] = torch.nan
        save_file(weights, hub / "model.safetensors", metadata={"format": "pt"})
    if what != "a router of NaN":
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    output, settings = tmp_path / "model" / "model.json", json.dumps(dict(source="published", id=str(hub)))
    assert main(["prepare-model", f"--settings={settings}", f"--output={output}"]) == 2
    assert re.search(rf"model '{hub}' .*{UNFIT[what]}", capsys.readouterr().err)
    assert not output.parent.exists()


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama"])
def test_a_dense_model_of_a_known_family_is_prepared(family, tmp_path, tokenizer):
    settings = SIZES | {"vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    asked = json.dumps(dict(source="published", id=str(tmp_path / "hub"), dtype="float32"))
    step("prepare-model", settings=asked, output=tmp_path / "model" / "model.json")
    assert read_json(tmp_path / "model" / "model.json")["weights"] == weights_digest(model)
