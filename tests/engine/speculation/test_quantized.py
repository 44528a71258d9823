"""Quantized weights and KV with speculation: what a proposal's KV is rounded to is what a token's own would be."""

import pytest

from tests.engine.speculation.test_equality import REPETITIVE, check_same, num_accepted, serve
from tests.support.model_folders.draft_models import load, make_folders, mixed


@pytest.mark.parametrize(("quantization", "kv_dtype"), [("int8", "int8"), ("int4-g32", "int4")])
def test_same_tokens_as_unspeculated(tmp_path, quantization, kv_dtype):
    target, _ = make_folders(tmp_path)
    options, requests = dict(dtype="bf16", quantization=quantization, kv_dtype=kv_dtype), mixed(24, **REPETITIVE)
    plain, _ = serve(load(target, **options), requests)
    engine = load(target, speculator="ngram", num_draft_tokens=4, **options)
    records, _ = serve(engine, requests)
    check_same(records, plain, plain)
    assert num_accepted(engine) > 10
