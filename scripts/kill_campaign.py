"""Kills processes of small real jobs at random moments: `python scripts/kill_campaign.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from tests.campaigns.kills.campaign import main

if __name__ == "__main__":
    main()
