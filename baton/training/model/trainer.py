"""The trainer: it spends a budget of minutes, always ends with an annealed learning rate, and can be stopped
anywhere."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from baton.engine.core.device import product_dtype
from baton.training.data.batches import Batches
from baton.training.data.files import save_atomically
from baton.training.model.llama import Llama

Loss = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets [batch, length] to a scalar, nats per token."""


@dataclass(frozen=True)
class TrainingPlan:
    """The plan for training one model.

    Progress runs from 0 to 1: the larger share of the budgets of minutes and of tokens that is spent. Learning rates
    and window lengths follow it."""

    minutes: float
    max_tokens: int
    batch_tokens: int = 8192
    matrix_lr: float = 0.02
    vector_lr: float = 0.012
    weight_decay: float = 0.05
    warmup: float = 0.02
    decay_from: float = 0.4
    lengths: tuple[tuple[float, int], ...] = ((0.0, 512), (0.6, 1024), (0.87, 2048))
    checkpoint_seconds: float = 120.0

    def length_at(self, progress: float) -> int:
        """Return the tokens per window. Short windows come first: attention takes a third of a step over 1,024 tokens,
        a sixth over 512."""
        return max(length for start, length in self.lengths if start <= progress)

    def lr_factor(self, progress: float) -> float:
        """Return the factor of the learning rates: warm up, hold, then fall linearly to zero."""
        rise = progress / self.warmup if self.warmup else 1.0
        fall = (1.0 - progress) / (1.0 - self.decay_from)
        return max(0.0, min(1.0, rise, fall))


class Trainer:
    """Trains one model on batches until its plan is spent.

    Matrices are trained by Muon, the embedding and the norms by AdamW. State is in `checkpoint`, rewritten every
    `plan.checkpoint_seconds`; if the file exists, the run continues from it, elapsed time included. `target`: the
    identity of a teacher model, if there is one. Raises ValueError if the checkpoint holds a model of another shape, or
    for another target."""

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Batches, plan: TrainingPlan, checkpoint: Path, target: str = ""
    ) -> None:
        self.model, self.loss, self.batches, self.plan = model, loss, batches, plan
        self.checkpoint, self.target = checkpoint, target
        self.optimizers = _optimizers(model, plan)
        self.num_tokens = 0
        self.num_steps = 0
        self.seconds = 0.0
        self.recent_loss = 0.0
        if checkpoint.exists():
            self._restore()

    @property
    def progress(self) -> float:
        return max(self.seconds / (60 * self.plan.minutes), self.num_tokens / self.plan.max_tokens)

    def run(self, name: str) -> dict:
        """Train to the end of the plan with a progress bar called `name`; return tokens, steps, minutes and the last
        loss. After Ctrl-C, end and save the current step, then raise KeyboardInterrupt."""
        saved = last = time.monotonic()
        with (
            _HeldInterrupt() as interrupt,
            tqdm(total=1000, initial=self._per_mille(), desc=name, **_bar_style()) as bar,
        ):
            while self.progress < 1.0:
                self._step()
                now = time.monotonic()
                self.seconds, last = self.seconds + now - last, now
                bar.set_postfix_str(f"loss {self.recent_loss:.3f} tokens {self.num_tokens:,}", refresh=False)
                bar.update(self._per_mille() - bar.n)
                if interrupt.came or now - saved > self.plan.checkpoint_seconds:
                    self._save()
                    saved = now
                if interrupt.came:
                    raise KeyboardInterrupt
        self._save()
        return {
            "num_tokens": self.num_tokens,
            "num_steps": self.num_steps,
            "minutes": round(self.seconds / 60, 1),
            "loss": round(self.recent_loss, 4),
        }

    def _per_mille(self) -> int:
        return min(1000, int(1000 * self.progress))

    def _step(self) -> None:
        plan = self.plan
        inputs, targets = self.batches.draw(self.num_tokens, plan.batch_tokens, plan.length_at(self.progress))
        factor = plan.lr_factor(self.progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak_lr"]
        loss = self.loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            with _MuonInProductDtype():
                optimizer.step()
            optimizer.zero_grad()
        self.num_tokens += inputs.numel()
        self.num_steps += 1
        self.recent_loss = _smooth(self.recent_loss, loss.item(), self.num_steps)

    def _save(self) -> None:
        """Save a checkpoint as safetensors: `model.NAME`, `optimizer.I.PARAMETER.NAME`, and the counters as
        metadata."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimizer.{number}.{parameter}.{name}"] = torch.as_tensor(value)
        counters = json.dumps((self.num_tokens, self.num_steps, self.seconds, self.recent_loss))
        metadata = {"counters": counters, "target": self.target}
        save_atomically(self.checkpoint, lambda path: save_file(tensors, path, metadata))

    def _restore(self) -> None:
        model: dict[str, Tensor] = {}
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        with safe_open(self.checkpoint, "pt") as file:
            # Checkpoints of earlier versions do not name their target.
            if file.metadata().get("target", self.target) != self.target:
                raise ValueError(
                    f"{self.checkpoint} is of a run for another target; choose another folder for this one"
                )
            for key in file.keys():
                kind, _, name = key.partition(".")
                if kind == "model":
                    model[name] = file.get_tensor(key)
                else:
                    number, parameter, name = name.split(".")
                    states[int(number)].setdefault(int(parameter), {})[name] = file.get_tensor(key)
            counters = json.loads(file.metadata()["counters"])
        try:
            self.model.load_state_dict(model)
        except RuntimeError as error:
            raise ValueError(f"{self.checkpoint} holds a model of another shape") from error
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self.num_tokens, self.num_steps, self.seconds, self.recent_loss = counters


class _HeldInterrupt:
    """Holds back a Ctrl-C until the current step ends, so that everything saved belongs to one step. A second one is
    not held back."""

    def __enter__(self) -> _HeldInterrupt:
        self.came = False
        # A script's background jobs ignore it, and go on doing so.
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_held = is_ours and threading.current_thread() is threading.main_thread()
        if self._is_held:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc) -> None:
        if self._is_held:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, *_) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def autocast() -> torch.autocast:
    """Return a context in which matrices are multiplied in the processor's fastest dtype, bf16 or fp32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=product_dtype() == torch.bfloat16)


class _MuonInProductDtype(TorchFunctionMode):
    """Lets Muon orthogonalize in the processor's fastest dtype. Its own bf16 took 12 s per step of the demo's target
    with AVX2; fp32 takes 0.4 s."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.bfloat16:
            return args[0].to(product_dtype(), copy=True)
        return func(*args, **(kwargs or {}))


def next_token_loss(model: Llama) -> Loss:
    """Return a loss, inputs and targets int64 [batch, length] -> scalar: cross entropy against the next token."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


def distillation_loss(model: Llama, teacher: Llama) -> Loss:
    """Return a loss, inputs and targets int64 [batch, length] -> scalar: cross entropy against the teacher's
    distribution at every position of the text."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad():
                aims = teacher(inputs).flatten(0, 1).float().softmax(-1)
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), aims)

    return loss


def _optimizers(model: nn.Module, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    vectors = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed_tokens" in name]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=plan.weight_decay)]
    if vectors:  # an adapter has no vectors
        made.append(torch.optim.AdamW(vectors, lr=plan.vector_lr, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return made


def _smooth(average: float, value: float, num_values: int) -> float:
    """Return the average of about the last 50 of `num_values` values."""
    return average + (value - average) / min(num_values, 50)


def _bar_style() -> dict:
    """Return tqdm's arguments for a live bar on a terminal, and a line per minute in a log."""
    interval = 0.5 if sys.stderr.isatty() else 60.0
    return {
        "mininterval": interval,
        "maxinterval": max(10.0, interval),
        "bar_format": "{desc} {percentage:5.1f} % |{bar:20}| {elapsed}<{remaining} {postfix}",
    }
