"""Opening models to run, trace, train or time; their tasks, tokenizers and example inputs."""
