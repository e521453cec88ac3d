"""What is said of a text that the tokenizer does not know."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lpconv.errors import InputError
from lpconv.models.tokenizer import tokenize


@pytest.mark.parametrize(("words", "unknown"), [("a b c a", 0.0), ("a b x y", 0.5), ("x y z x", 1.0)])
def test_unknown_tokens_are_counted_and_doubted(tmp_path: Path, words: str, unknown: float) -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "text.txt"
    path.write_text(words)
    found = tokenize(path, PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?"), seq_len=2, vocab_size=4)
    assert found.unknown == unknown
    assert len(found.doubts) == bool(unknown)
    assert all(f"{100 * unknown:.0f} %" in doubt for doubt in found.doubts)


def test_an_unknown_token_that_is_unknown_itself_is_no_bug(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordPiece({"a": 0, "?": 1}, unk_token="?"))
    path = tmp_path / "text.txt"
    path.write_text("a a a")
    odd = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="")
    with pytest.raises(InputError, match="unk"):
        tokenize(path, odd, seq_len=1, vocab_size=2)
