"""Names, files and tokenizers of base models. Knows nothing of tensors on a device: no torch here."""
