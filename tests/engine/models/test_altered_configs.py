"""Each value of a config.json, altered: the model is then another one as transformers has it, and here it is the same
one, or is refused. What is read past shows so."""

import json
import shutil

import pytest
import torch
import transformers

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import FAMILIES, ONE_OF_EACH_CLASS, SMALL, config_class, random_ids, randomize

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
ACTIVATIONS = {"gelu_pytorch_tanh", "relu", "relu2", "silu"}
# What transformers itself reads past (the first), and where it clamps what its authors and others do not.
NOT_AS_THERE = {("gemma3", "attn_logit_softcapping"), ("nemotron-3-latent", "time_step_min")}
# Of training and of how transformers runs and writes; ids and sizes of a vocabulary, which the prompt is of.
OTHER = {
    "architectures",
    "dtype",
    "initializer_range",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
OTHER |= {
    "return_dict",
    "router_aux_loss_coef",
    "use_cache",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
PROMPT = random_ids(60, 4)  # longer than the windows


def altered(value: object) -> list:
    """Return other values of its kind."""
    match value:
        case bool():
            return [not value]
        case int():
            return sorted({value + 1, value * 2, value // 2, 1} - {value})
        case float():
            return [value * 1.5 + 0.1, value * 0.5]
        case None:
            return [2, 16, 0.5, True]
        case str():
            return sorted(ACTIVATIONS - {value}) if value in ACTIVATIONS else []
        case list():
            return [value[::-1], value[:1] * len(value)]
    parts = {key: part for key, part in value.items() if key != "rope_type"}
    return [{**value, key: other} for key, part in parts.items() for other in altered(part)]


def made(folder, prefix: str, config) -> torch.Tensor | None:
    """Save a random model in place of the last; return its logits behind the prompt, None where transformers can't make
    it."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    try:
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        randomize(model, prefix)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0]
        model.save_pretrained(folder)
    except Exception:  # of any kind: nothing there looks at a config as a whole
        return None
    return logits if torch.isfinite(logits).all() else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_an_altered_value_means_what_it_means_there_or_is_refused(tmp_path, name):
    prefix, differences = FAMILIES[name]
    known = config_class(prefix)
    values = SMALL | differences
    told = json.loads(known(**values).to_json_string(use_diff=False))
    cases = [(key, other) for key, value in told.items() if key not in OTHER for other in altered(value)]
    folder, num_equal = tmp_path / "model", 0
    for key, other in cases:
        try:
            config = known(**values | {key: other})
        except Exception:  # as above
            continue
        wanted = made(folder, prefix, config)
        if wanted is None or (name, key) in NOT_AS_THERE:
            continue
        try:
            found = ManualBatch(load_model(EngineConfig(folder))).step({"a": PROMPT})["a"]
        except ModelError:
            continue
        close = wanted.abs().max() * 1e-3
        torch.testing.assert_close(found, wanted, atol=close.item(), rtol=0, msg=lambda text: f"{key} {other}: {text}")
        num_equal += 1
    assert num_equal >= 20
