"""Method B on a model: the sound form goes layer by layer."""

import copy
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
import torch

import gripmoe
from conftest import random_batch, small_model
from gripmoe.config.methods import method_table
from gripmoe.constraints import realignment as method_b
from gripmoe.constraints.null_space import feasible_router
from gripmoe.constraints.realignment import METHOD_A, kaczmarz_report, realign_routers
from gripmoe.data.documents import Batch
from gripmoe.geometry import realignment as geometry
from gripmoe.geometry.realignment import HELD_OUT, realign_sound
from gripmoe.geometry.routing import LayerRouting, jaccard, mean_stability, route, stability_by_layer
from gripmoe.library.realign import Original
from gripmoe.moe import MoEModel
from gripmoe.moe.placement import place
from pretended_devices import FIRST, PretendedDevices


def unlearned(seed=0, amount=0.3, noise_seed=9):
    """The small model with its experts and routers disturbed, as unlearning would."""
    moe = MoEModel(small_model(seed=seed))
    generator = torch.Generator().manual_seed(noise_seed)
    with torch.no_grad():
        for layer in moe.layers:
            for parameter in (*moe.expert_parameters(layer), moe.theta(layer)):
                parameter += amount * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return moe


def setting(count=24):
    original = MoEModel(small_model())
    batch = random_batch(rows=8 * count, seed=7)
    held_out = [random_batch(rows=8, seed=1000 + i) for i in range(6)]
    return original, batch, original.trace([batch]), held_out, original.trace(held_out)


def test_realigning_raises_held_out_stability():
    original, batch, trace, held_out, wanted = setting()
    moe = unlearned()
    before = mean_stability(stability_by_layer(wanted, moe.trace(held_out)))
    report = realign_routers(moe, original.thetas(), trace, batch)
    after = mean_stability(stability_by_layer(wanted, moe.trace(held_out)))
    restored = unlearned()
    restored.set_thetas(original.thetas())
    control = mean_stability(stability_by_layer(wanted, restored.trace(held_out)))
    assert after > before + 0.05
    assert after >= control - 0.01, "the original router is among the candidates"
    assert list(report) == original.layers


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("rows", [5, 3])
def test_tokens_carry_the_numbers_of_their_documents(rows, copies, monkeypatch):
    """Padding and first tokens aside; copies have one number. Fewer than four documents are split by places."""
    batch = repeated(random_batch(rows=rows, seed=7), copies)
    original, given = MoEModel(small_model()), []
    trace = original.trace([batch])

    def spy(*tokens, documents_N, **options):
        given.append((documents_N, len(tokens[2])))
        return realign_sound(*tokens, documents_N=documents_N, **options)

    monkeypatch.setattr(method_b, "realign_sound", spy)
    realign_routers(unlearned(), original.thetas(), trace, batch)
    lengths = batch.attention_mask.sum(dim=1).tolist()
    for documents_N, tokens in given:
        places = [list(range(length - 1)) for length in lengths]
        numbers = [[row % rows] * (length - 1) for row, length in enumerate(lengths)]
        assert documents_N.tolist() == sum(numbers if rows >= 4 else places, []) and len(documents_N) == tokens


def repeated(batch, copies):
    """The batch with each document so many times."""
    columns = (torch.cat([column] * copies) for column in (batch.input_ids, batch.attention_mask, batch.labels))
    return Batch(batch.row_ids * copies, *columns)


@pytest.mark.parametrize("rows", [9, 2])
def test_copies_of_a_document_do_not_check_a_fit_to_it(rows, monkeypatch):
    """Of many copies the held-out stability is that of one. The control: with a number for each row it is higher."""

    def held_out(copies):
        batch, original = repeated(random_batch(rows=rows, seed=7), copies), MoEModel(small_model())
        found = realign_routers(unlearned(amount=1.0), original.thetas(), original.trace([batch]), batch)
        return fmean(result.held_out_stability for result in found.values())

    once, often = held_out(1), held_out(5)
    assert often == pytest.approx(once, abs=0.01)
    monkeypatch.setattr(method_b, "_documents", lambda batch, keep, _: torch.arange(int(keep.sum())))
    assert held_out(5) > once + 0.03


def test_documents_without_a_token_that_counts_are_no_documents():
    """Four rows, of which the first is one token long: three documents, so tokens are split. By the numbers of the rows
    nothing would be left to check on."""
    batch = random_batch(seed=7)
    batch.attention_mask[0, 1:] = 0
    original = MoEModel(small_model())
    report = realign_routers(unlearned(), original.thetas(), original.trace([batch]), batch)
    assert all(0 <= result.held_out_stability <= 1 for result in report.values())


def wider(original):
    return replace(original, theta_0={n: theta.repeat(1, 2) for n, theta in original.theta_0.items()})


def shorter(original):
    first = {n: LayerRouting(*(tensor[:5] for tensor in vars(r).values())) for n, r in original.trace.items()}
    return replace(original, trace=first)


def broken(original):
    original.trace[1].x_Nd[3, 4] = torch.nan
    return original


REFUSED = {
    "deeper": (dict(num_layers=3), lambda o: o, r"layers \[0, 1, 2\].*layers \[0, 1\]"),
    "shallower": (dict(num_layers=1), lambda o: o, r"layers \[0\].*layers \[0, 1\]"),
    "more experts": (dict(num_experts=16), lambda o: o, r"layer 0: .*\(8, 32\).*\(16, 32\)"),
    "wider routers": ({}, wider, r"layer 0: .*\(8, 64\).*\(8, 32\)"),
    "other tokens": ({}, shorter, r"layer 0: .*\(5, 32\).*\(\d+, 32\)"),
    "not finite": ({}, broken, "layer 1: .*not finite"),
    "fewer words": (dict(vocabulary_size=20), lambda o: o, r"have token \d+, which this model lacks"),
    "another model": ({}, lambda o: o, "differ from the remembered ones by more than their norm"),
    "another thing": ({}, lambda o: o.theta_0, "`original` is a dict: give the result of gripmoe.remember"),
}


@pytest.mark.parametrize("form", ["sound", "paper"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_the_one_remembered_is_refused_before_anything_is_written(case, form):
    widths, change, message = REFUSED[case]
    original = gripmoe.remember(small_model(), [random_batch(rows=8, seed=7)])
    model = small_model(seed=1, **widths)
    before = MoEModel(model).thetas()
    with pytest.raises(ValueError, match=message):
        gripmoe.realign(model, change(original), form=form)
    assert all(torch.equal(theta, before[layer]) for layer, theta in MoEModel(model).thetas().items())


def test_a_model_whose_hidden_states_are_not_finite_is_refused():
    original = gripmoe.remember(small_model(), [random_batch(rows=8, seed=7)])
    model = unlearned().model
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.fill_(torch.nan)
    with pytest.raises(ValueError, match="hidden states of this model are not finite"):
        gripmoe.realign(model, original)


def test_documents_are_remembered_batch_by_batch_and_kept_in_a_file(tmp_path):
    """A long document does not pad the others. What was kept refits the routers to the same values."""
    batches = [random_batch(rows=8, length=12, seed=7), random_batch(rows=1, length=40, seed=8)]
    model, widths = small_model(), []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    original = gripmoe.remember(model, batches)
    hook.remove()
    assert widths == [tuple(batch.input_ids.shape) for batch in batches]
    torch.save(original, tmp_path / "original.pt")
    model = unlearned().model
    other = copy.deepcopy(model)
    gripmoe.realign(model, original)
    gripmoe.realign(other, torch.load(tmp_path / "original.pt"))
    assert torch.equal(MoEModel(model).theta(0), MoEModel(other).theta(0))
    later = "import sys, torch; from gripmoe import realign; torch.load(sys.argv[1])"  # a job of its own
    subprocess.run([sys.executable, "-c", later, str(tmp_path / "original.pt")], check=True)


def test_what_version_0_2_0_has_kept_is_read(tmp_path, monkeypatch):
    """Where the class had another module."""
    original = gripmoe.remember(small_model(), [random_batch(rows=8, seed=7)])
    monkeypatch.setattr(method_b, "Original", Original, raising=False)
    monkeypatch.setattr(Original, "__module__", method_b.__name__)
    torch.save(original, tmp_path / "original.pt")
    monkeypatch.undo()
    assert method_b.__name__.encode() in (tmp_path / "original.pt").read_bytes(), "the control"
    read = torch.load(tmp_path / "original.pt")
    assert isinstance(read, Original) and torch.equal(read.theta_0[0], original.theta_0[0])


def test_few_tokens_are_warned_of(recwarn):
    model = small_model()
    with pytest.warns(UserWarning, match="7 tokens that count, fewer than the hidden size of 32"):
        gripmoe.remember(model, [{"input_ids": torch.arange(3, 11)[None]}])
    recwarn.clear()
    gripmoe.remember(model, [{"input_ids": torch.arange(3, 36)[None]}])
    assert not recwarn.list


def test_texts_are_remembered_as_their_tokens(tokenizer):
    model, text = small_model(vocabulary_size=len(tokenizer)), tokenizer.decode(range(8, 50))
    from_texts, from_tokens = (
        gripmoe.remember(model, [text], tokenizer=tokenizer),
        gripmoe.remember(model, [tokenizer(text, return_tensors="pt")]),
    )
    assert torch.equal(from_texts.batch.input_ids, from_tokens.batch.input_ids)
    with pytest.raises(ValueError, match="`retain` holds texts, and `tokenizer` is None"):
        gripmoe.remember(model, [text])


def test_routers_are_as_they_were_where_a_later_layer_fails(monkeypatch):
    """The control: without the failure the first layer is changed."""
    original, batch, trace, *_ = setting(count=4)
    moe = unlearned()
    before, fitted = moe.thetas(), []

    def fails_in_the_second(*tokens, **options):
        fitted.append(realign_sound(*tokens, **options).theta_Ed)
        if len(fitted) == 2:
            raise RuntimeError("out of memory")
        return realign_sound(*tokens, **options)

    monkeypatch.setattr(method_b, "realign_sound", fails_in_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        realign_routers(moe, original.thetas(), trace, batch)
    assert not torch.equal(fitted[0], before[0]), "the control"
    assert all(torch.equal(theta, before[layer]) for layer, theta in moe.thetas().items())


def test_each_layer_is_fitted_to_what_corrected_layers_below_it_send():
    """The control: fitted to what the uncorrected model sends."""
    original, batch, trace, *_ = setting(count=4)
    lengths = batch.attention_mask.sum(dim=1) - 1
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)
    before, theta_0 = unlearned().thetas(), original.thetas()
    moe, corrected = unlearned(), unlearned()
    realign_routers(moe, theta_0, trace, batch)

    def fitted(layer, model):
        states = trace[layer].x_Nd, model.trace([batch])[layer].x_Nd
        given = dict(wanted_Nk=trace[layer].top_k_Nk, documents_N=documents)
        return realign_sound(theta_0[layer], before[layer], *states, moe.rule(layer), **given).theta_Ed

    for layer in original.layers:
        corrected.set_thetas({layer: fitted(layer, corrected)})
        torch.testing.assert_close(moe.theta(layer), corrected.theta(layer))
    assert (moe.theta(1) - fitted(1, unlearned())).abs().max() > 0.1


def test_where_no_fit_serves_the_original_router_is_put_back_and_the_report_says_so():
    """Routers alone have changed, and what is fitted is paired with the inputs of other tokens; as recorded, it is
    not."""
    original, batch, trace, *_ = setting(count=4)
    pairs = {True: trace, False: {}}
    lengths = batch.attention_mask.sum(dim=1) - 1
    fitted = (torch.arange(len(lengths)).repeat_interleave(lengths) % 4 != 0).nonzero()[:, 0]
    for layer, seen in trace.items():
        x_Nd = seen.x_Nd.clone()
        x_Nd[fitted] = x_Nd[fitted.roll(7)]
        pairs[False][layer] = LayerRouting(x_Nd, seen.scores_NE, seen.top_k_Nk)
    for as_recorded, recorded in pairs.items():
        model = small_model()
        MoEModel(model).set_thetas({layer: 0 * theta for layer, theta in original.thetas().items()})
        report = gripmoe.realign(model, Original(original.thetas(), recorded, batch))
        assert {result.ridge == math.inf for result in report.values()} == {not as_recorded}
        assert all(result.accepted and result.held_out_stability == 1.0 for result in report.values())
        for layer, theta in MoEModel(model).thetas().items():
            assert torch.equal(theta, original.theta(layer))


def held_out_stability(trace, moe, batch):
    """Of every fourth document, by layer; the model is the corrected one, as layers were when they were fitted."""
    lengths = batch.attention_mask.sum(dim=1) - 1
    held = torch.arange(len(lengths)).repeat_interleave(lengths) % 4 == 0
    after = moe.trace([batch])
    return {n: jaccard(seen.top_k_Nk[held], after[n].top_k_Nk[held]).mean().item() for n, seen in trace.items()}


@pytest.mark.parametrize(("form", "row"), [("paper", "expert_specific_paper"), ("sound", "expert_specific")])
def test_a_rejected_layer_falls_back_to_the_rows_of_method_a(form, row):
    assert METHOD_A[form].model_dump(exclude={"training"}) == method_table()[row].model_dump(exclude={"training"})


def test_an_unlearned_router_that_keeps_most_held_out_sets_stays():
    """It undoes what was done to its inputs. The control: Method A's projection of it loses sets."""
    batch, model = random_batch(rows=32, seed=7), small_model(num_layers=1)
    original = gripmoe.remember(model, [batch])
    scale_d = torch.linspace(0.2, 3.0, 32)
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.mul_(scale_d)
        model.model.layers[0].mlp.gate.weight.div_(scale_d)
    moe = MoEModel(model)
    theta, rule = moe.theta(0).detach().clone(), moe.rule(0)
    projected = feasible_router(METHOD_A["sound"], original.theta_0[0], theta, original.trace[0], rule)
    found = gripmoe.realign(model, original)[0]
    assert torch.equal(moe.theta(0), theta) and not found.accepted and not found.fell_back
    assert found.held_out_stability == held_out_stability(original.trace, moe, batch)[0] == 1.0
    moe.set_thetas({0: projected})
    assert held_out_stability(original.trace, moe, batch)[0] < 0.9


@pytest.mark.parametrize("form", ["sound", "paper"])
def test_a_layer_whose_fit_is_rejected_falls_back_to_method_a(form, monkeypatch):
    """Its router keeps the sets of the tokens that the form looks at. The control is the unlearned router."""
    original, batch, trace, *_ = setting(count=1)
    moe = unlearned()
    after, seen = moe.thetas(), moe.trace([batch])
    monkeypatch.setattr(geometry, "RIDGES", ())  # no candidate of the sound form
    monkeypatch.setattr(method_b, "realign_paper", partial(method_b.realign_paper, accept=1.0))
    report = realign_routers(moe, original.thetas(), trace, batch, form=form)
    assert all(result.fell_back and not result.accepted for result in report.values())
    if form == "sound":
        reported = {layer: result.held_out_stability for layer, result in report.items()}
        assert reported == pytest.approx(held_out_stability(trace, moe, batch), abs=1e-6)
    for layer, theta_0 in original.thetas().items():
        assert not torch.equal(moe.theta(layer), theta_0), "nor is it the original"
        rule, x = moe.rule(layer), (seen if form == "paper" else trace)[layer].x_Nd
        wanted = route(x, theta_0, rule).top_k_Nk
        kept, lost = (
            jaccard(wanted, route(x, theta, rule).top_k_Nk).mean() for theta in (moe.theta(layer), after[layer])
        )
        assert kept > 0.95 > 0.9 > lost, (kept, lost)


def test_paper_form_fits_few_tokens_and_not_others():
    """N_r = d tokens: perfect on them, poor elsewhere; the sound form on the same tokens is not."""
    original, batch, trace, held_out, wanted = setting()
    stability = {}
    for form in ("paper", "sound"):
        moe = unlearned()
        report = realign_routers(moe, original.thetas(), trace, batch, form=form, retain_tokens=32)
        stability[form] = mean_stability(stability_by_layer(wanted, moe.trace(held_out)))
        if form == "paper":
            assert all(result.fit_cosine > 0.95 for result in report.values())
    assert stability["sound"] > stability["paper"] + 0.1


@pytest.mark.parametrize("count", [9, 20, 45])
def test_a_part_of_the_tokens_is_split_like_all_of_them(count, monkeypatch):
    """Even if they end within the first document, or soon after it: some fit, and fewer check."""
    original, batch, trace, *_ = setting()
    parts = []

    def split(*given, documents_N, **more):
        parts.append(documents_N % HELD_OUT == 0)
        return realign_sound(*given, documents_N=documents_N, **more)

    monkeypatch.setattr(method_b, "realign_sound", split)
    realign_routers(unlearned(), original.thetas(), trace, batch, form="sound", retain_tokens=count)
    assert all(len(part) == count and 0 < part.float().mean() < 0.4 for part in parts) and parts


def test_routers_are_refitted_in_eval_mode():
    """Dropout would blur what they are fitted to; the mode is what it was afterwards."""
    original, batch, trace, *_ = setting()
    ends = []
    for training in (False, True):
        moe = MoEModel(copy.deepcopy(original.model))
        for layer in moe.model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        with torch.no_grad():
            moe.expert_parameters(0)[0].mul_(1.3)
        moe.model.train(training)
        realign_routers(moe, original.thetas(), trace, batch)
        assert moe.model.training is training
        ends.append(moe.thetas())
    assert all(torch.equal(ends[0][layer], ends[1][layer]) for layer in ends[0])


def test_draws_of_algorithm_1_leave_what_the_exact_projection_does_not():
    original, _, trace, _, _ = setting()
    report = kaczmarz_report(unlearned(), original.thetas(), trace)
    assert report["violation_exact"] < 1e-6
    assert 1.0 > report["violation_after_10"] > report["violation_after_300"] > report["violation_exact"]
    assert kaczmarz_report(MoEModel(small_model()), original.thetas(), trace) == {}, "nothing moved"


def test_a_model_that_has_moved_since_is_realigned():
    """A `Trainer` brings a model to its device after `remember`. The routers are those of a model that stayed."""
    batch, found = random_batch(rows=8, seed=7), []
    for moves in (False, True):
        model = small_model()
        with PretendedDevices():
            original = gripmoe.remember(model, [batch])
            model.load_state_dict(unlearned().model.state_dict())
            place(model, [FIRST] if moves else ["cpu"])
            gripmoe.realign(model, original)
            found.append({layer: theta.cpu() for layer, theta in MoEModel(model).thetas().items()})
    assert all(torch.equal(theta, found[1][layer]) for layer, theta in found[0].items())


def test_remembering_leaves_the_model_as_it_is_and_a_held_model_is_not_realigned():
    model = small_model().bfloat16()
    original = gripmoe.remember(model, [random_batch(rows=8, seed=7)])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gripmoe.constrain(model, optimizer, [random_batch()]), pytest.raises(ValueError, match="another handle holds"):
        gripmoe.realign(model, original)
    gripmoe.realign(model, original)
