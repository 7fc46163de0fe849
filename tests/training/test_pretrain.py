"""Training of a base model: facts enter through experts and routers alone, and an interruption changes nothing."""

import pytest
import torch

from conftest import SMALL
from gripmoe.data.documents import encode
from gripmoe.moe.storage import weights_digest
from gripmoe.training import pretrain
from gripmoe.worlds.documents import FACT_MIX, training_batch
from gripmoe.worlds.models import make_model

SIZE = SMALL | {"num_layers": 3}


class Killed(Exception):
    pass


def fresh_model(tokenizer, family="qwen3_moe"):
    return make_model(family, len(tokenizer), seed=0, **SIZE)


def outside_blocks(model):
    """The bytes of every parameter and buffer outside experts and routers, by name."""
    return {
        name: tensor.contiguous().view(torch.uint8).clone()
        for name, tensor in model.state_dict().items()
        if ".mlp." not in name
    }


def differing(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "qwen3"])
def test_facts_enter_through_the_blocks_alone(family, world, tokenizer, tmp_path):
    """Equal bytes outside the blocks before and after stage B, and in a base model and its retrained twin."""
    found = {}
    for name, seen in (("base", world), ("retrained", world.without_forget())):
        model = fresh_model(tokenizer, family)
        before, blocks = outside_blocks(model), weights_digest(model)
        settings = dict(steps=3, learning_rate=1e-2, seed=0, state_file=tmp_path / f"{name}.pt")
        pretrain.train_facts(model, tokenizer, seen, **settings)
        assert not differing(before, outside_blocks(model))
        assert all(p.grad is None for n, p in model.named_parameters() if ".mlp." not in n)
        assert weights_digest(model) != blocks, "the blocks have learned"
        found[name] = outside_blocks(model), weights_digest(model)
    assert not differing(found["base"][0], found["retrained"][0]) and found["base"][1] != found["retrained"][1]


def test_control_stage_a_moves_what_stage_b_leaves(world, tokenizer, tmp_path):
    model = fresh_model(tokenizer)
    before = outside_blocks(model)
    settings = dict(max_steps=2, last_steps=1, learning_rate=1e-2, seed=0, state_file=tmp_path / "state.pt")
    pretrain.train_skills(model, tokenizer, world, **settings)
    moved = differing(before, outside_blocks(model))
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= moved


@pytest.fixture(scope="module", params=[0, 2], ids=["", "gradient routing"])
def train(request, world, tokenizer):
    """Phases end by their probes, after two steps each, before `max_steps` is reached."""

    def run(folder):
        model = fresh_model(tokenizer)
        settings = dict(learning_rate=1e-3, seed=0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pretrain, "PROBE_EVERY", 2)
            patched.setattr(pretrain, "SAVE_EVERY", 1)
            patched.setattr(pretrain, "letter_probe", lambda *arguments: lambda model: 1.0)
            patched.setattr(pretrain, "drill_probe", lambda *arguments: lambda model: 1.0)
            skills = pretrain.train_skills(
                model, tokenizer, world, max_steps=20, last_steps=3, **settings, state_file=folder / "a.pt"
            )
            settings |= {"steps": 4, "forget_experts": request.param}
            facts = pretrain.train_facts(model, tokenizer, world, **settings, state_file=folder / "b.pt")
        return skills, facts, weights_digest(model)

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """What a run that nothing kills ends in."""
    return train(tmp_path_factory.mktemp("whole"))


KILLED = {  # by stage and step
    "drills": ("a.pt", 1),
    "skills begin": ("a.pt", 2),
    "the last steps begin": ("a.pt", 4),
    "the last": ("a.pt", 6),
    "stage B": ("b.pt", 2),
}


@pytest.mark.parametrize("last", KILLED.values(), ids=KILLED)
def test_a_killed_run_ends_in_the_same_bytes(last, train, whole, tmp_path, monkeypatch):
    assert [len(trained.losses) for trained in whole[:2]] == [7, 4], "two phases of two steps, three last ones; stage B"
    save, saved = pretrain.save_state, []

    def dies(file, *arguments, **state):
        save(file, *arguments, **state)
        saved.append((file.name, len(state["losses"])))
        if saved[-1] == last:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(pretrain, "save_state", dies)
        with pytest.raises(Killed):
            train(tmp_path)
    assert saved[-1] == last
    torch.manual_seed(1)  # nothing hangs on what the process has drawn before
    assert train(tmp_path) == whole


def test_the_tokens_of_training_are_those_of_its_documents_without_padding(world, tokenizer, tmp_path):
    model = fresh_model(tokenizer)
    settings = dict(steps=2, learning_rate=1e-3, seed=0, state_file=tmp_path / "state.pt")
    trained = pretrain.train_facts(model, tokenizer, world, **settings)
    documents = [each for step in range(2) for each in training_batch(world, FACT_MIX, 0, step)]
    assert trained.tokens == sum(len(encode(tokenizer, each.spans).ids) for each in documents)
