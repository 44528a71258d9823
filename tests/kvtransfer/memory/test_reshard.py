"""Any cut, any block size, any form: what arrives is what a slow reference says, and each byte travels once."""

import asyncio
import itertools

import numpy as np
import pytest

from kvtransfer import errors
from kvtransfer.compatible import EXACT, MIXED, gives, relation, takes
from kvtransfer.errors import LayoutMismatch, ProtocolError
from kvtransfer.layout import KV_FORMS, Box, Endpoint, KVGroup, KVLayout, Part, Range
from kvtransfer.memory import blocks
from kvtransfer.memory.convert import encode, read
from kvtransfer.memory.digest import make_digests, span_names
from kvtransfer.memory.reshard import plan, sharding_of
from tests.support.kvtransfer.ranks_and_forms import (
    IDENTITY,
    NUM_HEADS,
    NUM_LAYERS,
    Cluster,
    Rank,
    by_heads,
    by_layers,
    cells,
    check_arrived,
    codec,
    layout,
    numerics,
)  # fmt: skip
from tests.support.kvtransfer.rig import Destination, span_hashes
from tests.support.waiting import until_async

CUTS = [*(by_heads(tp) for tp in (1, 2, 4)), by_layers(2)]
FORMS = (("bf16", "bf16"), ("int4", "int4"), ("bf16", "int8"), ("fp32", "fp8_e4m3"), ("int8", "int4"))
SIZES = ((16, 16), (1, 64), (64, 16), (32, 128), (192, 128))
NUM_TOKENS = 150


def parts_of(shards) -> tuple[Part, ...]:
    return tuple(
        Part(*box, (Endpoint("tcp", f"h:{rank}", "host"),)) for rank, shard in enumerate(shards) for box in shard
    )


# ---- the plan ----


@pytest.mark.parametrize("source", [*CUTS, by_heads(8)])
@pytest.mark.parametrize("taker", [*CUTS, by_heads(8)])
def test_every_cell_is_pulled_once_by_each_rank_that_wants_it(source, taker):
    parts, totals = parts_of(source), {}
    for rank, shard in enumerate(taker):
        seen = set()
        for share in plan(parts, taker, rank):
            held = share.part
            assert held in parts
            for layer, head in itertools.product(share.box.layers, share.box.heads):
                assert layer in held.layers and head in held.heads and (layer, head) not in seen
                seen.add((layer, head))
            totals.setdefault(share.part.endpoints, []).append((share.index, share.num_shares))
        assert seen == {(layer, head) for box in shard for layer in box.layers for head in box.heads}
    for shares in totals.values():
        assert sorted(shares) == [(index, len(shares)) for index in range(len(shares))]


def test_equal_cuts_have_one_share_each_and_are_planned_once():
    parts = parts_of(by_heads(4))
    assert [len(plan(parts, by_heads(4), rank)) for rank in range(4)] == [1] * 4
    assert plan(parts, by_heads(4), 2) is plan(parts, by_heads(4), 2)
    assert len(plan(parts, by_heads(1), 0)) == 4 and len(plan(parts_of(by_layers(2)), by_heads(2), 0)) == 2


def test_a_part_that_is_missing():
    with pytest.raises(LayoutMismatch, match="no part of the source holds"):
        plan(parts_of(by_heads(4))[:3], by_heads(1), 0)


def test_groups_are_planned_apart():
    two = KVLayout((KVGroup("paged", 2, 4, 8, "bf16", 16), KVGroup("paged", 3, 2, 8, "bf16", 16)))
    parts = tuple(Part(*box, (Endpoint("tcp", "h:1", "host"),)) for box in two.whole)
    shares = plan(parts, (two.whole,), 0)
    assert [(share.box, share.index, share.num_shares) for share in shares] == [
        (two.whole[0], 0, 2), (two.whole[1], 1, 2),
    ]  # fmt: skip
    assert sharding_of(parts[0], parts, two).shard == two.whole and two.first_layer(1) == 2


def test_boxes_that_are_not_there():
    rank = Rank.make(layout(16, "bf16"), by_heads(2)[1], 2)
    for box in (Box(0, range(4), range(2)), Box(0, range(2, 5), range(2, 4)), Box(1, range(1), range(1))):
        with pytest.raises(ProtocolError, match="not in this pool"):
            cells(rank, box)
    rank.region.close()
    with pytest.raises(ValueError):
        layout(16, "bf16").cut((Box(0, range(5), range(4)),))


# ---- the bytes: all combinations, read and sent ----


def moved_in_parts(num_tokens: int) -> list[Range]:
    """As a dialogue moves them: whole, then a stretch by layers."""
    return [Range(0, 64, 0, NUM_LAYERS), Range(64, num_tokens, 0, 1), Range(64, num_tokens, 1, NUM_LAYERS)]


# Every cut with one pair of forms, and every pair with one cut.
@pytest.mark.parametrize(
    ("forms", "source_cut", "taker_cut"),
    [
        pytest.param(
            forms, source, taker, id=f"d{len(taker)}-p{len(source)}-{'-'.join(forms)}-{index}",
            marks=() if forms == ("bf16", "int8") or index == 9 else pytest.mark.long,
        )
        for forms in FORMS
        for index, (source, taker) in enumerate(itertools.product(CUTS, repeat=2))
    ],
)  # fmt: skip
def test_every_cut_and_form_is_resharded(forms, source_cut, taker_cut, monkeypatch):
    check_combination("paged", forms, source_cut, taker_cut, monkeypatch)


@pytest.mark.parametrize("forms", FORMS, ids="-".join)
def test_latent_rows_are_resharded(forms, monkeypatch):
    """One row a token and head in place of K and V."""
    check_combination("latent", forms, by_layers(1), by_layers(2), monkeypatch)


def check_combination(kind, forms, source_cut, taker_cut, monkeypatch):
    rng = np.random.default_rng(5)
    tokens = (63, 64, int(rng.integers(65, NUM_TOKENS - 1)), NUM_TOKENS - 1)
    monkeypatch.setattr(blocks, "CHUNK_BYTES", 4096)  # several chunks a range
    for sizes in SIZES:
        whole = [layout(size, form, kind) for size, form in zip(sizes, forms)]
        ids = [rng.permutation(each.num_blocks(NUM_TOKENS) + 3) for each in whole]
        sources = [Rank.make(whole[0], shard, len(ids[0])) for shard in source_cut]
        for rank in sources:
            rank.memory.blocks[:] = rng.integers(0, 256, rank.memory.blocks.shape, dtype=np.uint8)
        for how in (read_share, send_share):
            takers = [Rank.make(whole[1], shard, len(ids[1])) for shard in taker_cut]
            for index, rank in enumerate(takers):
                for share in plan(parts_of(source_cut), taker_cut, index):
                    held = sharding_of(share.part, parts_of(source_cut), whole[0]).shard
                    (source,) = [each for each in sources if each.shard == held]
                    how(source, rank, share.box, *ids)
            check_arrived(sources, ids[0], takers, ids[1], tokens)
            for rank in takers:
                rank.region.close()
        for rank in sources:
            rank.region.close()


def ranges_of(box: Box) -> list[Range]:
    """moved_in_parts, as far as the box has their layers."""
    found = []
    for moved in moved_in_parts(NUM_TOKENS):
        begin, end = max(moved.layer_begin, box.layers.start), min(moved.layer_end, box.layers.stop)
        if begin < end:
            found.append(moved._replace(layer_begin=begin, layer_end=end))
    return found


def digests_for(rank: Rank, box: Box):
    names = span_names(span_hashes(NUM_TOKENS), bytes(32), NUM_TOKENS)
    return make_digests("sum", rank.layout, box, names)


def read_share(source: Rank, taker: Rank, box: Box, source_ids, taker_ids) -> None:
    for moved in ranges_of(box):
        theirs, ours = cells(source, box), cells(taker, box)
        found = read(ours, theirs, taker_ids, source_ids, moved, digests_for(taker, box), codec)
        assert (found == digests_for(source, box).of_pool(theirs, source_ids, moved)).all(), (
            "both sides name the cells alike"
        )


def send_share(source: Rank, taker: Rank, box: Box, source_ids, taker_ids) -> None:
    for moved in ranges_of(box):
        theirs, ours = cells(source, box), cells(taker, box)
        alike = source.layout == taker.layout and theirs.is_whole and ours.is_whole
        if theirs.form != ours.form:
            sent = encode(theirs, source_ids, moved, ours.group, codec)
            data = b"".join(bytes(each.flat) for each in sent)
            promised = digests_for(source, box).of_parts(moved, ((each.part, each.staged) for each in sent))
        else:
            data = b"".join(bytes(b) for group in theirs.outgoing(source_ids, moved, alike) for b in group)
            promised = digests_for(source, box).of_pool(theirs, source_ids, moved)
        assert len(data) == ours.num_bytes(moved)
        for group in ours.incoming(taker_ids, moved, alike):
            for buffer in group:
                buffer[:], data = data[: len(buffer)], data[len(buffer) :]
        assert not data and (digests_for(taker, box).of_pool(ours, taker_ids, moved) == promised).all()


def test_a_codec_that_gives_other_sizes():
    source, taker = (Rank.make(layout(16, form), by_heads(1)[0], 4) for form in ("bf16", "int8"))
    (box,), ids, moved = source.shard, np.arange(4), Range(0, 64, 0, 1)
    for bad, error in ((lambda *rows: rows[:2], errors.TransferFailed), (None, LayoutMismatch)):
        with pytest.raises(error):
            read(cells(taker, box), cells(source, box), ids, ids, moved, digests_for(taker, box), bad)
    for rank in (source, taker):
        rank.region.close()


# ---- which layouts may feed which ----


@pytest.mark.parametrize("source_form", KV_FORMS)
@pytest.mark.parametrize("taker_form", KV_FORMS)
def test_the_same_or_a_lossier_form(source_form, taker_form):
    ours, theirs = (layout(16, source_form), numerics(source_form)), (layout(64, taker_form), numerics(taker_form, 2))
    fits = source_form == taker_form or KV_FORMS[source_form].lossiness < KV_FORMS[taker_form].lossiness
    if fits:
        assert relation(*ours, *theirs) == MIXED
    else:
        with pytest.raises(
            LayoutMismatch, match=f"{source_form} cannot become {taker_form}.*keeps.*the taker KVLayout"
        ):
            relation(*ours, *theirs)
    assert bool(set(gives(*ours)) & set(takes(*theirs))) == fits
    assert not set(gives(*ours, is_strict=True)) & set(takes(*theirs))
    assert not set(gives(*ours)) & set(takes(*theirs, is_strict=True))


def test_one_class_is_exact_whatever_its_blocks():
    ours, theirs = (layout(16, "bf16"), numerics("bf16")), (layout(64, "bf16"), numerics("bf16"))
    assert relation(*ours, *theirs, is_strict=True) == EXACT
    for strict in ((True, True), (True, False), (False, True)):
        assert set(gives(*ours, is_strict=strict[0])) & set(takes(*theirs, is_strict=strict[1]))


def test_another_model_or_shape():
    ours = (layout(16, "bf16"), numerics("bf16"))
    others = (
        (layout(16, "bf16"), numerics("bf16").replace(IDENTITY, "f" * 16)),
        (KVLayout((KVGroup("paged", NUM_LAYERS, NUM_HEADS * 2, 8, "bf16", 16),)), numerics("bf16")),
        (layout(16, "bf16"), "no class at all"),
    )
    for other in others:
        with pytest.raises(LayoutMismatch):
            relation(*ours, *other)
        assert not set(gives(*ours)) & set(takes(*other)) and not set(gives(*other)) & set(takes(*ours))


# ---- over real connections ----


@pytest.mark.parametrize(
    "transport, digest, source_cut, taker_cut",
    [("inproc", "sum", *cuts) for cuts in ((1, 2), (2, 1), (4, 2), (2, 4), (1, 8))]
    + [(name, digest, 2, 4) for name in ("shm", "tcp") for digest in ("sum", "sha256")],
)
def test_ranks_pull_what_crosses_their_own(transport, digest, source_cut, taker_cut):
    async def main():
        shapes = (layout(16, "bf16"), by_heads(source_cut), layout(64, "int8"), by_heads(taker_cut))
        async with Cluster(transport, *shapes, digest=digest) as cluster:
            handle, ticket = cluster.offer("k", 300)
            destinations = cluster.destinations(300)
            fetching = asyncio.create_task(cluster.fetch(handle, ticket, destinations))
            cluster.advance("k", 128)
            await until_async(
                lambda: all(each.upto[-1:] == [128] for each in destinations), "the first chunk, on all ranks"
            )
            cluster.advance("k", 300, 2)
            cluster.finish("k")
            reports = await fetching
            assert all(report.numerics == MIXED and report.num_tokens == 300 for report in reports)
            assert all(report.num_bytes_early > 0 for report in reports)
            cluster.check_arrived((0, 127, 128, 299))
            await until_async(lambda: len(cluster.endings) == source_cut, "every rank's lease is over")
            assert {ending for _, _, ending in cluster.endings} == {"released"}

    asyncio.run(main())


@pytest.mark.parametrize("transport", ("shm", "tcp"))
def test_latent_rows_move(transport):
    async def main():
        shapes = (layout(16, "bf16", "latent"), by_layers(1), layout(64, "int8", "latent"), by_layers(1))
        async with Cluster(transport, *shapes) as cluster:
            handle, ticket = cluster.offer("k", 300)
            cluster.advance("k", 128)
            cluster.finish("k")
            (report,) = await cluster.fetch(handle, ticket, cluster.destinations(300))
            assert report.num_tokens == 300
            cluster.check_arrived((0, 127, 128, 299))

    asyncio.run(main())


@pytest.mark.parametrize("transport", ("shm", "tcp"))
def test_ranks_that_are_alike_move_whole_blocks(transport):
    async def main():
        async with Cluster(transport, layout(16, "bf16"), by_heads(2), layout(16, "bf16"), by_heads(2)) as cluster:
            handle, ticket = cluster.offer("k", 300)
            cluster.finish("k")
            await cluster.fetch(handle, ticket, cluster.destinations(300))
            cluster.check_arrived((0, 127, 299))

    asyncio.run(main())


@pytest.mark.parametrize("form", ("bf16", "int8"))
@pytest.mark.parametrize("taker_cut", (by_layers(2), by_layers(1), by_heads(2)), ids=("alike", "whole", "by heads"))
def test_ranks_with_room_for_the_whole_model_feed_any_cut(taker_cut, form):
    """Ranks of other hosts have such pools, of which they use their layers; GPUs with the same layers have nothing
    else."""

    async def main():
        shapes = (layout(16, form), by_layers(2), layout(16, form), taker_cut)
        async with Cluster("tcp", *shapes, in_whole_pools=True) as cluster:
            handle, ticket = cluster.offer("k", 300)
            cluster.finish("k")
            await cluster.fetch(handle, ticket, cluster.destinations(300))
            cluster.check_arrived((0, 127, 128, 299))

    asyncio.run(main())


def test_a_rank_that_fails_fails_the_fetch():
    """Half of the heads is nothing: what one rank alone has verified is never reported."""

    async def main():
        async with Cluster("tcp", layout(16, "bf16"), by_heads(2), layout(16, "bf16"), by_heads(1)) as cluster:
            handle, ticket = cluster.offer("k", 300)
            cluster.sources[1].cancel("k")
            cluster.sources[0].finish("k")
            destination = cluster.destinations(300)[0]
            assert isinstance(destination, Destination)
            with pytest.raises(errors.KVError):
                await cluster.fetch(handle, ticket, [destination])
            assert destination.upto == []

    asyncio.run(main())
