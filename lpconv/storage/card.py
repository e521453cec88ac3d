"""Facts of a model card that the card of a derived checkpoint has to repeat: licence and base model."""

from pathlib import Path

import yaml

_MAX_BYTES = 2**16  # of a card's head
_REPEATED = ("base_model", "license", "license_name", "license_link")


def inherited_facts(directory: Path, hub_id: str | None) -> dict[str, str]:
    """The licence of a checkpoint, and the model on the hub that it is, or was made from itself; empty without a card.

    A card that is no text, or whose front matter is no YAML, says nothing.
    """
    try:
        with (directory / "README.md").open(encoding="utf-8") as file:
            parts = file.read(_MAX_BYTES).split("---\n")
        found = yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0].strip() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = {}
    facts = {k: str(found[k]) for k in _REPEATED if isinstance(found, dict) and isinstance(found.get(k), str)}
    return facts | ({"base_model": hub_id} if hub_id else {})
