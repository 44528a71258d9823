"""Flags that describe a model on a device to a plan, and their values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from baton.gguf import is_gguf
from baton.service.arguments import whole

if TYPE_CHECKING:
    from baton.engine.core.model_spec import ModelSpec
    from baton.planning.devices import Device
    from baton.planning.efficiency import Efficiencies
    from baton.planning.memory import Form

FORMS = ("none", "int8", "int4-g32", "fp8")  # of weights; baton/planning/memory.py knows their bytes
_SHAPES = Path(__file__).resolve().parents[2] / "planning" / "shapes"


def shape_names() -> list[str]:
    """Return the names of the models whose shapes are shipped."""
    return sorted(folder.name for folder in _SHAPES.iterdir() if folder.is_dir())


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR|FILE|NAME",
        help=f"model folder, .gguf file, or {', '.join(shape_names())} (default: the shipped model)",
    )
    parser.add_argument(
        "--device", default="cpu", help="H100, H200, B200, A100, L40S, RTX4090, or cpu: this machine's (default: cpu)"
    )
    parser.add_argument("--threads", type=whole, default=1, metavar="N", help="of each worker on a CPU (default: 1)")
    parser.add_argument(
        "--efficiencies", type=Path, metavar="FILE", help="of bench/kernels.py (default: the shipped file)"
    )


def model_name(args: argparse.Namespace) -> str:
    """Return the model as it was given, or the path of the shipped one."""
    from baton.cli.launch.stack import SHIPPED_MODEL

    return args.model or str(SHIPPED_MODEL)


def name_to_start(args: argparse.Namespace) -> str:
    """Return the model as other commands take it; the placeholder DIR if only its shapes are here."""
    return "DIR" if args.model in shape_names() else model_name(args)


def read_model(args: argparse.Namespace) -> tuple[ModelSpec, Device, Efficiencies]:
    """Return the model, device and efficiencies that the flags name. Raises ModelError or ValueError, one line."""
    # imported here, since they need torch, after wrong use has been reported
    from baton.engine.models.registry import read_spec
    from baton.planning.devices import find_device, this_cpu
    from baton.planning.efficiency import read_efficiencies, shipped

    name = model_name(args)
    spec, device = read_spec(_SHAPES / name if name in shape_names() else Path(name)), find_device(args.device)
    kind = "cpu" if device is None else device.kind
    efficiencies = shipped(kind) if args.efficiencies is None else read_efficiencies(args.efficiencies)
    return spec, device or this_cpu(args.threads, efficiencies), efficiencies


def stored_form(args: argparse.Namespace, spec: ModelSpec, device: Device, dtype: str = "bf16") -> Form | None:
    """Return the form of weights that are quantized already, which workers serve as they are; None if workers may round
    the weights. If only a config.json is here, it is the nearest form, which the user names. `dtype` is the one that
    workers compute in. Raises ModelError or ValueError, one line."""
    from baton.engine.weights.formats.registry import quantization_config
    from baton.engine.weights.tensors import weight_files
    from baton.planning.stored_form import StoredForm

    path, asked = spec.folder, args.quantization
    if not is_gguf(path) and quantization_config(path) is None:
        return None
    own = "a GGUF file" if is_gguf(path) else "quantized already"
    is_given = asked not in (None, "any")
    if not any(file.exists() for file in weight_files(path)):
        if not is_given or asked == "none":
            *others, last = FORMS[1:]
            forms = f"{', '.join(others)} or {last}"
            raise ValueError(
                f"{path} is {own} and its weights are not here: say with --quantization {forms} what is nearest"
            )
        return asked
    if is_given:
        raise ValueError(f"--quantization {asked}: {path} is {own}, and served as it is; leave it out")
    return StoredForm(spec, device, dtype)


def lengths_of(text: str) -> tuple[int, int]:
    """Return the mean tokens of prompt and output. Raises ValueError."""
    try:
        prompt, output = (int(part) for part in text.split(","))
    except ValueError:
        prompt = output = 0
    if prompt < 1 or output < 1:
        raise ValueError(f"--lengths {text}: two numbers of tokens, PROMPT,OUTPUT, as 2000,200")
    return prompt, output
