"""Rollout engines: token ids in, token ids and their log-probs out; weights by way of model directories."""
