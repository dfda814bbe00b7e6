"""Rollout engines (SGLang, vLLM, transformers): requests, servers and weight updates."""
