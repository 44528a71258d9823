"""Find how an answer is read whose tools may have schemas that no grammar keeps to: those of tools that are not strict
are given up, each by itself."""

import json
from collections.abc import Collection, Sequence

from baton.constraints.constraint import MAX_BYTES, Constraint
from baton.service.clock import now
from baton.service.errors import InvalidRequest
from gateway.answer.answer_reader import AnswerParsing, AnswerReader, parameter_bytes
from gateway.parsers.answer_grammar import of_object
from gateway.text.templates import ChatOptions, Conversation
from gateway.text.text_work import TextWork

_MOST_GIVEN_UP = 4  # each may take seconds to be refused; where more are, all are given up
_MOST_S = 10.0  # for all: of 128 tools each may take a second, before anything is paid
_FIELD = "messages.tools"


class ParsingSearch:
    """The search for one request."""

    def __init__(self, reader: AnswerReader, text: TextWork, tenant: str, deadline: float):
        self._reader, self._text, self._tenant, self._deadline = reader, text, tenant, deadline

    async def find(
        self, conversation: Conversation | None, prompt_ids: Sequence[int], constraint: Constraint | None
    ) -> AnswerParsing:
        """Return how an answer to this prompt is read. Calls of tools that are not strict, and whose schemas cannot be
        kept to, have any arguments. Raises BatonError."""
        try:
            return await self._find(conversation, prompt_ids, constraint)
        except InvalidRequest as error:
            if conversation is not None and error.field == _FIELD:
                await self._check_strict(conversation.options)
            raise

    async def _check_strict(self, options: ChatOptions) -> None:
        """Raises InvalidRequest for a strict tool whose schema cannot be kept to by itself, in its own words: an error
        of the grammar of all tools has places that nobody knows."""
        until = now() + _MOST_S
        for index, tool in enumerate(options.tools):
            if tool["name"] in options.strict_tools and now() < until:
                schema = Constraint("json_schema", json.dumps(of_object(tool["parameters"])))
                await self._check(schema, f"{_FIELD}[{index}].parameters")

    async def _find(
        self, conversation: Conversation | None, prompt_ids: Sequence[int], constraint: Constraint | None
    ) -> AnswerParsing:
        async def parsing_with(kept: Collection[str] | None) -> AnswerParsing:
            parsing = self._reader.parsing_of(conversation, prompt_ids, constraint, kept)
            if parsing.constraint is not None and parsing.constraint != constraint:
                await self._check(parsing.constraint)
            return parsing

        try:
            return await parsing_with(None)
        except InvalidRequest:
            if conversation is None or not conversation.options.loose_tools:
                raise
        free = await parsing_with(())
        if not (kept := await self._keepable(conversation)):
            return free
        try:
            return await parsing_with(kept)
        except InvalidRequest:  # what else is too much together
            return free

    async def _keepable(self, conversation: Conversation) -> list[str]:
        """Return the tools that are not strict whose schemas can be kept to, each by itself; none where that takes
        long."""
        options, kept = conversation.options, list[str]()
        names = sorted(filter(self._reader.can_call, options.loose_tools))
        if len(names) == 1 or parameter_bytes(options, names) > MAX_BYTES:
            return []
        until = now() + _MOST_S
        for number, name in enumerate(names):
            if now() > until:
                return []
            try:
                await self._check(self._reader.grammar_of_tool(conversation, name))
                kept.append(name)
            except InvalidRequest:
                if number + 1 - len(kept) > _MOST_GIVEN_UP:
                    return []
        return kept if len(kept) < len(names) else []

    async def _check(self, constraint: Constraint, field: str = _FIELD) -> None:
        await self._text.check_constraint(constraint, self._tenant, self._deadline, field)
