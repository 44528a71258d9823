"""`baton eval`: measure how well a model predicts held-out text, and how often it agrees with another."""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from baton.gguf import is_gguf
from baton.service.arguments import add_command, whole
from baton.service.exits import FAILED, WRONG_USE, fail

SHIPPED_TEXT = Path(__file__).resolve().parents[2] / "quantization" / "held_out.txt"


@dataclass(frozen=True)
class Texts:
    name: str
    texts: list[str]

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


_EXAMPLES = """
baton eval --model ./Llama-3.2-1B --text held-out.txt
baton eval --model ./Llama-3.2-1B-int4 --against ./Llama-3.2-1B
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "eval",
        summary="bits per byte, perplexity and agreement of a model",
        description="Score a model on text it was not trained on, through the engine, KV as it is stored.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="model folder, of any weight format but .gguf"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text (default: the demo's held-out modules of this machine)"
    )
    parser.add_argument("--kv-dtype", default="auto", metavar="F", help="how KV is stored (default: as computed in)")
    parser.add_argument("--quantization", default="auto", metavar="S", help="round float weights as they are loaded")
    parser.add_argument("--against", type=Path, metavar="DIR", help="the model to agree with, in bf16 with bf16 KV")
    parser.add_argument("--threads", type=whole, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score the model and print the figures; return 0 done, 1 failed, 2 wrong use or input."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train-demo
    # imported here, since torch takes seconds
    from baton.engine.core.device import set_threads
    from baton.engine.core.model_errors import ModelError
    from baton.quantization.core.errors import QuantizeError

    set_threads(args.threads)
    try:
        figures = evaluate(args)
    except (QuantizeError, ModelError, ValueError) as error:
        return fail("baton eval", error, WRONG_USE)
    except (OSError, RuntimeError) as error:
        return fail("baton eval", str(error).splitlines()[0], FAILED)
    print(json.dumps(figures) if args.json else _lines(figures))
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """Return all figures as plain values. Raises QuantizeError, ModelError, ValueError."""
    from baton.engine.core.config import EngineConfig, resolve_dtypes
    from baton.engine.models.loader import load_model
    from baton.quantization.core.errors import QuantizeError
    from baton.quantization.scoring import score

    texts = read_texts(args.text)
    token_ids = encode(args.model, texts)
    if args.against is not None and encode(args.against, texts) != token_ids:
        raise QuantizeError(f"{args.against} and {args.model} read the text as different tokens; they cannot agree")
    config = EngineConfig(args.model, quantization=args.quantization, kv_dtype=args.kv_dtype)
    model = load_model(config)
    form = resolve_dtypes(config, model.spec).kv_dtype
    found = score(model, form, token_ids, texts.num_bytes, progress=True)
    figures = {
        "model": args.model.name,
        "text": texts.name,
        "num_bytes": texts.num_bytes,
        "num_tokens": found.num_tokens,
        "kv_form": form,
        "bits_per_byte": round(found.bits_per_byte, 5),
        "perplexity": round(found.perplexity, 4),
    }
    if args.against is not None:
        reference = load_model(EngineConfig(args.against, dtype="bf16"))
        agreed = score(reference, "bf16", token_ids, texts.num_bytes, progress=True)
        figures |= {"against": args.against.name, "against_bits_per_byte": round(agreed.bits_per_byte, 5)}
        figures["top1_agreement"] = round(found.agreement(agreed), 5)
    return figures


def read_texts(path: Path | None) -> Texts:
    """Return the text of the file; without one, the held-out modules of this machine's standard library, or the shipped
    text if it has none."""
    from baton.quantization.core.errors import QuantizeError
    from baton.training.data.corpus import HELD_OUT

    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise QuantizeError(f"{path}: not readable as UTF-8 text ({error})") from None
        if not text.strip():
            raise QuantizeError(f"{path}: empty")
        return Texts(path.name, [text])
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    modules = [stdlib / name for name in HELD_OUT if (stdlib / name).is_file()]
    if modules:
        return Texts(f"{len(modules)} held-out modules", [module.read_text(encoding="utf-8") for module in modules])
    return Texts("the shipped text", [SHIPPED_TEXT.read_text(encoding="utf-8")])


def encode(model: Path, texts: Texts) -> list[list[int]]:
    """Return the token ids of each text after the model's own beginning: what its tokenizer adds, or its bos or eos."""
    from baton.engine.models.registry import read_spec
    from baton.quantization.calibration import check_vocabulary, load_tokenizer
    from baton.quantization.core.errors import QuantizeError

    if is_gguf(model):
        raise QuantizeError(f"{model}: a .gguf file is not scored; give the model folder that it was made of")
    spec, tokenizer = read_spec(model), load_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    begins = [config.get("bos_token_id"), *spec.eos_token_ids]
    begin = next((token_id for token_id in begins if isinstance(token_id, int)), 0)
    encoded = [tokenizer.encode(text).ids for text in texts.texts]
    check_vocabulary(tokenizer, max(max(ids) for ids in encoded), spec.vocab_size, model)
    alone, around = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    has_begin = around[:1] != alone[:1]
    return [ids if has_begin or ids[0] == begin else [begin, *ids] for ids in encoded]


def _lines(figures: dict[str, object]) -> str:
    return "\n".join(f"{name.replace('_', ' '):22} {value}" for name, value in figures.items())
