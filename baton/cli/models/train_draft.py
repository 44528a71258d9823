"""`baton train-draft`: train heads that guess a model's next tokens, for speculative decoding."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from baton.service.arguments import add_command, positive, whole
from baton.service.exits import FAILED, WRONG_USE, fail

DEFAULT_MINUTES = 12.0


_EXAMPLES = """
baton train-draft --kind eagle --model ./Llama-3.2-1B --text code.txt --out heads
baton up --model ./Llama-3.2-1B --speculator eagle --draft-model heads
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "train-draft",
        summary="train heads that guess a model's next tokens (speculation)",
        description="Train heads on a frozen model. What it writes is used with "
        "`baton up --speculator medusa|eagle --draft-model OUT`.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--kind", choices=("medusa", "eagle"), required=True, help="what is trained")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the target, a model folder")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FILE",
        help="UTF-8 text like that to be generated; repeat for more (default: this machine's standard library, "
        "without the demo's held-out modules)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to fill")
    parser.add_argument(
        "--minutes", type=positive, default=DEFAULT_MINUTES, help="training time (default: %(default)g)"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in the same folder")
    parser.add_argument("--threads", type=whole, help="CPU threads (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and export; return 0 done, 1 failed, 2 wrong use."""
    if wrong := _wrong_use(args):
        return fail("baton train-draft", wrong, WRONG_USE)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train-demo
    # after the checks, since importing torch takes seconds
    from baton.engine.core.device import set_threads
    from baton.engine.core.model_errors import ModelError
    from baton.training.heads.heads import train_heads

    set_threads(args.threads)
    try:
        figures = train_heads(args.kind, args.model, _documents(args.text), args.out, args.minutes, args.seed)
    except KeyboardInterrupt:
        return fail("baton train-draft", "interrupted; continue with the same command and --resume", FAILED)
    except (OSError, ValueError, RuntimeError, ModelError) as error:
        return fail("baton train-draft", str(error).splitlines()[0], FAILED)
    shares = ", ".join(f"{share:.1%}" for share in figures["agreement"])
    print(f"{args.out}: agrees with the target on {shares} of the tokens, one ahead, two ahead and so on")
    return 0


def _wrong_use(args: argparse.Namespace) -> str | None:
    """Return why these arguments are refused, or None. Finished heads are never overwritten."""
    unfinished = (args.out / ".training").exists()
    if unfinished and not args.resume:
        return f"{args.out} holds an unfinished run; add --resume, or choose another --out"
    if (args.out / "model.safetensors").exists() and not unfinished:
        return f"{args.out} already holds weights; choose another --out"
    return None


def _documents(paths: list[Path] | None) -> list:
    from baton.training.data.corpus import Document, gather

    if paths is None:
        return list(gather().library)
    documents = []
    for path in paths:
        try:
            documents.append(Document(path.name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return documents
