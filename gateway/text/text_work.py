"""Turn prompts into token ids, and token ids into text. The work is bounded before it begins, and runs in a thread if
it may take longer than a millisecond."""

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from baton.constraints.constraint import BadConstraint, Constraint
from baton.constraints.gbnf import in_lark
from baton.protocol import DEFAULT_TENANT
from baton.service.clock import now
from baton.service.errors import ContextLengthExceeded, DeadlineExceeded, FailedPrecondition, InvalidRequest
from gateway.text.constraint_checks import ConstraintChecks
from gateway.text.detokenizer import Detokenizer
from gateway.text.infilling import find_infilling
from gateway.text.origins import Rendered, render_origins
from gateway.text.prompt_input import PromptInput
from gateway.text.templates import ChatOptions, ChatTemplate, ClientTexts, Conversation, TemplateFailed
from gateway.text.text_threads import NUM_CHECKS, TextThreads
from gateway.text.tokenizer import CannotEncode, ControlTokenInContent, Tokenizer

# Characters or ids; longer work does not run in the event loop.
_INLINE = 2048


class TextWork:
    """The work on text for one model. Belongs to the event loop."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int, prompts_spell_controls: bool = False
    ):
        """Work for a model of `vocab_size` ids, which may be fewer than its tokenizer's. `prompts_spell_controls`: text
        of a prompt that spells a control token becomes that token."""
        self.detokenizer = Detokenizer(tokenizer)
        self._prompts_spell_controls = prompts_spell_controls
        self._tokenizer, self._template, self._vocab_size = tokenizer, template, vocab_size
        self._infilling = find_infilling(tokenizer)
        self._constraints = ConstraintChecks(tokenizer.json, vocab_size)
        self._threads = TextThreads()
        # Separate threads: a check waits seconds for its process at worst, and prompts do not wait behind it.
        self._checks = TextThreads(NUM_CHECKS, "constraints")
        self._starting: asyncio.Future | None = None  # the first process that checks constraints

    async def encode(
        self,
        prompt: PromptInput,
        context: int,
        tenant: str = DEFAULT_TENANT,
        deadline: float = math.inf,
        is_data: bool = False,
    ) -> Sequence[int]:
        """Return the token ids of a prompt, in little memory. `is_data`: the text is data, which never spells control
        tokens. Raises InvalidRequest, before any work if the prompt could never fit, and DeadlineExceeded."""
        text, token_ids, messages = prompt
        if token_ids is not None:
            return token_ids
        given = ClientTexts([text], []) if text is not None else messages.client_texts
        num_chars = sum(map(len, given.texts))
        self._check_length(prompt.field, num_chars, context)
        if text is None:
            if self._template is None:
                raise InvalidRequest("messages", "this model has no chat template: send text or token_ids")
            self._check_options(messages, self._template.of(messages.options))
            return await self._in_thread(partial(self._encode_chat, messages, given, context), tenant, deadline)
        spells_controls = self._prompts_spell_controls and not is_data
        work = partial(self._encode, partial(self._tokenizer.encode_text, text, spells_controls))
        return work() if num_chars <= _INLINE else await self._in_thread(work, tenant, deadline)

    @property
    def infilling_ends(self) -> frozenset[int]:
        """The tokens that end an answer between two texts."""
        return self._infilling.end_ids if self._infilling else frozenset()

    async def infill(
        self, prefix: str, suffix: str, context: int, tenant: str = DEFAULT_TENANT, deadline: float = math.inf
    ) -> Sequence[int]:
        """Return the token ids of a prompt that asks for the text between two others. Raises InvalidRequest, also if
        the model has no tokens for that, and DeadlineExceeded."""
        if (infilling := self._infilling) is None:
            message = "this model's tokenizer has no control tokens for it, such as <|fim_prefix|>: send the text before alone"
            raise InvalidRequest("suffix", message)
        num_chars = len(prefix) + len(suffix)
        self._check_length("text", num_chars, context)
        work = partial(self._encode, partial(infilling.encode, prefix, suffix))
        return work() if num_chars <= _INLINE else await self._in_thread(work, tenant, deadline)

    def control_ids(self, *names: str) -> frozenset[int]:
        """Return the ids of the named control tokens that both tokenizer and model have."""
        known = self._tokenizer.control_ids
        return frozenset(known[name] for name in names if known.get(name, self._vocab_size) < self._vocab_size)

    def label_ids(self, labels: Sequence[str]) -> list[int]:
        """Return the token id of each label, which is a whole answer in a conversation. Raises FailedPrecondition if a
        label is not a single token, or the model has no chat template."""
        if self._template is None:
            raise FailedPrecondition("this model has no chat template, by which it could be asked for scores")
        ids = [self._tokenizer.only_token(label) for label in labels]
        if None in ids:
            raise FailedPrecondition(f"this model has no single token for each of {', '.join(labels)}")
        return [token_id for token_id in ids if token_id is not None]

    @property
    def own_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and behind it."""
        return self._tokenizer.own_ids

    async def decode(self, token_ids: Sequence[int], tenant: str, deadline: float) -> str:
        """Return the text of token ids. Raises DeadlineExceeded."""
        work = partial(self.detokenizer.decode, token_ids)
        return work() if len(token_ids) <= _INLINE else await self._in_thread(work, tenant, deadline)

    async def check_constraint(
        self, constraint: Constraint, tenant: str, deadline: float, field: str | None = None
    ) -> Constraint:
        """Return the constraint as workers take it, with a grammar in Lark, after checking it. `field`: the request's
        field to name in errors, if not the constraint's own. Raises InvalidRequest if no answer can be held to it
        within bounds, Unavailable and DeadlineExceeded."""
        try:
            if constraint.kind == "grammar" and "::=" in constraint.text:
                lark = await self._in_thread(partial(in_lark, constraint.text), tenant, deadline)
                constraint = constraint._replace(text=lark)
            problem = self._constraints.known(constraint, tenant)
            if problem is None:
                work = partial(self._constraints.check, constraint, tenant)
                problem = await self._in_thread(work, tenant, deadline, self._checks)
        except BadConstraint as error:
            problem = error.path, error.reason
        place, reason = problem
        if reason:
            raise InvalidRequest(field or f"constraint.{constraint.kind}", f"{place}: {reason}" if place else reason)
        return constraint

    def expect_constraints(self) -> None:
        """Start a process that checks constraints, if none was started yet. That takes seconds with a large vocabulary;
        the first constraint then need not wait for it. Further processes start with constraints that come meanwhile."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._checks.run(DEFAULT_TENANT, self._constraints.start))

    def close(self) -> None:
        """End the threads, and the processes that check constraints."""
        self._threads.close()
        self._checks.close()
        self._constraints.close()

    async def _in_thread(self, work: Callable, tenant: str, deadline: float, threads: TextThreads | None = None):
        try:
            async with asyncio.timeout(None if deadline == math.inf else max(0.0, deadline - now())):
                return await (threads or self._threads).run(tenant, work)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the text waited or was processed") from None

    def _check_length(self, field: str, num_chars: int, context: int) -> None:
        """Raise InvalidRequest for a text that could never fit: tokenizing a mebibyte takes seconds."""
        if not self._tokenizer.can_fit(num_chars, context):
            message = (
                f"prompt is too long: {num_chars} characters cannot fit {context} tokens, the maximum context length"
            )
            raise ContextLengthExceeded(field, message)

    def _encode(self, encode: Callable[[], list[int]]) -> Sequence[int]:
        try:
            return self._known("text", encode())
        except CannotEncode as error:
            raise InvalidRequest("text", f"the model's tokenizer fails on it: {error}") from None

    def _encode_chat(self, messages: Conversation, given: ClientTexts, context: int) -> Sequence[int]:
        try:
            rendered = self._render(messages, given)
            self._check_length("messages", len(rendered.text), context)
            self._check_tools(messages.options, rendered.text)
            return self._known("messages", self._tokenizer.encode_chat(rendered))
        except TemplateFailed as error:
            raise InvalidRequest("messages", f"refused by the model's chat template: {error}") from None
        except CannotEncode as error:
            raise InvalidRequest("messages", f"the model's tokenizer fails on them: {error}") from None
        except ControlTokenInContent:
            message = "a content or a key spells a control token or a part of one, and this model's chat template may make it one"
            raise InvalidRequest("messages", message) from None

    def _known(self, field: str, token_ids: list[int]) -> Sequence[int]:
        if (most := max(token_ids, default=0)) >= self._vocab_size:
            raise InvalidRequest(field, f"encodes to token {most}, but the model has {self._vocab_size} ids")
        return array("I", token_ids)

    def _check_options(self, conversation: Conversation, template: ChatTemplate) -> None:
        """Raise InvalidRequest for options that the template would leave out, or variables that it already has."""
        options = conversation.options
        if not template.takes_tool_calls and any(message.tool_calls for message in conversation.messages):
            raise InvalidRequest("messages.messages", "this model's chat template has no place for tool_calls")
        if options.tools and not template.names_tools:
            raise InvalidRequest("messages.tools", "this model's chat template has no place for tools")
        if taken := next(filter(template.names, options.kwargs), None):
            raise InvalidRequest("messages.chat_template_kwargs", f"{taken} is given to every template already")

    def _check_tools(self, options: ChatOptions, prompt: str) -> None:
        """Raise InvalidRequest if the prompt names none of the callable tools: the template writes no tools, and the
        client put them neither into template variables (xml_tools of SmolLM3) nor into a message."""
        names = options.callable_tools
        if names and not self._template.of(options).takes_tools and not any(name in prompt for name in names):
            message = "this model's chat template has no place for tools: write them in a message too, or into the"
            raise InvalidRequest("messages.tools", f"{message} chat_template_kwargs that it reads, such as xml_tools")

    def _render(self, conversation: Conversation, given: ClientTexts) -> Rendered:
        """Render a conversation and find the control tokens that the template wrote: all of them if no text of the
        client can spell one. Raises ControlTokenInContent if a key can: templates look keys up, so keys carry no
        marks."""
        messages, options = conversation
        tokenizer, (texts, keys), template = self._tokenizer, given, self._template.of(options)
        if any(map(tokenizer.may_spell_control, keys)):
            raise ControlTokenInContent
        if any(map(tokenizer.may_spell_control, texts)) or any(map(tokenizer.controls.may_name, keys)):
            return render_origins(template, tokenizer.controls, messages, options)
        text = template.render(messages, options)
        return Rendered(text, tuple(tokenizer.controls.find(text)))
