"""Counts other frameworks' example files that convert and start: `python scripts/count_peer_configs.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from tests.campaigns.peer_configs.count import main

if __name__ == "__main__":
    main()
