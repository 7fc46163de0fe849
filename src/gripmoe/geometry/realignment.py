"""Method B: one closed-form correction that gives a drifted router its old scores back (Sec. 4.3, Eq. 5, App. D).

N tokens, d hidden size, E experts. theta_Ed and x_Nd belong to the original model, theta_post_Ed and x_post_Nd to the
unlearned one, for the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gripmoe.geometry.routing import SelectionRule, jaccard, route

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, math.inf)
HELD_OUT = 4  # one document of so many checks the fit


@dataclass(frozen=True)
class Realignment:
    """The router that Method B chose for one layer (Eq. 5), and how well it fits.

    `theta_Ed`: (E, d). `fit_cosine`: -1 to 1, between original and new scores, mean over the tokens fitted to; in the
    paper's form that of the fit, even of a rejected one. `held_out_stability`: 0 to 1, routing stability (Eq. 2) on the
    quarter that no fit sees; None in the paper's form. `ridge`: absolute in the paper's form; in the sound form
    relative to the mean eigenvalue of Xt Xt^T, infinity for the original router, None without an accepted fit.
    `accepted`: whether a fit was better than the unlearned router. `fell_back`: whether `theta_Ed` is Method A's
    projection of the unlearned router instead; in the sound form only if that keeps more sets.
    """

    theta_Ed: Tensor = field(repr=False)
    fit_cosine: float
    held_out_stability: float | None
    ridge: float | None
    accepted: bool
    fell_back: bool = False


def holdout_stability(
    theta_Ed: Tensor,
    theta_post_Ed: Tensor,
    x_Nd: Tensor,
    x_post_Nd: Tensor,
    rule: SelectionRule,
    wanted_Nk: Tensor,
    sizes: Sequence[int],
    form: str,
) -> dict[int, tuple[float, float]]:
    """Routing stability of a `form` ("paper" or "sound") by the number of tokens it is fitted to: on those, and on the
    second half of all, which no fit sees; `wanted_Nk` are the original sets. The paper's form is accepted whatever its
    cosine."""
    half = len(x_Nd) // 2
    stability = {}
    for size in sizes:
        old = theta_Ed, theta_post_Ed, x_Nd[:size], x_post_Nd[:size]
        if form == "paper":
            result = realign_paper(*old, accept=-math.inf)
        else:
            result = realign_sound(*old, rule, wanted_Nk=wanted_Nk[:size])
        agreement_N = jaccard(wanted_Nk, route(x_post_Nd, result.theta_Ed.to(x_post_Nd), rule).top_k_Nk)
        stability[size] = agreement_N[:size].mean().item(), agreement_N[half:].mean().item()
    return stability


def score_cosine(wanted_NE: Tensor, got_NE: Tensor) -> float:
    """Mean over tokens of the cosine between two score vectors: the paper's acceptance measure (App. D)."""
    return torch.cosine_similarity(wanted_NE, got_NE, dim=-1).mean().item()


def realign_paper(
    theta_Ed: Tensor,
    theta_post_Ed: Tensor,
    x_Nd: Tensor,
    x_post_Nd: Tensor,
    *,
    ridge: float = 1e-6,
    accept: float = 0.95,
) -> Realignment:
    """Eq. 5: Delta = Theta X Xt^T (Xt Xt^T + ridge I)^-1 - Theta_t, accepted on the tokens it was fitted
    to. The result of a rejected fit has the unlearned router.

    In fp64, not the FP32 of App. D: for fewer tokens than dimensions Xt Xt^T is near singular, fp32 rounding exceeds
    the ridge, and the weights become up to hundreds of times too large.
    """
    dtype = theta_post_Ed.dtype
    x_Nd, x_post_Nd = x_Nd.double(), x_post_Nd.double()
    wanted_NE = x_Nd @ theta_Ed.double().T
    gram_dd = x_post_Nd.T @ x_post_Nd
    gram_dd.diagonal().add_(ridge)
    # A general solve is the nearest thing to the paper's inverse; Cholesky fails where rounding exceeds the ridge.
    fitted_Ed = torch.linalg.solve(gram_dd, x_post_Nd.T @ wanted_NE).T
    correction_Ed = fitted_Ed - theta_post_Ed
    corrected_Ed = (theta_post_Ed + correction_Ed).to(dtype)
    cosine = score_cosine(wanted_NE, x_post_Nd @ corrected_Ed.double().T)
    accepted = cosine > accept  # False for a solution that is not finite
    return Realignment(corrected_Ed if accepted else theta_post_Ed, cosine, None, ridge, accepted)


def realign_sound(
    theta_Ed: Tensor,
    theta_post_Ed: Tensor,
    x_Nd: Tensor,
    x_post_Nd: Tensor,
    rule: SelectionRule,
    *,
    wanted_Nk: Tensor | None = None,
    documents_N: Tensor | None = None,
    fallback: Callable[[], Tensor] | None = None,
) -> Realignment:
    """The sound form, which starts from the original router: W = Theta + (Theta X - Theta Xt) Xt^T (Xt Xt^T + rho tr/d
    I)^-1 in fp64, rho by held-out RS.

    Every fourth document is held out from the fit, by the numbers `documents_N` of the tokens' documents (if absent,
    every fourth token). Candidates are the ridges, the original router (rho = infinity) and the unlearned router; the
    one that keeps most of the original sets on held-out tokens wins, judged after the cast back to the router's dtype.
    If the unlearned router wins, `fallback` may give another one, (E, d), which is taken if it keeps more.
    `wanted_Nk` are the original sets (if absent, those of the original router under `rule`, whose biases are the
    unlearned model's).
    Raises ValueError if no token is left to fit, or none to check.
    """
    dtype = theta_post_Ed.dtype
    theta64_Ed, x_Nd, x_post_Nd = theta_Ed.double(), x_Nd.double(), x_post_Nd.double()
    is_held_out_N = _held_out(documents_N, x_Nd)
    if is_held_out_N.all() or not is_held_out_N.any():
        raise ValueError(
            f"Method B fits to some documents and checks on one in {HELD_OUT}, and all {len(x_Nd)} tokens are on one "
            "side: give tokens of more documents, or two tokens or more without `documents_N`"
        )
    fit_x_Nd, fit_post_Nd = x_Nd[~is_held_out_N], x_post_Nd[~is_held_out_N]
    residual_NE = (fit_x_Nd - fit_post_Nd) @ theta64_Ed.T
    gram_dd = fit_post_Nd.T @ fit_post_Nd
    eye_dd = torch.eye(len(gram_dd), dtype=gram_dd.dtype, device=gram_dd.device)
    if wanted_Nk is None:
        wanted_Nk = route(x_Nd, theta64_Ed, rule).top_k_Nk
    wanted_Nk = wanted_Nk[is_held_out_N]

    candidates: dict[float | None, Tensor] = {None: theta_post_Ed}
    for ridge in RIDGES:
        if math.isinf(ridge):
            candidates[ridge] = theta_Ed.to(dtype)
        else:
            regularized_dd = gram_dd + ridge * gram_dd.trace() / len(gram_dd) * eye_dd
            factor_dd, failed = torch.linalg.cholesky_ex(regularized_dd)
            if not failed:
                shift_dE = torch.cholesky_solve(fit_post_Nd.T @ residual_NE, factor_dd)
                candidates[ridge] = (theta64_Ed + shift_dE.T).to(dtype)

    def stability(candidate_Ed: Tensor) -> float:
        got = route(x_post_Nd[is_held_out_N], candidate_Ed.double(), rule)
        return jaccard(wanted_Nk, got.top_k_Nk).mean().item()

    held_out_stability = {ridge: stability(candidate) for ridge, candidate in candidates.items()}
    best = max(held_out_stability, key=held_out_stability.__getitem__)
    chosen_Ed, kept, fell_back = candidates[best], held_out_stability[best], False
    if best is None and fallback:
        fallback_Ed = fallback()
        if (of_fallback := stability(fallback_Ed)) > kept:
            chosen_Ed, kept, fell_back = fallback_Ed, of_fallback, True
    fit_cosine = score_cosine(fit_x_Nd @ theta64_Ed.T, fit_post_Nd @ chosen_Ed.double().T)
    return Realignment(chosen_Ed, fit_cosine, kept, best, best is not None, fell_back)


def _held_out(documents_N: Tensor | None, x_Nd: Tensor) -> Tensor:
    """Which tokens check a fit, (N,), bool."""
    numbers_N = torch.arange(len(x_Nd), device=x_Nd.device) if documents_N is None else documents_N
    return numbers_N % HELD_OUT == 0
