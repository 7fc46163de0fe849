"""Two processes that share a model train it as one does: on CPU, over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import HANGS, small_model
from gripmoe.io import distributed
from gripmoe.moe import MoEModel
from gripmoe.training.checkpoint import claim_state, save_state
from sharded_training import BF16, CASES, FIRST_STEP, RESUMED, finetuned, first_step, model_of, train

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or torchao compiles its optimizer, which takes longer than all else
PROGRAM = Path(__file__).parents[1] / "sharded_training.py"


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What two processes found, and where they wrote it."""
    folder = tmp_path_factory.mktemp("shared")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, PROGRAM, folder], capture_output=True, text=True, timeout=HANGS, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder, torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(name, folder) for name in CASES}


@pytest.mark.parametrize("name", [name for name in CASES if name not in BF16])
def test_the_model_is_the_one_of_a_single_process(name, shared, alone):
    """Up to a thousandth of what was moved. States in 8 bits turn a rounding error into another of 256 values: there,
    up to a twentieth."""
    two, one = shared[1][name], alone[name]
    moved = largest_difference(one["state"], model_of(name).state_dict())
    in_8_bits = name == "adamw_8bit"
    assert largest_difference(two["state"], one["state"]) < moved / (20 if in_8_bits else 1000)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-2 if in_8_bits else 1e-4)


def distance(one, other):
    return torch.cat([(one[name].float() - other[name].float()).flatten() for name in one]).norm().item()


@pytest.mark.parametrize("name, allowed", [("bf16", 1 / 20), ("bf16_fp8", 1 / 10), ("bf16_8bit", 1 / 4)])
def test_bf16_experts_under_fp32_routers_are_those_of_a_single_process_but_for_rounding(name, allowed, shared, alone):
    """Allowed is a share of the way that training went. In FP8 each process scales by its own tokens; beside states in
    8 bits each rounds its weights at random."""
    two, one = shared[1][name], alone[name]
    routers = {key for key in one["state"] if key.endswith("mlp.gate.weight")}
    assert {key for key, value in two["state"].items() if value.dtype == torch.float32} == routers
    assert distance(two["state"], one["state"]) < allowed * distance(one["state"], model_of(name).state_dict())
    assert two["losses"] == pytest.approx(one["losses"], rel=allowed)
    others = {"bf16", "bf16_fp8"} - {name} if name != "bf16_8bit" else ()
    for other in others:
        apart = distance(two["state"], alone[other]["state"])
        assert distance(two["state"], one["state"]) < apart / 2, "its own precision"


@pytest.mark.parametrize("name", FIRST_STEP)
def test_a_step_moves_routers_as_that_of_a_single_process_does(name, shared, tmp_path):
    """Within a thousandth of what was moved, 5e-3: weights are up to 4, and matrices of other sizes round otherwise."""
    start = MoEModel(small_model("qwen2_moe")).thetas()
    one, two = first_step(name, tmp_path)["thetas"][0], shared[1]["first step"][name]["thetas"]
    assert all((one - each).abs().max() < 5e-6 for each in two)
    assert (one - torch.stack(list(start.values()))).abs().max() > 4e-3


def test_constrain_refuses_documents_that_differ_between_processes(shared):
    """In every process: one that went on would wait for the other. The control: the same documents are accepted."""
    refusals = shared[1]["refusals"]
    assert refusals[True] == ["", ""]
    assert all("processes differ in documents or weights" in refusal for refusal in refusals[False])


def test_means_of_means_are_another_loss(shared, alone):
    """Documents are of different lengths."""
    moved = largest_difference(alone["gd"]["state"], small_model("qwen2_moe").state_dict())
    assert largest_difference(shared[1]["means of means"]["state"], alone["gd"]["state"]) > moved / 20


def test_without_averaged_gradients_it_is_not(shared, alone):
    found = shared[1]["not averaged"]
    assert largest_difference(found["state"], alone["unconstrained"]["state"]) > 1e-4
    assert (found["thetas"] - alone["unconstrained"]["thetas"]).abs().max() > 1e-4, "routers too"


@pytest.mark.parametrize("name", [*CASES, "finetuned"])
def test_every_process_has_the_same_of_all_that_is_not_sharded_to_the_bit(name, shared):
    """Routers, shared experts, attention, embeddings and norms."""
    first, second = shared[1][name]["replicated"]
    assert torch.equal(first, second)


def test_control_a_shared_expert_whose_gradient_is_not_averaged_is_another_in_each_process(shared):
    """Routers alone would not tell: without clipping, which looks at all gradients, they stay the same."""
    found = shared[1]["shared expert not averaged"]
    assert not torch.equal(*found["replicated"]) and torch.equal(*found["thetas"])


def test_what_is_written_is_the_whole_model(shared):
    folder, results = shared
    written = AutoModelForCausalLM.from_pretrained(folder / "router_l2").state_dict()
    assert largest_difference(written, results["router_l2"]["state"]) == 0


def test_both_processes_know_the_digest_of_what_was_written_when_it_is_there(shared):
    found = shared[1]["router_l2"]
    assert found["saved"].tolist() == 2 * [[*bytes.fromhex(found["digest"]), True]]


@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_resume_where_two_were_stopped(name, shared):
    results = shared[1]
    assert results[f"{name} resumed"]["digest"] == results[name]["digest"]


@pytest.mark.parametrize("time", ["made", "found"])
def test_references_on_disk_are_one_file_for_both_processes(time, shared):
    folder, results = shared
    assert results[f"references {time}"]["digest"] == results["anchored"]["digest"]
    [file] = (folder / "original_answers").glob("*.safetensors")
    assert file.name.startswith("original_states_")


@pytest.mark.parametrize("name", ["finetuned", "finetuned checkpointed"])
def test_finetuning_in_two_processes_is_that_of_one(name, shared, tmp_path):
    """In passes, with documents of different lengths. What is moved is little: on some processors rounding is more than
    a thousandth of it."""
    one, two = finetuned(tmp_path), shared[1][name]
    moved = largest_difference(one["state"], small_model("qwen2_moe").state_dict())
    assert largest_difference(two["state"], one["state"]) < moved / 200
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4) and len(one["losses"]) == 3


def test_finetuning_resumes_in_two_processes(shared):
    whole, again = shared[1]["finetuned"], shared[1]["finetuned again"]
    assert again["losses"] == whole["losses"] and largest_difference(again["state"], whole["state"]) == 0


def test_a_part_that_was_not_finished_by_all_is_passed_over(tmp_path, monkeypatch):
    """The first of two processes died before it wrote part 2; it is written again, and what is left is removed."""
    (tmp_path / "state.pt.0.1.part").touch()
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "wait_for_all", lambda: None)
    monkeypatch.setattr(distributed, "from_first_", lambda tensor: torch.tensor(2))
    for number in (1, 2):
        (tmp_path / f"state.pt.1.{number}.part").touch()
    layer = torch.nn.Linear(2, 2)
    save_state(tmp_path / "state.pt", layer, torch.optim.AdamW(layer.parameters()), step=3)
    assert {file.name for file in tmp_path.iterdir()} == {"state.pt.0.1.part", "state.pt.1.2.part"}
    assert (tmp_path / "state.pt.1.2.part").stat().st_size > 0


def test_one_process_does_not_resume_what_two_have_saved(shared):
    with pytest.raises(ValueError, match="saved by 2 processes.*delete the file"):
        train("anchored", shared[0])


def test_a_step_in_which_no_process_has_a_row_that_counts_has_no_share(monkeypatch):
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    monkeypatch.setattr(distributed, "average", lambda count: 1.5)
    assert distributed.share(3) == 2.0
    monkeypatch.setattr(distributed, "average", lambda count: 0.0)
    assert distributed.share(0) == 1.0


def test_parts_of_more_processes_than_there_are_now_do_not_stay(tmp_path):
    """Whoever follows the advice to delete the file of four processes, and goes on with one."""
    for rank in range(4):
        (tmp_path / f"state.pt.{rank}.1.part").write_bytes(b"large")
    (tmp_path / "other.pt.0.1.part").write_bytes(b"of another cell")
    claim_state(tmp_path / "state.pt", {"code": "x"})
    assert {file.name for file in tmp_path.iterdir()} == {"state.identity.json", "other.pt.0.1.part"}
