"""Hosts' files against their conversions, by the hosts' own functions: `python scripts/prove_conversion.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from tests.campaigns.conversion_proof.prove import main

if __name__ == "__main__":
    sys.exit(main())
