"""Slots of adapters: bounded, least recently used first, never one that a request uses; and answers that do not depend
on them."""

import hashlib
import random
import threading
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.adapters import adapters
from baton.engine.adapters.adapters import Adapter, Adapters
from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.device import UTILIZATION, Memory
from baton.engine.core.model_errors import ModelError
from baton.engine.core.request import Refusal
from baton.engine.engine import Engine
from baton.engine.execute import build
from baton.engine.models import decoder
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.adapters import ATTENTION, MLP, PROMPT, identities, load_with_adapters
from tests.support.model_folders.families import make_adapter, make_folder


class Shelf:
    """Adapters whose folder is their content, and requests that hold some."""

    def __init__(self, num_slots: int | None):
        self.made = Counter()
        self.held: list[Adapter] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_full = False
        self.adapters = Adapters(self, num_slots)

    def read_adapter(self, folder: Path) -> Any:
        if folder.name == "bad":
            raise ModelError("bad")
        return SimpleNamespace(identity=identity_of(folder.name))

    def make_adapter(self, name: str, copy) -> Adapter:
        self.gate.wait()
        self.made[copy.identity] += 1
        if self.is_full:
            raise MemoryError("no memory")
        return Adapter(name, copy, ())

    def ask(self, identity: bytes) -> str:
        """Hold it for a request; return why not."""
        try:
            self.held.append(self.adapters.find(identity, lambda: set(self.held)))
        except Refusal as refusal:
            return refusal.reason
        return ""

    def get(self, identity: bytes) -> str:
        if (reason := self.ask(identity)) == "adapter_loading":
            self.adapters.wait(identity)
            return self.ask(identity)
        return reason


def identity_of(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


def add_as(shelf: Shelf, name: str, content: str) -> bytes:
    return shelf.adapters.add(name, Path(content))


def add(shelf: Shelf, *names: str) -> list[bytes]:
    return [add_as(shelf, name, name) for name in names]


def test_the_least_recently_used_goes():
    shelf = Shelf(2)
    a, b, c = add(shelf, "a", "b", "c")
    assert shelf.adapters.ready == [a, b], "a third is read, and has no slot"
    assert shelf.get(a) == "" and shelf.adapters.ready == [b, a]
    shelf.held.clear()
    assert shelf.get(c) == "" and shelf.adapters.ready == [a, c]
    assert shelf.held[0].identity == c


def test_one_in_use_stays():
    shelf = Shelf(2)
    a, b, c = add(shelf, "a", "b", "c")
    assert shelf.get(a) == shelf.get(b) == ""
    assert shelf.ask(c) == "adapter_slots"
    shelf.held.pop(0)
    assert shelf.get(c) == "" and set(shelf.adapters.ready) == {b, c}


def test_a_slot_is_taken_while_one_is_made_ready():
    shelf = Shelf(1)
    a, b, c = add(shelf, "a", "b", "c")
    shelf.gate.clear()
    assert shelf.ask(b) == "adapter_loading" and shelf.ask(b) == "adapter_loading"
    assert shelf.ask(c) == "adapter_slots" and shelf.ask(a) == "adapter_slots"
    shelf.gate.set()
    shelf.adapters.wait(b)
    assert shelf.ask(b) == "" and shelf.adapters.ready == [b]
    assert shelf.made[b] == 2, "once when it was read, once for its slot"


def test_one_that_is_ready_waits_for_who_asked_for_it(monkeypatch):
    """Two that ask in turn for the last slot had each other's made ready for ever, and had none."""
    now = 0.0
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: now))
    shelf = Shelf(1)
    a, b = add(shelf, "a", "b")
    assert shelf.ask(b) == "adapter_loading"
    shelf.adapters.wait(b)
    assert shelf.ask(a) == "adapter_slots" and shelf.ask(b) == ""
    shelf.held.clear()
    assert shelf.ask(a) == "adapter_loading", "it has had it"
    shelf.adapters.wait(a)
    now = adapters._AWAITED_S
    assert shelf.get(b) == "", "and nobody came for this one"


def test_one_that_nobody_comes_for_keeps_another_waiting_for_a_moment_alone(monkeypatch):
    """Each worker makes it ready that a request asked, and one serves: the others were idle, and refused for two
    seconds."""
    now = 0.0
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: now))
    shelves = [Shelf(1), Shelf(1)]
    for shelf in shelves:
        a, b = add(shelf, "a", "b")
        assert shelf.ask(b) == "adapter_loading"
        shelf.adapters.wait(b)
    assert shelves[0].ask(b) == ""
    now = 0.5
    assert shelves[1].ask(a) == "adapter_slots", "its request may be on its way"
    now = 0.7
    assert shelves[1].ask(a) == "adapter_slots"
    now = 0.76
    assert shelves[1].get(a) == "" and shelves[0].ask(a) == "adapter_slots"


def test_streams_that_overlap_keep_no_other_out_for_good(monkeypatch):
    """The oldest in a slot takes no new requests once another was asked for for two seconds, and as long as it is."""
    at = [0.0]
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: at[0]))
    shelf = Shelf(2)
    a, b, c = add(shelf, "a", "b", "c")
    for at[0] in (0.0, 1.0, 1.9):
        assert [shelf.get(each) for each in (a, b, c)] == ["", "", "adapter_slots"]
    at[0] = 2.0
    assert [shelf.get(each) for each in (c, a, b)] == ["adapter_slots", "adapter_slots", ""]
    shelf.held = [each for each in shelf.held if each.identity != a]
    assert [shelf.get(each) for each in (c, b, a)] == ["", "", "adapter_slots"]
    for at[0] in (3.0, 4.0):
        assert shelf.get(a) == "adapter_slots"
    assert [shelf.get(each) for each in (b, c)] == ["adapter_slots", ""], "now it has been there for longest"
    at[0] = 6.0
    assert shelf.get(b) == "", "nobody asks for the other any more"


def test_one_without_a_name_serves_those_that_began_with_it():
    shelf = Shelf(2)
    (a,) = add(shelf, "a")
    assert shelf.get(a) == "" and shelf.adapters.remove("a") and not shelf.adapters.remove("a")
    assert shelf.ask(a) == "", "a leg of the same request"
    shelf.held.clear()
    assert shelf.ask(a) == "no_adapter"
    b, c = add(shelf, "b", "c")
    assert shelf.get(b) == shelf.get(c) == "" and set(shelf.adapters.ready) == {b, c}


@pytest.mark.parametrize("lose", [lambda shelf: shelf.adapters.remove("a"), lambda shelf: add_as(shelf, "a", "other")])
def test_without_bound_one_without_a_name_goes_with_its_last_request(lose):
    """No slot is ever wanted of it: it had stayed as long as the worker ran."""
    shelf = Shelf(None)
    (a,) = add(shelf, "a")
    assert shelf.get(a) == ""
    held = weakref.ref(shelf.held[0])
    lose(shelf)
    assert a not in shelf.adapters.ready and shelf.ask(a) == "", "a leg of the same request"
    assert add_as(shelf, "b", "a") == a and shelf.get(a) == "" and len(set(shelf.held)) == 1, "it has a name again"
    shelf.adapters.remove("b")
    shelf.held.clear()
    assert held() is None and shelf.ask(a) == "no_adapter"


def test_one_that_cannot_be_made_ready_is_told_and_let_be_for_a_while(monkeypatch, caplog):
    """It would cost the slot of another one with each try."""
    now = 0.0
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: now))
    shelf = Shelf(1)
    a, b = add(shelf, "a", "b")
    shelf.is_full = True
    with suppress(MemoryError):
        shelf.get(b)
    assert "adapter b cannot be made ready" in caplog.text and "no memory" in caplog.text
    shelf.is_full = False
    assert shelf.ask(b) == "no_adapter" and shelf.get(a) == "" and shelf.made[b] == 2, "once when it was read"
    shelf.held.clear()
    now = adapters._PAUSE_S
    assert shelf.get(b) == ""


def test_two_names_of_one_and_one_name_of_two():
    shelf = Shelf(None)
    first = shelf.adapters.add("x", Path("one"))
    assert shelf.adapters.add("y", Path("one")) == first and shelf.adapters.listed() == {"x": first, "y": first}
    second = shelf.adapters.add("x", Path("two"))
    assert shelf.adapters.listed() == {"x": second, "y": first}
    shelf.adapters.remove("y")
    assert shelf.ask(first) == "no_adapter" and shelf.get(second) == ""
    with pytest.raises(ModelError):
        shelf.adapters.add("x", Path("bad"))
    assert shelf.adapters.listed() == {"x": second}


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_never_exceed_or_confuse_the_slots(seed):
    """Never more than there are slots, never one away that is in use, never another's."""
    rng = random.Random(seed)
    shelf = Shelf(3)
    contents = [f"content-{n}" for n in range(8)]
    for _ in range(400):
        act = rng.random()
        if act < 0.1:
            shelf.adapters.add(rng.choice("abcdef"), Path(rng.choice(contents)))
        elif act < 0.15:
            shelf.adapters.remove(rng.choice("abcdef"))
        elif act < 0.5 and shelf.held:
            shelf.held.pop(rng.randrange(len(shelf.held)))
        else:
            asked = identity_of(rng.choice(contents))
            known = asked in shelf.adapters.listed().values()
            used = {adapter.identity for adapter in shelf.held}
            reason = shelf.get(asked)
            if reason == "no_adapter":
                assert not known and asked not in used
            elif reason == "adapter_slots":
                assert len(used) == 3 and asked not in used
            else:
                assert reason == "" and shelf.held[-1].identity == asked and (known or asked in used)
        assert len(shelf.adapters.ready) <= 3
        assert {adapter.identity for adapter in shelf.held} <= set(shelf.adapters.ready)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    model = make_folder(folder / "base", "llama3", hidden_size=64, intermediate_size=96)
    for seed, name in enumerate("abc"):
        make_adapter(folder / name, model, ATTENTION + MLP, rank=8, seed=seed)
    return [folder / name for name in ("base", "a", "b", "c")]


def test_answers_do_not_depend_on_slots(folders):
    """One slot for three adapters: each request is the slot's next, the answers those of an engine that holds all."""
    tight, loose = load_with_adapters(*folders, adapter_slots=1), load_with_adapters(*folders)
    assert len(tight.adapters.ready) == 1 and len(loose.adapters.ready) == 3
    order = "abcacb"
    for index, name in enumerate(order):
        request = engine_request(f"r{index}", PROMPT, 8, named=False, logprobs=1, adapter=identities(loose)[name])
        records = [run_to_end(engine, [request])[request.key] for engine in (tight, loose)]
        assert records[0].logprobs == records[1].logprobs and records[0].answer() == records[1].answer()
        tight.check_integrity()


def test_all_slots_in_use(folders):
    engine = load_with_adapters(*folders, adapter_slots=1)
    known = identities(engine)
    engine.submit(engine_request("first", PROMPT, 8, adapter=known["a"]))
    with pytest.raises(Refusal, match="adapter_slots"):
        engine.submit(engine_request("second", PROMPT, 8, adapter=known["b"]))
    engine.check_integrity()
    assert engine.load_report().ready_adapters == (known["a"],)
    assert load_with_adapters(*folders).load_report().ready_adapters == (), "without a bound each is ready"


def test_settings_that_are_refused(folders):
    with pytest.raises(ValueError, match="adapter_slots 0: must be at least 1"):
        Engine.load(EngineConfig(folders[0], adapter=(f"a={folders[1]}",), adapter_slots=0))
    with pytest.raises(ValueError, match="adapter_slots has no effect"):
        EngineConfig(folders[0], adapter_slots=1)


def test_a_gpu_has_room_for_adapters_behind_its_pool(tmp_path, monkeypatch):
    """For all that are named, or for as many of the largest as there are slots, and the one that is made ready before
    it has one."""
    base = make_folder(tmp_path / "base", "llama3", num_hidden_layers=1)
    for rank in (4, 16):
        make_adapter(tmp_path / str(rank), base, ATTENTION + MLP, rank=rank)
    monkeypatch.setattr(build, "step_bytes", lambda *given: 0)
    monkeypatch.setattr(Memory, "of", lambda device: Memory(1 << 24, 1 << 24, 0))
    named = tuple(f"a{rank}={tmp_path / str(rank)}" for rank in (4, 16))
    config = resolve(
        EngineConfig(tmp_path / "base", num_blocks=64, max_num_batched_tokens=128), read_spec(tmp_path / "base")
    )
    adapted = replace(config, adapter=named)
    model = load_model(adapted)
    small, large = (model.make_adapter("a", LoraFolder(tmp_path / str(rank))).num_bytes for rank in (4, 16))
    each = model.kv_layout(config.kv_dtype, config.block_size).block_bytes
    room = int((1 << 24) * UTILIZATION)
    for given, taken in ((config, 0), (adapted, small + large), (replace(adapted, adapter_slots=3), 4 * large)):
        assert build.gpu_sizes(given, model, False) == ((room - taken) // each, None)


def test_an_adapter_for_which_a_gpu_has_no_memory(tmp_path, monkeypatch):
    """One line, as of others that are not served: a start ends with it, and a command is refused."""
    make_adapter(tmp_path / "a", make_folder(tmp_path / "base", "llama3", num_hidden_layers=1), ATTENTION)
    engine = load_with_adapters(tmp_path / "base", adapter_root=tmp_path)

    def read_low_ranks(*given):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(decoder, "read_low_ranks", read_low_ranks)
    with pytest.raises(
        ModelError, match=r"/a: the GPU has no memory left for this adapter; lower gpu_memory_utilization, or"
    ):
        engine.add_adapter("a", tmp_path / "a")
    assert not engine.adapters.listed()
