"""Facts that the model card of a derived checkpoint has to repeat: licence and base model."""

from pathlib import Path

import yaml

_MAX_BYTES = 2**16  # of front matter that is read
_REPEATED = ("base_model", "license", "license_name", "license_link")


def inherited_facts(directory: Path, hub_id: str | None) -> dict[str, str]:
    """The licence of a checkpoint, and the hub model that it is or was made from; empty without a card.

    A card that is not text, or whose front matter is not YAML, is ignored.
    """
    try:
        with (directory / "README.md").open(encoding="utf-8") as file:
            parts = file.read(_MAX_BYTES).split("---\n")
        front_matter = yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0].strip() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        front_matter = {}
    facts = {
        k: str(front_matter[k])
        for k in _REPEATED
        if isinstance(front_matter, dict) and isinstance(front_matter.get(k), str)
    }
    return facts | ({"base_model": hub_id} if hub_id else {})
