"""What a config.json does not say means what transformers' class for it says."""

import dataclasses
import json

import pytest

from baton.engine.core.model_errors import ModelError
from baton.engine.models.registry import read_spec
from tests.support.model_folders.families import FAMILIES, ONE_OF_EACH_CLASS, SMALL, config_class

# Not taken over: what ends a text, which generation_config.json says, and the length that longrope began with, where
# its parameters say another. Latent attention has no KV heads.
LEFT_OUT = {"eos_token_id", "original_max_position_embeddings"}


@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_a_silent_config_means_what_transformers_assumes(tmp_path, name):
    prefix, differences = FAMILIES[name]
    known = config_class(prefix)
    values = json.loads(known(**(SMALL | differences)).to_json_string(use_diff=False))
    values["architectures"] = [f"{prefix}ForCausalLM"]

    def spec_of(values: dict):
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            return read_spec(tmp_path)
        except ModelError as error:
            return str(error)

    assert not isinstance(spec_of(values), str)
    assumed = {field.name: field.default for field in dataclasses.fields(known) if field.name in values}
    assumed["rope_parameters"] = getattr(known(), "rope_parameters", None)
    for key in LEFT_OUT | ({"num_key_value_heads"} if "kv_lora_rank" in values else set()):
        assumed.pop(key, None)
    for key, value in assumed.items():
        if value in (None, dataclasses.MISSING):
            continue
        silent = spec_of({name: value for name, value in values.items() if name != key})
        if not isinstance(silent, str):
            assert silent == spec_of(values | {key: value}), key
