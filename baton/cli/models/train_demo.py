"""`baton train-demo`: make the demo model from this machine's standard library, in one command."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from baton.service.arguments import add_command, positive, whole
from baton.service.exits import FAILED, WRONG_USE, fail

DEFAULT_OUT = Path("demo-run")
DEFAULT_MINUTES = 130.0


_EXAMPLES = """
baton train-demo --quick --out demo-quick
baton up --model demo-quick/target
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "train-demo",
        summary="train the demo model (tokenizer, target, draft, heads) and evaluate it",
        description="Make the demo model from this machine's Python standard library: tokenizer, target, draft and heads, then "
        "measure them. What it writes is served with `baton up --model OUT/target`.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to fill (default: %(default)s)")
    parser.add_argument("--minutes", type=positive, help=f"training time (default: {DEFAULT_MINUTES:.0f})")
    parser.add_argument("--quick", action="store_true", help="about a minute: tiny models on a slice of the corpus")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in the same folder")
    parser.add_argument(
        "--qat",
        action="store_true",
        help="train int4 weights of the target too (quantization-aware, groups of 32): OUT/target-int4; these alone where OUT "
        "holds a finished target",
    )
    parser.add_argument(
        "--mixture",
        action="store_true",
        help="train a small mixture of experts too: OUT/mixture; as --qat alone where it can",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="train a LoRA adapter of the target, for source indented by tabs: OUT/adapter",
    )
    parser.add_argument("--threads", type=whole, help="CPU threads (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, export and evaluate; return 0 done, 1 failed, 2 wrong use."""
    if wrong := _wrong_use(args):
        return fail("baton train-demo", wrong, WRONG_USE)
    # On a shared machine, threads that spin while they wait take the cores from the threads they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from baton.training import recipe  # after the checks: importing torch takes seconds

    try:
        chosen = recipe.quick() if args.quick else recipe.full(args.minutes or DEFAULT_MINUTES)
        figures = None
        if not _is_finished(args.out):
            figures = recipe.make_demo(chosen, args.out, seed=args.seed, threads=args.threads)
        for name, make in (
            ("qat", recipe.make_int4),
            ("mixture", recipe.make_mixture),
            ("adapter", recipe.make_adapter),
        ):
            if getattr(args, name):
                make(chosen, args.out, seed=args.seed, threads=args.threads)
    except KeyboardInterrupt:
        return fail(
            "baton train-demo", f"interrupted; continue with: baton train-demo --out {args.out} --resume", FAILED
        )
    except (OSError, ValueError, RuntimeError) as error:
        return fail("baton train-demo", str(error).splitlines()[0], FAILED)
    if figures is not None:
        _report(args.out, figures)
    return 0


def _wrong_use(args: argparse.Namespace) -> str | None:
    """Return why these arguments are refused, or None. A finished model is never overwritten."""
    unfinished = any(args.out.glob(".training*"))
    beside = {"target-int4": args.qat, "mixture": args.mixture, "adapter": args.adapter}
    if args.quick and args.minutes:
        return "--quick has its own length; give it or --minutes"
    if unfinished and not args.resume:
        return f"{args.out} holds an unfinished run; add --resume, or choose another --out"
    if _is_finished(args.out) and not any(beside.values()):
        return f"{args.out} already holds a model; choose another --out"
    for folder, is_asked in beside.items():
        if is_asked and (args.out / folder).exists():
            return f"{args.out} already holds {folder}; choose another --out"
    return None


def _is_finished(out: Path) -> bool:
    return (out / "target").exists() and not (out / ".training").exists()


def _report(out: Path, figures: dict) -> None:
    print(f"{out}: {figures['target_bits_per_byte']:.3f} bits per byte on held-out modules, ", end="")
    print(f"{figures['function_heads_parsed']} of {figures['function_heads']} functions parse, ", end="")
    print(f"draft and target agree on {figures['draft_agreement']:.1%} of the tokens")
