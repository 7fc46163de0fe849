"""`gripmoe fit-basis`: the retain bases of one method."""

from __future__ import annotations

from gripmoe.cli.common import beside
from gripmoe.config.methods import Method
from gripmoe.config.provenance import recorded
from gripmoe.config.reading import parse_settings
from gripmoe.constraints.null_space import fit_bases, held_trace
from gripmoe.io.files import file_digest, read_json, remove_halves, write_json
from gripmoe.moe.bases import save_bases
from gripmoe.moe.traces import StoredTrace, load_rules


def fit_basis(args) -> None:
    """Fits the bases of one method to the recorded routing."""
    method = parse_settings(Method, args.settings)
    with recorded(beside(args.output), fit_basis):
        weights = {"model": read_json(args.model)["weights"]}
        traces = StoredTrace(args.trace, weights), StoredTrace(args.forget_trace, weights)
        trace = held_trace(method, *traces)
        remove_halves(args.output.parent, args.output.name)
        bases = fit_bases(trace, load_rules(args.trace), method)
        save_bases(args.output, bases, weights)
        ranks = {layer: basis.ranks.double() for layer, basis in bases.items()}
        statistics = {f"mean_rank_layer_{layer}": of_experts.mean().item() for layer, of_experts in ranks.items()}
        for layer, of_experts in ranks.items():
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                statistics[f"rank_{100 * share:.0f}_layer_{layer}"] = of_experts.quantile(share).item()
        size = {"basis_megabytes": args.output.stat().st_size / 1e6}
        write_json(args.digest, {**weights, "sha256": file_digest(args.output), **size, **statistics})
