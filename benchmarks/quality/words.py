"""A task for `lpconv verify --tasks`: 400 WordNet definitions, each with four words, one of which it defines.

    python -m benchmarks.quality.words --out FOLDER
    lpconv verify OUTPUT --against MODEL --tasks FOLDER/words.yaml

The wrong words are other nouns from the same lexicographer file. Needs Debian's wordnet-base.
"""

import json
import random
from collections import defaultdict

from benchmarks import common, wordnet

COUNT, SEED = 400, 0
_TASK = """task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def nouns() -> list[tuple[str, str, int]]:
    """Nouns that their definition does not contain, the definition, and the lexicographer file."""
    rows = []
    for synset in wordnet.synsets("noun"):
        word, definition = synset.split()[4].replace("_", " "), wordnet.definition(synset)
        if word.islower() and 20 < len(definition) < 120 and word not in definition:
            rows.append((word, definition, wordnet.lexicographer_file(synset)))
    return rows


def questions() -> list[dict[str, object]]:
    """The same questions on every call."""
    rows, generator = nouns(), random.Random(SEED)
    generator.shuffle(rows)
    words = defaultdict(list)
    for word, _, kind in rows:
        words[kind].append(word)
    items: list[dict[str, object]] = []
    for word, definition, kind in rows[:COUNT]:
        choices = [word, *generator.sample([w for w in words[kind] if w != word], 3)]
        generator.shuffle(choices)
        question = f"Definition: {definition}.\nWord:"
        items.append({"question": question, "choices": choices, "label": choices.index(word)})
    return items


def main() -> None:
    options = common.parser(__doc__, needs_out=True).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    items = options.out / "items.jsonl"
    items.write_text("".join(json.dumps(q) + "\n" for q in questions()), encoding="utf-8")
    (options.out / "words.yaml").write_text(_TASK.format(items=items.resolve()), encoding="utf-8")


if __name__ == "__main__":
    main()
