"""Every test runs offline; nothing may reach for a model hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of torch's own would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")
