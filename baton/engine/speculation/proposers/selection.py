"""Choose the proposers that an engine runs, and refuse those that do not fit before any request."""

from pathlib import Path

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError, read_json
from baton.engine.models.decoder import Model
from baton.engine.speculation.proposers import draft_model, eagle, medusa, mtp
from baton.engine.speculation.proposers.ngram import NgramProposer
from baton.engine.speculation.proposers.proposer import Proposer
from baton.engine.speculation.proposers.suffix import SuffixProposer

MODULES = {"draft": draft_model, "medusa": medusa, "eagle": eagle}


def make_proposers(config: EngineConfig, model: Model) -> list[Proposer]:
    """Return the proposers of a resolved `config` in the order they are asked, prompt lookup first. Raises ModelError
    or ValueError."""
    proposers: list[Proposer] = []
    if config.speculator in ("auto", "ngram"):
        proposers.append(NgramProposer(config.max_num_seqs, config.max_model_len))
    if config.speculator == SuffixProposer.name:
        proposers.append(SuffixProposer(config.max_num_seqs, config.max_model_len))
    if config.speculator == mtp.MultiTokenPredictor.name:
        proposers.append(mtp.load(model, config))
    if config.draft_model is not None:
        kind = kind_of(config.draft_model)
        if config.speculator not in ("auto", kind):
            raise ValueError(f"speculator {config.speculator}: {config.draft_model} holds what {kind} needs")
        proposers.append(MODULES[kind].load(config.draft_model, model, config))
    return proposers


def kind_of(folder: Path) -> str:
    """Return "draft", "medusa" or "eagle". Raises ModelError for any other folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    kind = read_json(path).get("speculator", "draft")
    if kind not in MODULES:
        raise ModelError(f"{path}: speculator {kind!r}: one of {', '.join(MODULES)}")
    return kind
