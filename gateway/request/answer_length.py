"""Find how long an answer may get, once the length of its prompt is known."""

from baton.service.errors import ContextLengthExceeded, InvalidRequest
from gateway.config.served_model import ServedModel
from gateway.request.validation import ValidatedRequest, prompt_too_long_error

USUAL_TOKENS = 256  # of an answer whose length nobody has limited


def resolve_max_tokens(validated: ValidatedRequest, num_prompt_tokens: int, served: ServedModel) -> int:
    """Return max_tokens of a request whose prompt has `num_prompt_tokens`. Raises InvalidRequest."""
    room, max_tokens = room_behind(validated, num_prompt_tokens, served), validated.max_tokens
    if max_tokens is None:
        max_tokens = _default_max_tokens(validated, num_prompt_tokens, room, served)
    elif max_tokens > room:
        sums = f"{num_prompt_tokens} + {max_tokens} > {served.context}"
        message = f"input length and `max_tokens` exceed context limit: {sums}, {served.context_label}: {room} are left"
        raise ContextLengthExceeded("stopping.max_tokens", message)
    elif validated.num_choices * max_tokens > served.limits.output_tokens:
        raise InvalidRequest("sampling.n", f"n x max_tokens is over {served.limits.output_tokens}")
    elif _numbers_a_token(validated) * validated.num_choices * max_tokens > (most := served.limits.output_logprobs):
        raise InvalidRequest("sampling.logprobs", f"(logprobs + 2) x n x max_tokens is over {most}")
    num_asked = (validated.num_prompt_logprobs + 1) * num_prompt_tokens
    if validated.asks_for_prompt_logprobs and num_asked > (most := served.limits.prompt_logprobs):
        raise InvalidRequest(
            "sampling.prompt_logprobs", f"asks for {num_asked} of {num_prompt_tokens} tokens, {most} are allowed"
        )
    for index, num_received in enumerate(validated.resume_from):
        if num_received > max_tokens:
            raise InvalidRequest(f"resume_from[{index}]", f"{num_received} is over max_tokens, {max_tokens}")
    if validated.min_tokens > max_tokens:
        raise InvalidRequest("stopping.min_tokens", f"{validated.min_tokens} is over max_tokens, {max_tokens}")
    return max_tokens


def _default_max_tokens(validated: ValidatedRequest, num_prompt_tokens: int, room: int, served: ServedModel) -> int:
    """Return max_tokens of a request that names none: the model's own default, or what the context leaves.

    If decode workers hold contexts of different lengths, only the shortest one that has room for a usual answer counts:
    otherwise its workers would stand idle, and requests wait for longer ones, for what most answers never need."""
    limits, of_model = served.limits, served.defaults.max_tokens
    asked = max(1, validated.min_tokens, *validated.resume_from)
    if (known := max(served.lengths, default=served.context) - num_prompt_tokens) >= asked:
        room = known
    num_tokens = min(
        limits.output_tokens, limits.output_logprobs // max(1, _numbers_a_token(validated))
    )  # of all choices
    most = min(limits.default_max_tokens, room, num_tokens // validated.num_choices)
    if of_model is not None:
        return min(most, of_model)
    least = max(USUAL_TOKENS, asked)
    rooms = (length - num_prompt_tokens for length in served.lengths)
    return min(most, next((left for left in rooms if left >= least), room))


def _numbers_a_token(validated: ValidatedRequest) -> int:
    """Return how many numbers each token of the answer makes if log-probabilities are asked for: the token itself
    counts as one more, without them it is 0."""
    return validated.num_logprobs and validated.num_logprobs + 1


def room_behind(validated: ValidatedRequest, num_prompt_tokens: int, served: ServedModel) -> int:
    """Return how many tokens the context has left behind a prompt. Raises InvalidRequest if there are none, or if the
    prompt is empty."""
    room = served.context - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequest(validated.prompt.field, "is an empty prompt")
    if room < 1:
        raise prompt_too_long_error(validated.prompt.field, num_prompt_tokens, served.context - 1, served)
    return room
