"""`gripmoe fit-basis`: the retain bases of one method."""

from __future__ import annotations

from gripmoe.cli import options
from gripmoe.config.methods import Method
from gripmoe.config.provenance import provenance_of, recorded
from gripmoe.config.reading import parse_settings
from gripmoe.constraints.null_space import constrained_trace, fit_bases
from gripmoe.io.files import file_digest, read_json, remove_halves, write_json
from gripmoe.moe.bases import save_bases
from gripmoe.moe.traces import StoredTrace, load_rules


def fit_basis(
    *,
    settings: options.Settings,
    model_file: options.ModelFile,
    trace_file: options.TraceFile,
    forget_trace_file: options.ForgetTraceFile,
    digest: options.DigestFile,
    output: options.OutputFile,
) -> None:
    """Fit the retain bases of a method.

    \b
    Example:
      gripmoe fit-basis --settings '{"constraint": "null_space", "basis": "original",
          "eps_null": {"value": 0.0001, "kind": "relative"}}' --model model/model.json \\
          --trace routing.safetensors --forget-trace routing_forget.safetensors \\
          --digest bases.json --output bases.safetensors
    """
    method = parse_settings(Method, settings)
    with recorded(provenance_of(output), fit_basis):
        weights = {"model": read_json(model_file)["weights"]}
        retain, forget = (StoredTrace(file, weights) for file in (trace_file, forget_trace_file))
        trace = constrained_trace(method, retain, forget)
        remove_halves(output.parent, output.name)
        bases = fit_bases(trace, load_rules(trace_file), method)
        corpora = {"corpus": retain.corpus, "forget_corpus": forget.corpus}
        save_bases(output, bases, weights | corpora | {"fitted_with": method.fitted_with})
        ranks = {layer: basis.ranks.double() for layer, basis in bases.items()}
        statistics = {f"mean_rank_layer_{layer}": of_experts.mean().item() for layer, of_experts in ranks.items()}
        for layer, of_experts in ranks.items():
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                statistics[f"rank_{100 * share:.0f}_layer_{layer}"] = of_experts.quantile(share).item()
        size = {"basis_megabytes": output.stat().st_size / 1e6}
        write_json(digest, {**weights, "sha256": file_digest(output), **size, **statistics})
