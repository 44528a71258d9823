"""Train heads: a frozen target, a text, and a module each of whose steps is compared with the target's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.models.registry import read_spec
from baton.engine.speculation.proposers.heads_folder import MARK, target_mark
from baton.training.data.batches import Batches
from baton.training.data.corpus import Corpus, Document
from baton.training.data.files import save_atomically, save_text
from baton.training.data.tokenizer import check_vocabulary, load_tokenizer
from baton.training.heads.eagle import EagleDraft
from baton.training.heads.medusa import MedusaHeads
from baton.training.heads.target import FrozenTarget
from baton.training.model.trainer import Loss, Trainer, TrainingPlan, autocast

Heads = MedusaHeads | EagleDraft
FIGURES = "training.json"  # beside the weights: the result of train_heads

LENGTH = 256  # tokens of a window
LEAST_TOKENS = 16 * LENGTH  # of a text: a shorter one would be memorized
NUM_MEDUSA_HEADS = 4
# weight of a step relative to the previous one: a later token counts only if all earlier ones are accepted
FADING = 0.8
MAX_LOGITS = 1 << 26  # of all steps of a batch: limits memory to 1 GiB of fp32 values and gradients
MAX_EPOCHS = 20


def default_plan(vocab_size: int, minutes: float, num_tokens: int) -> TrainingPlan:
    """Return the plan for a text of `num_tokens`."""
    return TrainingPlan(
        minutes=minutes,
        max_tokens=MAX_EPOCHS * num_tokens,
        batch_tokens=max(LENGTH, min(1024, MAX_LOGITS // (NUM_MEDUSA_HEADS * vocab_size))),
        matrix_lr=0.1,
        vector_lr=0.02,
        weight_decay=0.0,
        decay_from=0.3,
        lengths=((0.0, LENGTH),),
    )


def new_heads(target: FrozenTarget, kind: str, seed: int = 0) -> Heads:
    """Return an untrained module with its fixed initialization."""
    torch.manual_seed(seed)
    spec, scale = target.spec, target.feature_scale
    if kind == "medusa":
        return MedusaHeads(spec.hidden_size, NUM_MEDUSA_HEADS, spec.norm.eps, scale)
    return EagleDraft(spec, scale)


def train_heads(
    kind: str, model: Path, documents: Iterable[Document], out: Path, minutes: float, seed: int = 0
) -> dict:
    """Train heads of a `kind` (medusa or eagle) for the model folder `model`, and write them to `out`.

    State for resuming is kept in `out/.training` and removed at the end. Returns figures, among them `agreement`: for
    each step the share of places at which heads and target choose the same token. Raises ValueError if the text is too
    short, has a token that the model lacks, if the state is another target's, or if the model has no rope for an eagle
    draft; ModelError if the model folder cannot be read; OSError if `out` cannot be written."""
    spec = read_spec(model)
    if kind == "eagle" and not spec.ropes:
        raise ValueError(f"{model}: an eagle draft turns by the model's rope, and it has none; train --kind medusa")
    if not (model / "tokenizer.json").is_file():
        raise ValueError(f"{model}: no tokenizer.json, so the text cannot be turned into its tokens")
    tokenizer = load_tokenizer(model)
    batches = Batches(tokenizer, Corpus(tuple(documents), (), ()), seed)
    if batches.num_tokens < LEAST_TOKENS:
        raise ValueError(f"the training text has {batches.num_tokens} tokens, at least {LEAST_TOKENS} are needed")
    check_vocabulary(tokenizer, batches.largest_id, spec.vocab_size, model)
    plan = default_plan(spec.vocab_size, minutes, batches.num_tokens)
    target = FrozenTarget(model, LENGTH, plan.batch_tokens)
    heads = new_heads(target, kind, seed)
    work = out / ".training"
    checkpoint, identity = work / f"{kind}.safetensors", target.identity.hex()
    trainer = Trainer(heads, heads_loss(heads, target), batches, plan, checkpoint, identity)
    figures = trainer.run(kind)
    figures["agreement"] = agreement(heads, target, *batches.draw(trainer.num_tokens, 4 * plan.batch_tokens, LENGTH))
    export_heads(heads, kind, target, out)
    save_text(out / FIGURES, json.dumps(figures, indent=2) + "\n")
    shutil.rmtree(work)
    return figures


def heads_loss(heads: Heads, target: FrozenTarget) -> Loss:
    """Return the loss: cross entropy against the target's distribution, averaged over all steps with more weight on
    early ones."""
    weights = [FADING**step for step in range(heads.num_steps)]

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        features = target.features(inputs)
        aims = target.distribution(features)
        with autocast():
            guesses = heads.guesses(target, features, torch.cat((inputs, targets[:, -1:]), dim=1))
            for step, (weight, logits) in enumerate(zip(weights, guesses, strict=True), start=1):
                aim = aims[:, step : step + logits.shape[1]]
                total = total + weight * F.cross_entropy(logits.flatten(0, 1).float(), aim.flatten(0, 1))
        return total / sum(weights)

    return loss


@torch.no_grad()
@autocast()
def agreement(heads: Heads, target: FrozenTarget, inputs: Tensor, targets: Tensor) -> list[float]:
    """Return for each step the share of places at which the most likely token equals the target's. Inputs [batch,
    length] are a text, targets the same text one token later."""
    same = [0.0] * heads.num_steps
    for token_ids, last in zip(inputs.split(1), targets[:, -1:].split(1), strict=True):
        features = target.features(token_ids)
        best = target.logits(features).argmax(-1)
        guesses = heads.guesses(target, features, torch.cat((token_ids, last), dim=1))
        for step, logits in enumerate(guesses):
            guessed = logits.argmax(-1)
            same[step] += (guessed == best[:, step + 1 : step + 1 + guessed.shape[1]]).float().mean().item()
    return [round(total / len(inputs), 4) for total in same]


def export_heads(heads: Heads, kind: str, target: FrozenTarget, folder: Path) -> None:
    """Write config.json and bf16 weights as `--speculator` reads them; the weights come last."""
    spec = target.spec
    config = {
        "speculator": kind,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        **({"num_heads": heads.num_steps} if kind == "medusa" else {"intermediate_size": spec.intermediate_size}),
        "target": target.identity.hex(),
    }
    save_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in heads.state_dict().items()}
    weights[MARK] = target_mark(target.model)
    save_atomically(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
