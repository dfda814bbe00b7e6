"""Chats through the tokenizer's own template: prompts, the assistant's tokens, stop tokens."""

from __future__ import annotations

import json
import re

import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.encode import encode_documents
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.texts import Conversation, Instruction, Pair, Prompt, iterate_texts
from roll_batching.jobs.texts.tokenizers import CharTokenizer, HFTokenizer
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.rl.jobs import write_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

CHAT = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "#2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "#4"},
]


def tokenizer(folder, template):
    tiny.write_tokenizer(folder, template)
    return HFTokenizer(folder)


def learnt(own, messages=CHAT):
    """The whole text, and the learnt parts of it."""
    tokens, mask = ChatTemplate(own).conversation(messages)
    parts, previous = [], False
    for token, marked in zip(tokens, mask, strict=True):
        if marked:
            parts = parts if previous else [*parts, ""]
            parts[-1] += own.decode([token])
        previous = marked
    return own.decode(tokens), parts


@pytest.mark.parametrize("template", [tiny.PLAIN_TEMPLATE, tiny.MARKED_TEMPLATE], ids=["prefixes", "marks"])
def test_the_assistants_turns_are_learnt(tmp_path, template):
    own = tokenizer(tmp_path, template)
    assert learnt(own) == ("<s>add$<u>1+1=$<a>#2$<u>2+2=$<a>#4$", ["#2$", "#4$"])
    assert ChatTemplate(own).prompt(CHAT[:2]) == "<s>add$<u>1+1=$<a>"


def test_what_follows_the_end_token_is_the_templates_own(tmp_path):
    own = tokenizer(tmp_path, tiny.PLAIN_TEMPLATE.replace("+ '$'", "+ '$' + '\\n'"))
    assert learnt(own) == ("<s>add$\n<u>1+1=$\n<a>#2$\n<u>2+2=$\n<a>#4$\n", ["#2$", "#4$"])


def test_a_batch_of_conversations(tmp_path):
    own = tokenizer(tmp_path, tiny.PLAIN_TEMPLATE)
    batch = encode_documents([Conversation(tuple(CHAT)), Conversation(tuple(CHAT[:3]))], own, max_length=40)
    assert batch.lengths.tolist() == [25, 15]
    assert [row.int().tolist() for row in batch.to_lists("response_mask")][1] == [0] * 12 + [1] * 3


@pytest.mark.bad_input
def test_a_template_that_would_have_to_be_guessed_is_refused(tmp_path, report):
    forgetful = tiny.PLAIN_TEMPLATE.replace(
        "message['content']", "(message['content'] if loop.last or message['role'] != 'assistant' else 'x')"
    )
    cases = {
        "otherwise when more messages follow": (forgetful, CHAT, "renders message 3, or the"),
        "the last turn alone": (forgetful, CHAT[:3], None),
        "no turn of the assistant": (tiny.PLAIN_TEMPLATE, CHAT[:2], "no token to train"),
        "no marks": (tiny.MARKED_TEMPLATE.replace("== 'assistant'", "== 'nobody'"), CHAT, "marks no token"),
        "a template that raises": ("{{ raise_exception('no system') }}", CHAT, "fails on it .*no system"),
        "no template": (None, CHAT, "has no chat template"),
    }
    for name, (template, messages, expected) in cases.items():
        own = tokenizer(tmp_path / name, template)
        if expected is None:
            assert learnt(own, messages)[1] == ["#2$"]
            continue
        with pytest.raises(DataError, match=expected) as caught:
            learnt(own, messages)
        report(f"{name}: {caught.value}")
    with pytest.raises(DataError, match="tokenizer.type hf"):
        ChatTemplate(CharTokenizer("ab$", "$"))


@pytest.mark.bad_input
def test_a_token_across_the_border_is_refused(tmp_path):
    """To this tokenizer `=#`, the end of a turn's mark and the beginning of its content, is one token."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    turns = "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + '$' }}{% endfor %}"
    own = tokenizer(tmp_path, turns + "{% if add_generation_prompt %}{{ 'a=' }}{% endif %}")
    own.tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("=#|."), "isolated")
    assert learnt(own, [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])[1] == ["2$"]
    with pytest.raises(DataError, match="a token spans the beginning or the end of message"):
        ChatTemplate(own).conversation([{"role": "user", "content": "1"}, {"role": "assistant", "content": "#2"}])


def test_lines_hold_messages_as_a_list_or_as_text(tmp_path, report):
    own = ChatTemplate(tokenizer(tmp_path, tiny.PLAIN_TEMPLATE))
    file = tmp_path / "chats.jsonl"
    lines = [
        {"messages": CHAT[:2], "answer": "2"},
        {"messages": json.dumps(CHAT[:4]), "answer": "4", "tag": "x"},
        {"messages": CHAT, "answer": "2"},
        {"messages": "hello", "answer": "2"},
        {"messages": [{"content": "hello"}], "answer": "2"},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    faults = Faults()
    found = list(iterate_texts(Prompt, file, ("messages", "answer"), faults, template=own))
    assert [prompt.prompt for prompt in found] == ["<s>add$<u>1+1=$<a>", "<s>add$<u>1+1=$<a>#2$<u>2+2=$<a>"]
    assert found[1].line == lines[1]
    with pytest.raises(DataError) as caught:
        faults.check()
    for words in (
        "chats.jsonl:3",
        "the last message is the assistant's",
        "not the JSON of a list",
        "has no role",
        "message 1 of 'messages' has an image",
    ):
        assert words in str(caught.value)
    report(str(caught.value))


def test_texts_of_a_line_make_a_chat(tmp_path):
    own = ChatTemplate(tokenizer(tmp_path, tiny.PLAIN_TEMPLATE))
    file = tmp_path / "instructions.jsonl"
    lines = [
        {"ask": "1+1=", "more": "", "who": "add", "say": "#2", "bad": "#3"},
        {"ask": "1+1=", "more": "2", "who": "", "say": "#4", "bad": "#3", "tag": "x"},
        {"ask": "", "more": "", "who": "add", "say": "#4", "bad": "#3"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    both = Instruction(query="more", system="who")

    def texts(kind, keys, **options):
        faults = Faults()
        found = list(iterate_texts(kind, file, keys, faults, **options))
        with pytest.raises(DataError, match="jsonl:3: the prompt is empty \\('ask'\\)"):
            faults.check()
        return found

    first = {"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}
    second = ({"role": "user", "content": "1+1=\n2"},)
    prompts = texts(Prompt, ("ask", "say"), template=own, instruction=both)
    assert [prompt.prompt for prompt in prompts] == ["<s>add$<u>1+1=$<a>", "<u>1+1=\n2$<a>"]
    assert prompts[1].line == lines[1]
    conversations = texts(Conversation, ("ask", "say"), instruction=both)
    answered = [{"role": "assistant", "content": text} for text in ("#2", "#4")]
    assert [one.messages for one in conversations] == [(*first, answered[0]), (*second, answered[1])]
    pairs = texts(Pair, ("ask", "say", "bad"), template=own, instruction=both)
    assert [json.loads(pair.prompt) for pair in pairs] == [list(first), list(second)]
    assert [(pair.chosen, pair.rejected, pair.chat) for pair in pairs] == [("#2", "#3", True), ("#4", "#3", True)]


def test_a_pair_may_be_two_whole_chats(tmp_path):
    user, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "1"), *[("assistant", t) for t in "23"])
    )
    file, faults = tmp_path / "pairs.jsonl", Faults()
    rows = [([user, good], [user, bad]), ([user, good, user], [user, bad]), ([good], [bad]), ([user, good], [bad, bad])]
    file.write_text("".join(json.dumps({"chosen": one, "rejected": two}) + "\n" for one, two in rows))
    template = ChatTemplate(tokenizer(tmp_path, tiny.PLAIN_TEMPLATE))
    (pair,) = iterate_texts(Pair, file, ("chosen", "chosen", "rejected"), faults, template=template)
    assert (json.loads(pair.prompt), pair.chosen, pair.rejected, pair.chat) == ([user], "2", "3", True)
    for line, words in (
        (2, "does not end with a text of the assistant"),
        (3, "last message alone"),
        (4, "do not differ"),
    ):
        assert re.search(f"jsonl:{line}: 'chosen' (or|and) 'rejected' .*{words}", str(faults)), faults


@pytest.mark.config
def test_keys_of_chats_that_do_not_go_together(tmp_path):
    def broken(**keys):
        write_data(tmp_path)
        made = job(tmp_path)
        made["actor_train"]["data_args"] |= keys
        with pytest.raises(ConfigFileError) as caught:
            config_from_dict(made)
        return {problem.path[-1]: problem.message for problem in caught.value.problems}

    assert "keep one of the two" in broken(chat=True, messages="messages")["chat"]
    assert broken(query="more", system="who").keys() == {"query", "system"}


def test_stop_tokens_are_those_of_the_generation_config(tmp_path):
    tiny.write_model(tmp_path, "llama3")
    own = tokenizer(tmp_path, None)
    end = own.eos_token_id
    assert own.stop_token_ids == tuple(sorted({5, end}))  # 5: in the generation_config.json that transformers wrote
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert HFTokenizer(tmp_path).stop_token_ids == (7, 9, end)
    assert HFTokenizer(tmp_path, eos="$").stop_token_ids == (end,)
    generation.unlink()
    assert HFTokenizer(tmp_path).stop_token_ids == tuple(sorted({5, end}))  # config.json's


def test_a_job_of_chats(tmp_path, report):
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    for name in ("corpus", "prompts", "heldout"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            turns = [{"role": "user", "content": row.pop("prompt")}]
            if "response" in row:
                turns.append({"role": "assistant", "content": row.pop("response")})
            row["messages"] = turns
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"warmup__messages": "messages", "actor_train__data_args__messages": "messages"}
    data = job(tmp_path, **changes)
    inputs = load_inputs(config_from_dict(data))
    assert inputs.prompts[0].prompt == "<u>a+1b+1=$<a>"
    run_ranks(1, "tests.jobs.rl.jobs:run", data)
    rows = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert len(rows) == 4
    report(f"a job of chats: losses {rows[0]['loss']:.3f}, {rows[1]['loss']:.3f}, rewards {rows[2]['reward']:.2f}")
