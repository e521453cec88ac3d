"""URLs of remote checkpoints: validation without a request."""

import re
from urllib.parse import urlsplit

from lpconv.errors import UnsupportedError, UsageError, check_installed

UNFINISHED = "lpconv-unfinished/"  # folder of an unfinished run below its output's URL; deleted once it is published
_SCHEMES = ("s3", "gs", "az", "hf", "https", "http")


def is_url(name: str) -> bool:
    """Whether a name is a URL."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def check_url(url: str) -> str:
    """Check a checkpoint's URL and return it as it is recorded: without empty parts of its path.

    Raises UsageError for a URL with credentials, a query or a fragment, and UnsupportedError for an unsupported scheme
    or if obstore is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise UnsupportedError(
            f"lpconv cannot read `{parts.scheme}://` URLs",
            hint="it reads " + ", ".join(f"{s}://" for s in _SCHEMES[:-1]),
        )
    if (parts.username and parts.scheme != "hf") or parts.password or parts.query or parts.fragment:
        raise UsageError(
            f"a `{parts.scheme}://` URL must not contain credentials, a query or a fragment",
            hint="pass credentials in the provider's environment variables",
        )
    check_installed(f"`{parts.scheme}://`", "obstore", extra="remote")
    key = "/".join(filter(None, [parts.netloc, *parts.path.split("/")]))
    return url.rstrip("/") if parts.scheme.startswith("http") else f"{parts.scheme}://{key}"


def hub_names(url: str) -> tuple[str, str]:
    """The repository and the revision in an ``hf://`` URL; the revision is empty if there is none."""
    repo_id, _, revision = url.removeprefix("hf://").partition("@")
    return repo_id, revision
