"""A folder of heads: config.json says for which target they were made, model.safetensors holds their weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.core.model_errors import read_json
from baton.engine.models.decoder import Model
from baton.engine.weights.tensors import Weights

KINDS = ("medusa", "eagle")
MARK = "target_mark"  # a tensor beside the weights
MARK_ROWS = 256
MIN_LIKENESS = 0.9  # cosine; the same model in four bits is above 0.98, another model of the same shape near 0


@dataclass(frozen=True, slots=True)
class HeadsFolder:
    """Hold a folder of heads that was checked against the target."""

    path: Path
    config: dict
    weights: Weights

    @classmethod
    def open(cls, path: str | Path, kind: str, model: Model) -> "HeadsFolder":
        """Open a folder of heads. Raises ValueError if it is of another kind or for another target, ModelError naming
        the file if it cannot be read."""
        path = Path(path)
        config = read_json(path / "config.json")
        found = config.get("speculator")
        if found not in KINDS:
            raise ValueError(f"{path}: speculator {found!r} is not known, one of {', '.join(KINDS)}")
        if found != kind:
            raise ValueError(f"{path}: holds {found} weights, {kind} was asked for; use --speculator {found}")
        for name, wanted in (("vocab_size", model.spec.vocab_size), ("hidden_size", model.spec.hidden_size)):
            if config.get(name) != wanted:
                raise ValueError(
                    f"{path}: {name} {config.get(name)}, the target {model.spec.name} has {wanted}; "
                    "make heads for it with baton train-draft"
                )
        folder = cls(path, config, Weights(path))
        mark = target_mark(model)
        likeness = torch.cosine_similarity(folder.read(MARK, mark.numel()), mark, dim=0).item()
        if not likeness >= MIN_LIKENESS:
            raise ValueError(
                f"{path}: trained for another model ({config.get('target')}), not for {model.spec.name}; "
                "make heads for it with baton train-draft"
            )
        return folder

    def read(self, name: str, *shape: int) -> Tensor:
        """Return a tensor fp32 [*shape]. Raises ModelError if it is missing or has another shape."""
        return self.weights.read(name, shape).float()

    def count(self, key: str) -> int:
        """Return a positive integer of the config. Raises ValueError."""
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path / 'config.json'}: {key} is {value!r}, not a positive integer")
        return value


@torch.no_grad()
def target_mark(model: Model) -> Tensor:
    """Return a mark of the model, fp32 [MARK_ROWS]: sums of embedding rows with alternating signs. Quantizing the
    weights hardly changes it; another model of the same shape has an unrelated one."""
    token_ids = torch.linspace(0, model.spec.vocab_size - 1, MARK_ROWS).long().to(model.device)
    rows = model.embedded(token_ids).float().cpu()
    signs = torch.ones(model.spec.hidden_size)
    signs[1::2] = -1
    return rows @ signs
