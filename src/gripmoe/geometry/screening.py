"""Safe screening (ours): which retain tokens can bind a router row near where the row is.

A projection onto a convex set moves no point farther than its argument moves. So from a feasible point c, the
projection of u is within |u - c| of c, and a token whose hyperplane is farther from c, along the directions that Stage
1 leaves free, does not bind. A step of an optimizer has few tokens in reach.

N tokens, d hidden size, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gripmoe.geometry.halfspace import in_full_precision, nearest_feasible
from gripmoe.geometry.nullspace import RetainBasis

AHEAD = 4.0  # the radius within which tokens are looked up, in lengths of the present step
AT_ONCE = 65_536  # tokens that may need a copy in fp64
ROUNDING = 1e-5  # of scores and of the products of norms behind them: ten times what `nearest_feasible` forgives


class ScreenedProjection:
    """Projects many updates in turn onto one polyhedron with `nearest_feasible`; each update is near the one before.
    The answer is the same as over all tokens, up to rounding. `basis`, `x_Nd` and `bounds_NE` are as in
    `nearest_feasible`."""

    def __init__(self, basis: RetainBasis, x_Nd: Tensor, bounds_NE: Tensor):
        self._x_Nd, self._bounds_EN = x_Nd, bounds_NE.T.contiguous()
        self._norms_N = x_Nd.norm(dim=1)
        self._free_norms_EN = basis.free_norms(x_Nd)
        # Centre, (E, d), and radius, (E,), of the last look-up. They alone determine the tokens in reach, so a resumed
        # run looks them up again.
        self.looked_from: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()  # saves a seventh of the time, which many small operations take
    def __call__(self, update_Ed: Tensor, basis: RetainBasis, near_Ed: Tensor, **options) -> Tensor:
        """The point nearest to `update_Ed`. `near_Ed` is that of the step before; `options` are of `nearest_feasible`.
        The basis is given again, since a basis may lie on disk between two steps."""
        if self.looked_from is None or self._leaves(update_Ed):
            at_Ed = basis.double().project(near_Ed.double()).to(near_Ed.dtype)  # loaded weights may be outside Stage 1
            distance_E = (update_Ed - at_Ed).norm(dim=1)
            self.look(at_Ed, AHEAD * distance_E.clamp_min(distance_E.mean()))
        if not len(self._tokens_in_reach_Nd):
            return basis.double().project(update_Ed.double()).to(update_Ed.dtype)
        return nearest_feasible(
            update_Ed, basis, self._tokens_in_reach_Nd, self._bounds_in_reach_NE, near_Ed=near_Ed, **options
        )

    def look(self, at_Ed: Tensor, radius_E: Tensor) -> None:
        """Looks up the tokens with a hyperplane within `radius_E` of `at_Ed`; all tokens if `at_Ed` is not feasible."""
        at_Ed, radius_E = at_Ed.to(self._x_Nd), radius_E.to(self._x_Nd)
        parts = map(in_full_precision, self._x_Nd.split(AT_ONCE))
        scores_EN = torch.cat([(at_Ed.to(x_Nd) @ x_Nd.T).to(at_Ed) for x_Nd in parts], dim=1)
        slack_EN = self._bounds_EN - scores_EN
        rounding_EN = ROUNDING * (1 + torch.outer(at_Ed.norm(dim=1), self._norms_N))
        reached_N = (slack_EN <= radius_E[:, None] * self._free_norms_EN + rounding_EN).any(dim=0)
        reached_N |= (slack_EN < -rounding_EN).any()
        self._tokens_in_reach_Nd, self._bounds_in_reach_NE = self._x_Nd[reached_N], self._bounds_EN[:, reached_N].T
        self.looked_from = at_Ed, radius_E

    def _leaves(self, update_Ed: Tensor) -> bool:
        at_Ed, radius_E = self.looked_from
        return bool(((update_Ed - at_Ed).norm(dim=1) > radius_E).any())
