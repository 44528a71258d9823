"""Families cut into stages: the logits of transformers within 1e-4, and in fp32 and bf16 the bits of one process."""

import itertools
import socket
import struct
from dataclasses import replace

import pytest
import torch

from baton.engine.core.batch import AdapterRows, ForwardBatch, SeqSlice, StateRows
from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.pipeline import DONE, PipelineLeader
from baton.engine.parallel.stage import PipelineStage, cut_layers, micro_batches, rows_of
from baton.engine.parallel.stream import SocketStream
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import FAMILIES, make_folder, random_ids
from tests.support.native.ranks_in_threads import staged

TOLERANCE = 1e-4
# A head that is the embedding, norms behind both halves, windows and ropes by layer, experts, latent attention, states.
ORDINARY = ("llama3", "qwen3", "olmo2", "gemma3", "qwen3-moe", "deepseek-v3", "nemotron-h")

NAMES = [name for name in FAMILIES if name != "llama-longrope"]  # its context is shorter than what is asked here


def logits_of(hand: ManualBatch, ids: list[int]) -> torch.Tensor:
    """A chunk that is parted, another one beside a second sequence, single tokens of both."""
    found = [hand.step({"a": ids[:300]})["a"], hand.step({"b": ids[:70], "a": ids[300:370]})["a"]]
    return torch.cat([*found, *(hand.step({"a": [token], "b": [token]})["a"] for token in ids[370:])])


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_stages_have_the_bits_of_one_process(tmp_path, name):
    reference = make_folder(tmp_path, name)
    ids = random_ids(373, 1)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    for dtype in ("fp32", "bf16"):
        config = EngineConfig(tmp_path, dtype=dtype)
        whole = ManualBatch(load_model(config), form=dtype)
        expected = logits_of(whole, ids)
        hand = ManualBatch(whole.model, form=dtype)
        with staged(config, 2, hand.pool) as hand.model:
            assert torch.equal(logits_of(hand, ids), expected), dtype
            assert hand.model.layers[-1] is None
        assert torch.equal(hand.pool.bytes, whole.pool.bytes), "KV"
        assert hand.states() == whole.states()
        if dtype == "fp32":
            torch.testing.assert_close(expected, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4-g32"])
def test_stages_of_quantized_weights_without_native_layers(tmp_path, quantization):
    make_folder(tmp_path, "llama3", hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    for linear in ("auto", "dense"):
        config = EngineConfig(tmp_path, dtype="bf16", quantization=quantization, linear=linear)
        whole = ManualBatch(load_model(config), form="bf16")
        ids = random_ids(373, 1)
        expected = logits_of(whole, ids)
        hand = ManualBatch(whole.model, form="bf16")
        with staged(config, 3, hand.pool) as hand.model:
            assert torch.equal(logits_of(hand, ids), expected), linear


def test_layers_are_cut_by_what_they_hold_and_read(tmp_path):
    """A stage's cost is the weights that it holds and those that a token meets; no other cut has a smaller largest
    one."""
    make_folder(tmp_path, "qwen3-moe", num_hidden_layers=7, num_experts=4, mlp_only_layers=[0, 1, 2])
    spec = read_spec(tmp_path)
    alone = [replace(spec, layers=(layer,)) for layer in spec.layers]
    costs = [each.num_layer_weights() + each.num_layer_weights(chosen_only=True) for each in alone]

    def largest(ends: tuple[int, ...]) -> int:
        found = [sum(costs[begin:end]) for begin, end in zip((0, *ends), (*ends, 7))]
        return max(found[0] + 3 * spec.vocab_size * spec.hidden_size, *found[1:])

    for count in (2, 3, 4, 7):
        stages = cut_layers(spec, count)
        assert [index for stage in stages for index in stage.layers] == list(range(7))
        assert [stage.index for stage in stages] == list(range(count)) and all(stage.layers for stage in stages)
        cut = tuple(stage.layers.stop for stage in stages[:-1])
        assert largest(cut) == min(map(largest, itertools.combinations(range(1, 7), count - 1)))
    assert cut_layers(spec, 1) == [PipelineStage(0, range(7))]
    with pytest.raises(ValueError, match="^pipeline_parallel 8: the model has 7 layers$"):
        cut_layers(spec, 8)


def test_micro_batches_hold_every_row_of_a_step_once():
    """With what its sequence has up to there."""
    lens = [(1, 9), (200, 300), (70, 70), (1, 1), (30, 400)]
    starts = [sum(length for length, _ in lens[:index]) for index in range(len(lens))]
    seqs = [SeqSlice(start, *each, torch.tensor([index])) for index, (start, each) in enumerate(zip(starts, lens))]
    num_tokens = sum(length for length, _ in lens)
    positions = torch.cat([torch.arange(kv_len - length, kv_len) for length, kv_len in lens])
    rows = torch.arange(num_tokens)
    batch = ForwardBatch(rows, positions, rows, seqs, rows[-1:], adapters=(AdapterRows(1, 250, "a"),))
    parts = micro_batches(batch, 2)
    assert len(parts) == 4 and parts[0][0] == 0
    assert torch.equal(torch.cat([part.token_ids for _, part in parts]), rows)
    adapted = []
    for first, part in parts:
        assert part.seqs[0].query_start == 0
        for seq in part.seqs:
            own = slice(seq.query_start, seq.query_start + seq.query_len)
            assert part.positions[own].tolist() == list(range(seq.kv_len - seq.query_len, seq.kv_len))
        assert sum(seq.query_len for seq in part.seqs) == len(part.token_ids)
        adapted += [first + row for begin, end, _ in part.adapters for row in range(begin, end)]
    assert adapted == list(range(1, 250))
    assert len(micro_batches(batch, 1)) == 4 and len(micro_batches(rows_of(batch, 0, 127), 2)) == 1


def test_micro_batches_part_no_proposals():
    """Of layers with a state: all proposals of a sequence are in one part, behind the rows that its state takes in."""
    length, drafts, count = 11, 8, 31
    seqs = [
        SeqSlice(length * index, length, 50 + length, torch.tensor([index]), StateRows(index, 2, drafts))
        for index in range(count)
    ]
    rows = torch.arange(length * count)
    parts = [part for _, part in micro_batches(ForwardBatch(rows, rows, rows, seqs, rows), 3)]
    assert len(parts) == 5 and torch.equal(torch.cat([part.token_ids for part in parts]), rows)
    told = [seq for part in parts for seq in part.seqs]
    for seq in seqs:
        own = [each for each in told if each.state.state_id == seq.state.state_id]
        assert [each.state.num_pending for each in own] == [2, 0][: len(own)]
        assert sum(each.query_len - each.state.num_drafts for each in own) == length - drafts
        assert [each.state.num_drafts for each in own if each.state.num_drafts] == [drafts]
    assert len(told) > count, "no border was in a sequence"


@pytest.mark.parametrize("told", [b"short", struct.pack("<3q", DONE, 0, 0)], ids=["no numbers", "of no part"])
def test_a_stage_that_says_what_makes_no_sense_is_lost(caplog, told):
    """The engine would wait for its rows without end."""
    own, theirs = socket.socketpair()
    with own, theirs:
        leader = PipelineLeader([SocketStream(own)], torch.zeros(2, 1))
        SocketStream(theirs).send(told)
        with pytest.raises(RankLost):
            leader.receive()
        with pytest.raises(RankLost):
            SocketStream(theirs).receive()
    assert "stage 1 is lost: what it has sent could not be taken" in caplog.text
