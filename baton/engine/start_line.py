"""Describe an engine for the worker's log at start."""

from baton.engine.engine import Engine


def start_line(engine: Engine) -> str:
    """Describe the choices made at start in one line."""
    config, layout, model = engine.config, engine.layout, engine.runner.model
    backends = ", ".join(f"{kind} {name}" for kind, name in model.backends.items())
    mebibytes, states = engine.num_blocks * layout.block_bytes / (1 << 20), engine.ledger.window.summary
    if engine.pool.states is not None:
        each = layout.state_bytes / (1 << 20)
        states += f", {len(engine.pool.states)} states of {each:.1f} MiB"
    ranks = "" if engine.ranks is None else f" {engine.ranks.summary},"
    return (
        f"model {engine.model_name} {engine.spec.family} {engine.runner.launcher.summary},{ranks} weights {model.weights}, "
        f"{config.dtype}, kv {config.kv_dtype}, context {config.max_model_len}, {engine.num_blocks} blocks of "
        f"{layout.block_size} tokens ({mebibytes:.0f} MiB){states}; {backends}{engine.speculator.summary}{engine.adapters.summary}"
    )


def start_details(engine: Engine) -> list[str]:
    """Return further lines about the model."""
    return engine.runner.model.details
