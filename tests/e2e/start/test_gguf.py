"""The shipped model as a .gguf file, through gateway, prefill and decode worker: there is nothing beside the file."""

from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer

from baton.v1 import inference_pb2 as pb
from tests.support.client import Client
from tests.support.gguf.model_files import write_gguf
from tests.support.gguf.vocabulary import add_vocabulary
from tests.support.stack import Stack

SHIPPED = Path(__file__).resolve().parents[3] / "demo" / "target"
PROMPT = "A list is a sequence of"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype="float32")
    tokenizer = (SHIPPED / "tokenizer.json").read_bytes()

    def describe(writer) -> None:
        add_vocabulary(writer, tokenizer, "gpt2", "llama-bpe")
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{% for m in messages %}<|user|>{{ m['content'] }}<|assistant|>{% endfor %}")

    path = tmp_path_factory.mktemp("gguf") / "shipped-Q8_0.gguf"
    write_gguf(path, model, describe=describe)
    return path


def test_text_and_chat(path, fork_server, tmp_path):
    with Stack(path, tmp_path, options=("--num-blocks", "100", "--threads", "1"), fork_server=fork_server) as stack:
        client = Client(stack.target)
        info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        assert (info.name, info.quantization, info.context) == ("shipped-Q8_0", "int8-g32", 2048)
        reply = client.generate(PROMPT, max_tokens=16)
        assert reply.usage.prompt_tokens == len(Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(PROMPT).ids)
        assert len(reply.choices[0].text.split()) > 3
        chat = client.generate([("user", "What is a list?")], max_tokens=8)
        assert chat.token_ids and chat.usage.prompt_tokens > 4
        client.close()
        assert not any(stack.stop().values())
    assert "weights int8-g32 (" in stack.text() and "rows expanded as they are looked up" in stack.text()
    assert not stack.complaints()
