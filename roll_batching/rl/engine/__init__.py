"""Rollouts by engines: how a job asks them, starts their servers, and gives them weights."""
