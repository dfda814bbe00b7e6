"""Roles with a model of their own beside the one that trains: on the same ranks, or in processes of their own."""
