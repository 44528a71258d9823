"""Write answers of OpenAI's chat and completions APIs: one object, or the events of a stream."""

import itertools
import time
from collections.abc import Iterable
from typing import NamedTuple

from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import ParsedBody
from gateway.http.wire.encoding import COMMENT, Data, Json, event, to_bytes_in_turns, to_text
from gateway.http.wire.writers import SequenceDecoder, TokenTexts, logprob_in_json, token_logprobs

_DONE = b"data: [DONE]\n\n"


class _ObjectNames(NamedTuple):
    """The values of `object` in answers."""

    object: str
    chunk: str  # in events of a stream


class ChoicesWriter:
    """Write one answer. `ChatWriter` and `CompletionWriter` define the form of a choice."""

    names: _ObjectNames
    ping = COMMENT

    def __init__(self, body: ParsedBody, model: str, tokens: TokenTexts):
        self._body, self._model, self._tokens = body, model, tokens
        self._stop_token_ids = frozenset(body.requests[0].stopping.stop_token_ids)
        self._created = int(time.time())
        head = to_text(self._head(self.names.chunk))
        # The beginning and the end of all events are written once, so that a token costs its own part only.
        self._before = f'data: {head[:-1]},"choices":['
        self._behind = ',"usage":null}\n\n' if body.include_usage else "}\n\n"
        self._so_far: dict[int, pb.Usage] = {}  # by prompt, if each event reports the usage
        self._begun: set[int] = set()

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> Data:
        """Return the event for a message to this prompt; empty if there is nothing to send."""
        if self._body.continuous_usage_stats:
            self._count(prompt, message)
        index = prompt * self._body.num_choices + message.index
        is_first = index not in self._begun
        self._begun.add(index)
        says = message.text or message.reasoning or message.tool_calls or message.finish_reason
        if not (is_first or says or self._shows_tokens(message)):
            return b""  # tokens that are half a character, or may begin a stop string
        choice = {"index": index, **self._delta(message, index, is_first), **self._end(message)}
        behind = self._behind
        if self._body.continuous_usage_stats:
            behind = f',"usage":{to_text(_usage(self._so_far.values()))}}}\n\n'
        behind = f"]{self._beside(message)}{behind}"
        if choice.get("logprobs") or "prompt_logprobs" in choice:
            return self._in_turns(choice, behind)
        return f"{self._before}{to_text(choice)}{behind}".encode()

    def tail(self, usages: Iterable[pb.Usage]) -> bytes:
        """Return the last events: the usage, if it was asked for, without choices, and [DONE]."""
        if not self._body.include_usage:
            return _DONE
        return event({**self._head(self.names.chunk), "choices": [], "usage": _usage(usages)}) + _DONE

    def error_event(self, error: Json) -> bytes:
        """Return the event that an error ends a stream with."""
        return event(error)

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object, for `to_bytes_in_turns`."""
        choices = [
            {"index": index, **self._choice(choice, response, index), **self._end(choice)}
            for prompt, response in enumerate(responses)
            for choice in response.choices
            for index in (prompt * self._body.num_choices + choice.index,)
        ]
        usage = _usage(response.usage for response in responses)
        return {**self._head(self.names.object), "choices": choices, "usage": usage}

    async def _in_turns(self, choice: Json, behind: str) -> bytes:
        """Return the event of a choice that has iterators."""
        return self._before.encode() + await to_bytes_in_turns(choice) + behind.encode()

    def _count(self, prompt: int, message: pb.GenerateResponse) -> None:
        usage = self._so_far.setdefault(prompt, pb.Usage())
        usage.prompt_tokens += message.prompt_tokens
        usage.output_tokens += len(message.token_ids)
        usage.cached_tokens += message.usage.cached_tokens
        usage.reasoning_tokens += message.usage.reasoning_tokens

    def _head(self, what: str) -> Json:
        return {"id": self._body.id, "object": what, "created": self._created, "model": self._model}

    def _shows_tokens(self, message: pb.GenerateResponse) -> bool:
        return bool(message.logprobs or (self._body.return_token_ids and message.token_ids))

    def _beside(self, message: pb.GenerateResponse) -> str:
        """Return further fields of the event, as JSON after a comma; "" if there are none."""
        return ""

    def _end(self, part: pb.GenerateResponse | pb.Choice) -> Json:
        found: Json = {"finish_reason": None}
        if part.finish_reason:
            name = pb.FinishReason.Name(part.finish_reason)
            found = {"finish_reason": name.removeprefix("FINISH_REASON_").lower()}
            found["stop_reason"] = part.matched_stop or self._stop_token(part)
        if self._body.return_token_ids:
            found["token_ids"] = list(part.token_ids)
        return found

    def _stop_token(self, part: pb.GenerateResponse | pb.Choice) -> int | None:
        """Return the token of the client's stop_token_ids that ended a choice; None if none did."""
        is_named = part.finish_reason != pb.FINISH_REASON_LENGTH and self._stop_token_ids.intersection(
            part.token_ids[-1:]
        )
        return part.token_ids[-1] if is_named else None

    def _delta(self, message: pb.GenerateResponse, index: int, is_first: bool) -> Json:
        """Return the delta of a choice, with iterators for its logprobs."""
        raise NotImplementedError

    def _choice(self, choice: pb.Choice, response: pb.CompleteResponse, index: int) -> Json:
        """Return a whole choice, with iterators for its logprobs."""
        raise NotImplementedError


class ChatWriter(ChoicesWriter):
    """Write answers of /v1/chat/completions."""

    names = _ObjectNames("chat.completion", "chat.completion.chunk")

    def __init__(self, body: ParsedBody, model: str, tokens: TokenTexts):
        super().__init__(body, model, tokens)
        self._num_calls: dict[int, int] = {}  # by choice, so far

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> Data:
        """Return the event for a message; empty if there is nothing to send."""
        if self._body.hides_reasoning:
            message.ClearField("reasoning")
        return super().chunk(prompt, message)

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object, for `to_bytes_in_turns`."""
        (response,) = responses
        if self._body.hides_reasoning:
            for choice in response.choices:
                choice.ClearField("reasoning")
        answer = super().whole(responses)
        return answer | {"prompt_token_ids": list(response.prompt.token_ids)} if self._body.return_token_ids else answer

    def _beside(self, message: pb.GenerateResponse) -> str:
        is_told = self._body.return_token_ids and message.HasField("prompt")
        return f',"prompt_token_ids":{to_text(list(message.prompt.token_ids))}' if is_told else ""

    def _delta(self, message: pb.GenerateResponse, index: int, is_first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": message.text} if is_first else {}
        if message.text:
            delta["content"] = message.text
        if message.reasoning:
            delta["reasoning_content"] = message.reasoning
        if message.tool_calls:
            delta["tool_calls"] = [self._part(index, part) for part in message.tool_calls]
        if message.logprobs:
            content = token_logprobs(message.logprobs, self._tokens)
            return {"delta": delta, "logprobs": {"content": content, "refusal": None}}
        return {"delta": delta}

    def _choice(self, choice: pb.Choice, response: pb.CompleteResponse, index: int) -> Json:
        content = choice.text if choice.text or not choice.tool_calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [_call(call) for call in choice.tool_calls]
        content = token_logprobs(choice.logprobs, self._tokens)
        return {"message": message, "logprobs": {"content": content, "refusal": None} if choice.logprobs else None}

    def _part(self, index: int, part: pb.ToolCall) -> Json:
        """Return a call that begins, or more arguments of the previous one."""
        num_before = self._num_calls.get(index, 0)
        if not part.name:
            return {"index": num_before - 1, "function": {"arguments": part.arguments}}
        self._num_calls[index] = num_before + 1
        return {"index": num_before, **_call(part)}


class CompletionWriter(ChoicesWriter):
    """Write answers of /v1/completions."""

    names = _ObjectNames("text_completion", "text_completion")

    def __init__(self, body: ParsedBody, model: str, tokens: TokenTexts):
        super().__init__(body, model, tokens)
        self._positions: dict[int, _TextPosition] = {}  # by choice
        self._continues = [bool(each.text) or tokens.has_text(each.token_ids.ids) for each in body.requests]
        self._has_logprobs, self._echoes = body.requests[0].sampling.HasField("logprobs"), body.requests[0].echo
        self._firsts: dict[int, pb.GenerateResponse] = {}  # by prompt: its first message, which has the prompt's data

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> Data:
        """Return the event for a message to this prompt; empty if there is nothing to send."""
        if self._body.is_prompt_alone:
            _clear_answer(message)
            if message.HasField("usage"):
                message.usage.output_tokens = 0
        first = self._firsts.setdefault(prompt, message)
        if first is message and not message.HasField("prompt") and not message.prompt_logprobs:
            self._firsts[prompt] = pb.GenerateResponse()  # nothing of the prompt has to be kept
        return super().chunk(prompt, message)

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object, for `to_bytes_in_turns`."""
        if self._body.is_prompt_alone:
            for response in responses:
                response.usage.output_tokens = 0
                for choice in response.choices:
                    _clear_answer(choice)
        return super().whole(responses)

    def _delta(self, message: pb.GenerateResponse, index: int, is_first: bool) -> Json:
        if not is_first:
            return {"text": message.text, "logprobs": self._logprobs(message.logprobs, index)}
        return self._begun_choice(message, self._firsts[index // self._body.num_choices], index)

    def _choice(self, choice: pb.Choice, response: pb.CompleteResponse, index: int) -> Json:
        return self._begun_choice(choice, response, index)

    def _begun_choice(
        self, part: pb.GenerateResponse | pb.Choice, first: pb.GenerateResponse | pb.CompleteResponse, index: int
    ) -> Json:
        """Return a choice from its beginning, after the prompt if it is echoed, with iterators. `first` has the data
        of the prompt."""
        logprobs = self._logprobs(part.logprobs, index, first if self._echoes else None)
        found = {"text": first.prompt.text + part.text, "logprobs": logprobs}
        if self._body.return_token_ids:
            found["prompt_token_ids"] = list(first.prompt.token_ids)
        if first.prompt_logprobs:
            found["prompt_logprobs"] = itertools.chain((None,), map(self._by_token, first.prompt_logprobs))
        return found

    def _by_token(self, logprobs: pb.Logprobs) -> Json:
        """Return the chosen token and its alternatives, by token id as in vLLM."""
        return {
            str(each.token_id): {
                "logprob": logprob_in_json(each.logprob),
                "decoded_token": self._tokens.shown(each.token_id)[0],
            }
            for each in (logprobs.chosen, *logprobs.top)
        }

    def _logprobs(
        self,
        logprobs: Iterable[pb.Logprobs],
        index: int,
        echoed: pb.GenerateResponse | pb.CompleteResponse | None = None,
    ) -> Json | None:
        """Return logprobs as iterators. `echoed` has the prompt, which comes first; its first token has no logprob."""
        if not logprobs and (echoed is None or not self._has_logprobs):
            return None
        rows = list[tuple[_TextPosition, int, pb.Logprobs | None]]()
        if echoed is not None:
            prompt = _TextPosition(self._tokens.decoder())
            rows.append((prompt, echoed.prompt.token_ids[0], None))
            rows += [(prompt, each.chosen.token_id, each) for each in echoed.prompt_logprobs]
        if index not in self._positions:
            decoder = self._tokens.decoder(self._continues[index // self._body.num_choices])
            self._positions[index] = _TextPosition(decoder, len(echoed.prompt.text) if echoed else 0)
        rows += [(self._positions[index], each.chosen.token_id, each) for each in logprobs]
        return {
            "tokens": (self._tokens.shown(token_id)[0] for _, token_id, _ in rows),
            "token_logprobs": (each and logprob_in_json(each.chosen.logprob) for _, _, each in rows),
            "top_logprobs": (each and self._by_text(each) for _, _, each in rows),
            "text_offset": (position.pass_token(token_id) for position, token_id, _ in rows),
        }

    def _by_text(self, logprobs: pb.Logprobs) -> Json:
        """Return the chosen token and its alternatives, by text as in OpenAI's API."""
        likeliest = (logprobs.chosen, *reversed(logprobs.top))  # of two with the same text the likelier one stays
        return {self._tokens.shown(each.token_id)[0]: logprob_in_json(each.logprob) for each in likeliest}


def _clear_answer(part: pb.GenerateResponse | pb.Choice) -> None:
    """Remove everything but the end, as if no token had been asked for."""
    for name in ("text", "token_ids", "logprobs", "matched_stop"):
        part.ClearField(name)
    if part.finish_reason:
        part.finish_reason = pb.FINISH_REASON_LENGTH


class _TextPosition:
    """The position of the next token in a text, in characters. It takes a decoder, since a special token has no text,
    several tokens may be one character, and the first may lose its space."""

    def __init__(self, decoder: SequenceDecoder, offset: int = 0):
        self._decoder, self._offset = decoder, offset

    def pass_token(self, token_id: int) -> int:
        """Return where the token begins, and advance over it."""
        begin = self._offset
        self._offset += len(self._decoder.push([token_id]))
        return begin


def _call(call: pb.ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(usages: Iterable[pb.Usage]) -> Json:
    """Return the sum of usages in OpenAI's form."""
    usages = list(usages)
    num_prompt, num_cached, num_output, num_reasoning = (
        sum(getattr(usage, f"{name}_tokens") for usage in usages)
        for name in ("prompt", "cached", "output", "reasoning")
    )
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }
