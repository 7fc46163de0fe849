"""Stage 1: the span of the retain inputs that each expert serves, and the projection out of it (Sec. 4.2, App. B, D).

N tokens, d hidden size, E experts, r retained rank. Bases of fewer directions than the widest are padded with zero
columns; the d x d projector is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

EpsKind = Literal["absolute", "relative", "energy"]


@dataclass(frozen=True)
class EpsNull:
    """Which eigenvalues of X X^T count as zero (App. B.1): all below `value` (absolute, the paper), below `value` times
    the largest (relative), or the smallest ones that together hold at most `value` of the trace (energy)."""

    value: float
    kind: EpsKind

    def ranks(self, eigenvalues_Er: Tensor) -> Tensor:
        """Number of directions to keep, shape (E,), from eigenvalues in descending order."""
        if self.kind == "absolute":
            kept_Er = eigenvalues_Er >= self.value
        elif self.kind == "relative":
            kept_Er = eigenvalues_Er >= self.value * eigenvalues_Er[:, :1]
        elif self.kind == "energy":
            remaining_Er = eigenvalues_Er.flip(-1).cumsum(-1).flip(-1)
            kept_Er = remaining_Er > self.value * remaining_Er[:, :1]
        else:
            raise ValueError(f"unknown eps_null kind {self.kind!r}; absolute, relative or energy")
        return (kept_Er & (eigenvalues_Er > 0)).sum(dim=-1)


@dataclass(frozen=True)
class RetainBasis:
    """Orthonormal `columns_Edr` that span the retain inputs of each expert; E is 1 where all experts share one. Or,
    with `is_complement`, columns that span what these inputs leave free: the same projection."""

    columns_Edr: Tensor
    is_complement: bool = False

    def of(self, rows: slice | Tensor) -> RetainBasis:
        """The bases of some experts; a basis that all experts share is that of any of them."""
        return self if len(self.columns_Edr) == 1 else replace(self, columns_Edr=self.columns_Edr[rows])

    def double(self) -> RetainBasis:
        return replace(self, columns_Edr=self.columns_Edr.double())

    def narrow(self) -> RetainBasis:
        """Itself, or its complement where that has fewer columns."""
        size, width = self.columns_Edr.shape[1:]
        if self.is_complement or size - int(self.ranks.min()) >= width:
            return self
        eye_dd = torch.eye(size, dtype=self.columns_Edr.dtype, device=self.columns_Edr.device)
        free_Edd = eye_dd - self.columns_Edr @ self.columns_Edr.transpose(1, 2)
        shares_Ed, vectors_Edd = torch.linalg.eigh(free_Edd)  # 0 or 1
        return replace(_padded_basis(vectors_Edd.flip(-1), (shares_Ed > 0.5).sum(dim=-1)), is_complement=True)

    @cached_property
    def ranks(self) -> Tensor:
        """Directions fixed per expert, shape (E,)."""
        columns_E = (self.columns_Edr != 0).any(dim=1).sum(dim=-1)
        return self.columns_Edr.shape[1] - columns_E if self.is_complement else columns_E

    def project(self, update_Ed: Tensor) -> Tensor:
        """P u = u - U (U^T u) for each router row (Eq. 19); twice, since U is orthonormal up to rounding only."""
        return self.remainder(self.remainder(update_Ed[:, None, :]))[:, 0]

    def remainder(self, x_Emd: Tensor) -> Tensor:
        """One projection of m vectors per expert. U from the left: (x U) U^T takes CPUs three times as long."""
        coefficients_Erm = (x_Emd @ self.columns_Edr).transpose(1, 2)
        spanned_Emd = (self.columns_Edr @ coefficients_Erm).transpose(1, 2)
        return spanned_Emd.contiguous() if self.is_complement else x_Emd - spanned_Emd.contiguous()

    def coordinates(self, x_Emd: Tensor) -> Tensor:
        """`remainder` of m vectors per expert in coordinates that keep lengths and angles: those along the columns of a
        complement, (E, m, r), else the remainder itself, (E, m, d)."""
        if not self.is_complement:
            return self.remainder(x_Emd)
        return (self.columns_Edr.transpose(1, 2) @ x_Emd.transpose(1, 2)).transpose(1, 2)

    def vectors(self, coordinates_Emr: Tensor) -> Tensor:
        """The vectors of `coordinates`, (E, m, d)."""
        if not self.is_complement:
            return self.remainder(coordinates_Emr)  # once more, since U is orthonormal up to rounding only
        return (self.columns_Edr @ coordinates_Emr.transpose(1, 2)).transpose(1, 2)

    def free_norms(self, x_Nd: Tensor) -> Tensor:
        """|P x_i| of each expert, (E, N), in the dtype of `x_Nd`: sqrt(|x|² - |U^T x|²). Rounding may cancel this
        difference, so it is at least what rounding may leave."""
        spanned_EN = torch.stack([(x_Nd.double() @ U_dr.double()).square().sum(dim=1) for U_dr in self.columns_Edr])
        if self.is_complement:
            return spanned_EN.sqrt().to(x_Nd.dtype)
        squares_N = x_Nd.double().square().sum(dim=1)
        least_N = torch.finfo(x_Nd.dtype).eps * squares_N
        return (squares_N - spanned_EN).maximum(least_N).sqrt().to(x_Nd.dtype)


class RetainStatistics:
    """Streams retain tokens into one triangular factor R per expert with R^T R = X^T X, by QR, so that the condition
    number is never squared. `max_rank` keeps only the strongest directions and bounds memory at E x max_rank x d."""

    def __init__(self, num_experts: int, hidden_size: int, max_rank: int | None = None):
        self.factor_Erd = torch.zeros(num_experts, 0, hidden_size, dtype=torch.float64)
        self.max_rank = max_rank or hidden_size

    def update(self, x_Nd: Tensor, selected_NE: Tensor) -> RetainStatistics:
        """Adds tokens; token i counts for expert j where selected_NE[i, j]. Returns itself."""
        served_Emd = _served(x_Nd.double(), selected_NE)
        stacked = torch.cat([self.factor_Erd.to(x_Nd.device), served_Emd], dim=1)
        self.factor_Erd = torch.linalg.qr(stacked, mode="r").R
        if self.factor_Erd.shape[1] > self.max_rank:
            _, singular, vectors = torch.linalg.svd(self.factor_Erd, full_matrices=False)
            self.factor_Erd = (singular[..., None] * vectors)[:, : self.max_rank]
        return self

    def basis(self, eps_null: EpsNull) -> RetainBasis:
        """The directions whose eigenvalue of X X^T is not near zero, by SVD of the factor."""
        _, singular_Er, vectors_Erd = torch.linalg.svd(self.factor_Erd, full_matrices=False)
        # Directions at rounding level are noise of the factorization whatever eps_null says.
        noise_E1 = singular_Er[:, :1] * torch.finfo(singular_Er.dtype).eps * self.factor_Erd.shape[-1]
        eigenvalues_Er = torch.where(singular_Er > noise_E1, singular_Er**2, 0)
        return _padded_basis(vectors_Erd.transpose(1, 2), eps_null.ranks(eigenvalues_Er))


def covariance_basis(x_Nd: Tensor, selected_NE: Tensor, eps_null: EpsNull) -> RetainBasis:
    """The paper's bases (App. B.1): eigenvectors of C_j = X_j X_j^T; the result has the dtype of the input.

    In fp32 the noise of this eigendecomposition lies near eps_null = 1e-2 (absolute), so the rank inflates where
    activations are large. Where no expert serves more than d distinct tokens, the same span comes from X_j^T X_j in
    fp64, without that noise, and where all its eigenvalues exceed an absolute eps_null, from its Cholesky factor.
    """
    x_Nd, times_NE = _distinct(x_Nd, selected_NE)
    X_Edm = _served(x_Nd, times_NE > 0, times_NE.sqrt()).transpose(1, 2)
    if X_Edm.shape[2] > X_Edm.shape[1]:
        eigenvalues_Ed, vectors_Edd = torch.linalg.eigh(X_Edm @ X_Edm.transpose(1, 2))
        return _padded_basis(vectors_Edd.flip(-1), eps_null.ranks(eigenvalues_Ed.flip(-1)))
    exact_Edm = X_Edm.double()
    gram_Emm = exact_Edm.transpose(1, 2) @ exact_Edm
    dependent_E = torch.ones(len(gram_Emm), dtype=torch.bool, device=gram_Emm.device)
    if eps_null.kind == "absolute":
        dependent_E = _has_eigenvalue_below(eps_null.value, gram_Emm)
    if not dependent_E.any():
        return RetainBasis(_columns(exact_Edm, gram_Emm).to(X_Edm.dtype))
    bases_Edm = torch.zeros_like(exact_Edm)
    bases_Edm[~dependent_E] = _columns(exact_Edm[~dependent_E], gram_Emm[~dependent_E])
    bases_Edm[dependent_E] = _strong_columns(exact_Edm[dependent_E], gram_Emm[dependent_E], eps_null)
    width = max(1, int((bases_Edm != 0).any(dim=1).sum(dim=1).max()))
    return RetainBasis(bases_Edm[..., :width].to(X_Edm.dtype).contiguous())


def _has_eigenvalue_below(least: float, gram_Emm: Tensor) -> Tensor:
    """Which Gram matrices have an eigenvalue below `least`, or one that may be rounding, (E,). The test: minus `least`
    times the identity, the matrix has no Cholesky factor. To compute eigenvalues would take GPUs a hundred times as
    long. Rows of zeros, which pad a matrix, do not count."""
    diagonal_Em = gram_Emm.diagonal(dim1=1, dim2=2)
    rounding_E1 = torch.finfo(gram_Emm.dtype).eps * gram_Emm.shape[1] * diagonal_Em.sum(dim=1, keepdim=True)
    taken_Em = torch.where(diagonal_Em > 0, rounding_E1.clamp_min(least), -1.0)
    return torch.linalg.cholesky_ex(gram_Emm - torch.diag_embed(taken_Em)).info != 0


def _columns(X_Edm: Tensor, gram_Emm: Tensor) -> Tensor:
    """Orthonormal columns that span those of X, which are independent; columns of zeros stay."""
    padding_Em = (gram_Emm.diagonal(dim1=1, dim2=2) == 0).to(gram_Emm.dtype)
    factor_Emm = torch.linalg.cholesky_ex(gram_Emm + torch.diag_embed(padding_Em)).L
    return torch.linalg.solve_triangular(factor_Emm, X_Edm.transpose(1, 2), upper=False).transpose(1, 2)


def _strong_columns(X_Edm: Tensor, gram_Emm: Tensor, eps_null: EpsNull) -> Tensor:
    """Orthonormal columns that span the directions of X whose eigenvalue is not near zero; the others are zeros."""
    eigenvalues_Em, vectors_Emm = (each.flip(-1) for each in torch.linalg.eigh(gram_Emm))
    noise_E1 = eigenvalues_Em[:, :1] * torch.finfo(gram_Emm.dtype).eps * gram_Emm.shape[1]
    eigenvalues_Em = torch.where(eigenvalues_Em > noise_E1, eigenvalues_Em, 0)
    strong_Em = torch.arange(gram_Emm.shape[1], device=gram_Emm.device) < eps_null.ranks(eigenvalues_Em)[:, None]
    return X_Edm @ (vectors_Emm * torch.where(strong_Em, eigenvalues_Em.rsqrt(), 0)[:, None])


def extended(basis: RetainBasis, x_Nd: Tensor, selected_NE: Tensor, eps_null: EpsNull) -> RetainBasis:
    """A basis with the directions of further tokens that it lacks (App. B.3): those of what remains of them outside its
    span, where their eigenvalue is not near zero."""
    remainder_Emd = basis.remainder(basis.remainder(_served(x_Nd, selected_NE)))
    _, singular_Em, vectors_Emd = torch.linalg.svd(remainder_Emd, full_matrices=False)
    new = _padded_basis(vectors_Emd.transpose(1, 2), eps_null.ranks(singular_Em**2))
    both_Edr = torch.cat([basis.columns_Edr, new.columns_Edr], dim=-1)
    filled_Er = (both_Edr != 0).any(dim=1)
    order_Er = filled_Er.to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # padding last
    width = int(filled_Er.sum(dim=-1).max())
    return RetainBasis(both_Edr.take_along_dim(order_Er[:, None, :width], dim=-1))


def padded_indices(chosen_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the rows chosen for each expert, (E, m), padded to one width, and which entries are real."""
    counts_E = chosen_NE.sum(dim=0)
    width = min(len(chosen_NE), max(1, int(counts_E.max())))
    index_mE = chosen_NE.to(torch.int8).topk(width, dim=0).indices
    return index_mE.T, torch.arange(width, device=index_mE.device) < counts_E[:, None]


def _served(x_Nd: Tensor, selected_NE: Tensor, factors_NE: Tensor | None = None) -> Tensor:
    """The tokens of each expert, times their factors, (E, m, d), those with fewer than the most padded with zeros."""
    index_Em, valid_Em = padded_indices(selected_NE)
    served_Emd = torch.where(valid_Em[..., None], x_Nd[index_Em], 0)
    return served_Emd if factors_NE is None else served_Emd * factors_NE.T.gather(1, index_Em)[..., None]


def _distinct(x_Nd: Tensor, selected_NE: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct tokens, and how often each expert serves each of them. Documents that begin alike repeat tokens,
    which makes Gram matrices large and singular."""
    order_N = x_Nd.sum(dim=1).argsort()
    x_Nd = x_Nd[order_N]
    first_N = torch.ones(len(x_Nd), dtype=torch.bool, device=x_Nd.device)
    first_N[1:] = (x_Nd[1:] != x_Nd[:-1]).any(dim=1)
    distinct_Nd = x_Nd[first_N]
    times_NE = x_Nd.new_zeros(len(distinct_Nd), selected_NE.shape[1])
    times_NE.index_add_(0, first_N.cumsum(dim=0) - 1, selected_NE[order_N].to(x_Nd.dtype))
    return distinct_Nd, times_NE


def _padded_basis(vectors_Edr: Tensor, ranks_E: Tensor) -> RetainBasis:
    width = int(ranks_E.max()) if ranks_E.numel() else 0
    kept_Er = torch.arange(width, device=ranks_E.device) < ranks_E[:, None]
    return RetainBasis(torch.where(kept_Er[:, None, :], vectors_Edr[..., :width], 0).contiguous())
