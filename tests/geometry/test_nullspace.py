"""Stage 1: the theorem (a projected update leaves selected scores alone), and a control that breaks it."""

import pytest
import torch

from gripmoe.geometry.nullspace import EpsNull, RetainStatistics, covariance_basis

EXACT = EpsNull(1e-12, "relative")


def instance(N=200, d=32, E=6, k=2, seed=0, rank=None, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, rank or d, generator=generator, dtype=torch.float64)
    if rank:
        x = x @ torch.randn(rank, d, generator=generator, dtype=torch.float64)
    theta = torch.randn(E, d, generator=generator, dtype=torch.float64)
    selected = torch.zeros(N, E, dtype=torch.bool).scatter_(1, (x @ theta.T).topk(k).indices, True)
    return x * scale, selected, torch.randn(E, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("blocks", [1, 7, 200])
def test_projected_update_leaves_selected_scores_alone(blocks):
    x, selected, update = instance(N=80, d=64)
    statistics = RetainStatistics(6, 64)
    for part, mask in zip(x.split(blocks), selected.split(blocks), strict=True):
        statistics.update(part, mask)
    projected = statistics.basis(EXACT).project(update)
    moved = (x @ projected.T).abs()
    assert moved[selected].max() < 1e-10
    assert moved[~selected].max() > 0.1, "unselected scores stay free"
    assert (x @ update.T).abs()[selected].max() > 1, "the control: unprojected, they move"


def test_basis_is_orthonormal_and_agrees_with_the_pseudoinverse_projector():
    """Eq. 19, from tokens that come in blocks, against the exact projector of Sec. 4.2."""
    x, selected, update = instance(N=60, d=40)
    statistics = RetainStatistics(6, 40)
    for part, mask in zip(x.split(17), selected.split(17), strict=True):
        statistics.update(part, mask)
    basis = statistics.basis(EXACT)
    projected = basis.project(update)
    for j in range(6):
        X = x[selected[:, j]].T
        P = torch.eye(40, dtype=torch.float64) - X @ torch.linalg.pinv(X.T @ X) @ X.T
        torch.testing.assert_close(projected[j], P @ update[j], atol=1e-9, rtol=0)
        U = basis.columns_Edr[j, :, : basis.ranks[j]]
        torch.testing.assert_close(U.T @ U, torch.eye(U.shape[1], dtype=torch.float64), atol=1e-10, rtol=0)


def test_rank_follows_the_data_and_expert_without_tokens_is_free():
    x, selected, update = instance(N=300, d=32, rank=5)
    selected[:, 3] = False
    basis = RetainStatistics(6, 32).update(x, selected).basis(EXACT)
    assert basis.ranks.tolist() == [5, 5, 5, 0, 5, 5]
    torch.testing.assert_close(basis.project(update)[3], update[3])


def test_shared_basis_constrains_every_expert():
    x, _, update = instance(N=20, d=32)
    basis = RetainStatistics(1, 32).update(x, torch.ones(20, 1, dtype=torch.bool)).basis(EXACT)
    assert (x @ basis.project(update).T).abs().max() < 1e-10


def test_eps_null_kinds_by_hand():
    eigenvalues = torch.tensor([[100.0, 10.0, 1.0, 0.005]])
    assert EpsNull(1e-2, "absolute").ranks(eigenvalues).tolist() == [3]
    assert EpsNull(0.05, "relative").ranks(eigenvalues).tolist() == [2]
    assert EpsNull(0.05, "energy").ranks(eigenvalues).tolist() == [2]
    with pytest.raises(ValueError, match="unknown eps_null kind"):
        EpsNull(1.0, "percent").ranks(eigenvalues)


def test_max_rank_keeps_the_strongest_directions():
    generator = torch.Generator().manual_seed(0)
    strong = torch.randn(1, 16, generator=generator, dtype=torch.float64)
    x = 100 * torch.randn(50, 1, generator=generator, dtype=torch.float64) * strong
    x = x + 0.01 * torch.randn(50, 16, generator=generator, dtype=torch.float64)
    statistics = RetainStatistics(1, 16, max_rank=2)
    for part in x.split(10):
        statistics.update(part, torch.ones(len(part), 1, dtype=torch.bool))
    basis = statistics.basis(EpsNull(1e-2, "relative"))
    assert statistics.factor_Erd.shape[1] == 2 and basis.ranks.tolist() == [1]
    assert (basis.columns_Edr[0, :, 0] @ strong[0]).abs() / strong.norm() > 0.9999


def test_paper_rank_inflates_in_fp32_where_the_sound_form_does_not():
    """With activations of LLM size the fp32 eigenvalue noise of X X^T exceeds eps_null = 1e-2 (absolute)."""
    x, selected, _ = instance(N=400, d=64, rank=10, scale=100.0)
    true_rank = 10
    paper = covariance_basis(x.float(), selected, EpsNull(1e-2, "absolute")).ranks
    sound = RetainStatistics(6, 64).update(x.float(), selected).basis(EpsNull(1e-4, "relative")).ranks
    assert (sound == true_rank).all()
    assert (paper > true_rank).all()


def test_paper_and_sound_agree_in_fp64_on_well_conditioned_data():
    x, selected, update = instance(N=60, d=48)
    paper = covariance_basis(x, selected, EpsNull(1e-6, "absolute")).project(update)
    sound = RetainStatistics(6, 48).update(x, selected).basis(EXACT).project(update)
    torch.testing.assert_close(paper, sound, atol=1e-8, rtol=0)


@pytest.mark.parametrize("d", [16, 60, 240])
def test_every_number_of_tokens_gives_the_paper_the_same_basis(d):
    """Where the Gram matrix of the tokens takes the place of a d x d matrix, and where it does not."""
    x, selected, update = instance(N=60, d=d)
    eps_null = EpsNull(1e-6, "absolute")
    thin = covariance_basis(x, selected, eps_null)
    assert (int(selected.sum(dim=0).max()) <= d) == (d > 16)
    assert d == 16 or thin.columns_Edr.shape[2] < d
    torch.testing.assert_close(thin.project(update), literal(x, selected, update, 1e-6), atol=1e-8, rtol=0)


def literal(x, selected, update, eps_null):
    """Projected along the eigenvectors of C_j with an eigenvalue of at least `eps_null`, in fp64."""
    served = torch.where(selected.T[:, :, None], x, 0).double()
    eigenvalues, vectors = torch.linalg.eigh(served.transpose(1, 2) @ served)
    kept = [vectors[j][:, eigenvalues[j] >= eps_null] for j in range(len(served))]
    return torch.stack([u - U @ (U.T @ u) for u, U in zip(update.double(), kept, strict=True)]).to(update.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_experts_whose_tokens_all_count_need_no_eigenvalues(dtype, monkeypatch):
    """And where some tokens do not count, eigenvalues are computed of these experts alone."""
    x, selected, update = instance(N=60, d=64)
    x, update, eps_null = x.to(dtype), update.to(dtype), EpsNull(1e-2, "absolute")
    eigh, computed = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrices: computed.append(len(matrices)) or eigh(matrices))
    for repeated in (False, True):
        others = torch.zeros(6, dtype=torch.bool)
        if repeated:  # two tokens of an expert are nearly one, which leaves an eigenvalue below eps_null
            first, second = selected[:, 2].nonzero()[-2:, 0]
            x[second] = x[first]
            x[second, 0] += 0.05
            others = selected[second] & selected[first]
        computed.clear()
        found = covariance_basis(x, selected, eps_null)
        assert computed == [int(others.sum())] * repeated
        torch.testing.assert_close(found.project(update), literal(x, selected, update, 1e-2), atol=1e-4, rtol=0)
        assert found.ranks.tolist() == (selected.sum(dim=0) - others.int()).tolist()
        gram = found.columns_Edr.transpose(1, 2) @ found.columns_Edr
        torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2).round()), atol=1e-5, rtol=0)
    assert 0 < others.sum() < 6


def test_equal_tokens_count_as_often_as_an_expert_serves_them():
    """A token of norm 0.06 has an eigenvalue of 0.0036, which eps_null leaves free; three of them have 0.0108."""
    x, selected = 0.06 * torch.eye(4, 8).repeat(3, 1), torch.ones(12, 2, dtype=torch.bool)
    selected[4:, 1] = False
    projected = covariance_basis(x, selected, EpsNull(1e-2, "absolute")).project(torch.ones(2, 8))
    expected = torch.ones(2, 8)
    expected[0, :4] = 0
    torch.testing.assert_close(projected, expected)


def test_equal_tokens_need_no_eigenvalues(monkeypatch):
    """Equal rows would make the Gram matrix singular."""
    x, selected, update = instance(N=60, d=240)
    x, selected = x.repeat(2, 1), selected.repeat(2, 1)
    expected = literal(x, selected, update, 1e-2)
    monkeypatch.setattr(torch.linalg, "eigh", lambda _: pytest.fail("equal tokens were not merged"))
    found = covariance_basis(x, selected, EpsNull(1e-2, "absolute"))
    torch.testing.assert_close(found.project(update), expected, atol=1e-8, rtol=0)


def test_eigenvalues_of_tokens_that_repeat_are_found():
    """Whatever the scale: many equal tokens, tokens of zeros, and experts without any."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = 10.0 ** (seed % 5) * torch.randn(4, 64, generator=generator)[torch.randint(4, (50,), generator=generator)]
        x[::7] = 0
        selected = torch.rand(50, 8, generator=generator) < 0.4
        selected[:, 0] = False
        basis = covariance_basis(x, selected, EpsNull(1e-2, "absolute"))
        served = torch.where(selected.T[:, :, None], x, 0).double()
        assert basis.ranks.tolist() == torch.linalg.matrix_rank(served, rtol=1e-9).tolist()
        assert basis.remainder(served.float()).norm() < 1e-5 * served.norm()
