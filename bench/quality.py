"""Measure the quality cost of quantization: python bench/quality.py [--quick] [--json FILE].

For every scheme on the demo model and every form of KV it measures bits per byte on the held-out modules, top-1
agreement with the bf16 model through the engine, and the bytes of the weights. The results are deterministic, so in
place of A/A rows each figure has the standard error of its difference from bf16, paired by token.
bench/lib/tables/quality.py makes the docs' table of it."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import random
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from baton.cli.models.eval import Texts, encode, read_texts
from baton.engine.core.config import EngineConfig
from baton.engine.kv import stored_forms as kv_quant
from baton.engine.kv.pool import KVPool
from baton.engine.models.loader import load_model
from baton.quantization.calibration import DEFAULT, NUM_SAMPLES, Prompt, make_samples, read_prompts
from baton.quantization.core.errors import QuantizeError
from baton.quantization.quantize import plan, quantize
from baton.quantization.scoring import Score, score
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, start
from kvtransfer.layout import KVLayout

GROUPS = (32, 64, 128)
KEYS_PER_CHANNEL = 32  # tokens that share a scale
KV_FORMS = {"fp8_e4m3": "", "fp8_e5m2": "", "int8": "ratio <= 1.005", "int4": "ratio <= 1.03"}
# scheme -> goal against bf16, and the plain rounding that it must beat
SCHEMES = {
    "int8": ("ratio <= 1.005", None),
    "int8-weight-only": ("ratio <= 1.005", None),
    "int8-outlier": ("ratio <= 1.005", "int8"),
    "smoothquant-w8a8": ("ratio <= 1.005", "int8"),
    "fp8": ("ratio <= 1.01", None),
    "fp8-static": ("ratio <= 1.01", "fp8"),
}
INT4 = {"int4-rtn": ("", None), "int4-awq": ("ratio <= 1.03", "int4-rtn"), "int4-gptq": ("ratio <= 1.03", "int4-rtn")}
# Library modules that are not held out: the demo model was trained on them.
OWN_MODULES = ("argparse.py", "dataclasses.py", "inspect.py", "pathlib.py", "subprocess.py", "tarfile.py", "typing.py")


class PerChannel(KVPool):
    """int4 as in KIVI (arXiv 2402.02750): a scale for each channel of 32 tokens' keys; values as in our int4. Decoded
    values are kept in an fp32 pool, since their quality is measured, not their size."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        missing = -len(k) % KEYS_PER_CHANNEL
        channels = F.pad(k.flatten(1).t().unsqueeze(0), (0, missing), mode="replicate")[0]
        rounded = _int4(channels.unflatten(1, (-1, KEYS_PER_CHANNEL))).flatten(1)[:, : len(k)]
        super().write(layer, slots, rounded.t().view(k.shape), _int4(v))


class PerToken(KVPool):
    """Our int4, stored like `PerChannel`."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer, slots, _int4(k), _int4(v))


def _int4(x: Tensor) -> Tensor:
    """Return fp32 [..., row] rounded to int4 and back, with one scale per row."""
    return kv_quant.decode("int4", *kv_quant.encode("int4", x.float()), x.dtype)


class Bench:
    """The bf16 model's figures, and everything else compared with them."""

    def __init__(self, report: Report, quick: bool):
        self._report = report
        self._ids, self._num_bytes = held_out(*((6, 256) if quick else (30, 768)))
        self._num_samples = 8 if quick else NUM_SAMPLES
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._default = self._samples(read_prompts(DEFAULT))
        self._scores: dict[str, Score] = {}
        self._model = load_model(EngineConfig(MODEL, dtype="bf16"))
        self._weight_bytes = weight_bytes(MODEL)
        report.add("text", self._num_bytes, "bytes")
        report.add("text", sum(len(ids) - 1 for ids in self._ids), "tokens")
        self._bf16 = self._scores["bf16"] = score(self._model, "bf16", self._ids, self._num_bytes)
        report.add("bf16: bits per byte", self._bf16.bits_per_byte, "bits/byte")
        report.add("bf16: weights", self._weight_bytes, "bytes")

    def weights(self, scheme: str, group: int | None, goal: str, rival: str | None) -> None:
        """Make and score a folder. `rival`: plain rounding at the same bits and group."""
        suffix = f" g{group}" if group else ""
        self._made(scheme + suffix, scheme, group, goal, self._default)
        if rival is not None:
            found, plain = self._scores[scheme + suffix], self._scores[rival + suffix]
            name = f"{scheme}{suffix}: against {rival}"
            beats = "" if scheme == "fp8-static" else "ratio <= 1.0"  # static scales cannot beat dynamic ones
            self._report.add(name, found.bits_per_byte, "bits/byte", against=plain.bits_per_byte, goal=beats)

    def loaded(self, quantization: str) -> None:
        """Score plain rounding as a worker does it while loading a float folder, with zero points at 4 bits."""
        found = score(load_model(EngineConfig(MODEL, quantization=quantization)), "bf16", self._ids, self._num_bytes)
        self._add(f"--quantization {quantization}", found, "")

    def calibrated_on(self, name: str, texts: list[str], scheme: str, group: int) -> None:
        """Score the same scheme calibrated on other texts."""
        samples = self._samples([Prompt(0, text, None) for text in texts])
        self._made(f"{scheme} g{group}, calibrated on {name}", scheme, group, "", samples)

    def kv(self, form: str, goal: str) -> None:
        self._add(f"kv {form}", score(self._model, form, self._ids, self._num_bytes), goal)
        group = self._model.kv_group(form, 32)
        plain = self._model.kv_group("bf16", 32)
        self._report.add(f"kv {form}: KV of a token", _token_bytes(group), "bytes", against=_token_bytes(plain))

    def keys_of_int4(self) -> None:
        """Score keys per channel and per token, both through the layers in torch, which let a pool round them."""
        model = load_model(EngineConfig(MODEL, dtype="bf16", attention="sdpa"))
        for name, pool_type in (("token", PerToken), ("channel", PerChannel)):
            found = score(model, "fp32", self._ids, self._num_bytes, pool_type=pool_type)
            self._add(f"kv int4, keys per {name}, in torch", found, "")

    def _made(self, name: str, scheme: str, group: int | None, goal: str, samples: list[Tensor]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "made"
            job = plan(MODEL, scheme, group)
            quantize(job, out, samples if job.scheme.calibrated else None)
            found = score(load_model(EngineConfig(out)), "bf16", self._ids, self._num_bytes)
            self._add(name, found, goal)
            self._report.add(f"{name}: weights", weight_bytes(out), "bytes", against=self._weight_bytes)

    def _add(self, name: str, found: Score, goal: str) -> None:
        self._scores[name] = found
        against = self._bf16.bits_per_byte
        self._report.add(f"{name}: bits per byte", found.bits_per_byte, "bits/byte", against=against, goal=goal)
        self._report.add(f"{name}: standard error", found.standard_error(self._bf16), "bits/byte", against=against)
        self._report.add(f"{name}: top-1 agreement", found.agreement(self._bf16), "share")

    def _samples(self, prompts: list[Prompt]) -> list[Tensor]:
        step = max(1, len(prompts) // self._num_samples)
        return make_samples(prompts[::step], self._tokenizer, lambda messages: "")


def held_out(num_modules: int, num_tokens: int) -> tuple[list[list[int]], int]:
    """Return the first tokens of each held-out module, and their number of bytes."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    found = read_texts(None)
    ids = [ids[: num_tokens + 1] for ids in encode(MODEL, Texts(found.name, found.texts[:num_modules]))]
    return ids, sum(len(tokenizer.decode(each[1:]).encode()) for each in ids)


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _token_bytes(group) -> float:
    """Return the bytes per token, scales included."""
    return KVLayout((group,)).block_bytes / group.block_size


def own_texts() -> list[str]:
    """Return pieces of library modules, as long as those of the default set."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [(stdlib / name).read_text() for name in OWN_MODULES if (stdlib / name).is_file()]
    pieces = [text[begin : begin + 1900] for text in texts for begin in range(0, min(len(text), 19000), 1900)]
    return pieces[:NUM_SAMPLES]


def number_tables() -> list[str]:
    """Return rows of decimals, which a model of Python source is never asked to write."""
    rng = random.Random(0)
    return [" ".join(f"{rng.uniform(-1000, 1000):.3f}" for _ in range(160)) for _ in range(NUM_SAMPLES)]


def main() -> int:
    arguments, report = start("quality", "Bits per byte of every scheme and KV form on the demo model.")
    bench = Bench(report, arguments.quick)
    for form, goal in KV_FORMS.items():
        bench.kv(form, goal)
    bench.keys_of_int4()
    for scheme, (goal, rival) in SCHEMES.items():
        bench.weights(scheme, None, goal, rival)
    fitting = [group for group in GROUPS if _fits(group)]
    for group in fitting:
        bench.loaded(f"int4-g{group}")
        for scheme, (goal, rival) in INT4.items():
            bench.weights(scheme, group, goal, rival)
    bench.calibrated_on("its own kind of text", own_texts(), "int4-gptq", fitting[-1])
    bench.calibrated_on("the wrong kind of text", number_tables(), "int4-gptq", fitting[-1])
    return finish(arguments, report)


def _fits(group: int) -> bool:
    try:
        plan(MODEL, "int4-rtn", group)
    except QuantizeError as error:
        print(f"group {group}: left out: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
