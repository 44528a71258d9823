"""Plan how an answer is read, and give up schemas of tools that cannot be enforced, one by one, unless they are
strict."""

import json
from collections.abc import Collection, Sequence

from baton.constraints.constraint import MAX_BYTES, Constraint
from baton.service.clock import now
from baton.service.errors import InvalidRequest
from gateway.answer.answer_planner import AnswerPlan, AnswerPlanner, parameter_bytes
from gateway.parsers.answer_grammar import of_object
from gateway.text.templates import ChatOptions, Conversation
from gateway.text.text_work import TextWork

_MOST_GIVEN_UP = 4  # beyond it all are given up: each may take seconds to be refused
_MOST_S = 10.0  # for all tools: each of 128 may take a second, before anything is paid
_FIELD = "messages.tools"


class ToolSchemaFallback:
    """Plan how the answer of one request is read, with the schemas of its tools as far as they can be enforced."""

    def __init__(self, planner: AnswerPlanner, text: TextWork, tenant: str, deadline: float):
        self._planner, self._text, self._tenant, self._deadline = planner, text, tenant, deadline

    async def plan_for(
        self, conversation: Conversation | None, prompt_ids: Sequence[int], constraint: Constraint | None
    ) -> AnswerPlan:
        """Return how an answer to this prompt is read. Calls of tools that are not strict may have any arguments if
        their schemas cannot be enforced. Raises BatonError."""
        try:
            return await self._plan_for(conversation, prompt_ids, constraint)
        except InvalidRequest as error:
            if conversation is not None and error.field == _FIELD:
                await self._check_strict(conversation.options)
            raise

    async def _check_strict(self, options: ChatOptions) -> None:
        """Raise InvalidRequest for a strict tool whose schema cannot be enforced by itself. Its error names a place in
        that schema, while an error of the grammar of all tools names places that the client does not know."""
        until = now() + _MOST_S
        for index, tool in enumerate(options.tools):
            if tool["name"] in options.strict_tools and now() < until:
                schema = Constraint("json_schema", json.dumps(of_object(tool["parameters"])))
                await self._check(schema, f"{_FIELD}[{index}].parameters")

    async def _plan_for(
        self, conversation: Conversation | None, prompt_ids: Sequence[int], constraint: Constraint | None
    ) -> AnswerPlan:
        async def plan_with(kept: Collection[str] | None) -> AnswerPlan:
            plan = self._planner.plan_for(conversation, prompt_ids, constraint, kept)
            if plan.constraint is not None and plan.constraint != constraint:
                await self._check(plan.constraint)
            return plan

        try:
            return await plan_with(None)
        except InvalidRequest:
            if conversation is None or not conversation.options.loose_tools:
                raise
        free = await plan_with(())
        if not (kept := await self._keepable(conversation)):
            return free
        try:
            return await plan_with(kept)
        except InvalidRequest:  # the tools are too much for one grammar together
            return free

    async def _keepable(self, conversation: Conversation) -> list[str]:
        """Return the tools that are not strict and whose schemas can be enforced, each by itself. Returns none if this
        takes too long, too many cannot be, or all can be (so that they fail only together)."""
        options, kept = conversation.options, list[str]()
        names = sorted(filter(self._planner.can_call, options.loose_tools))
        if len(names) == 1 or parameter_bytes(options, names) > MAX_BYTES:
            return []
        until = now() + _MOST_S
        for number, name in enumerate(names):
            if now() > until:
                return []
            try:
                await self._check(self._planner.grammar_of_tool(conversation, name))
                kept.append(name)
            except InvalidRequest:
                if number + 1 - len(kept) > _MOST_GIVEN_UP:
                    return []
        return kept if len(kept) < len(names) else []

    async def _check(self, constraint: Constraint, field: str = _FIELD) -> None:
        await self._text.check_constraint(constraint, self._tenant, self._deadline, field)
