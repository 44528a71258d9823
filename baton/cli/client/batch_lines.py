"""Send one line of a batch in OpenAI's format to a gateway, and return its line of the output, whether it succeeds or
fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.cli.client.asking import is_too_large
from baton.client import AsyncClient, CallError
from baton.service.errors import BatonError, InvalidRequest, from_code
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import ParsedBody, parse
from gateway.http.fields.reading import without_nulls
from gateway.http.openai.answers import ChatWriter, ChoicesWriter, CompletionWriter
from gateway.http.openai.requests import read_chat, read_completion
from gateway.http.wire.encoding import with_lists
from gateway.http.wire.errors import status_of, to_json
from gateway.text.detokenizer import LOOKED_AT, TextDecoder

_KINDS = {"/v1/chat/completions": (read_chat, ChatWriter), "/v1/completions": (read_completion, CompletionWriter)}
_IDS_AT_ONCE = 128  # token ids per call; every context is longer
# Statuses that concern the gateway or the caller, not the line.
_OF_NO_LINE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_SLO_CLASS = "batch"  # of a body that names no class

Json = dict[str, Any]


class NotServed(Exception):
    """No gateway answers, or it is too old or refuses this caller. The line has no result, and neither would later
    lines."""


@dataclass
class _LineModel:
    """The model's name in results, and the texts of tokens for results with log-probabilities."""

    name: str
    names: dict[int, str] = field(default_factory=dict)  # of tokens without text
    texts: dict[int, bytes] = field(default_factory=dict)
    first_texts: dict[int, bytes] = field(default_factory=dict)

    def add(self, token_id: int, token: pb.TokenText) -> None:
        """Store the text of a token."""
        self.names[token_id], self.texts[token_id] = token.name, token.text
        self.first_texts[token_id] = token.first_text

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """Return a token as it is shown on its own, and its bytes."""
        raw = self.texts[token_id] or self.names[token_id].encode()
        return raw.decode(errors="replace"), raw

    def decoder(self, continues: bool = False) -> TextDecoder:
        """Return a decoder of a sequence; `continues` says that text precedes the sequence."""
        return TextDecoder(self.texts, self.texts if continues else self.first_texts)

    def has_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of the first tokens has text; False if the texts were not fetched."""
        return any(self.texts.get(token_id) for token_id in token_ids[:LOOKED_AT])


class LineRunner:
    """Send lines to a gateway."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._models: dict[str, _LineModel] = {}  # by the name in lines

    async def result(self, number: int, line: str) -> Json:
        """Return the result of the line with that number. Raises NotServed."""
        found: Json = {"id": f"batch_req_{number}", "custom_id": custom_id_of(line), "response": None, "error": None}
        names: dict[str, str] = {}
        try:
            body, kind = _read_line(line)
            reader, writer = _KINDS[kind]
            parsed = reader(body)
            names = parsed.names
            answer = await self._answer(parsed, writer)
            found["response"] = {"status_code": 200, "request_id": parsed.id, "body": answer}
        except _NoRequest as error:
            found["error"] = {"code": "invalid_line", "message": str(error)}
        except CallError as error:
            if error.code() in _OF_NO_LINE:
                raise NotServed(str(error)) from None
            found["response"] = _refusal(_read(error), names)
        except BatonError as error:
            found["response"] = _refusal(error, names)
        return found

    async def _answer(self, parsed: ParsedBody, writer: type[ChoicesWriter]) -> Json:
        if parsed.stream:
            raise InvalidRequest("stream", "is not possible in a batch")
        for request in parsed.requests:
            request.slo_class = request.slo_class or _SLO_CLASS
        responses = await asyncio.gather(*(self._client.complete(request) for request in parsed.requests))
        model = await self._model(parsed.requests[0].model)
        await self._fetch_texts(parsed, responses, model)
        return with_lists(writer(parsed, model.name, model).whole(list(responses)))

    async def _model(self, asked: str) -> _LineModel:
        if asked not in self._models:
            self._models[asked] = _LineModel((await self._client.model_info(asked)).name)
        return self._models[asked]

    async def _fetch_texts(
        self, parsed: ParsedBody, responses: Sequence[pb.CompleteResponse], model: _LineModel
    ) -> None:
        """Fetch the texts of the tokens that the results name and of the first tokens of prompts."""
        named = set[int]()
        for request, response in zip(parsed.requests, responses, strict=True):
            rows = [*response.prompt_logprobs, *(each for choice in response.choices for each in choice.logprobs)]
            named |= {token.token_id for logprobs in rows for token in (logprobs.chosen, *logprobs.top)}
            if rows:
                named.update(request.token_ids.ids[:LOOKED_AT], response.prompt.token_ids[:1])
        unknown = list(named - model.texts.keys())
        for begin in range(0, len(unknown), _IDS_AT_ONCE):
            token_ids = unknown[begin : begin + _IDS_AT_ONCE]
            texts = await self._client.token_texts(token_ids, model=model.name)
            if not texts:
                raise NotServed("the gateway is older than this program, which log-probabilities need: upgrade it")
            for token_id, text in zip(token_ids, texts, strict=True):
                model.add(token_id, text)


class _NoRequest(Exception):
    """The line holds no request."""


def custom_id_of(line: str) -> str | None:
    """Return the custom_id of a line; None without one."""
    try:
        value = json.loads(line)
        name = value["custom_id"]
        name.encode()  # half of a surrogate pair cannot be encoded
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return name


def _read_line(line: str) -> tuple[Json, str]:
    """Return the body of a line and the API path that it is for. Raises _NoRequest, InvalidRequest."""
    try:
        value = parse(line.encode())
    except UnicodeEncodeError:
        raise _NoRequest("the line is not UTF-8") from None
    except InvalidRequest as error:
        raise _NoRequest(f"the line{error.message.removeprefix('body:')}") from None
    if custom_id_of(line) is None:
        raise _NoRequest("custom_id is missing or no text")
    if value.get("method", "POST") != "POST":
        raise _NoRequest(f"method is {str(value['method'])[:20]!r}: only POST is possible")
    if str(value.get("url")) not in _KINDS:
        raise _NoRequest(f"url is {str(value.get('url'))[:80]!r}: known are {', '.join(_KINDS)}")
    if not isinstance(value.get("body"), dict):
        raise _NoRequest("body is missing or no object")
    return without_nulls(value["body"]), value["url"]


def _refusal(error: BatonError, names: dict[str, str]) -> Json:
    return {"status_code": status_of(error), "request_id": error.request_id, "body": to_json(error, names)}


def _read(error: CallError) -> BatonError:
    reason = error.reason
    if is_too_large(error):
        reason = "BODY_TOO_LARGE"
    found = from_code(error.code(), error.message, reason=reason or None, field=error.field)
    found.request_id = error.request_id
    return found
