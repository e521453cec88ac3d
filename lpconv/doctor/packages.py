"""The libraries that lpconv needs and those that its extras add, and which of them are installed.

Versions come from package metadata, so that nothing heavy is imported. The tables repeat `pyproject.toml`, which an
installed lpconv no longer has; a test compares them.
"""

from importlib import metadata

from packaging.version import Version

from lpconv.results import ExtraRecord, PackageRecord

__all__ = ["EXTRAS", "PACKAGES", "extras", "packages"]

PACKAGES: dict[str, str] = {
    "torch": "2.11", "transformers": "5.17", "safetensors": "0.5", "huggingface-hub": "1.0", "typer": "0.15",
    "rich": "13.9", "numpy": "2.0", "onnx": "1.18", "packaging": "23.0", "jinja2": "3.1", "pyyaml": "6.0",
    "psutil": "6.0", "pydantic": "2.10", "accelerate": "1.10", "datasets": "4.0",
}  # fmt: skip

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "onnx": ("export to ONNX and run it", ("onnxscript", "onnxruntime")),
    "gguf": ("read GGUF files", ("gguf",)),
    "gpu": ("energy and clocks of NVIDIA GPUs", ("nvidia-ml-py",)),
    "remote": ("read checkpoints from object stores", ("obstore",)),
    "ray": ("batches on a Ray cluster", ("ray",)),
    "peers": (
        "benchmarks, with the libraries they compare",
        ("torchao", "torch-optimi", "unit-scaling", "matplotlib", "scikit-learn"),
    ),
    "test": (
        "run lpconv's own tests",
        ("compressed-tensors", "gguf", "hatchling", "onnxruntime", "onnxscript", "pytest", "pytest-xdist", "hypothesis",
         "ml_dtypes", "obstore", "gfloat", "matplotlib", "torchao", "unit-scaling", "ruff", "mypy", "types-PyYAML",
         "types-psutil"),
    ),
}  # fmt: skip


def packages() -> tuple[PackageRecord, ...]:
    """The required libraries, each with its installed version."""
    return tuple(_package(name, required) for name, required in PACKAGES.items())


def extras() -> tuple[ExtraRecord, ...]:
    """The extras, each with what is missing of it."""
    return tuple(
        ExtraRecord(
            name=name,
            purpose=purpose,
            missing=tuple(p for p in names if _version(p) is None),
            install=f"pip install 'lpconv[{name}]'",
        )
        for name, (purpose, names) in EXTRAS.items()
    )


def _package(name: str, required: str) -> PackageRecord:
    installed = _version(name)
    ok = installed is not None and Version(installed) >= Version(required)
    return PackageRecord(name=name, required=required, installed=installed, ok=ok)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
