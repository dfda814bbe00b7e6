"""`python -m roll_batching`: the command line."""

from roll_batching.cli import main

main()
