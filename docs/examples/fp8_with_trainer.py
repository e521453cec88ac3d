# Trains the demo model with transformers' Trainer, linear layers in fp8, and prints the first and last loss.
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from lpconv.data import demo_checkpoint
from lpconv.scaled import AdamW, scaled

path = demo_checkpoint()
tokenizer = AutoTokenizer.from_pretrained(path)
model = scaled(AutoModelForCausalLM.from_pretrained(path), method="unit", compute="fp8")
text = "It is a truth universally acknowledged, that a single man must be in want of a wife. "
tokens = tokenizer(text)["input_ids"][:64]
rows = [{"input_ids": tokens, "labels": tokens}] * 24

arguments = TrainingArguments(
    "trainer", per_device_train_batch_size=2, max_steps=12, logging_steps=3, report_to=[], use_cpu=True
)
trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(AdamW(model.parameters(), lr=1e-3), None))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
trainer.save_model("trained")  # an ordinary checkpoint
