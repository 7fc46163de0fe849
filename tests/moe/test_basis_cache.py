"""The tiers hold what they may, files that cannot be trusted are fitted again, and results never differ."""

import shutil
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import gripmoe
from conftest import random_batch, small_model
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.moe import MoEModel
from gripmoe.moe.basis_cache import BasisStore

D, EXPERTS = 16, 4
BYTES = D * 3 * 4  # of one basis of rank 3 in fp32


def fitted(layer: int) -> RetainBasis:
    generator = torch.Generator().manual_seed(layer)
    U = torch.linalg.qr(torch.randn(EXPERTS, D, 3, generator=generator)).Q
    return RetainBasis(torch.cat([U, torch.zeros(EXPERTS, D, 1)], dim=2))  # padded, as fits are


def store(folder, metadata=None, **limits):
    return BasisStore(folder, [0, 1], fitted, metadata or {"model": "abc"}, **limits)


def same(basis: RetainBasis, layer: int) -> bool:
    return torch.equal(basis.U_ret_Edr, fitted(layer).U_ret_Edr[..., :3])


def test_computed_once_then_found_on_disk_and_in_memory(tmp_path):
    first = store(tmp_path)
    assert same(first[0], 0) and first.counts["computed"] == 1 and first.counts["bytes_written"] == EXPERTS * BYTES
    assert first.counts["missed"] == 1, "of the first expert, which fits the whole layer"
    assert same(first[0], 0) and first.counts["hot"] == EXPERTS
    second = store(tmp_path)
    assert same(second[0], 0) and second.counts["computed"] == 0 and second.counts["cold"] == EXPERTS
    assert second.counts["missed"] == 0
    assert list(second) == [0, 1] and len(second) == 2
    with pytest.raises(KeyError):
        second[7]


@pytest.mark.parametrize(("hot", "warm", "expected"), [(2, 4, "warm"), (0, 4, "warm"), (0, 0, "cold"), (4, 0, "hot")])
def test_limits_are_kept(tmp_path, hot, warm, expected):
    limited = store(tmp_path, hot_bytes=hot * BYTES, warm_bytes=warm * BYTES)
    for _ in range(3):
        assert same(limited[1], 1)
        assert limited.held_bytes["hot"] <= hot * BYTES and limited.held_bytes["warm"] <= warm * BYTES
    assert limited.counts[expected] >= EXPERTS
    assert limited.counts["computed"] == 1


def test_least_recently_used_goes_first(tmp_path):
    limited = store(tmp_path, hot_bytes=2 * BYTES, warm_bytes=0)
    limited[0]
    for expert in (0, 1, 0, 2):  # 1 was used less recently than 0 when 2 came
        limited.of((0, expert))
    before = limited.counts["hot"]
    limited.of((0, 0))
    assert limited.counts["hot"] == before + 1
    limited.of((0, 1))
    assert limited.counts["hot"] == before + 1


@pytest.mark.parametrize("fault", ["truncated", "flipped", "other model", "no file"])
def test_what_cannot_be_trusted_is_fitted_again(tmp_path, fault):
    first = store(tmp_path)
    assert same(first[0], 0)
    file = first.folder / "0.2.safetensors"
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-40])
    elif fault == "flipped":
        content = bytearray(file.read_bytes())
        content[-3] ^= 0xFF
        file.write_bytes(content)
    elif fault == "other model":
        other = store(tmp_path, {"model": "xyz"})
        other.of((0, 2))
        shutil.copy(other.folder / file.name, file)
    else:
        file.unlink()
    again = store(tmp_path)
    if fault == "no file":
        again._num_experts[0] = EXPERTS
        assert same(again[0], 0)
    else:
        with pytest.warns(UserWarning, match="fitted again"):
            assert same(again[0], 0)
    assert again.counts["computed"] == 1


def rewritten(file, **changed):
    """The file with other metadata over the same tensor."""
    with safe_open(file, framework="pt") as opened:
        metadata, basis = opened.metadata(), opened.get_tensor("U_ret")
    save_file({"U_ret": basis}, file, metadata | changed)


@pytest.mark.parametrize("fault", ["nothing", "of another expert", "says it is shared by all"])
def test_a_basis_of_another_expert_or_another_number_of_experts_is_never_used(tmp_path, fault):
    first = store(tmp_path)
    first.of((0, 0))  # fits its layer
    folder = first.folder
    rewritten(folder / "0.1.safetensors")  # the control: what is written back unchanged is used
    if fault == "of another expert":
        shutil.copy(folder / "0.2.safetensors", folder / "0.3.safetensors")
    elif fault == "says it is shared by all":
        rewritten(folder / "0.0.safetensors", experts="1")
    again = store(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(again[0], 0)
    assert len(caught) == again.counts["computed"] == again.counts["missed"] == (fault != "nothing")


def test_two_that_share_a_folder_leave_each_other_alone(tmp_path):
    """Also where they take turns; the control is that each finds what it wrote itself."""
    kinds = ({"model": "abc"}, {"model": "xyz"}, {"model": "abc", "method": "another"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stores = [store(tmp_path, kind, hot_bytes=0, warm_bytes=0) for kind in kinds]
        assert all(same(one[layer], layer) for layer in (0, 1, 0) for one in stores)
        stores += [store(tmp_path, kind) for kind in kinds]
        assert all(same(one[0], 0) for one in stores[3:])
    assert [one.counts["computed"] for one in stores] == [2, 2, 2, 0, 0, 0]


def test_what_was_fitted_is_used_where_its_file_is_gone_at_once(tmp_path, monkeypatch):
    """As when another process distrusts it; nothing is then found on disk, ever."""
    limited = store(tmp_path, hot_bytes=BYTES, warm_bytes=BYTES)
    monkeypatch.setattr(limited, "compute", lambda layer: RetainBasis(fitted(layer).U_ret_Edr[..., :3].contiguous()))
    monkeypatch.setattr(limited, "_read", lambda key: None)
    assert same(limited[0], 0) and limited.counts["computed"] == EXPERTS
    assert all(tier.untyped_storage().nbytes() == BYTES for tier in limited._warm._kept.values()), "no whole layer"


def test_a_handle_over_a_store_holds_what_one_without_does(tmp_path):
    """Bases from disk, nothing kept in memory: the same routers to the bit."""
    routers = []
    for cache in (None, tmp_path / "bases"):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        limits = {"cache": cache, "hot_bytes": 0, "warm_bytes": 0} if cache else {}
        with gripmoe.constrain(model, optimizer, [random_batch(seed=9)], **limits) as handle:
            for step in range(3):
                batch = random_batch(seed=step)
                optimizer.zero_grad()
                model(**batch.inputs, labels=batch.input_ids).loss.backward()
                optimizer.step()
        routers.append(MoEModel(model).thetas())
    assert all(torch.equal(routers[0][layer], routers[1][layer]) for layer in routers[0])
    assert handle.constraint.bases.counts["cold"] > 0


def test_a_handle_fits_bases_again_where_anything_that_they_come_from_has_changed(tmp_path):
    """And finds them on disk where nothing has, whatever else shares the folder; each file says what it is of."""

    def counts(model, retain, method="expert_specific"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with gripmoe.constrain(model, optimizer, retain, method=method, cache=tmp_path) as handle:
            return [handle.constraint.bases[layer] for layer in handle.model.layers] and handle.constraint.bases.counts

    retain = [random_batch(seed=9)]
    assert counts(small_model(), retain)["computed"] == 2
    (file,) = tmp_path.glob("*/1.5.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata.keys() == {
        *("model", "layers", "dtype", "retain_tokens", "trace", "method"),
        *("layer", "expert", "experts", "checksum"),
    }
    tokens = int(retain[0].attention_mask.sum()) - 4
    assert metadata["retain_tokens"] == str(tokens) and metadata["layers"] == "[0, 1]" and metadata["layer"] == "1"
    assert metadata["model"] == "Qwen3MoeForCausalLM" and metadata["dtype"] == "torch.float32"
    assert metadata["expert"] == "5" and metadata["experts"] == "8"
    renamed = small_model()
    renamed.config._name_or_path = "another"
    others = [random_batch(seed=8)]
    for changed in (
        (renamed, retain),
        (small_model(seed=1), retain),
        (small_model(), others),
        (small_model(), others, "full_null_space"),
    ):
        assert counts(*changed)["computed"] == 2
    again = counts(small_model(), retain)
    assert again["computed"] == again["missed"] == 0 and again["cold"] == 2 * 8, "the control"


def test_files_that_a_killed_job_has_not_written_are_fitted(tmp_path):
    """Nor those of a layer whose experts share one basis are taken for others."""
    shared = BasisStore(tmp_path, [0, 1], lambda layer: RetainBasis(fitted(layer).U_ret_Edr[:1]), {"model": "shared"})
    assert len(shared[0].U_ret_Edr) == 1
    whole = store(tmp_path)
    assert same(whole[0], 0)
    for expert in (0, 2):
        (whole.folder / f"0.{expert}.safetensors").unlink()
        again = store(tmp_path)
        assert same(again[0], 0) and again.counts["computed"] == 1
