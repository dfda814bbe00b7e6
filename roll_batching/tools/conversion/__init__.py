"""Converts files of ROLL, NeMo-RL, verl and slime: composition, translation, and a check by the loader."""

from roll_batching.tools.conversion.convert import ORIGINS, Origin, convert_file, origin_of
from roll_batching.tools.conversion.draft import Conversion, KeptKey, LeftOut

__all__ = ["ORIGINS", "Conversion", "LeftOut", "KeptKey", "Origin", "convert_file", "origin_of"]
