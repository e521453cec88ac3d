"""The vocabulary of a GGUF file: tokens, merges or scores, special tokens and the chat template.

llama.cpp splits text by built-in rules, which GGUF only names. `_RULES` has the pre-tokenizers of tokenizer.json that
do the same; others are refused rather than guessed. Sources: ggml-org/llama.cpp, `convert_hf_to_gguf.py` and
`src/llama-vocab.cpp`.
"""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from lpconv.errors import UnsupportedError
from lpconv.storage.contents import read_json

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The names of llama.cpp's rules by what comes before the bytes: "digits", a regular expression, or nothing.
_RULES = {
    "": "gpt-2",
    "digits": "smollm",
    _CONTRACTIONS + _WORDS % "{1,3}": "llama-bpe",
    _CONTRACTIONS + _WORDS % "": "qwen2",
}
_SPACE = "\u2581"  # of SentencePiece
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def add_vocabulary(writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any]) -> None:
    """Add tokens, merges, special tokens and the chat template; a model without a tokenizer gets none.

    Raises UnsupportedError for a tokenizer that llama.cpp would not reproduce.
    """
    if not (directory / "tokenizer.json").is_file():
        other = next((n for n in _OTHERS if (directory / n).is_file()), None)
        if other is not None:
            raise _error(f"it is in `{other}`", "save it with transformers' AutoTokenizer first")
        writer.add_tokenizer_model("no_vocab")
        return
    document = read_json(directory / "tokenizer.json")
    settings = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    kind = document["model"].get("type")
    is_spm = kind == "BPE" and bool(document["model"].get("byte_fallback"))
    if is_spm:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(_adds_space(document))
    elif kind == "BPE":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_rule(document))
        if not document["model"]["merges"]:
            raise _error("it merges no bytes, but llama.cpp needs merges")
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]])
    elif kind == "WordPiece" and (document.get("normalizer") or {}).get("lowercase"):
        writer.add_tokenizer_model("bert")
    else:
        raise _error(f"it is {kind}" + (" that keeps upper case" if kind == "WordPiece" else ""))
    ids = _add_tokens(writer, document, config["vocab_size"], is_bert=kind == "WordPiece", is_spm=is_spm)
    if is_spm:
        writer.add_token_scores(_scores(document["model"], config["vocab_size"]))
    _add_special(writer, document, settings, config, ids)
    template = directory / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(chat, str):
        writer.add_chat_template(chat)


def _error(what: str, hint: str = "use another --layout") -> UnsupportedError:
    return UnsupportedError(f"layout `gguf` cannot store the tokenizer: {what}", hint=hint)


def _rule(document: Mapping[str, Any]) -> str:
    """llama.cpp's name for the rule by which a byte-level BPE splits text."""
    splitter = document.get("pre_tokenizer") or {}
    *first, last = splitter.get("pretokenizers", [splitter])
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if len(first) == 1 and first[0].get("type") == "Split" and first[0].get("behavior") == "Isolated":
        before, wanted["use_regex"] = first[0]["pattern"].get("Regex"), False
    elif len(first) == 1 and first[0].get("type") == "Digits" and first[0].get("individual_digits"):
        before = "digits"
    else:
        before = None if first else ""
    last = {"use_regex": True, **last}
    if before not in _RULES or any(last.get(k) != v for k, v in wanted.items()):
        words = json.dumps(splitter, ensure_ascii=False)
        raise _error(f"llama.cpp's rules {', '.join(_RULES.values())} do not split text like {words:.200}")
    return _RULES[before]


def _adds_space(document: Mapping[str, Any]) -> bool:
    """Whether a tokenizer that was made by SentencePiece puts a space before text."""
    normalizer, splitter = document.get("normalizer") or {}, document.get("pre_tokenizer") or {}
    steps = [s for s in normalizer.get("normalizers", [normalizer]) if s]
    first, space = {"type": "Prepend", "prepend": _SPACE}, {"type": "Replace", "pattern": {"String": " "}}
    if not splitter and steps in ([space | {"content": _SPACE}], [first, space | {"content": _SPACE}]):
        return first in steps
    if not steps and splitter == {**splitter, "type": "Metaspace", "replacement": _SPACE, "split": False}:
        return bool(splitter.get("prepend_scheme", "always") != "never")
    words = json.dumps([*steps, splitter], ensure_ascii=False)
    raise _error(f"llama.cpp's SentencePiece does not read text like {words:.200}")


def _scores(model: Mapping[str, Any], size: int) -> list[float]:
    """A score for each token, by which llama.cpp makes the merges of a BPE in the same order.

    SentencePiece makes the pair with the best score of the token that it becomes. This is the same if the merges are
    all pairs of tokens that become a token, and those of one token follow each other.
    """
    ids: Mapping[str, int] = model["vocab"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    merged = [token for token, _ in itertools.groupby(a + b for a, b in merges)]
    pairs = {(t[:i], t[i:]) for t in ids for i in range(1, len(t)) if t[:i] in ids and t[i:] in ids}
    if len(set(merged)) < len(merged) or pairs != set(merges):
        raise _error("its merges are not SentencePiece's")
    scores = [0.0] * size
    for rank, token in enumerate(merged):
        scores[ids[token]] = -float(rank)
    return scores


def _add_tokens(
    writer: gguf.GGUFWriter, document: Mapping[str, Any], size: int, *, is_bert: bool, is_spm: bool
) -> dict[str, int]:
    """Add the tokens, as many as the embedding has rows. Returns their ids."""
    ids = dict(document["model"]["vocab"])
    kinds = {}
    for token in document.get("added_tokens", ()):
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    named = {i: _phantom(token) if is_bert else token for token, i in ids.items()}
    if not all(isinstance(i, int) and i >= 0 and isinstance(token, str) for i, token in named.items()):
        raise TypeError("tokens are text, and their ids are counted from 0")
    if named and max(named) >= size:
        raise _error(f"it has {max(named) + 1} tokens, but the model has {size}")
    writer.add_token_list([named.get(i, f"[PAD{i}]") for i in range(size)])
    normal = {i: TokenType.NORMAL if i in named else TokenType.UNUSED for i in range(size)}
    if is_spm:
        normal |= {i: TokenType.BYTE for token, i in ids.items() if _BYTE.fullmatch(token)}
        kinds |= {i: TokenType.UNKNOWN for token, i in ids.items() if token == document["model"].get("unk_token")}
    writer.add_token_types([kinds.get(i, kind) for i, kind in normal.items()])
    return ids


def _phantom(token: str) -> str:
    """A token of WordPiece as llama.cpp writes it: word beginnings are marked instead of continuations."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix("##") if token.startswith("##") else _SPACE + token


def _add_special(
    writer: gguf.GGUFWriter,
    document: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    ids: Mapping[str, int],
) -> None:
    """Add the ids of special tokens, and whether text begins and ends with one."""
    keys = gguf.Keys.Tokenizer
    found = {}
    for name, key in (("bos", keys.BOS_ID), ("eos", keys.EOS_ID), ("unk", keys.UNK_ID), ("sep", keys.SEP_ID),
                      ("pad", keys.PAD_ID), ("cls", keys.BOS_ID), ("mask", keys.MASK_ID)):  # fmt: skip
        token = settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        number = config.get(f"{name}_token_id") if content is None else ids.get(content)
        if isinstance(number, int) and 0 <= number < config["vocab_size"]:
            found[name] = number
            writer.add_uint32(key, number)
    single = (document.get("post_processor") or {}).get("single") or [{}]
    ends = [ids.get((part.get("SpecialToken") or {}).get("id", "")) for part in (single[0], single[-1])]
    if document["model"].get("type") == "BPE":
        writer.add_add_bos_token(ends[0] is not None and ends[0] == found.get("bos"))
        writer.add_add_eos_token(ends[1] is not None and ends[1] == found.get("eos"))
