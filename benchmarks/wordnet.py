"""WordNet's data files (Debian's wordnet-base, or the folder that WNSEARCHDIR names)."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

WORDNET = Path(os.environ.get("WNSEARCHDIR", "/usr/share/wordnet"))


def synsets(part: str) -> Iterator[str]:
    """The lines of a part of speech, such as "noun", without the licence."""
    if not WORDNET.exists():
        raise SystemExit("this benchmark needs Debian's wordnet-base")
    text = (WORDNET / f"data.{part}").read_text(encoding="ascii", errors="replace")
    return (line for line in text.splitlines() if not line.startswith(" "))


def definition(synset: str) -> str:
    """The gloss of a synset without its examples."""
    return re.sub(r';?\s*".*', "", synset.partition("| ")[2]).strip()


def lexicographer_file(synset: str) -> int:
    """The number of the file that the synset is from, such as 3 for noun.Tops."""
    return int(synset.split(" ", 2)[1])
