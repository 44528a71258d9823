"""OpenAI's own client for Node: streams, tools, an answer with a shape, errors."""

import asyncio
import json

from tests.support.pace import patience
from tests.support.process import NODE_CLIENTS, node

CALL = '<tool_call>{"name": "find", "arguments": {"text": "Größe"}}</tool_call>'
ARGUMENTS = {"text": "Größe"}


async def test_openais_client_for_node_is_served(saying, capable):
    path = node()
    async with saying(f"One moment.\n{CALL}", http="127.0.0.1:0") as c:
        process = await asyncio.create_subprocess_exec(
            path,
            "openai.js",
            f"http://127.0.0.1:{c.gateway.http.port}/v1",
            cwd=NODE_CLIENTS,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(patience(60)):
            out, problems = await process.communicate()
        assert process.returncode == 0, problems.decode()
        saw = json.loads(out)
        schemas = [m.spec.constraint.json_schema for kind, m in c.prefill[0].commands if kind == "prefill"]
    for answer in (saw["whole"], saw["streamed"]):
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("find", ARGUMENTS)
        assert (answer["message"]["content"], answer["finish_reason"]) == ("One moment.", "tool_calls")
    assert saw["streamed"]["text"] == "One moment." and len(saw["streamed"]["parts"]) > 2
    assert json.loads("".join(saw["streamed"]["parts"])) == ARGUMENTS
    message, call = saw["responded"]["response"]["output"]
    assert saw["responded"]["response"]["output_text"] == message["content"][0]["text"] == "One moment."
    assert (call["type"], json.loads(call["arguments"])) == ("function_call", ARGUMENTS)
    assert saw["responded"]["kinds"].count("response.function_call_arguments.delta") > 2
    assert saw["shaped"].startswith("One moment.") and [bool(each) for each in schemas] == [False] * 3 + [True]
    assert json.loads(schemas[-1])["required"] == ["legs"]
    for name, param in (("refused", "top_p"), ("refused_stream", "tool_choice")):
        told = saw[name]
        assert (told["name"], told["status"], told["param"]) == ("BadRequestError", 400, param), told
