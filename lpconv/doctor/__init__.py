"""What this machine can do: number formats per device, libraries, extras, memory, disk and the model cache."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.doctor.examine import examine as examine
    from lpconv.doctor.require import missing as missing, require as require

__all__ = lazily(__name__)
