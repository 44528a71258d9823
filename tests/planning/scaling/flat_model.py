"""A latency model of fixed times."""


class FlatModel:
    """A prompt token takes 50 us of a prefill worker, an output token 0.4 ms of a decode worker."""

    def read_s(self, prompt_tokens):
        return prompt_tokens / 20_000

    def write_s(self, prompt_tokens, output_tokens):
        return output_tokens * 0.0004

    def token_s(self, num_streams, context):
        return 0.02
