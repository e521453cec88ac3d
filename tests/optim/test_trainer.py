"""transformers.Trainer drives the optimizer, and resumes it from its checkpoint exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from lpconv.optim import CollageAdamW, fp32_state_dict
from tests.helpers.models import tiny_model

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "variant": "plus", "compiled": False}


def tiny_llama() -> Any:
    return tiny_model("llama", hidden_size=16, intermediate_size=32).bfloat16()


def trained(folder: Path, *, resume: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(0))
    model = tiny_llama()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, save_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        gradient_checkpointing=True, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100, seed=1,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizer_cls_and_kwargs=(CollageAdamW, OPTIONS),
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    optimizer = trainer.optimizer
    while not isinstance(optimizer, CollageAdamW):  # accelerate wraps it
        assert optimizer is not None
        optimizer = optimizer.optimizer
    return fp32_state_dict(optimizer, model)


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_trainer_equals_an_unbroken_one(tmp_path: Path) -> None:
    start = {n: t.clone() for n, t in tiny_llama().state_dict().items()}
    unbroken = trained(tmp_path)
    resumed = trained(tmp_path, resume=True)
    assert all(torch.equal(t, resumed[n]) for n, t in unbroken.items())
    moved = [n for n, t in unbroken.items() if not torch.equal(t, start[n].float())]
    assert "model.layers.1.mlp.up_proj.weight" in moved
