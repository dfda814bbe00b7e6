"""Hugging Face model directories: `config.json`, model families, tensor names, safetensors files."""
