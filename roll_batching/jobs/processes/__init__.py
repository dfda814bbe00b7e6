"""Child processes: how they start, connect and end."""
