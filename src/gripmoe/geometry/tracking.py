"""Ours: a router that follows its inputs."""

from __future__ import annotations

import torch
from torch import Tensor


class RouterTracker:
    """Recursive least squares with forgetting: the router that gives current inputs x~ the scores that the original
    router gave the original inputs of the same tokens, as far as a linear router can.

        A <- g A + X~^T X~,   B <- g B + (S_0 - X~ Theta_0^T)^T X~,   Theta = Theta_0 + B (A + ridge tr(A)/d I)^-1

    in fp64. Where inputs have not drifted it is Theta_0. `theta_Ed` is the router of the last update.
    """

    def __init__(self, theta_0_Ed: Tensor, forgetting: float = 0.8, ridge: float = 1e-3):
        self.theta_0_Ed = self.theta_Ed = theta_0_Ed.double()
        self.forgetting, self.ridge = forgetting, ridge
        d = theta_0_Ed.shape[1]
        self.gram_dd = torch.zeros(d, d, dtype=torch.float64, device=theta_0_Ed.device)
        self.cross_Ed = torch.zeros_like(self.theta_0_Ed)

    def update(self, x_Nd: Tensor, wanted_NE: Tensor) -> Tensor:
        """The router after these tokens, (E, d) in fp64; unchanged if there are none or they are not finite."""
        # Written so that fake tensors, which answer False to every question, go on.
        if not len(x_Nd) or (~x_Nd.isfinite()).any() or (~wanted_NE.isfinite()).any():
            return self.theta_Ed
        x_Nd = x_Nd.double()
        residual_NE = wanted_NE.double() - x_Nd @ self.theta_0_Ed.T
        self.gram_dd = self.forgetting * self.gram_dd + x_Nd.T @ x_Nd
        self.cross_Ed = self.forgetting * self.cross_Ed + residual_NE.T @ x_Nd
        d = len(self.gram_dd)
        eye_dd = torch.eye(d, dtype=torch.float64, device=x_Nd.device)
        factor_dd, failed = torch.linalg.cholesky_ex(self.gram_dd + self.ridge * self.gram_dd.trace() / d * eye_dd)
        if not failed.any():
            self.theta_Ed = self.theta_0_Ed + torch.cholesky_solve(self.cross_Ed.T, factor_dd).T
        return self.theta_Ed

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gram_dd, self.cross_Ed, self.theta_Ed

    def load_state(self, state: tuple[Tensor, Tensor, Tensor]) -> None:
        self.gram_dd, self.cross_Ed, self.theta_Ed = (tensor.to(self.gram_dd) for tensor in state)
