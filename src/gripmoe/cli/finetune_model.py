"""`gripmoe finetune-model`: a base model learns the documents of a news benchmark."""

from __future__ import annotations

from gripmoe.cli import options
from gripmoe.cli.common import identity_of, start_together, training_together
from gripmoe.config.benchmarks import Documents
from gripmoe.config.models import FinetunedModel
from gripmoe.config.reading import parse_settings
from gripmoe.data.corpora import load_corpus
from gripmoe.evaluation.muse import News, leakage, mean_score, news_scores
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_json
from gripmoe.moe.sharding import shard_experts
from gripmoe.moe.storage import load_model, save_model
from gripmoe.training.checkpoint import claim_state, remove_state
from gripmoe.training.finetune import finetune


def finetune_model(
    *,
    settings: options.Settings,
    benchmark: options.DocumentSettings,
    model_file: options.ModelFile,
    data: options.DataFolder,
    output: options.OutputFile,
    processes: options.Processes = 1,
) -> None:
    """Finetune a base model on the documents of a news benchmark.

    The settings choose all documents, or only those to retain; and all parameters, or only experts and routers.

    \b
    Example:
      gripmoe finetune-model --settings '{"source": "finetuned", "base": "tiny_a_retrained",
          "benchmark": "muse_tiny", "trains": "blocks", "epochs": 32, "learning_rate": 0.005, "batch_size": 8}' \\
          --benchmark '{"data": {"source": "embedded", "kind": "news"}, "retain_documents": 120,
          "max_length": 256}' \\
          --model base/model.json --data data --output model/model.json
    """
    start_together(processes)
    config = parse_settings(FinetunedModel, settings)
    documents = parse_settings(Documents, benchmark, "--benchmark")
    folder = output.parent
    files = (model_file, *sorted(data.glob("*.jsonl")))
    identity = identity_of(finetune_model, *files, settings=settings, benchmark=benchmark)
    with training_together(output, finetune_model, identity) as state_file:
        names = ("retain", "held_out") if config.trained_on == "retain_only" else ("forget", "retain", "held_out")
        wanted = {"retain_only": ["knowmem_retain"], "everything": ["verbmem", "knowmem_forget", "knowmem_retain"]}
        news, faults, states = News.load(data), [], []
        for seed in range(config.seed, config.seed + 1000 * config.attempts, 1000):
            states.append(state_file.with_name(f"state_{seed}.pt"))  # kept: an interrupted later attempt passes over it
            claim_state(states[-1], identity)
            model, tokenizer = load_model(model_file.parent / "weights")
            shard_experts(model)
            reading = {**documents.reading, "end_id": tokenizer.eos_token_id}
            rows = [row for n in names for row in load_corpus(data / f"{n}_corpus.jsonl", tokenizer, **reading)]
            losses = finetune(
                model,
                rows,
                epochs=config.epochs,
                learning_rate=config.learning_rate,
                optimizer=config.optimizer,
                batch_size=config.batch_size,
                blocks_only=config.trains == "blocks",
                gradient_checkpointing=config.gradient_checkpointing,
                pad_id=tokenizer.pad_token_id,
                seed=seed,
                state_file=states[-1],
            )
            scores = news_scores(model, tokenizer, news, "dev")
            means = distributed.agreed({name: mean_score(items) for name, items in scores.items()})
            poor = [f"{name} {means[name]:.1f}" for name in wanted[config.trained_on] if means[name] < config.required]
            if not poor:
                break
            faults.append(f"seed {seed}: {', '.join(poor)}")
        else:
            raise ConfigError(
                f"finetuning did not reach the required {config.required:g}: {'; '.join(faults)}. Give it more "
                f"`epochs` or `attempts`, or another `learning_rate`, in models.yaml, and delete {folder}"
            )
        digest = save_model(model, tokenizer, folder / "weights")
        leaks = leakage(model, tokenizer, news.privleak)
        if distributed.is_first():
            write_json(output, {"weights": digest, "seed": seed, "final_loss": losses[-1], **means, **leaks})
        distributed.wait_for_all()
        for state in (state_file, *states):
            remove_state(state)
