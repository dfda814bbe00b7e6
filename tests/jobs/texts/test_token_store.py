"""Token ids are read as they are, and tokens of texts are kept between starts, equal to the bit."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.inputs import CHECKED, check_inputs, load_inputs
from roll_batching.jobs.steps.planned_steps import Encoder
from roll_batching.jobs.text_sets import load_tokenizer, prompts_of
from roll_batching.jobs.texts.fit import Fit
from roll_batching.jobs.texts.token_store import StoredTokens, TokenCache, TokenWriter
from roll_batching.jobs.texts.tokenizers import CharTokenizer
from tests.huggingface.tiny import MARKED_TEMPLATE, PLAIN_TEMPLATE, write_tokenizer
from tests.jobs.streams.jobs import settings, write_data
from tests.support.ranks import run_ranks
from tests.support.tiny_job import TOKENIZER, VOCABULARY

DATA = "actor_train__data_args__"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_data(tmp_path, 2050)  # more than one batch of the tokenizer
    monkeypatch.delenv(CHECKED, raising=False)
    return tmp_path


def job(folder, **changes):
    return config_from_dict(settings(folder, **changes))


def cached(folder, **changes):
    return job(folder, **{f"{DATA}token_cache": str(folder / "tokens")}, **changes)


def encoded(inputs, part="corpus"):
    texts = getattr(inputs, part)
    batch = Encoder(tokenizer=inputs.tokenizer, max_length=64).encode(texts[: len(texts)])
    return batch.lengths.tolist(), batch.fields["input_ids"].tolist(), batch.fields["response_mask"].tolist()


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chats(folder, template=PLAIN_TEMPLATE):
    write_tokenizer(folder / "tokenizer", template)
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    for name in ("sft", "sft_heldout") if template == PLAIN_TEMPLATE else ():
        write(folder / f"{name}.jsonl", [{"messages": turns * (1 + n % 2)} for n in range(9)])
    tokenizer = {"type": "hf", "name_or_path": str(folder / "tokenizer")}
    return {
        "tokenizer": tokenizer,
        f"{DATA}messages": "messages",
        "actor_train__model_args__architecture__vocab_size": 99,
    }


@pytest.mark.parametrize("kind", ["documents", "chats", "ids"])
def test_tokens_of_an_earlier_start_are_those_of_the_texts(folder, kind, monkeypatch):
    changes = chats(folder) if kind == "chats" else {}
    if kind == "ids":
        changes = {f"{DATA}input_ids": "ids"}
        for name in ("sft", "sft_heldout"):
            write(folder / f"{name}.jsonl", [{"ids": [n % 9, 2, 3], "loss_mask": [0, n % 2, 1]} for n in range(9)])
    plain = load_inputs(job(folder, **changes))
    with monkeypatch.context() as of_rank:
        for name, value in check_inputs(cached(folder, **changes)).items():
            of_rank.setenv(name, value)
        inputs = load_inputs(cached(folder, **changes))
    assert isinstance(inputs.corpus, StoredTokens) and inputs.fingerprint == plain.fingerprint
    assert inputs.corpus.record_fingerprint == plain.corpus.record_fingerprint
    assert encoded(inputs) == encoded(plain) and encoded(inputs, "validation") == encoded(plain, "validation")
    assert inputs.token_counts.tolist() == encoded(plain)[0]


def test_the_second_start_tokenises_nothing_and_any_change_everything(folder, monkeypatch):
    seen, encode = [], CharTokenizer.encode
    monkeypatch.setattr(CharTokenizer, "encode", lambda self, text: (seen.append(text), encode(self, text))[1])

    def tokenised(**changes):
        seen.clear()
        load_inputs(cached(folder, **changes))
        return len(seen)

    corpus, count, file = 2 * 2050, 2 * 2056, folder / "sft.jsonl"
    assert tokenised() == count and tokenised() == tokenised(sequence_length=50) == 0
    assert tokenised(tokenizer={**TOKENIZER, "vocabulary": VOCABULARY[::-1]}) == count
    assert tokenised(**{f"{DATA}prompt": "response", f"{DATA}response": "prompt"}) == count
    stat = file.stat()
    file.write_text(file.read_text().replace("a", "b", 1))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tokenised() == corpus and tokenised() == 0, "the same size and time, another content"
    os.utime(file, ns=(1, 1))
    assert tokenised() == corpus and tokenised() == 0, "another time"


def test_another_template_is_tokenised_anew(folder):
    masks = []
    for template in (PLAIN_TEMPLATE, MARKED_TEMPLATE, PLAIN_TEMPLATE.replace("'$'", "'$$'")):
        masks.append(encoded(load_inputs(cached(folder, **chats(folder, template))))[1:])
        assert masks[-1] == encoded(load_inputs(job(folder, **chats(folder, template))))[1:]
    assert len(list((folder / "tokens").glob("*.npz"))) == 2 * len(masks)


@pytest.mark.bad_input
def test_kept_tokens_hide_no_fault(folder, caplog):
    load_inputs(cached(folder))
    with pytest.raises(DataError, match=r"sft.jsonl:\d+: the document has \d+ tokens.*more than the 20 allowed"):
        check_inputs(cached(folder, sequence_length=20))
    expected = encoded(load_inputs(cached(folder)))
    for tokens in (folder / "tokens").glob("*.tokens"):
        os.truncate(tokens, tokens.stat().st_size - 4)
    with caplog.at_level(logging.WARNING):
        assert encoded(load_inputs(cached(folder))) == expected
    assert "cannot be read" in caplog.text and "tokenised again" in caplog.text
    (folder / "sft.jsonl").open("a").write('{"prompt": "a="}\n')
    for start in (check_inputs, load_inputs):
        with pytest.raises(DataError, match=r"sft.jsonl:2051: .*'response'"):
            start(cached(folder))


@pytest.mark.bad_input
@pytest.mark.parametrize("number, words", [(errno.ENOSPC, "No space left"), (errno.ENOLCK, "No locks available")])
def test_a_folder_that_takes_no_tokens_is_named(folder, number, words, monkeypatch):
    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((TokenWriter, "add") if number == errno.ENOSPC else (fcntl, "flock")), fail)
    with pytest.raises(DataError, match=f"token_cache: .*tokens cannot be written .{words}.*name a folder"):
        load_inputs(cached(folder))
    monkeypatch.undo()
    assert encoded(load_inputs(cached(folder))) == encoded(load_inputs(job(folder)))


@pytest.mark.bad_input
def test_a_file_of_another_folder_is_not_the_caches_fault(tmp_path):
    with pytest.raises(FileNotFoundError, match="vocabulary"), TokenCache(tmp_path / "kept", "key", "texts").lock():
        (tmp_path / "vocabulary.json").open()


KILLED = """
import json, os, signal, sys
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.texts.token_store import TokenWriter
add = TokenWriter.add
def kill(self, *args):
    return os.kill(os.getpid(), signal.SIGKILL) if len(self.lengths) == 9 else add(self, *args)
TokenWriter.add = kill
load_inputs(config_from_dict(json.loads(sys.argv[1])))
"""


def test_a_process_killed_while_writing_leaves_nothing_that_is_used(folder):
    payload = cached(folder).to_dict()
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, json.dumps(payload)], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert [file.name.split("-")[0] for file in (folder / "tokens").glob(".*")] == [".partial"]
    assert encoded(load_inputs(cached(folder))) == encoded(load_inputs(job(folder)))
    assert not list((folder / "tokens").glob(".*"))


def tokens_of_rank(payload):
    """On a rank: how many texts it tokenised, and the digest of all."""
    seen, encode = [], CharTokenizer.encode
    CharTokenizer.encode = lambda self, text: (seen.append(text), encode(self, text))[1]  # type: ignore[method-assign]
    inputs = load_inputs(config_from_dict(payload))
    return len(seen), inputs.fingerprint


def test_of_several_ranks_one_writes(folder):
    by_rank = run_ranks(3, f"{__name__}:tokens_of_rank", cached(folder).to_dict())
    assert sum(count for count, _ in by_rank) == 2 * 2056  # training's and held-out texts, maybe by two ranks
    assert {fingerprint for _, fingerprint in by_rank} == {load_inputs(job(folder)).fingerprint}


# ---- ids


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "row, message",
    [
        ({"ids": [1, 43]}, "the token id 43 is not one of the tokenizer's 43"),
        ({"ids": [1, -1]}, "the token id -1 is not"),
        ({"ids": [1, 2.5]}, "'ids' must be a list of integers"),
        ({"ids": "1 2"}, "'ids' must be a list of integers"),
        ({"ids": []}, "'ids' must be a list of integers, at least one"),
        ({"tokens": [1]}, "key 'ids' is missing; the line has tokens"),
        ({"ids": [1, 2], "labels": [2, -100]}, "'labels' are other tokens than 'ids'"),
        ({"ids": [1, 2], "loss_mask": [1]}, "'loss_mask' has 1 values for 2 tokens"),
        ({"ids": [1, 2], "labels": [-100, -100]}, "no token of 'ids' is trained"),
        ({"ids": [1, 2, 0], "attention_mask": [1, 1, 0]}, "'attention_mask' has zeros, so 'ids' are padded"),
        ({"ids": [1, 2, 0], "position_ids": [0, 1, 0]}, "write each document as a record"),
        ({"ids": [1, 2, 0], "loss_mask": [0, 1, 2]}, "'loss_mask' has values other than 0"),
        ({"ids": [1] * 65}, "the sample has 65 tokens, more than the 64 allowed"),
    ],
)
@pytest.mark.parametrize("make", [job, cached])
def test_ids_that_cannot_be_used_are_named(folder, make, row, message):
    write(folder / "sft.jsonl", [{"ids": [1, 2]}, row])
    write(folder / "sft_heldout.jsonl", [{"ids": [1, 2]}])
    with pytest.raises(DataError, match="sft.jsonl:2: ") as caught:
        check_inputs(make(folder, **{f"{DATA}input_ids": "ids"}))
    assert message in str(caught.value)


def test_masks_of_trl_say_what_is_trained(folder):
    write(
        folder / "sft.jsonl", [{"ids": [1, 2, 3], name: [0, 0, 1]} for name in ("completion_mask", "assistant_masks")]
    )
    write(folder / "sft_heldout.jsonl", [{"ids": [1, 2], "attention_mask": [1, 1]}])
    corpus = load_inputs(job(folder, **{f"{DATA}input_ids": "ids"})).corpus
    assert [item.trained.tolist() for item in corpus] == [[False, False, True]] * 2


def write_indexed(prefix, documents, dtype=np.uint16):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return {f"{DATA}file_name": str(prefix), f"{DATA}eval_file_name": str(prefix)}


def test_megatrons_files_are_read_and_long_documents_cut(folder, caplog):
    long = [n % 43 for n in range(150)]
    changes = write_indexed(folder / "corpus", [[5, 6, 7], long, [42, 0]])
    with caplog.at_level(logging.WARNING):
        inputs = load_inputs(job(folder, **changes))
    assert "1 of 3 documents have more than 64 tokens, and are cut into 3 pieces" in caplog.text
    assert [item.input_ids.tolist() for item in inputs.corpus] == [
        [5, 6, 7],
        long[:50],
        long[50:100],
        long[100:],
        [42, 0],
    ]
    assert [item.trained.tolist() for item in inputs.corpus][::4] == [[False, True, True], [False, True]]
    assert inputs.token_counts.tolist() == encoded(inputs)[0] == [3, 50, 50, 50, 2]
    assert list(check_inputs(job(folder, **changes))) == [CHECKED]


@pytest.mark.bad_input
def test_megatrons_files_that_cannot_be_used_are_named(folder):
    changes = write_indexed(folder / "corpus", [[5, 6, 7], [1, 43]])
    for start in (check_inputs, load_inputs):
        with pytest.raises(DataError, match="corpus:2: the token id 43 is not one of the tokenizer's 43"):
            start(job(folder, **changes))
    for key, value, words in (("task", "dpo", "task: dpo reads texts"), (f"{DATA}chat", True, "no messages or chat")):
        with pytest.raises(ConfigError, match=words):
            tokenizer = chats(folder) if key != "task" else {}
            check_inputs(job(folder, **{**tokenizer, f"{DATA}messages": None, **changes, key: value}))
    with pytest.raises(ConfigError, match="eval_file_name: .* is a file of token ids, and task: dpo reads texts"):
        check_inputs(job(folder, task="dpo", **{f"{DATA}eval_file_name": changes[f"{DATA}file_name"]}))
    with pytest.raises(DataError, match="(?s)one of Megatron.s two files of token ids.*Name their prefix: .*corpus\\."):
        check_inputs(job(folder, **{f"{DATA}file_name": str(folder / "corpus.bin")}))
    for documents, words in (
        ([[1] * 65, [], [1, 43]], "corpus:3: the token id 43"),
        ([[1, 2], [3]], "document 2 has a"),
    ):
        with pytest.raises(DataError, match=words):
            check_inputs(job(folder, **write_indexed(folder / "corpus", documents)))
    config = job(folder)
    fit = Fit(tokenizer=load_tokenizer(config), max_length=9, setting="prompt_length", keys=("prompt", "response"))
    with pytest.raises(ConfigError, match="corpus is a file of token ids, and prompts are texts"):
        prompts_of(config.actor_train.data_args, folder / "corpus", fit)
    write_indexed(folder / "other", [[5, 6, 7]], np.int32)
    write_indexed(folder / "corpus", [[5, 6, 7]])
    (folder / "other.bin").replace(folder / "corpus.bin")
    with pytest.raises(DataError, match=".idx describes 3 tokens of uint16, and .bin has 6"):
        check_inputs(job(folder, **changes))
    os.truncate(folder / "corpus.bin", 4)
    with pytest.raises(DataError, match="corpus.bin and .idx cannot be read"):
        check_inputs(job(folder, **changes))
