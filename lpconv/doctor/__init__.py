"""What this machine can do: number formats per device, libraries, extras, memory, disk and the model cache."""
