"""Step 4: check that CUDA graphs of all batch sizes are captured, that their tokens equal those of steps without
graphs, and that they fit in the memory which the pool leaves."""

from pathlib import Path

import torch

from baton.cli.gpu.check import Say
from baton.cli.gpu.random_engine import LLAMA_8B, RandomEngine
from baton.engine.execute.step_memory import step_bytes

PROMPTS = (3, 40, 65, 300)
NUM_OUTPUT = 16


def check(say: Say, model: Path | None, device: torch.device | None = None, sizes=LLAMA_8B, num_seqs: int = 64) -> None:
    device = device or torch.device("cuda", 0)
    made = RandomEngine("bf16", device, sizes, exact=True, max_num_seqs=num_seqs, context=512, chunk=512)
    launcher = made.launcher
    say("capture", launcher.num_graphs > 0, f"{launcher.num_graphs} graphs for up to {num_seqs} sequences")
    prompts = [made.ids(length) for length in PROMPTS]
    for name, sampling in (("greedy", {}), ("top_p", dict(temperature=0.8, top_p=0.9, seed=1))):
        replayed = made.answers(prompts, NUM_OUTPUT, **sampling)
        with launcher.without_graphs():
            eager = made.answers(prompts, NUM_OUTPUT, **sampling)
        alone = [made.answers([ids], NUM_OUTPUT, **sampling)[0] for ids in prompts]
        say(
            f"tokens, {name}",
            replayed == eager == alone,
            "graphs, no graphs, and each prompt alone agree"
            if replayed == eager == alone
            else "graphs, no graphs or prompts alone DIFFER",
        )
    if device.type == "cuda":
        with torch.inference_mode():
            planned = step_bytes(made.model, made.config, False)
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free - made.model.weights.num_bytes - made.engine.pool.bytes.nbytes
        allowed = planned + int(0.1 * total)
        say(
            "memory",
            taken <= allowed,
            f"{taken >> 20} MiB beside weights and pool; {planned >> 20} were planned for "
            f"steps, and a tenth of the GPU is left",
        )
    made.close()
