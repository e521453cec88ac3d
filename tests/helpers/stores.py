"""An object store that the environment variables point to."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from lpconv.storage.remote import store_at
from tests.helpers.object_store import ENVIRONMENT, Store, serving

__all__ = ["offered"]


@contextmanager
def offered(
    monkeypatch: pytest.MonkeyPatch, folder: Path, objects: Mapping[str, bytes] | None = None
) -> Iterator[Store]:
    """Serve `s3://bucket` until the end of the block, with an empty cache in `folder`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for name, value in {**ENVIRONMENT, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    store_at.cache_clear()
    with serving(objects) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        yield store
    store_at.cache_clear()
