"""A job tokenises its texts once: their token counts are kept, and anything that changes them is noticed."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.inputs import CHECKED, check_inputs, load_inputs
from roll_batching.jobs.texts.fit import token_counts
from roll_batching.jobs.texts.tokenizers import CharTokenizer, HFTokenizer
from tests.huggingface import tiny
from tests.jobs.streams.jobs import settings, write_data
from tests.support.tiny_job import VOCABULARY

pytestmark = pytest.mark.streams
TEXTS, HELD_OUT = 20, 6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_data(tmp_path, TEXTS)
    monkeypatch.delenv(CHECKED, raising=False)
    return tmp_path


@pytest.fixture
def encoded(monkeypatch):
    """All texts that the tokenizer was given."""
    seen, encode = [], CharTokenizer.encode
    monkeypatch.setattr(CharTokenizer, "encode", lambda self, text: (seen.append(text), encode(self, text))[1])
    return seen


def started(job, encoded, monkeypatch):
    """How many texts of a start were tokenised by the launcher, and by a rank; and the rank's counts."""
    encoded.clear()
    variables = check_inputs(job)
    by_launcher = len(encoded)
    encoded.clear()
    with monkeypatch.context() as of_rank:
        for name, value in variables.items():
            of_rank.setenv(name, value)
        counts = load_inputs(job).token_counts
    return by_launcher, len(encoded), counts


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_second_start_tokenises_a_few(folder, encoded, monkeypatch, task):
    job = config_from_dict(settings(folder, task))
    each = 2 if task == "sft" else 4  # prompt and response, of a pair twice
    first, rank, counts = started(job, encoded, monkeypatch)
    assert (first, rank) == (each * (TEXTS + HELD_OUT), each * 16)
    texts = load_inputs(job).corpus
    assert np.array_equal(counts, token_counts(texts, CharTokenizer(VOCABULARY, "$", ".")))
    assert counts.shape == ((TEXTS,) if task == "sft" else (TEXTS, 2))
    again, rank, same = started(job, encoded, monkeypatch)
    assert (again, rank) == (each * HELD_OUT, each * 16) and np.array_equal(same, counts)


def test_ranks_of_another_launcher_keep_and_find_them_too(folder, encoded):
    job = config_from_dict(settings(folder))
    first = load_inputs(job).token_counts
    encoded.clear()
    assert np.array_equal(load_inputs(job).token_counts, first)
    assert len(encoded) == 2 * (16 + HELD_OUT)


def _another_text(folder, job):
    lines = (folder / "sft.jsonl").read_text().replace('"0', '"00', 1)
    (folder / "sft.jsonl").write_text(lines)


def _another_tokenizer(folder, job):
    job["tokenizer"]["vocabulary"] = VOCABULARY[::-1]


def _half_a_file(folder, job):
    (file,) = (folder / "runs" / "token_counts").iterdir()
    file.write_bytes(file.read_bytes()[:100])


def _other_counts(folder, job):
    (file,) = (folder / "runs" / "token_counts").iterdir()
    np.savez(file, counts=np.full(TEXTS, 3), without_stop=0)


@pytest.mark.parametrize("change", [_another_text, _another_tokenizer, _half_a_file, _other_counts])
def test_what_changes_them_is_noticed(folder, encoded, monkeypatch, change, caplog):
    job = settings(folder)
    started(config_from_dict(job), encoded, monkeypatch)
    change(folder, job)
    with caplog.at_level(logging.WARNING):
        _, _, counts = started(config_from_dict(job), encoded, monkeypatch)
    expected = token_counts(load_inputs(config_from_dict(job)).corpus, CharTokenizer(VOCABULARY, "$", "."))
    assert counts is None if change is _other_counts else np.array_equal(counts, expected)
    said = "counted again" in caplog.text
    assert said == (change in (_half_a_file, _other_counts)), caplog.text
    assert np.array_equal(started(config_from_dict(job), encoded, monkeypatch)[2], expected), "and kept anew"


@pytest.mark.bad_input
def test_known_counts_hide_no_fault(folder, encoded, monkeypatch):
    job = settings(folder)
    started(config_from_dict(job), encoded, monkeypatch)
    with pytest.raises(DataError, match=r"sft.jsonl:\d+: the document has \d+ tokens.*more than the 20 allowed"):
        check_inputs(config_from_dict(job | {"sequence_length": 20}))
    with (folder / "sft.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a="}) + "\n")
    with pytest.raises(DataError, match=r"sft.jsonl:21: .*'response'"):
        check_inputs(config_from_dict(job))


def test_where_they_cannot_be_kept_a_notice_says_so(folder, encoded, monkeypatch, caplog):
    (folder / "runs").mkdir()
    (folder / "runs" / "token_counts").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        _, _, counts = started(config_from_dict(settings(folder)), encoded, monkeypatch)
    assert counts is None and "the next start counts again" in caplog.text


def test_a_tokenizers_digest_is_of_its_rules(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tiny.write_tokenizer(tmp_path / name)
    one, two = HFTokenizer(tmp_path / "one"), HFTokenizer(tmp_path / "two")
    one.tokenizer(["a b"], truncation=True, max_length=1)  # a call's settings stay in it, and are no rules
    assert one.fingerprint == two.fingerprint
    third = HFTokenizer(tmp_path / "two")
    third.tokenizer.chat_template += "\n"
    assert third.fingerprint != two.fingerprint
    assert CharTokenizer("ab$", "$").fingerprint != CharTokenizer("ab$", "b").fingerprint
