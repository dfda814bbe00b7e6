"""Warnings that nobody can act on are hidden; every other record of the same loggers is shown."""

from __future__ import annotations

import logging
import warnings

from roll_batching.known_warnings import hide_known_warnings


def test_known_records_and_warnings_are_hidden_and_no_others(caplog):
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hide_known_warnings()
        hide_known_warnings()
        assert len(logger.filters) == 1, "once, however often it is called"
        logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
        logger.warning("the GPTModel IS DEPRECATED here")
        warnings.warn("MimoModelConfig is experimental and still under active development.", stacklevel=1)
        warnings.warn("a warning of another kind", stacklevel=1)
    assert [record.getMessage() for record in caplog.records] == ["the GPTModel IS DEPRECATED here"]
    assert [str(one.message) for one in caught] == ["a warning of another kind"]
