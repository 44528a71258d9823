"""The path of one request: checked message -> tokens -> span hashes -> index -> workers -> answer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.service.errors import AlreadyExists, DeadlineExceeded, InvalidRequest
from baton.service.telemetry import format_traceparent
from gateway.admission import Admission, Lines
from gateway.answer import Answer, Emit
from gateway.attempts import Attempts
from gateway.detokenizer import Detokenizer
from gateway.limits import Checked, ServedModel, resolve_max_tokens
from gateway.prefix_index import PrefixIndex
from gateway.record import Record
from gateway.registry import Registry
from gateway.spec import make_spec
from gateway.templates import ChatMessage, ChatTemplate, Rendered, TemplateFailed
from gateway.timing import now
from gateway.tokenizer import ControlTokenInContent, Tokenizer
from kvtransfer.naming import SPAN_TOKENS, chain_hashes


@dataclass
class Pipeline:
    """Shared by all requests. Belongs to the event loop."""

    registry: Registry
    index: PrefixIndex
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    template: ChatTemplate | None
    admission: Admission
    lines: Lines
    max_queue_wait_s: float
    on_gap: Callable[[Record, float], None]  # between two messages of a choice, seconds a token

    async def serve(self, checked: Checked, model: ServedModel, deadline: float, record: Record, emit: Emit) -> None:
        """Answer one request, or raise BatonError. Whatever it held on workers is given back on every way out."""
        if checked.request_id in self.admission.request_ids:
            raise AlreadyExists(f"request_id {checked.request_id} is in use", reason="REQUEST_ID_IN_USE")
        self.admission.enter(checked.request_id)
        try:
            await self._serve(checked, model, deadline, record, emit)
        finally:
            self.admission.leave(checked.request_id)

    async def _serve(self, checked, model, deadline, record, emit) -> None:
        prompt_ids = await self.encode(checked.text, checked.token_ids, checked.messages)
        record.num_prompt_tokens = len(prompt_ids)
        max_tokens = resolve_max_tokens(checked, len(prompt_ids), model)
        record.stamps.tokenized = now()
        root = self.registry.root
        hashes = chain_hashes(root, prompt_ids)
        # The last token is always read: its logits are wanted.
        matches = await self.index.lookup(hashes[: (len(prompt_ids) - 1) // SPAN_TOKENS])

        def spec_of(output_ids: list[int]):
            spans = chain_hashes(root, [*prompt_ids, *output_ids]) if output_ids else hashes
            parent = spans[-1] if spans else root
            traceparent = format_traceparent(record.context)
            return make_spec(checked, prompt_ids, output_ids, max_tokens, spans, parent, traceparent, deadline)

        answer = Answer(
            checked, self.detokenizer, record.stamps, _bounded(emit, deadline), lambda gap_s: self.on_gap(record, gap_s)
        )
        attempts = Attempts(
            self.registry, self.lines, answer, record, matches, spec_of, deadline, self.max_queue_wait_s
        )
        try:
            await attempts.run()
            await answer.finish(len(prompt_ids), record.num_cached_tokens, record.measured)
        finally:
            attempts.close()
            record.num_output_tokens, record.num_longest_output = answer.num_output_tokens, answer.num_longest
            record.finish_reasons = answer.finish_reasons

    async def encode(
        self, text: str | None, token_ids: Sequence[int] | None, messages: Sequence[ChatMessage] | None
    ) -> Sequence[int]:
        """Token ids of a prompt, given in one of three ways. Raises InvalidRequest."""
        if token_ids is not None:
            return token_ids
        if text is not None:
            return await self.tokenizer.encode_text(text)
        if self.template is None:
            raise InvalidRequest("messages", "this model has no chat template: send text or token_ids")
        try:
            return await self.tokenizer.encode_chat(self._render(messages))
        except TemplateFailed as error:
            raise InvalidRequest("messages", f"refused by the model's chat template: {error}") from None
        except ControlTokenInContent:
            raise InvalidRequest(
                "messages", "a content spells a control token, and this model's chat template would make it one"
            ) from None

    def _render(self, messages: Sequence[ChatMessage]) -> Rendered:
        """Where no content can spell a control token, where it stands does not matter."""
        if any(self.tokenizer.has_control(message.content) for message in messages):
            return self.template.render_spans(messages)
        return Rendered(self.template.render(messages), ())


def _bounded(emit: Emit, deadline: float) -> Emit:
    """A client that does not read holds a request up to its deadline and no longer."""

    async def bounded(message) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - now())):
                await emit(message)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the client did not read") from None

    return bounded
