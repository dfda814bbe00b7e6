from __future__ import annotations

import json
import os
import sys

import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.texts import (
    CharTokenizer,
    Document,
    DocumentDataset,
    EpochStream,
    HFTokenizer,
    Prompt,
    PromptDataset,
    PromptStream,
    Tokenizer,
    encode_documents,
    encode_prompts,
    epoch_order,
)

VOCABULARY = "0123456789+=$."


def write(path, *lines):
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def prompts(count):
    return PromptDataset(Prompt(f"{i}+1=", str(i + 1)) for i in range(count))


# ---- files


def test_prompts_keep_their_other_keys_and_their_place(tmp_path):
    one = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2", "level": 3, "tags": ["x"]}, b"", b" ")
    two = write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + json.dumps({"prompt": "é", "answer": ""}).encode())
    both = PromptDataset.from_jsonl([one, str(two)])
    assert both[0] == Prompt("1+1=", "2", {"prompt": "1+1=", "answer": "2", "level": 3, "tags": ["x"]}, f"{one}:1")
    assert both[1] == Prompt("é", "", {"prompt": "é", "answer": ""}, f"{two}:1")
    assert [p.prompt for p in both] == [p.prompt for p in both[:2]] == ["1+1=", "é"]


def test_keys_have_the_names_that_the_file_gives_them(tmp_path):
    file = write(tmp_path / "a.jsonl", b"", {"question": "1+1=", "solution": "2"})
    assert PromptDataset.from_jsonl(file, prompt_key="question", answer_key="solution")[0].answer == "2"
    documents = DocumentDataset.from_jsonl(file, prompt_key="question", response_key="solution")
    assert documents[0] == Document("1+1=", "2", {"question": "1+1=", "solution": "2"}, f"{file}:2")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "lines, message",
    [
        ([b'{"prompt": "1"'], r"a.jsonl:1: not valid JSON: .* at column 15"),
        ([{"prompt": "1", "answer": "2"}, b"", b"oops"], "a.jsonl:3: not valid JSON"),
        ([{"prompt": "1", "answer": "2"}, b'{"prompt": "\xff"}'], "a.jsonl:2: not UTF-8 .byte 13"),
        ([["prompt", "answer"]], "a.jsonl:1: a JSON object is needed, got list"),
        ([{"promt": "1", "answer": "2"}], "a.jsonl:1: key 'prompt' is missing; the line has promt, answer"),
        ([{"prompt": None, "answer": "2"}], "a.jsonl:1: 'prompt' must be a string, got NoneType"),
        ([{"prompt": "", "answer": "2"}], "a.jsonl:1: the prompt is empty"),
        ([b"", b"  "], "a.jsonl holds no records"),
        ([], "a.jsonl holds no records"),
        ([b"[" * 100_000], "a.jsonl:1: nested too deeply"),
        ([b'{"prompt": "1", "answer": "2", "level": ' + b"9" * 5000 + b"}"], "a.jsonl:1: not valid JSON: Exceeds"),
        ([b'{"prompt": "1 \\ud83d", "answer": "2"}'], r"a.jsonl:1: 'prompt' holds a lone surrogate: '.ud83d'"),
        ([b"\x1f\x8b\x08 packed"], "a.jsonl is a gzip file. Write it as uncompressed JSON Lines in UTF-8"),
        ([b"\xff\xfe{\x00"], "a.jsonl is a UTF-16 file"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, message, report):
    with pytest.raises(DataError, match=message) as caught:
        PromptDataset.from_jsonl(write(tmp_path / "a.jsonl", *lines))
    report(str(caught.value).replace(str(tmp_path), "..."))


@pytest.mark.bad_input
def test_a_missing_file_is_named(tmp_path, report, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"nope.jsonl does not exist. Looked at /.*/nope.jsonl") as caught:
        PromptDataset.from_jsonl("nope.jsonl")
    report(str(caught.value).replace(str(tmp_path), "..."))
    with pytest.raises(DataError, match="cannot be read"):
        DocumentDataset.from_jsonl(tmp_path)
    with pytest.raises(DataError, match="No data file"):
        DocumentDataset.from_jsonl([])
    with pytest.raises(DataError, match="at least one text"):
        PromptDataset([])


@pytest.mark.bad_input
def test_all_bad_lines_are_told_at_once_the_first_of_each_kind_with_their_place(tmp_path, report):
    good = {"prompt": "1", "answer": "2"}
    one = write(tmp_path / "a.jsonl", good, b"oops", {"prompt": 1}, *[{"promt": "1"}] * 2000, good)
    with pytest.raises(DataError) as caught:
        PromptDataset.from_jsonl([one, tmp_path / "nope.jsonl"])
    said = str(caught.value)
    assert said.startswith("the data files have 2,003 faults:") and len(said.splitlines()) == 13
    for words in (
        ":2: not valid JSON",
        ":3: 'prompt' must be",
        ":4: key 'prompt'",
        ":7: key",
        "and 1,996 more of this",
    ):
        assert words in said, said
    assert "nope.jsonl does not exist" in said
    report(said.replace(str(tmp_path), "..."))


@pytest.mark.bad_input
def test_a_pipe_is_refused_at_once_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is a pipe or a device. Every process reads it"):
        PromptDataset.from_jsonl(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        CharTokenizer.from_file(tmp_path / "pipe.jsonl", "$")


def test_line_ends_of_windows_and_byte_order_marks_do_not_count(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": "2"}\r\n\r\n{"prompt": "3", "answer": "4"}\r\n')
    assert [(p.prompt, p.answer) for p in PromptDataset.from_jsonl(file)] == [("1", "2"), ("3", "4")]
    (tmp_path / "vocabulary.txt").write_bytes(b"\xef\xbb\xbfab$\r\n")
    assert CharTokenizer.from_file(tmp_path / "vocabulary.txt", "$").vocab_size == 3


# ---- streams


def test_each_epoch_holds_every_prompt_once_in_its_own_order():
    stream = PromptStream(prompts(7), 3, seed=5)
    drawn = [item for _ in range(7) for item in next(stream)]  # 21 items: three epochs
    epochs = [drawn[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(e, key=str) == sorted(prompts(7), key=str) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert drawn[:7] == [prompts(7)[i] for i in epoch_order(7, 5, 0)]
    assert stream.epoch == 3


def test_orders_depend_on_the_seed_and_on_nothing_else():
    assert epoch_order(6, 0, 0).tolist() == epoch_order(6, 0, 0).tolist()
    assert epoch_order(50, 0, 0).tolist() != epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 0, 1).tolist() != epoch_order(50, 1, 0).tolist()


def test_a_batch_may_be_larger_than_the_dataset():
    stream = PromptStream(prompts(2), 5, shuffle=False)
    assert [p.answer for p in next(stream)] == ["1", "2", "1", "2", "1"]
    assert [p.answer for p in next(stream)] == ["2", "1", "2", "1", "2"]


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 7, 20])
def test_a_resumed_stream_goes_on_with_the_very_next_batch(batches):
    stream = PromptStream(prompts(10), 4, seed=3)
    for _ in range(batches):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [next(stream) for _ in range(6)]
    again = PromptStream(prompts(10), 4, seed=3)
    again.load_state_dict(state)
    assert [next(again) for _ in range(6)] == expected


@pytest.mark.bad_input
def test_a_position_is_refused_where_it_does_not_belong():
    state = PromptStream(prompts(10), 4, seed=3).state_dict()
    with pytest.raises(DataError, match="belongs to other texts"):
        PromptStream(prompts(11), 4, seed=3).load_state_dict(state)
    with pytest.raises(DataError, match=r"another seed \(seed 3, here 4\)"):
        PromptStream(prompts(10), 4, seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="another order"):
        PromptStream(prompts(10), 4, seed=3, shuffle=False).load_state_dict(state)
    with pytest.raises(DataError, match="lacks position"):
        PromptStream(prompts(10), 4, seed=3).load_state_dict({k: state[k] for k in state if k != "position"})
    with pytest.raises(DataError, match="impossible: epoch 0, position 10"):
        PromptStream(prompts(10), 4, seed=3).load_state_dict(state | {"position": 10})
    with pytest.raises(DataError, match="batch_size is 0"):
        PromptStream(prompts(10), 0)
    with pytest.raises(DataError, match="not negative; got -1"):
        PromptStream(prompts(10), 1, seed=-1)


def test_documents_stream_as_prompts_do():
    documents = DocumentDataset([Document("1", "2"), Document("3", "4")])
    assert sorted(d.prompt for d in next(EpochStream(documents, 2))) == ["1", "3"]
    assert documents.fingerprint != DocumentDataset([Document("1", "2"), Document("34", "")]).fingerprint


# ---- tokenizers


def test_characters_are_tokens():
    tokenizer = CharTokenizer(VOCABULARY, "$", ".")
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("10+2=") == [1, 0, 10, 2, 11]
    assert tokenizer.decode([1, 0, 10, 2, 11, 12, 13]) == "10+2=$."
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (12, 13, 14)
    assert CharTokenizer(VOCABULARY, "$").pad_token_id == 12


def test_a_vocabulary_comes_from_a_file(tmp_path):
    file = tmp_path / "vocabulary.txt"
    file.write_text(" ab\n$\r\n\n", encoding="utf-8")
    tokenizer = CharTokenizer.from_file(file, "$")
    assert tokenizer.encode("a \nb") == [1, 0, 3, 2]
    with pytest.raises(DataError, match="cannot be read"):
        CharTokenizer.from_file(tmp_path / "nope.txt", "$")


@pytest.mark.bad_input
def test_unknown_and_reserved_characters_are_named():
    tokenizer = CharTokenizer(VOCABULARY, "$", ".")
    with pytest.raises(DataError, match=r"Character 'x' at position 2 of '1\+x=' is not in the vocabulary"):
        tokenizer.encode("1+x=")
    with pytest.raises(DataError, match=r"'\$' at position 1 of '1\$' is reserved \(it ends a response\)"):
        tokenizer.encode("1$")
    with pytest.raises(DataError, match=r"'\.' at position 0 of '\.' is reserved \(it fills gaps\)"):
        tokenizer.encode(".")
    with pytest.raises(DataError, match=r"outside the vocabulary of 14: \[-1, 14\]"):
        tokenizer.decode([0, -1, 14])
    with pytest.raises(DataError, match="'a' more than once"):
        CharTokenizer("aba$", "$")
    with pytest.raises(DataError, match="end token 'END' is not one character"):
        CharTokenizer(VOCABULARY, "END")
    with pytest.raises(DataError, match="pad token '_' is not"):
        CharTokenizer(VOCABULARY, "$", "_")


@pytest.mark.skipif("transformers" in sys.modules, reason="transformers is imported already")
def test_a_missing_transformers_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"needs the package transformers.*pip install 'roll-batching\[hf\]'"):
        HFTokenizer("gpt2")


def test_a_hugging_face_tokenizer_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    fast = Fast(WordLevel({"<unk>": 0, "one": 1, "two": 2, "<end>": 3}, unk_token="<unk>"))
    fast.pre_tokenizer = WhitespaceSplit()
    with pytest.raises(DataError, match="No tokenizer could be loaded"):
        HFTokenizer(tmp_path / "nothing")
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="has no end token"):
        HFTokenizer(tmp_path)
    with pytest.raises(DataError, match="has no token '<stop>'"):
        HFTokenizer(tmp_path, eos="<stop>")
    tokenizer = HFTokenizer(tmp_path, eos="<end>")
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("two one") == [2, 1] and tokenizer.decode([2, 1, 3]) == "two one <end>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (3, 3, 4)


# ---- texts to batches


def test_prompts_become_a_batch():
    batch = encode_prompts(prompts(11)[9:], CharTokenizer(VOCABULARY, "$", "."), max_length=5, ids=[4, 8])
    assert batch.ids.tolist() == [4, 8] and batch.lengths.tolist() == [4, 5]
    assert batch.to_padded("input_ids").tolist() == [[9, 10, 1, 11, 13], [1, 0, 10, 1, 11]]


def test_documents_learn_their_response_and_its_end():
    documents = [Document("1+1=", "2"), Document("1", "23"), Document("4", "")]
    batch = encode_documents(documents, CharTokenizer(VOCABULARY, "$"), max_length=6)
    assert [r.tolist() for r in batch.to_lists("input_ids")] == [[1, 10, 1, 11, 2, 12], [1, 2, 3, 12], [4, 12]]
    assert [r.int().tolist() for r in batch.to_lists("response_mask")] == [
        [0, 0, 0, 0, 1, 1],
        [0, 1, 1, 1],
        [0, 1],
    ]


@pytest.mark.bad_input
def test_a_text_that_does_not_fit_is_named(report):
    tokenizer = CharTokenizer(VOCABULARY, "$")
    cases = [
        (encode_prompts, Prompt("1+1=", "", {}, "p.jsonl:3"), r"p.jsonl:3: the prompt has 4 tokens.*the 3 allowed"),
        (
            encode_prompts,
            Prompt("1x", "", {}, "p.jsonl:3"),
            "p.jsonl:3: the prompt: Character 'x'.*tokenizer.vocabulary",
        ),
        (encode_documents, Document("1+", "2", {}, "d.jsonl:9"), r"d.jsonl:9: the document has 4 tokens, end"),
        (encode_documents, Document("1", "y", {}, "d.jsonl:9"), "d.jsonl:9: the response: Character 'y'"),
        (encode_documents, Document("", "1", {}, "d.jsonl:9"), "d.jsonl:9: the prompt has no tokens"),
        (encode_prompts, Prompt("", "1", {}, "p.jsonl:3"), "p.jsonl:3: the prompt has no tokens"),
    ]
    for encode, text, message in cases:
        with pytest.raises(DataError, match=message) as caught:
            encode([text], tokenizer, max_length=3)
        report(str(caught.value))


def _read_all(paths, keys):
    from roll_batching.jobs.texts.faults import Faults
    from roll_batching.jobs.texts.records import iterate_records

    faults = Faults()
    records = list(iterate_records(paths, keys, faults))
    faults.check()
    return records


@pytest.mark.parametrize("layout", [{"indent": 1}, {}])
@pytest.mark.parametrize("start", ["", "\n \n", "\ufeff"])
def test_a_json_array_is_a_file_of_records(tmp_path, layout, start):
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "é\n", "answer": "3"}]
    path = tmp_path / "pairs.json"
    path.write_text(start + json.dumps(rows, **layout), encoding="utf-8")
    found = _read_all([path], ["prompt"])
    assert [(one.texts, one.line, one.source) for one in found] == [
        (("1+1",), rows[0], f"{path}:1"),
        (("é\n",), rows[1], f"{path}:2"),
    ]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"prompt": "a"}', "begins as a JSON array"),
        ('[{"prompt": "a"}]\n[{"prompt": "b"}]\n', "begins as a JSON array"),
        ('[{"prompt": NaN', "begins as a JSON array"),
        ("[]", "a JSON object is needed, got list"),
        ('[{"prompt": "a"}, [1]]', ":2: a JSON object is needed, got list"),
        ('[{"prompt": 3}]', "'prompt' must be a string"),
        ('[{"prompt": ' + "[" * 100_000, "nested too deeply"),
        ('[{"prompt": "a"}, {"other": "b"}]', "key 'prompt' is missing"),
    ],
)
def test_an_array_that_cannot_be_used_is_one_error(tmp_path, text, words):
    path = tmp_path / "array.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        _read_all(path, ["prompt"])
    assert words in str(caught.value) and str(path) in str(caught.value)
