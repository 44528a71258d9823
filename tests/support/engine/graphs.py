"""What stands in for CUDA's graphs."""


def replay_by_computing(run):
    """`CudaCapture` without graphs: replay computes again, into the outputs of the first time."""
    outputs = run()

    def replay() -> None:
        for kept, made in zip(outputs, run(), strict=True):
            kept.copy_(made)

    return replay, outputs
