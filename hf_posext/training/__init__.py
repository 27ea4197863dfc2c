"""Fine-tuning of a patched model: the data, what is trained, the loss, and what is kept of it."""
