"""Small models with random weights for tests on a GPU."""

from pathlib import Path

import torch


def write_model(folder: Path, kind: str, *, layers: int = 3) -> Path:
    """Scaled so that logits have the magnitude of a trained model."""
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    sizes |= {"vocab_size": 5000, "max_position_embeddings": 1024, "num_attention_heads": 8}
    if kind == "qwen3":
        config = transformers.Qwen3Config(
            **sizes, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False
        )
    elif kind == "qwen2":  # biases; one key head for each query head; tied embeddings
        config = transformers.Qwen2Config(**sizes, num_key_value_heads=8, tie_word_embeddings=True)
    else:
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=2, head_dim=80, tie_word_embeddings=False
        )
    config.eos_token_id = None
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.1 if "lm_head" in name else weight.shape[1] ** -0.5)
            elif "bias" in name:
                weight.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder
