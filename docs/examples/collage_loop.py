# Trains the demo model in bf16 without an fp32 copy, in a plain PyTorch loop, and prints the loss of every fifth step.
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lpconv.data import demo_checkpoint
from lpconv.optim import CollageAdamW

path = demo_checkpoint()
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
optimizer = CollageAdamW(model.parameters(), lr=1e-3)
text = "It is a truth universally acknowledged, that a single man must be in want of a wife. "
tokens = tokenizer(text * 4, return_tensors="pt")["input_ids"][:, :128]

for step in range(16):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
model.save_pretrained("trained")  # bf16; optimizer.state_dict() has the bits that bf16 drops
