"""The vocabulary of a tokenizer.json as convert_hf_to_gguf.py puts it into a .gguf file."""

import json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def token_ids_and_merges(content: dict) -> tuple[dict[str, int], list[str]]:
    """Return the id of every token of a tokenizer.json, in the order of ids, and its merges."""
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
    return dict(sorted(vocabulary.items(), key=lambda item: item[1])), merges


def add_vocabulary(writer, tokenizer_json: bytes, kind: str, pre: str = "") -> dict[str, int]:
    """Add it to a gguf.GGUFWriter; kind: gpt2, with the splitting rule `pre`, or llama. Returns token -> id."""
    content = json.loads(tokenizer_json)
    token_ids, merges = token_ids_and_merges(content)
    tokens = list(token_ids)
    types = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in content["added_tokens"]}
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    if kind == "gpt2":
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    else:
        rank = {merge.replace(" ", ""): index for index, merge in enumerate(merges)}
        writer.add_token_scores([-float(rank.get(token, len(tokens))) for token in tokens])
        types |= {"<unk>": UNKNOWN} | {token: BYTE for token in tokens if token.startswith("<0x")}
    writer.add_token_types([types.get(token, NORMAL) for token in tokens])
    return token_ids
