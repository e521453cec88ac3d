"""An object store for tests, as the environment names one."""

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
    """A store that ``s3://bucket`` means up to the end of the block, with an empty cache in `folder`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for name, value in {**ENVIRONMENT, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    store_at.cache_clear()
    with serving(objects) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        yield store
    store_at.cache_clear()
