"""Quantized weights and KV with speculation: what a proposal's KV is rounded to is what a token's own would be."""

import pytest

from tests.support.engine.serving import REPETITIVE, check_same, num_accepted, serve
from tests.support.model_folders.draft_models import load_draftable, make_target_and_draft, mixed_requests


@pytest.mark.parametrize(("quantization", "kv_dtype"), [("int8", "int8"), ("int4-g32", "int4")])
def test_same_tokens_as_unspeculated(tmp_path, quantization, kv_dtype):
    target, _ = make_target_and_draft(tmp_path)
    options, requests = (
        dict(dtype="bf16", quantization=quantization, kv_dtype=kv_dtype),
        mixed_requests(24, **REPETITIVE),
    )
    plain, _ = serve(load_draftable(target, **options), requests)
    engine = load_draftable(target, speculator="ngram", num_draft_tokens=4, **options)
    records, _ = serve(engine, requests)
    check_same(records, plain, plain)
    assert num_accepted(engine) > 10
