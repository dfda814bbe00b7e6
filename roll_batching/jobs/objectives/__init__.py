"""What an RL step optimises: advantages from rewards, their running state, and the loss of a configuration."""
