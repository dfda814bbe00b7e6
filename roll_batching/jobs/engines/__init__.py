"""Rollout engines: token ids in, token ids and log-probs out; their servers, and how weights get to them."""
