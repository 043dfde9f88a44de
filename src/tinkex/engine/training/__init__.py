"""Training: request checks, micro-batches, losses and optimizers."""
