"""LoRA adapters: their tensors, their memory (device, host, disk) and their files."""
