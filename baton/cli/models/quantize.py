"""`baton quantize`: make a quantized model folder from a float one, calibrated if the scheme needs it."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from baton.service.arguments import add_command, whole
from baton.service.exits import FAILED, WRONG_USE, fail

# Those of baton.quantization.schemes, which imports torch: --help and wrong use need not wait for that.
SCHEMES = (
    "int8",
    "int8-weight-only",
    "int8-outlier",
    "smoothquant-w8a8",
    "int4-rtn",
    "int4-awq",
    "int4-gptq",
    "fp8",
    "fp8-static",
)


_EXAMPLES = """
baton quantize --model ./Llama-3.2-1B --out ./Llama-3.2-1B-int4 --scheme int4-awq
baton quantize --model ./Llama-3.2-1B --out ./Llama-3.2-1B-int4 --scheme int4-awq --calibration prompts.jsonl
baton up --model ./Llama-3.2-1B-int4
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "quantize",
        summary="make a quantized model folder",
        description="Write a quantized copy of a model folder, in the layout of compressed-tensors.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="float model folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make; must not exist")
    parser.add_argument("--scheme", required=True, metavar="S", help=f"one of {', '.join(SCHEMES)}")
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="inputs per scale: 32, 64 or 128 (default: int4, the largest that divides; int8-weight-only, a whole row)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='prompts like those to come, JSON lines of "text", "prompt" or "messages" (default: a small mixed set)',
    )
    parser.add_argument("--threads", type=whole, metavar="N", help="CPU threads (default: all)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the quantized folder; return 0 done, 1 failed, 2 wrong use or input."""
    if wrong := _wrong_use(args):
        return fail("baton quantize", wrong, WRONG_USE)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train-demo
    # after the checks, since importing torch takes seconds
    from baton.engine.core.device import set_threads
    from baton.engine.core.model_errors import ModelError
    from baton.quantization.core.errors import QuantizeError
    from baton.quantization.quantize import plan, quantize

    set_threads(args.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a partial folder is removed
    try:
        job = plan(args.model, args.scheme, args.group)
        if args.calibration is not None and not job.scheme.calibrated:
            raise QuantizeError(f"scheme {args.scheme} is not calibrated; leave --calibration away")
        samples = _samples(args.model, args.calibration) if job.scheme.calibrated else None
        quantize(job, args.out, samples, progress=True)
    except KeyboardInterrupt:
        return fail("baton quantize", f"interrupted; {args.out} was not made", FAILED)
    except (QuantizeError, ModelError) as error:
        return fail("baton quantize", error, WRONG_USE)
    except (OSError, ValueError, RuntimeError) as error:
        return fail("baton quantize", str(error).splitlines()[0], FAILED)
    group = f", groups of {job.settings.group}" if job.settings.group else ""
    print(f"{args.out}: {args.scheme}{group}, {_weight_bytes(args.out)} bytes of {_weight_bytes(args.model)}")
    return 0


def _wrong_use(args: argparse.Namespace) -> str | None:
    if args.scheme not in SCHEMES:
        return f"--scheme {args.scheme}: one of {', '.join(SCHEMES)}"
    if args.out.exists():
        return f"{args.out} already exists; choose another --out"
    return None


def _samples(model: Path, calibration: Path | None) -> list:
    """Return the token ids of the calibration set."""
    from baton.engine.models.registry import read_spec
    from baton.quantization.calibration import DEFAULT, check_vocabulary, load_tokenizer, make_samples, read_prompts

    prompts, tokenizer = read_prompts(calibration or DEFAULT), load_tokenizer(model)
    samples = make_samples(prompts, tokenizer, lambda messages: _render(model, messages))
    check_vocabulary(tokenizer, max(int(sample.max()) for sample in samples), read_spec(model).vocab_size, model)
    return samples


def _render(model: Path, messages: list[dict[str, str]]) -> str:
    """Render a conversation with the model's own chat template."""
    from baton.quantization.core.errors import QuantizeError
    from baton.service.settings import SettingsError
    from gateway.model.model_folder import read_folder
    from gateway.text.templates import ChatMessage, ChatTemplate, TemplateFailed

    try:
        folder = read_folder(model)
        if folder.chat_template is None:
            raise QuantizeError(f'{model}: has no chat template; calibrate on {{"text": ...}} lines')
        template = ChatTemplate(folder.chat_template, folder.special_tokens)
        return template.render([ChatMessage(message["role"], message["content"]) for message in messages])
    except (SettingsError, TemplateFailed) as error:
        raise QuantizeError(f"{model}: chat template: {error}") from None


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
