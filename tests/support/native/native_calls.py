"""Calls of the native kernels as they were made here, with all the memory that they reach, for a processor of another
kind to repeat: `python -m tests.support.native.native_calls FILE` writes them, replay_calls.cpp repeats them.

A file is a row of calls, little-endian: name [32], number of regions, 14 arguments (int64); then for each region its
address and size (int64) and its bytes before and after the call. Addresses are new ones that are free in any process.
"""

import ctypes
import gc
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import torch

from baton.engine.native import build

FIRST_ADDRESS = 1 << 36
NUM_ARGUMENTS = 14
ALIGNMENT = 64


class Recorder(build.NativeLibrary):
    """Keeps what each call found and left."""

    calls: list[bytes] = []

    def function(self, name: str, *argtypes, restype=None):
        real = super().function(name, *argtypes, restype=restype)
        if restype is not None and not argtypes:
            return real

        def call(*arguments: int | ctypes.Array | None) -> int | None:
            values = [ctypes.addressof(one) if isinstance(one, ctypes.Array) else one or 0 for one in arguments]
            reached = _reach([value for value, kind in zip(values, argtypes, strict=True) if kind is ctypes.c_void_p])
            before = [ctypes.string_at(start, size) for start, size, _ in reached]
            returned = real(*arguments)
            self.calls.append(_packed(name, values, argtypes, reached, before))
            return returned

        return call


def record(work) -> list[bytes]:
    """Return the calls that `work()` makes, in a process that has not loaded the library before; those of several steps
    end by their number, not by the time, which an emulator takes more of."""
    from baton.engine.execute import multi_step

    build.NativeLibrary, multi_step.BUDGET_NS = Recorder, 1 << 60
    work()
    return Recorder.calls


def _reach(pointers: list[int]) -> list[tuple[int, int, bool]]:
    """Start, size and whether it holds pointers, of all memory that these lead to."""
    known, found, waiting = sorted(_regions()), {}, list(pointers)
    while waiting:
        pointer = waiting.pop()
        region = next((one for one in known if one[0] <= pointer < one[0] + one[1]), None)
        if region is None or region in found:
            continue
        found[region] = None
        if region[2]:
            waiting += struct.unpack(f"<{region[1] // 8}q", ctypes.string_at(region[0], region[1] // 8 * 8))
    return list(found)


def _regions() -> Iterator[tuple[int, int, bool]]:
    """Memory of tensors, arrays of numpy and of Python, and structs, as far as the callers hold them: the last two may
    hold pointers."""
    frame, waiting = sys._getframe(3), []
    while frame:
        waiting += frame.f_locals.values()
        frame = frame.f_back
    seen = set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | FunctionType | type | str | bytes | int | float):
            continue
        seen.add(id(thing))
        match thing:
            case torch.Tensor():
                storage = thing.untyped_storage()
                yield storage.data_ptr(), storage.nbytes(), False
            case np.ndarray():
                low, high = np.lib.array_utils.byte_bounds(thing)
                yield low, high - low, thing.dtype == np.int64
            case ctypes.Structure() | ctypes.Array() | ctypes.c_int32():
                yield ctypes.addressof(thing), ctypes.sizeof(thing), True
            case array():
                address, count = thing.buffer_info()
                yield address, count * thing.itemsize, thing.typecode == "q"
            case _:
                waiting += gc.get_referents(thing)


def _packed(name: str, values: list[int], argtypes, reached, before: list[bytes]) -> bytes:
    """Return a call with the addresses of its regions, and all that points to them, moved."""
    places, place = [], FIRST_ADDRESS
    for start, size, _ in reached:
        places.append(place + start % ALIGNMENT)
        place += (start % ALIGNMENT + size + 4 * ALIGNMENT) // ALIGNMENT * ALIGNMENT

    def moved(value: int) -> int:
        for (start, size, _), to in zip(reached, places, strict=True):
            if start <= value < start + size:
                return value - start + to
        return value

    def image(content: bytes, has_pointers: bool) -> bytes:
        if not has_pointers:
            return content
        count = len(content) // 8
        return (
            struct.pack(f"<{count}q", *map(moved, struct.unpack(f"<{count}q", content[: count * 8])))
            + content[count * 8 :]
        )

    arguments = [moved(v) if kind is ctypes.c_void_p else v for v, kind in zip(values, argtypes, strict=True)]
    parts = [
        struct.pack(
            f"<32sq{NUM_ARGUMENTS}q", name.encode(), len(reached), *arguments, *[0] * (NUM_ARGUMENTS - len(arguments))
        )
    ]
    for (start, size, has_pointers), to, content in zip(reached, places, before, strict=True):
        after = ctypes.string_at(start, size)
        parts += [struct.pack("<2q", to, size), image(content, has_pointers), image(after, has_pointers)]
    return b"".join(parts)


def _linears() -> None:
    from baton.engine.layers.linear.packed import PackedLinear, unfit
    from baton.engine.weights.leaves import leaves_of
    from tests.support.model_folders.weight_forms import FORMS, dense_weight

    for dtype in (torch.float32, torch.bfloat16):
        weights = {name: make((72, 96)) for name, make in FORMS.items()} | {"dense": dense_weight((72, 96), dtype)}
        for name, weight in weights.items():
            if unfit(weight, dtype):
                print("left out:", name, dtype, unfit(weight, dtype))
                continue
            kernel = PackedLinear(weight, torch.randn(72).to(dtype), dtype)
            for num_rows in (1, 6, 9):
                x = torch.randn(num_rows, 96).to(dtype)
                x[0, :3] = torch.tensor((0.0, 300.0, -1e-9))
                kernel(x)
            if leaves_of(weight) > 1:
                PackedLinear(weight, None, dtype, leaves_of(weight))(x)
    from_far = PackedLinear(FORMS["int8-g32"]((64, 1216)), None, torch.float32)  # more than a chunk of inputs
    from_far(torch.randn(7, 1216))
    of_four = PackedLinear(FORMS["int8-dynamic"]((64, 100)), None, torch.float32)  # no whole number of eights
    of_four(torch.randn(5, 100))


def _attention() -> None:
    from baton.engine.attention.base import AttentionShape
    from baton.engine.attention.native import KINDS, NativeAttention
    from baton.engine.kv.stored_forms import STORED
    from tests.support.engine.attention.attention_step import attended, one_step

    for dtype in KINDS:
        for form in STORED:
            shape = AttentionShape(4, 2, 32, (None, 20), dtype, kv_form=form)
            pool, batch, q = one_step(shape, [(1, 70), (7, 40), (9, 9)], form=form)
            for layer in range(2):
                attended(NativeAttention(shape), pool, batch, layer, q)


def _layers_and_drafts() -> None:
    import tempfile

    from tests.support.model_folders.draft_models import load_draftable, make_target_and_draft, mixed_requests

    with tempfile.TemporaryDirectory() as folder:
        target, draft = make_target_and_draft(Path(folder))
        for options in ({"dtype": "fp32"}, {"dtype": "bf16", "kv_dtype": "int8"}):
            engine = load_draftable(
                target, num_blocks=64, speculator="draft", draft_model=draft, num_draft_tokens=2, **options
            )
            for seed in range(3):
                engine.submit(mixed_requests(1, max_tokens=8, seed=seed)[0])  # greedy: drafted in one call
            for _ in range(4):
                engine.step()


def _heads() -> None:
    import tempfile

    from tests.support.bare_engine import load_engine
    from tests.support.engine.toy_engine import engine_request
    from tests.support.model_folders.learned_model import make_heads, make_learned_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_learned_model(Path(folder))
        heads = make_heads(Path(folder) / "heads", "medusa", model)
        for dtype in ("fp32", "bf16"):
            engine = load_engine(
                model, num_blocks=32, dtype=dtype, speculator="medusa", draft_model=heads, num_draft_tokens=2
            )
            engine.submit(engine_request("greedy", [3, 7, 9], 8, named=False))
            for _ in range(4):
                engine.step()


def _adapters() -> None:
    import tempfile

    from tests.support.bare_engine import load_engine
    from tests.support.engine.toy_engine import engine_request
    from tests.support.model_folders.families import make_adapter, make_folder

    with tempfile.TemporaryDirectory() as folder:
        base, adapter = Path(folder) / "base", Path(folder) / "a"
        make_adapter(adapter, make_folder(base, "llama3", hidden_size=64), ["q_proj", "v_proj", "down_proj"], rank=6)
        for dtype in ("fp32", "bf16"):
            engine = load_engine(base, num_blocks=32, dtype=dtype, adapter=(f"a={adapter}",))
            for name, identity in (("adapted", engine.adapters.listed()["a"]), ("plain", b"")):
                request = engine_request(name, [3, 7, 9], 4, named=False, adapter=identity, logprobs=0)
                engine.submit(request)  # logprobs: step by step
            for _ in range(3):
                engine.step()


def _states() -> None:
    from tests.support.engine.mixers import MIXER_SPECS, MixerSteps, make_mixer

    for spec in MIXER_SPECS.values():
        for dtype in (torch.float32, torch.bfloat16):
            steps = MixerSteps(make_mixer(spec, dtype), [9, 4], dtype)
            steps.step([5, 2])
            steps.step([1, 1], drafts=[2, 0], accepted=[1, 0])


def _copies_and_digests() -> None:
    from baton.worker.kv.native_digests import NativeMemoryKernels

    kernels = NativeMemoryKernels(build.library())
    draw = np.random.default_rng(0)
    words = draw.integers(0, 1 << 63, (5, 3, 2, 2, 24), np.uint64)
    target, table = np.zeros_like(words), draw.integers(0, 1 << 63, 64, np.uint64)
    kernels.word_sums(words, np.array([4, 0, 2]), table, np.array([0, 8, 40]), target, np.array([1, 3, 0]))
    kernels.word_sums(words, np.array([1]), table, np.array([3]), None, None)
    source = draw.integers(0, 255, (4, 3, 2, 80), np.uint8)
    kernels.copy_runs(np.zeros_like(source), np.array([0, 3]), source, np.array([2, 1]))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    kinds = (_linears, _attention, _layers_and_drafts, _heads, _adapters, _states, _copies_and_digests)
    calls = record(lambda: [work() for work in kinds])
    Path(sys.argv[1]).write_bytes(b"".join(calls))
    print(len(calls), "calls by", build.library().tier.name)


if __name__ == "__main__":
    main()
