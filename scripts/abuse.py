"""Abuses of a small job, each checked for its exit code, message and time limit: `python scripts/abuse.py --help`."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from tests.campaigns.abuse.campaign import main

if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # ends through `finally`: no process, disk or folder is left
    # A shell starts background jobs with SIGINT ignored, which the abused commands would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
