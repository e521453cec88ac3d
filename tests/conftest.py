"""Every test runs offline; nothing may reach for a model hub."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of torch's own would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """What has been imported stays: the many collections of a trainer or a compiler need not look at it each time."""
    gc.freeze()
