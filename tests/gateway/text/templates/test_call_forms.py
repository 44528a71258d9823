"""Calls as templates read them: some write one only where the content is none, or only arguments that are text."""

import json

import pytest

from gateway.text.origins import render_origins
from gateway.text.templates import CallForm, ChatMessage, ChatOptions, ChatTemplate, ChatToolCall
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text.templates.published import reference
from tests.support.gateway.small_tokenizers import byte_level

CONTROLS = Tokenizer(byte_level()).controls
ARGUMENTS = {"city": "München <|end|>", "days": 2}
CALL = ChatToolCall("call00001", "weather", ARGUMENTS)
USER, TOOL = ChatMessage("user", "How is it?"), ChatMessage("tool", "sunny", tool_call_id="call00001")
CHAT = (USER, ChatMessage("assistant", "", (CALL,)), TOOL)

TEXT = "{%- if m.content is not none %}{{- '<' + m.role + '>' + m.content }}{%- endif %}"


def calls(arguments: str) -> str:
    """Return a loop over the calls of a message."""
    written = f"{{{{- '<call>' + call.function.name + ' ' + {arguments} + '</call>' }}}}"
    return "{% for call in m.tool_calls %}{% set a = call.function.arguments %}" + written + "{% endfor %}"


def template(message: str) -> str:
    return "{% for m in messages %}" + message + "{% endfor %}"


TEMPLATES = {
    # In the manner of Qwen, and of most.
    "json": (template(calls("a | tojson") + TEXT.replace(" is not none", "")), CallForm()),
    "either": (template(calls("(a if a is string else a | tojson)") + TEXT), CallForm(None)),
    # Of DeepSeek V3 and R1, and V3.1.
    "none alone": (
        template(
            "{% if m.role == 'assistant' and m.content is none %}" + calls("a") + "{% else %}" + TEXT + "{% endif %}"
        ),
        CallForm(None, as_text=True, is_apart=True),
    ),
    "joined": (template(calls("a") + "{{- '<' + m.role + '>' + m.content }}"), CallForm("", as_text=True)),
    # As Python writes an object.
    "written": (template(calls("a | string") + TEXT), CallForm(None, as_text=True)),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_written_once_as_json(name):
    source, form = TEMPLATES[name]
    found = ChatTemplate(source, {})
    text = found.render(CHAT)
    begin = text.index("<call>weather ") + len("<call>weather ")
    assert json.loads(text[begin : text.index("</call>")]) == ARGUMENTS
    assert text.count("<call>") == 1 and "None" not in text and text.endswith("<tool>sunny")
    assert found.form == form


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_before_calls_stays_with_them(name):
    chat = (USER, ChatMessage("assistant", "I look.", (CALL,)), TOOL)
    text = ChatTemplate(TEMPLATES[name][0], {}).render(chat)
    assert text.count("<call>") == 1 and text.count("I look.") == 1 and "sunny" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_of_calls_are_the_clients(name):
    rendered = render_origins(ChatTemplate(TEMPLATES[name][0], {}), CONTROLS, CHAT)
    assert "<|end|>" in rendered.text and rendered.of_template == ()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_needs_tools_is_tried_with_some(name):
    """Tried without it fails, and a call could be left out of prompts."""
    source, form = TEMPLATES[name]
    found = ChatTemplate("{% for tool in tools %}{{ tool.function.name + '|' }}{% endfor %}" + source, {})
    tools = ChatOptions(({"name": "weather", "description": "", "parameters": {}},))
    assert found.form == form and found.render(CHAT, tools).count("<call>weather") == 1


def test_a_template_that_writes_no_call_is_given_what_others_are():
    assert ChatTemplate("{{ messages[0].content }}{# tool_calls #}", {}).form == CallForm()


def test_a_template_that_refuses_a_text_before_calls_either_way():
    source = template(
        "{% if m.content and (m.tool_calls or m.role == 'assistant') %}{{ raise_exception('no') }}{% endif %}"
        + calls("a | tojson")
    )
    assert ChatTemplate(source, {}).form == CallForm()


# gpt-oss calls reasoning `thinking`, and refuses it beside a text before calls.
HARMONY = """
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{- raise_exception("both") }}{%- endif %}
{{- '<analysis>' + (m.content or m.thinking or '') + '<call>' + (m.tool_calls[0].function.arguments | tojson) }}
{%- else %}{{- '<' + m.role + '>' + m.content }}{%- endif %}
{%- endfor %}"""


def test_thoughts_before_a_call_reach_a_template_that_names_them_thinking():
    chat = (USER, ChatMessage("assistant", "", (CALL,), reasoning="I need the weather."), TOOL)
    text = ChatTemplate(HARMONY, {}).render(chat)
    assert "<analysis>I need the weather.<call>" in text
    theirs = reference("qwen-chatml", byte_level()).apply_chat_template(
        [message.values() for message in chat], tokenize=False, chat_template=HARMONY, add_generation_prompt=True
    )
    assert text == theirs


def test_thoughts_and_a_text_before_a_call_are_not_refused():
    chat = (USER, ChatMessage("assistant", "I look.", (CALL,), reasoning="I need the weather."), TOOL)
    assert "<analysis>I look.<call>" in ChatTemplate(HARMONY, {}).render(chat)
