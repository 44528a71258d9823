"""A tenant's cache is separate from all others', and the credential alone names the tenant (S6, S7). Workers are
stand-ins that keep names of spans as real ones do; test_probe.py asks real ones."""

import asyncio
from functools import partial

import pytest

from baton.service.security.credentials import new_key
from baton.service.security.guard import METHODS
from baton.service.settings import SettingsError
from baton.v1 import inference_pb2 as pb
from gateway.prefix.prefix_hashes import PrefixHashes
from gateway.prefix.public_prefixes import read_public_prefixes
from kvtransfer.naming import chain_hashes, root_hash
from tests.gateway.calls import read
from tests.gateway.conftest import cluster, digest, folder  # noqa: F401
from tests.support.client import make_request
from tests.support.gateway.fake_worker import tokens_of

PROMPT = list(range(20, 320))
IDENTITY = b"i" * 32
TENANTS = ("acme", "globex")
PUBLIC = "A public beginning of many prompts, words that anyone may know. " * 12


@pytest.fixture
def keys(tmp_path) -> dict[str, str]:
    """A key of each tenant; the file is in tmp_path."""
    made = {tenant: new_key() for tenant in TENANTS}
    lines = [
        f'[keys.{key_id}]\ntenant = "{tenant}"\nsha256 = "{hashed}"' for tenant, (_, key_id, hashed) in made.items()
    ]
    (tmp_path / "credentials.toml").write_text("\n".join(lines))
    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "public.toml").write_text(f'texts = ["{PUBLIC}"]\nsystems = ["{PUBLIC}"]')
    return {tenant: key for tenant, (key, _, _) in made.items()}


@pytest.fixture
def tenants(cluster, keys, tmp_path):  # noqa: F811
    """`async with tenants() as c`, and `await ask(c, tenant, prompt, ...)`."""
    return lambda **more: cluster(
        credentials=tmp_path / "credentials.toml", cluster_secret=tmp_path / "secret", split="auto", **more
    )


@pytest.fixture
def ask(keys):
    async def ask(c, tenant, prompt=PROMPT, metadata=(), **fields) -> list[pb.GenerateResponse]:
        shown = (("authorization", f"Bearer {keys[tenant]}"), *metadata)
        request = make_request(prompt, **{"max_tokens": 3, "temperature": 0.0, **fields})
        messages = await read(c.stub.Generate(request, timeout=20, metadata=shown))
        await c.idle()
        await c.spread()
        return messages

    return ask


async def test_caches_are_apart_and_each_own_one_is_found(tenants, ask):
    async with tenants() as c:
        cached = [
            (await ask(c, tenant))[-1].usage.cached_tokens
            for tenant in ("acme", "globex", "acme", "globex", "globex", "acme")
        ]
        assert cached == [0, 0, 256, 256, 256, 256]


async def test_what_a_client_says_of_itself_is_not_heard(tenants, ask):
    """In no metadata key and no field; there is no field for it."""
    async with tenants() as c:
        for index, name in enumerate(("tenant", "x-tenant-id", "baton-tenant", "x-salt", "tenant-bin")):
            prompt, value = list(range(20 + index, 320)), b"acme" if name.endswith("-bin") else "acme"
            assert (await ask(c, "acme", prompt))[-1].usage.cached_tokens == 0
            assert (await ask(c, "globex", prompt, [(name, value)]))[-1].usage.cached_tokens == 0
            assert (await ask(c, "acme", prompt, [(name, "globex")] if value == "acme" else ()))[-1].usage.cached_tokens
    for message in (pb.GenerateRequest, pb.TokenizeRequest, pb.Message, pb.Sampling):
        assert not {"tenant", "tenant_id", "salt", "cache_salt", "user"} & set(message.DESCRIPTOR.fields_by_name)


async def test_two_tenants_may_choose_one_request_id(tenants, ask):
    """Neither learns of the other's, and neither can speak of it."""
    async with tenants() as c:
        c.decode[0].hold("decode")
        running = asyncio.create_task(ask(c, "acme", request_id="mine"))
        await c.until(lambda: c.gateway.handler.num_running == 1)
        other = asyncio.create_task(ask(c, "globex", list(range(40, 340)), request_id="mine"))
        await c.until(lambda: c.gateway.handler.num_running == 2)
        await c.until(lambda: len(c.gateway.recent._running) == 2)
        c.decode[0].release("decode")
        first, second = await running, await other
        assert first[0].request_id == second[0].request_id == "mine"
        assert [i for m in second for i in m.token_ids] == tokens_of(list(range(40, 340)), 3, 400)


async def test_public_prefixes_are_shared_and_nothing_behind_them(tenants, ask, tmp_path):
    async with tenants(public_prefixes=tmp_path / "public.toml") as c:
        for prompt in (PUBLIC + "and my own", [("system", PUBLIC), ("user", "and my own " * 8)]):
            first = (await ask(c, "acme", prompt))[-1].usage
            other = (await ask(c, "globex", prompt))[-1].usage
            own = (await ask(c, "globex", prompt))[-1].usage
            assert 0 < other.cached_tokens <= own.cached_tokens < first.prompt_tokens
            encode = partial(c.pipeline.text.encode, context=1024)
            public = await read_public_prefixes(tmp_path / "public.toml", encode)
            longest = max(len(ids) // 64 * 64 for ids in public)
            assert other.cached_tokens <= longest
        private = [("system", PUBLIC[:-200] + "private. " * 20), ("user", "x")]
        before = (await ask(c, "acme", private))[-1].usage
        assert (await ask(c, "globex", private))[-1].usage.cached_tokens < before.prompt_tokens // 64 * 64


@pytest.mark.parametrize("text", ["texts = 5", 'texts = "You are"', "systems = ['']", "systems = [1]", "more = []"])
async def test_a_file_of_public_prefixes_that_is_refused(tmp_path, text):
    (tmp_path / "public.toml").write_text(text)
    with pytest.raises(SettingsError, match="lists of strings"):
        await read_public_prefixes(tmp_path / "public.toml", None)


# ---- names ----


class Known:
    """A registry that serves one model."""

    secret = b"s" * 32

    def known_identity(self):
        return IDENTITY


def names(public=()) -> PrefixHashes:
    made = PrefixHashes(Known())
    made.make_public(public)
    return made


def test_names_of_tenants_have_nothing_in_common():
    made = names()
    spans = [made.spans(tenant, PROMPT).hashes for tenant in ("default", *TENANTS)]
    assert len({name for chain in spans for name in chain}) == 12
    assert made.spans("acme", PROMPT) == made.spans("acme", PROMPT)


def test_output_goes_on_where_the_prompt_ended():
    made = names()
    whole = [*PROMPT, *range(100)]
    assert made.spans("acme", PROMPT, range(100)) == made.spans("acme", whole)
    assert made.spans("acme", PROMPT[:10]).hashes == []
    assert made.spans("acme", PROMPT[:10], PROMPT[10:64]).hashes == made.spans("acme", PROMPT[:64]).hashes
    parent = made.spans("acme", PROMPT[:256]).parent
    assert chain_hashes(parent, PROMPT[192:256]) != made.spans("acme", PROMPT[:256]).hashes[3:]
    assert chain_hashes(parent, PROMPT[:64]) == made.spans("acme", [*PROMPT[:256], *PROMPT[:64]]).hashes[4:]


@pytest.mark.parametrize("num_public", [1, 63, 64, 65, 127, 128, 192, 300])
def test_only_full_spans_of_a_public_prompt_are_public(num_public):
    made, full = names([PROMPT[:num_public]]), num_public // 64
    acme, globex = (made.spans(tenant, PROMPT).hashes for tenant in TENANTS)
    assert acme[:full] == globex[:full] == chain_hashes(root_hash(IDENTITY), PROMPT[: 64 * full])
    assert not set(acme[full:]) & set(globex[full:])


def test_a_public_span_in_another_place_is_private():
    """A span is named by the chain from the prompt's beginning."""
    made = names([PROMPT[:128]])
    moved = [7, *PROMPT]
    acme, globex = (made.spans(tenant, moved).hashes for tenant in TENANTS)
    assert not set(acme) & set(globex)


def test_what_a_model_writes_is_never_public():
    made = names([PROMPT[:128]])
    written = made.spans("acme", PROMPT[:64], PROMPT[64:128])
    asked = made.spans("acme", PROMPT[:128])
    assert written.hashes[0] == asked.hashes[0] and written.hashes[1] != asked.hashes[1]


def test_every_method_that_names_spans_knows_its_tenant():
    """Generate and Complete go through the same servicer, Embed and Score name no spans; a new method of
    Inference must be thought about here."""
    assert {path.rpartition("/")[2] for path in METHODS if "Inference" in path} == {
        "Generate", "Complete", "Tokenize", "Detokenize", "Embed", "Score", "GetModelInfo", "ListModels",
    }  # fmt: skip
