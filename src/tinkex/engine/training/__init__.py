"""Training passes: request checks, losses, optimizers."""
