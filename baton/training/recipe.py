"""The recipe of the demo model: tokenizer, target, draft, heads, evaluation, in this order; finished parts are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.engine.core.device import product_dtype, set_threads
from baton.engine.speculation.proposers.heads_folder import KINDS
from baton.training.data.batches import Batches
from baton.training.data.corpus import HELD_OUT, Corpus, Document, gather
from baton.training.data.files import save_atomically, save_text
from baton.training.data.tokenizer import load_tokenizer, train_tokenizer
from baton.training.heads.heads import FIGURES, train_heads
from baton.training.model.adapter import export_adapter, tabbed_corpus, train_adapter
from baton.training.model.evaluate import evaluate, token_ids, total_bits
from baton.training.model.export import export, load
from baton.training.model.llama import Llama, ModelConfig
from baton.training.model.mixture import Mixture, MixtureConfig, mixture_loss
from baton.training.model.rounded import train_rounded
from baton.training.model.trainer import Loss, Trainer, TrainingPlan, distillation_loss, next_token_loss

TARGET = ModelConfig(4096, 256, 704, num_layers=7, num_heads=4, num_kv_heads=2, head_dim=64)
"""6.2 M parameters, 1.0 M of them the embedding."""

DRAFT = ModelConfig(4096, 128, 192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
"""0.77 M parameters, 0.52 M of them the embedding; two layers, the least that can copy from the context."""


_SHORT_BYTES = 8_000  # of the held-out modules that measure an adapter: the two evaluations then take a minute

MIXTURE = MixtureConfig(4096, 128, 80, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
"""1.7 M parameters, 0.52 M of them the embedding; a token takes 2 of 8 experts a layer, 0.96 M in all."""


@dataclass(frozen=True)
class Recipe:
    """Two shapes with one vocabulary, the training plan of each part, and how much text is read.

    The draft learns first from the text and then from the target, which costs four times as much per token."""

    target: ModelConfig
    draft: ModelConfig
    target_plan: TrainingPlan
    draft_plan: TrainingPlan
    distill_plan: TrainingPlan
    heads_minutes: float
    mixture: MixtureConfig
    mixture_plan: TrainingPlan
    adapter_plan: TrainingPlan
    int4_plan: TrainingPlan
    num_function_heads: int = 50
    max_corpus_bytes: int | None = None
    compiled: bool = False


def full(minutes: float) -> Recipe:
    """Return the recipe of the committed model, scaled to `minutes`."""
    return Recipe(
        TARGET,
        DRAFT,
        target_plan=TrainingPlan(minutes=0.65 * minutes, max_tokens=30_000_000),
        draft_plan=TrainingPlan(
            minutes=0.06 * minutes,
            max_tokens=30_000_000,
            batch_tokens=4096,
            decay_from=0.8,
            lengths=((0.0, 512), (0.75, 2048)),
        ),
        distill_plan=TrainingPlan(
            minutes=0.11 * minutes,
            max_tokens=30_000_000,
            batch_tokens=4096,
            matrix_lr=0.014,
            vector_lr=0.006,
            decay_from=0.2,
            lengths=((0.0, 512), (0.75, 2048)),
        ),
        heads_minutes=0.09 * minutes,
        mixture=MIXTURE,
        mixture_plan=TrainingPlan(
            minutes=0.12 * minutes, max_tokens=10_000_000, batch_tokens=4096, lengths=((0.0, 256), (0.9, 1024))
        ),
        adapter_plan=TrainingPlan(
            minutes=0.06 * minutes,
            max_tokens=2_000_000,
            batch_tokens=2048,
            matrix_lr=0.004,
            weight_decay=0.0,
            lengths=((0.0, 256),),
        ),
        int4_plan=TrainingPlan(
            minutes=0.3 * minutes,
            max_tokens=3_000_000,
            batch_tokens=2048,
            matrix_lr=0.0004,
            vector_lr=0.0001,
            weight_decay=0.0,
            warmup=0.05,
            decay_from=0.2,
            lengths=((0.0, 512),),
        ),
        # A third more tokens a second, after a minute of compiling; needs a C++ compiler.
        compiled=shutil.which("g++") is not None,
    )


def quick(minutes: float = 0.6) -> Recipe:
    """Return a recipe with every step at a size that teaches nothing, for trying the command."""
    shape = {"vocab_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_length": 256}
    plan = {"max_tokens": 10_000_000, "batch_tokens": 2048, "lengths": ((0.0, 128), (0.8, 256))}
    return Recipe(
        ModelConfig(hidden_size=64, intermediate_size=192, num_layers=2, **shape),
        ModelConfig(hidden_size=32, intermediate_size=96, num_layers=1, **shape),
        target_plan=TrainingPlan(minutes=0.7 * minutes, **plan),
        draft_plan=TrainingPlan(minutes=0.1 * minutes, **plan),
        distill_plan=TrainingPlan(minutes=0.1 * minutes, **plan),
        heads_minutes=0.05 * minutes,
        mixture=MixtureConfig(hidden_size=32, intermediate_size=32, num_layers=1, **shape),
        mixture_plan=TrainingPlan(minutes=0.1 * minutes, **plan),
        adapter_plan=TrainingPlan(minutes=0.1 * minutes, **plan),
        int4_plan=TrainingPlan(minutes=0.1 * minutes, **plan),
        num_function_heads=5,
        max_corpus_bytes=200_000,
    )


def make_demo(recipe: Recipe, out: Path, seed: int = 0, threads: int | None = None) -> dict:
    """Make everything in `out`: target/, draft/, medusa/, eagle/, held_out.txt and evaluation.json; return the
    evaluation's figures.

    State for resuming is kept in `out/.training` and removed at the end. Raises OSError if `out` cannot be written,
    ValueError if the corpus is too small."""
    set_threads(threads)
    run = Run(recipe, out, out / ".training", seed)
    target_figures = run.train_target()
    # the draft imitates the model that is served
    draft_figures = run.train_draft(load(out / "target").to(product_dtype()))
    heads_figures = {kind: run.train_heads(kind) for kind in KINDS}
    models = load(out / "target"), load(out / "draft")
    figures = evaluate(*models, run.tokenizer, run.corpus.held_out, recipe.num_function_heads)
    record = {
        "evaluation": figures,
        "target": target_figures,
        "draft": draft_figures,
        **heads_figures,
        "corpus": run.corpus.manifest(),
        "seed": seed,
        "torch": torch.__version__,
    }
    save_text(out / "evaluation.json", json.dumps(record, indent=2) + "\n")
    save_text(out / "held_out.txt", "\n".join(HELD_OUT) + "\n")
    shutil.rmtree(run.work)
    return figures


def make_int4(recipe: Recipe, out: Path, seed: int = 0, threads: int | None = None) -> dict:
    """Train int4 weights of the target in `out` and write them to target-int4/; return the figures.

    State for resuming is kept in `out/.training-int4` and removed at the end. Raises OSError if `out` cannot be
    written."""
    set_threads(threads)
    target, work = out / "target", out / ".training-int4"
    tokenizer = load_tokenizer(target)
    batches = Batches(tokenizer, gather(max_bytes=recipe.max_corpus_bytes), seed)
    work.mkdir(exist_ok=True)
    figures = train_rounded(target, tokenizer, batches, recipe.int4_plan, work, out / "target-int4")
    shutil.rmtree(work)
    return figures


def make_mixture(recipe: Recipe, out: Path, seed: int = 0, threads: int | None = None) -> dict:
    """Train a mixture of experts with the tokenizer of the target in `out` and write it to mixture/; return the
    figures.

    State for resuming is kept in `out/.training-mixture` and removed at the end. Raises OSError if `out` cannot be
    written."""
    set_threads(threads)
    torch.manual_seed(seed)
    work, corpus, tokenizer = (
        out / ".training-mixture",
        gather(max_bytes=recipe.max_corpus_bytes),
        load_tokenizer(out / "target"),
    )
    model = Mixture(recipe.mixture)
    work.mkdir(exist_ok=True)
    batches = Batches(tokenizer, corpus, seed)
    figures = Trainer(model, mixture_loss(model), batches, recipe.mixture_plan, work / "mixture.safetensors").run(
        "mixture"
    )
    export(model, tokenizer, work / "made")
    bits = bits_per_byte(load(work / "made"), tokenizer, corpus.held_out)
    figures = {"num_parameters": model.num_parameters(), **figures, "bits_per_byte": bits}
    _finish(work, out / "mixture", figures)
    return figures


def make_adapter(recipe: Recipe, out: Path, seed: int = 0, threads: int | None = None) -> dict:
    """Train an adapter of the target in `out` for source indented by tabs and write it to adapter/; return the figures.

    State for resuming is kept in `out/.training-adapter` and removed at the end. Raises OSError if `out` cannot be
    written."""
    set_threads(threads)
    work, corpus = out / ".training-adapter", tabbed_corpus(gather(max_bytes=recipe.max_corpus_bytes))
    tokenizer, model = load_tokenizer(out / "target"), load(out / "target")
    work.mkdir(exist_ok=True)
    held_out = [document for document in corpus.held_out if document.num_bytes <= _SHORT_BYTES]
    before = bits_per_byte(model, tokenizer, held_out)
    figures = train_adapter(model, Batches(tokenizer, corpus, seed), recipe.adapter_plan, work / "adapter.safetensors")
    export_adapter(model, work / "made", base="target")
    after = bits_per_byte(model.eval(), tokenizer, held_out)
    _finish(work, out / "adapter", {**figures, "bits_per_byte": after, "bits_per_byte_without": before})
    return figures


def bits_per_byte(model: Llama, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """Return the bits per byte that the model needs for the documents."""
    texts = [token_ids(tokenizer, document) for document in documents]
    return round(total_bits(model, texts) / sum(document.num_bytes for document in documents), 4)


def _finish(work: Path, folder: Path, figures: dict) -> None:
    """Write the figures, and move the result to its folder, which must not exist."""
    save_text(work / "made" / FIGURES, json.dumps(figures, indent=2) + "\n")
    (work / "made").replace(folder)
    shutil.rmtree(work)


class Run:
    """One run of a recipe: results go to `out`, state for resuming to `work`."""

    def __init__(self, recipe: Recipe, out: Path, work: Path, seed: int = 0) -> None:
        self.recipe, self.out, self.work, self.seed = recipe, out, work, seed
        self.corpus: Corpus = gather(max_bytes=recipe.max_corpus_bytes)
        self.tokenizer = self._tokenizer()
        self.batches = Batches(self.tokenizer, self.corpus, seed)

    def train_target(self) -> dict:
        """Train and export the target; return its figures."""
        target = self._new_model(self.recipe.target)
        figures = self._train("target", target, self.recipe.target_plan, self._text_loss(target))
        export(target, self.tokenizer, self.out / "target")
        return figures

    def train_draft(self, target: Llama) -> dict:
        """Train the draft on the text, then to imitate the target, and export it; return its figures."""
        draft = self._new_model(self.recipe.draft)
        inherit_embedding(draft, target)
        on_text = self._train("draft", draft, self.recipe.draft_plan, self._text_loss(draft))
        # Not compiled: in 13 minutes, compiling the teacher for each length costs what it saves.
        imitating = self._train("distill", draft, self.recipe.distill_plan, distillation_loss(draft, target))
        export(draft, self.tokenizer, self.out / "draft")
        return {"on_text": on_text, "imitating": imitating}

    def train_heads(self, kind: str) -> dict:
        """Train heads on the library text and export them; return their figures."""
        folder = self.out / kind
        if (folder / "model.safetensors").exists():
            return json.loads((folder / FIGURES).read_text())
        minutes = self.recipe.heads_minutes
        return train_heads(kind, self.out / "target", self.corpus.library, folder, minutes, self.seed)

    def _new_model(self, config: ModelConfig) -> Llama:
        torch.manual_seed(self.seed)
        return Llama(config)

    def _text_loss(self, model: Llama) -> Loss:
        loss = next_token_loss(model)
        return torch.compile(loss, dynamic=False) if self.recipe.compiled else loss

    def _train(self, name: str, model: Llama, plan: TrainingPlan, loss: Loss) -> dict:
        figures = Trainer(model, loss, self.batches, plan, self.work / f"{name}.safetensors").run(name)
        return {"num_parameters": model.num_parameters(), **figures}

    def _tokenizer(self) -> Tokenizer:
        path = self.work / "tokenizer.json"
        if not path.exists():
            texts = (document.text for document in self.corpus.library)
            tokenizer = train_tokenizer(texts, self.recipe.target.vocab_size)
            save_atomically(path, lambda temporary: tokenizer.save(str(temporary)))
        return load_tokenizer(self.work)


@torch.no_grad()
def inherit_embedding(draft: Llama, target: Llama) -> None:
    """Start the draft's embedding [vocab_size, hidden_size] from the principal components of the target's.

    After 30 steps (one run, on a 3 MB slice of the text) the draft was 0.35 nats ahead of one that starts from
    noise."""
    weight = target.model.embed_tokens.weight.float()
    components = torch.linalg.svd(weight, full_matrices=False).Vh[: draft.config.hidden_size]
    projected = weight @ components.T
    # Three times the root mean square of a random start; at the target's 0.3 the first logits would be far too sure.
    draft.model.embed_tokens.weight.copy_(0.06 * projected / projected.square().mean().sqrt())
