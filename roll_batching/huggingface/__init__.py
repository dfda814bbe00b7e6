"""Model directories of Hugging Face: what `config.json` means, which tensors there are, and their files."""
