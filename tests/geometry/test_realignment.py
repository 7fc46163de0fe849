"""Method B: exact where the drift is linear, and where the paper's form interpolates instead of generalising."""

import math

import pytest
import torch

from gripmoe.geometry.realignment import RIDGES, realign_paper, realign_sound
from gripmoe.geometry.routing import SelectionRule, jaccard, route


def drifted(N, d=32, E=8, noise=0.0, seed=0, decay=1.0):
    """Tokens of an anisotropic distribution, the same after a linear drift plus noise, and a router."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, d + 1).double().pow(-decay / 2)
    x = torch.randn(N, d, generator=generator, dtype=torch.float64) * spectrum
    mixing = torch.eye(d, dtype=torch.float64) + 0.2 * torch.randn(
        d, d, generator=generator, dtype=torch.float64
    ) / math.sqrt(d)
    wobble = noise * spectrum * torch.randn(N, d, generator=generator, dtype=torch.float64)
    theta = torch.randn(E, d, generator=generator, dtype=torch.float64)
    return x, x @ mixing.T + wobble, theta


def stability(theta, x, new_theta, x_post, k=2):
    return (
        jaccard(route(x, theta, SelectionRule(k)).top_k_Nk, route(x_post, new_theta, SelectionRule(k)).top_k_Nk)
        .mean()
        .item()
    )


@pytest.mark.parametrize("form", ["paper", "sound"])
def test_linear_drift_is_undone(form):
    x, x_post, theta = drifted(2000, decay=0.0)
    before = stability(theta, x, theta, x_post)
    result = (
        realign_paper(theta, theta, x, x_post)
        if form == "paper"
        else realign_sound(theta, theta, x, x_post, SelectionRule(2))
    )
    after = stability(theta, x, result.theta_Ed.double(), x_post)
    assert result.accepted and before < 0.9 and after > 0.98


def test_error_peaks_at_as_many_tokens_as_dimensions_in_the_papers_form_only():
    """Of sets of other tokens, mean of three draws: from half as many over as many to four times as many. At as many
    the paper's form keeps the sets of its own tokens."""
    d = 64
    error = {"paper": torch.zeros(3), "sound": torch.zeros(3)}
    for seed in range(3):
        x, x_post, theta = drifted(4 * d + 2000, d=d, noise=0.3, seed=seed)
        rest = slice(4 * d, None)
        for number, size in enumerate((d // 2, d, 4 * d)):
            given = theta, theta, x[:size], x_post[:size]
            for form, result in (("paper", realign_paper(*given)), ("sound", realign_sound(*given, SelectionRule(2)))):
                error[form][number] += (1 - stability(theta, x[rest], result.theta_Ed.double(), x_post[rest])) / 3
                if form == "paper" and size == d:
                    assert result.accepted and result.fit_cosine > 0.99
                    assert stability(theta, x[:d], result.theta_Ed.double(), x_post[:d]) > 0.95
    half, peak, fourfold = error["paper"].tolist()
    assert peak > half + 0.1 and peak > fourfold + 0.3
    half, at_d, fourfold = error["sound"].tolist()
    assert at_d < max(half, fourfold) + 0.05


def test_paper_form_rejects_below_its_cosine_and_leaves_the_router():
    x, _, theta = drifted(500)
    unrelated = drifted(500, seed=9)[0]
    post = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    result = realign_paper(theta, post, x, unrelated)
    assert not result.accepted and result.fit_cosine < 0.95
    assert torch.equal(result.theta_Ed, post)


def test_paper_form_accepts_above_a_cosine_of_0_95():
    """Of scores that noise moves by a share; without it the cosine is 1."""
    cosines = {}
    for accepted, noise in ((True, 0.28), (False, 0.32)):
        x, _, theta = drifted(2000, decay=0.0)
        result = realign_paper(theta, theta, x, x + noise * drifted(2000, decay=0.0, seed=1)[0])
        assert result.accepted == accepted
        cosines[accepted] = result.fit_cosine
    assert 0.94 < cosines[False] < 0.95 < cosines[True] < 0.96


def test_paper_acceptance_passes_at_low_stability():
    """A large score direction common to all tokens keeps the cosine high while the sets are wrong."""
    x, x_post, theta = drifted(2000, noise=1.0)
    offset = torch.ones(2000, 1, dtype=torch.float64) * 20
    x, x_post = torch.cat([x, offset], dim=1), torch.cat([x_post, offset], dim=1)
    theta = torch.cat([theta, torch.ones(8, 1, dtype=torch.float64)], dim=1)
    result = realign_paper(theta, theta, x, x_post)
    assert result.accepted and result.fit_cosine > 0.95
    assert stability(theta, x, result.theta_Ed.double(), x_post) < 0.7


def test_sound_form_puts_the_original_router_back_when_nothing_drifted():
    x, _, theta = drifted(1000)
    post = theta + 0.5 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    result = realign_sound(theta, post, x, x.clone(), SelectionRule(2))
    assert result.held_out_stability == 1.0
    assert stability(theta, x, result.theta_Ed, x) == 1.0


def test_the_best_of_several_ridges_is_relative_to_the_size_of_the_inputs():
    """And is larger where there is more noise."""
    ridges = []
    for noise in (0.1, 0.5):
        x, x_post, theta = drifted(200, d=64, noise=noise)
        post = theta + torch.randn(theta.shape, generator=torch.Generator().manual_seed(9)).double()
        small, large = (realign_sound(theta, post, s * x, s * x_post, SelectionRule(2)) for s in (1e-3, 1e3))
        torch.testing.assert_close(small.theta_Ed, large.theta_Ed)
        assert small.ridge == large.ridge
        ridges.append(small.ridge)
    assert ridges[0] < ridges[1] < math.inf


def test_documents_are_kept_from_the_fit_as_a_whole():
    """Where the tokens of a document are alike, those beside a fitted one say nothing of other documents. The
    control is every fourth token."""
    x, x_post, theta = drifted(24, noise=1.0)
    documents = torch.arange(24).repeat_interleave(8)
    alike = [tokens[documents] for tokens in (x, x_post)]
    others, others_post, _ = drifted(4000, noise=1.0, seed=1)
    results = {
        kind: realign_sound(theta, theta, *alike, SelectionRule(2), documents_N=numbers)
        for kind, numbers in (("documents", documents), ("tokens", None))
    }
    claimed = {kind: result.held_out_stability for kind, result in results.items()}
    found = {kind: stability(theta, others, r.theta_Ed.double(), others_post) for kind, r in results.items()}
    assert claimed["tokens"] > found["tokens"] + 0.2, "the control"
    assert claimed["documents"] < found["documents"] + 0.1 and found["documents"] > found["tokens"]


@pytest.mark.parametrize("best", ["original", "unlearned"])
def test_sound_form_without_a_fit_that_serves_takes_the_router_that_does_and_says_so(best):
    """What is fitted says nothing of the held-out tokens. If their inputs have not drifted, the original router keeps
    all their sets; if the unlearned router has undone their drift, that one does."""
    x, x_post, theta = drifted(200)
    post = theta @ torch.linalg.pinv(torch.linalg.lstsq(x, x_post).solution.T) if best == "unlearned" else -theta
    seen = (x_post if best == "unlearned" else x).clone()
    fitted = torch.arange(200) % 4 != 0
    seen[fitted] = drifted(200, seed=9)[0][fitted]
    result = realign_sound(theta, post, x, seen, SelectionRule(2))
    expected, ridge = (theta, math.inf) if best == "original" else (post, None)
    assert result.ridge == ridge and result.accepted == (best == "original") and result.held_out_stability == 1.0
    assert torch.equal(result.theta_Ed, expected)
    repaired = realign_sound(theta, post, x, x_post, SelectionRule(2))
    assert (repaired.ridge in RIDGES[:-1]) == (best == "original"), "the control: tokens that do say something"


@pytest.mark.parametrize("size", [1, 16, 60, 64, 256])
@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_paper_form_is_equation_5_however_few_the_tokens(size, decay):
    """Against the same ridge regression by SVD, which never squares the condition number. The control: solved in fp32,
    fewer tokens than dimensions give weights many times as large."""
    x, x_post, theta = (t.float() for t in drifted(size, d=64, noise=0.3, decay=decay))
    left, singular, right = torch.linalg.svd(x_post.double(), full_matrices=False)
    wanted = x.double() @ theta.double().T
    expected = wanted.T @ left @ torch.diag(singular / (singular**2 + 1e-6)) @ right
    result = realign_paper(theta, theta, x, x_post, accept=-math.inf)
    assert result.theta_Ed.dtype == theta.dtype
    assert (result.theta_Ed - expected).norm() < 1e-5 * expected.norm()
    if size == 16 and decay == 0:
        gram = x_post.T @ x_post + 1e-6 * torch.eye(64)
        assert torch.linalg.solve(gram, x_post.T @ (x @ theta.T)).norm() > 10 * expected.norm(), "the control"


@pytest.mark.parametrize("numbers", [None, [0, 0, 0, 0, 0], [1, 1, 2, 3, 3]])
def test_tokens_that_leave_nothing_to_fit_or_nothing_to_check_are_refused(numbers):
    """One token; one document; no fourth document. The control: two of them."""
    x, x_post, theta = drifted(5)
    documents = None if numbers is None else torch.tensor(numbers)
    tokens = slice(1) if numbers is None else slice(None)
    with pytest.raises(ValueError, match="on one side"):
        realign_sound(theta, theta, x[tokens], x_post[tokens], SelectionRule(2), documents_N=documents)
    two = None if numbers is None else torch.tensor([0, 0, 0, 1, 1])
    result = realign_sound(theta, theta, x, x_post, SelectionRule(2), documents_N=two)
    assert math.isfinite(result.fit_cosine) and math.isfinite(result.held_out_stability)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e200])
def test_a_model_that_has_diverged_is_no_reason_to_stop(broken):
    """No ridge can be fitted to its states: the original router, or the unlearned one, is what remains."""
    x, x_post, theta = drifted(200)
    post = theta + 0.1
    result = realign_sound(theta, post, x, x_post * broken, SelectionRule(2))
    assert result.ridge in (math.inf, None) and torch.equal(result.theta_Ed, theta if result.ridge else post)
    assert realign_sound(theta, post, x, x_post, SelectionRule(2)).ridge not in (math.inf, None), "the control"
