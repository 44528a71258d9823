"""An answer that calls tools, and the planner of such answers."""

from tokenizers import Tokenizer as Tokens

from gateway.answer.answer_planner import AnswerPlanner
from gateway.parsers.formats import format_named
from gateway.text.detokenizer import Detokenizer
from gateway.text.templates import ChatMessage, ChatOptions, Conversation
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.small_tokenizers import byte_level

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOKENIZER_JSON = byte_level(unspecial=MARKERS)
TOKENIZER, TOKENS = Tokenizer(TOKENIZER_JSON), Tokens.from_str(TOKENIZER_JSON.decode())
PLANNER = AnswerPlanner(TOKENIZER, Detokenizer(TOKENIZER), format_named("hermes"))
TOOLS = ({"name": "find", "description": "", "parameters": {}},)
CONVERSATION = Conversation((ChatMessage("user", "x"),), ChatOptions(TOOLS, callable_tools=("find",)))
CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "Größe </tool_call> 東京 🙂"}}\n</tool_call>'
IDS = TOKENS.encode(f"<think>\nI look for naïve 🙂.\n</think>\n\nOne moment.\n{CALL}\n{CALL}<|im_end|>").ids


def plan_of(prompt: str = "x", conversation=CONVERSATION):
    return PLANNER.plan_for(conversation, TOKENS.encode(prompt).ids)
