"""The hot paths, each beside a slow reference that shares its tests."""
