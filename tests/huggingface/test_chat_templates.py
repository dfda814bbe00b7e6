"""Tools and stop tokens in the chat templates of the listed families, and variables of templates in jobs."""

from __future__ import annotations

import json
import logging

import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.inputs import CHECKED, check_inputs, load_inputs, prompt_of
from roll_batching.jobs.texts.chat import ChatTemplate, variables_of
from roll_batching.jobs.texts.encode import encode_documents, encode_judged, encode_pairs
from roll_batching.jobs.texts.texts import documents_of
from roll_batching.jobs.texts.tokenizers import HFTokenizer
from tests.support.chat_templates import FOLDER, STOPS, write_directory

pytestmark = pytest.mark.models

CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "sums", "parameters": {}}}]
ASK, MORE = {"role": "user", "content": "1+1="}, {"role": "user", "content": "2+2="}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": CALL["id"], "content": "2"}
TWO, FOUR = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "4"}
WITHOUT_TOOLS = ("gemma3", "deepseek_v3")
NO_THINKING = {"enable_thinking": False}
THOUGHTS = {"minimax_m2": "hm"}  # it opens every turn with thoughts


def template_of(folder, name, **options):
    write_directory(folder, name, **options)
    return ChatTemplate(HFTokenizer(folder))


def learnt(template, messages, variables):
    """The whole text, and the learnt parts of it."""
    tokens, mask = template.conversation(messages, variables)
    own, parts, previous = template._tokenizer, [], False
    for token, marked in zip(tokens, mask, strict=True):
        if marked:
            parts = parts if previous else [*parts, ""]
            parts[-1] += own.decode([token])
        previous = marked
    assert not template.lacks_stops(messages, tokens, mask)
    return own.decode(tokens), parts


def of_family(name, turn):
    return {**turn, "reasoning_content": THOUGHTS[name]} if name in THOUGHTS and turn["role"] == "assistant" else turn


@pytest.mark.parametrize("name", STOPS)
def test_a_turn_ends_with_the_stop_token_at_which_an_engine_ends_it(tmp_path, name, report):
    """The learnt part of a chat is what follows its prompt, and one stop token is its end."""
    template = template_of(tmp_path, name)
    messages = [ASK, of_family(name, TWO)]
    text, parts = learnt(template, messages, NO_THINKING)
    learnt_text = template.prompt(messages[:1], NO_THINKING) + parts[0]
    assert text.startswith(learnt_text) and text[len(learnt_text) :] in ("", "\n") and len(parts) == 1
    (end,) = [stop for stop in STOPS[name] if parts[0].endswith(stop)]
    assert parts[0].count(end) == 1 and "2" in parts[0]
    report(f"{name}: {parts}")


@pytest.mark.parametrize("name", ["glm4_5", "glm4_7"])
def test_a_stop_token_that_opens_the_next_message_is_learnt(tmp_path, name):
    template = template_of(tmp_path, name)
    _, parts = learnt(template, [ASK, TWO, MORE, FOUR], NO_THINKING)
    assert [part.lstrip("\n") for part in parts] == ["2<|user|>", "4<|user|>"]
    _, parts = learnt(template, [ASK, CALLING, RESULT, TWO], NO_THINKING)
    assert parts[0].endswith("</tool_call><|observation|>") and parts[1].endswith("2<|user|>")
    _, parts = learnt(template, [ASK, CALLING], NO_THINKING)
    assert parts[0].endswith("</tool_call><|observation|>"), "the last turn, too"


def test_markers_get_the_stop_token_as_well(tmp_path):
    write_directory(tmp_path, "glm4_5")
    own = HFTokenizer(tmp_path)
    own.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert learnt(ChatTemplate(own), [ASK, TWO, MORE, FOUR], {})[1] == ["2<|user|>", "4<|user|>"]


def test_pairs_and_judged_answers_end_with_it(tmp_path):
    from roll_batching.jobs.texts.texts import Judged, Pair

    write_directory(tmp_path, "glm4_5")
    own = HFTokenizer(tmp_path)
    ask, variables = json.dumps([ASK, TWO, MORE]), {"tools": TOOLS, **NO_THINKING}
    pairs = encode_pairs([Pair(ask, "4", "5", chat=True, variables=variables)], own, max_length=500)
    judged = encode_judged([Judged(ask, "4", True, chat=True, variables=variables)], own, max_length=500)
    rows = [*zip(pairs.to_lists("input_ids"), pairs.to_lists("response_mask"), strict=True)]
    rows += zip(judged.to_lists("input_ids"), judged.to_lists("response_mask"), strict=True)
    assert [own.decode(tokens[mask]) for tokens, mask in rows] == ["\n4<|user|>", "\n5<|user|>", "\n4<|user|>"]
    assert all("sums" in own.decode(tokens) for tokens, _ in rows)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_of_calls_are_texts_where_the_template_joins_or_prints_them(tmp_path, arguments):
    template = template_of(tmp_path, "deepseek_v3")
    call = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}]}
    text, parts = learnt(template, [ASK, call, RESULT, TWO], {})
    assert 'add\n```json\n{"a": 1}\n```' in parts[0] and text.startswith(template.prompt([ASK], {}))
    own = template._tokenizer.tokenizer
    own.chat_template = own.chat_template.replace("call.function.arguments +", "call.function.arguments ~")
    template = ChatTemplate(template._tokenizer)
    assert '{"a": 1}' in learnt(template, [ASK, call, RESULT, TWO], {})[1][0], "not in Python's notation"


@pytest.mark.bad_input
def test_a_template_that_fails_both_ways_is_named_with_both_errors(tmp_path):
    template = template_of(tmp_path, "deepseek_v3")
    with pytest.raises(DataError, match="dict.*with arguments of calls as texts: .*(None|content)"):
        template.conversation([ASK, CALLING, {**RESULT, "content": None}])


def test_two_stop_tokens_of_the_last_turn_do_not_hide_a_turn_without_any(tmp_path):
    write_directory(tmp_path, "qwen3")
    own = HFTokenizer(tmp_path)
    turn = "{% generation %}{{ m.content }}{% if END %}{{ '<|im_end|><|endoftext|>' }}{% endif %}{% endgeneration %}"
    lacking = {"loop.last": True, "true": False}
    for end, expected in lacking.items():
        own.tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}"
            + turn.replace("END", end)
            + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        )
        template, messages = ChatTemplate(own), [ASK, TWO, MORE, FOUR]
        assert template.lacks_stops(messages, *template.conversation(messages)) == expected


@pytest.mark.parametrize("name", [name for name in STOPS if name not in WITHOUT_TOOLS])
def test_tools_are_shown(tmp_path, name):
    template = template_of(tmp_path, name)
    variables = {"tools": TOOLS, **NO_THINKING}
    assert "add" in template.prompt([ASK], variables) and "add" not in template.prompt([ASK], {})
    text, parts = learnt(template, [ASK, of_family(name, CALLING)], variables)
    assert text.startswith(template.prompt([ASK], variables))
    assert "add" in parts[0] or CALL["id"] in parts[0], "Kimi names the call by its id"
    assert '\\"a\\"' not in parts[0], "arguments are not written as the JSON of a text"


@pytest.mark.bad_input
def test_a_turn_that_the_template_opens_otherwise_is_refused_with_its_cure(tmp_path, report):
    for name in ("glm4_7", "minimax_m2"):
        template = template_of(tmp_path / name, name)
        with pytest.raises(DataError, match="opens the turn of message 2 with .*<think>.*reasoning_content") as caught:
            template.conversation([ASK, TWO])
        report(str(caught.value))
        tokens, mask = template.conversation([ASK, {**TWO, "reasoning_content": "hm"}])
        assert "hm" in template._tokenizer.decode(token for token, marked in zip(tokens, mask, strict=True) if marked)
    with pytest.raises(DataError, match="differently when more messages follow"):
        template_of(tmp_path / "qwen3", "qwen3").conversation([ASK, CALLING, RESULT, TWO])


def test_variables_of_a_template_are_neither_its_own_nor_those_of_transformers():
    read = {path.stem: set(variables_of(path.read_text())) for path in FOLDER.glob("*.jinja")}
    assert read["llama3"] == {"tools", "custom_tools", "date_string"}
    assert read["qwen3"] == {"tools", "enable_thinking"} and read["gemma3"] == set() == read["deepseek_v3"]
    assert read["gpt_oss"] == {"tools", "reasoning_effort"}
    assert variables_of("{% if %}") == frozenset()
    for template in (
        "{% set tools = tools | default([]) %}{{ tools }}",
        "{% for tools in [tools] %}{{ tools }}{% endfor %}",
        "{% if not tools %}{% set tools = [] %}{% endif %}{{ tools }}",
    ):
        assert variables_of(template) == {"tools"}, template
    assert variables_of("{% if messages %}{% set own = 1 %}{% endif %}{{ own }}") == frozenset()


def job(folder, name, task, lines, **data):
    """A job of `task` with the tokenizer of a family and `lines` of data."""
    write_directory(folder, name)
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rl = {"reward_function": "exact_match", "prompt_length": 400, "response_length": 20}
    return {
        "task": task,
        "output_dir": str(folder / "runs"),
        "max_steps": 1,
        **(rl if task == "grpo" else {"sequence_length": 500}),
        "tokenizer": {"type": "hf", "name_or_path": str(folder)},
        "actor_train": {
            "data_args": {"file_name": str(folder / "data.jsonl"), "messages": "messages", **data},
            "training_args": {"per_device_train_batch_size": 2},
            "model_args": {
                "architecture": {
                    "hidden_size": 8, "num_layers": 1, "num_attention_heads": 1, "ffn_hidden_size": 8,
                    "vocab_size": 256, "max_position_embeddings": 600,
                }
            },
        },
    }  # fmt: skip


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Runs a function, and returns its result and the warnings that it logged."""
    monkeypatch.delenv(CHECKED, raising=False)
    monkeypatch.delenv("RANK", raising=False)

    def collect(call):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            result = call()
        return result, [record.getMessage() for record in caplog.records]

    return collect


LINES = {
    "sft": {"messages": [ASK, TWO]},
    "grpo": {"messages": [ASK], "answer": "2"},
    "dpo": {"messages": [ASK], "chosen": "2", "rejected": "3"},
    "kto": {"messages": [ASK], "completion": "2", "label": True},
}


def texts_of(inputs):
    """The text of the first item, as it is trained or sampled from."""
    if inputs.prompts is not None:
        return inputs.prompts[0].prompt
    (first, *_) = inputs.corpus
    document = documents_of(first)[0]
    batch = encode_documents([document], inputs.tokenizer, max_length=500)
    return inputs.tokenizer.decode(batch.to_lists("input_ids")[0])


@pytest.mark.parametrize("task", LINES)
def test_variables_of_a_record_reach_the_template(tmp_path, task, warnings):
    line = LINES[task]
    lines = [{**line, "tools": TOOLS}, {**line, "tools": json.dumps(TOOLS)}, {**line, "tools": []}, line]
    inputs, said = warnings(lambda: load_inputs(config_from_dict(job(tmp_path, "qwen3", task, lines))))
    assert "sums" in texts_of(inputs) and not said
    plain = job(tmp_path / "plain", "qwen3", task, lines, tools=None)
    without, said = warnings(lambda: load_inputs(config_from_dict(plain)))
    assert "sums" not in texts_of(without) and without.fingerprint != inputs.fingerprint
    (text,) = said
    assert "records have 'tools', which the chat template reads and does not get" in text and "tools: tools" in text


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_other_variables_come_from_a_column_the_record_or_the_job(tmp_path, task, warnings):
    empty = "<think>\n\n</think>"
    line = LINES[task]
    forms = {
        "column": ([{**line, "think": False}], {"chat_template_columns": {"enable_thinking": "think"}}),
        "record": ([{**line, "chat_template_kwargs": {"enable_thinking": False}}], {}),
        "job": ([line], {"chat_template_kwargs": {"enable_thinking": False}}),
        "record before job": (
            [{**line, "chat_template_kwargs": {"enable_thinking": False}}],
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
    }
    for name, (lines, data) in forms.items():
        config = config_from_dict(job(tmp_path / name, "qwen3", task, lines, **data))
        inputs, said = warnings(lambda config=config: load_inputs(config))
        text = texts_of(inputs)
        assert not said, name
        if task == "grpo":
            assert text.endswith(empty + "\n\n"), name
            continue
        encoded = encode_documents(list(inputs.corpus), inputs.tokenizer, max_length=500)
        mask = encoded.to_lists("response_mask")[0]
        assert empty in text and inputs.tokenizer.decode(encoded.to_lists("input_ids")[0][mask]) == "2<|im_end|>", name
    inputs, said = warnings(
        lambda: load_inputs(config_from_dict(job(tmp_path / "x", "qwen3", task, [{**line, "enable_thinking": False}])))
    )
    assert len(said) == 1 and "chat_template_columns: {enable_thinking: enable_thinking}" in said[0]


def test_a_typed_prompt_has_the_variables_of_the_job(tmp_path):
    config = config_from_dict(
        job(tmp_path, "qwen3", "grpo", [LINES["grpo"]], chat_template_kwargs={"enable_thinking": False})
    )
    assert prompt_of("1+1=", config, HFTokenizer(tmp_path)).prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.bad_input
def test_variables_that_nothing_reads_are_refused_or_said(tmp_path, warnings, report):
    line = LINES["sft"]
    refused = {
        "no variable": ({"chat_template_kwargs": {"enable_thinkin": False}}, [line], "sets 'enable_thinkin', which"),
        "no column": ({"chat_template_columns": {"tokenize": "t"}}, [line], "sets 'tokenize', which"),
        "tools of numbers": ({}, [{**line, "tools": [1]}], "data.jsonl:1: 'tools' must be a list of tools"),
        "tools as a word": ({}, [line, {**line, "tools": "hammer"}], "data.jsonl:2: 'tools' must be a list of tools"),
        "kwargs as a list": ({}, [{**line, "chat_template_kwargs": [1]}], "must be an object of variables"),
    }
    for name, (data, lines, expected) in refused.items():
        with pytest.raises((ConfigError, DataError), match=expected) as caught:
            check_inputs(config_from_dict(job(tmp_path / name, "qwen3", "sft", lines, **data)))
        report(f"{name}: {caught.value}")
    said = {
        "a template without tools": ("gemma3", {}, {**line, "tools": TOOLS}, "reads no tools"),
        "a key of no record": ("qwen3", {"tools": "functions"}, line, "no record has 'functions'"),
        "kwargs of records": ("qwen3", {}, {**line, "chat_template_kwargs": {"x": 1}}, "sets x, which"),
    }
    for name, (family, data, one, expected) in said.items():
        config = config_from_dict(job(tmp_path / name, family, "sft", [one, one], **data))
        _, texts = warnings(lambda config=config: load_inputs(config))
        assert len(texts) == 1 and expected in texts[0], (name, texts)
        report(f"{name}: {texts[0]}")
    for data, expected in (
        ({"chat_template_columns": {"tools": "t"}}, "data_args.tools"),
        ({"messages": None, "chat_template_kwargs": {"enable_thinking": False}}, "is for chats"),
    ):
        with pytest.raises(ConfigFileError, match=expected):
            config_from_dict(job(tmp_path, "qwen3", "sft", [line], **data))


@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
def test_turns_without_a_stop_token_are_said_with_counts(tmp_path, task, warnings, report):
    """As with a base model, whose generation_config.json does not have the token that ends turns."""
    settings = job(tmp_path, "qwen2_5", task, [LINES[task]] * 3)
    write_directory(tmp_path, "qwen2_5", stops=["<|endoftext|>"])
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | {"eos_token": "<|endoftext|>"}))
    for _ in range(2):  # the second start has cached counts
        variables, said = warnings(lambda: check_inputs(config_from_dict(settings)))
        assert len(said) == 1 and "3 of 3 texts have turns of the assistant that end without a stop token" in said[0]
        assert "'<|endoftext|>'" in said[0] and "tokenizer.eos_token" in said[0]
    assert variables[CHECKED]
    report(said[0])
    (tmp_path / "runs" / "token_counts").rename(tmp_path / "away")
    assert len(warnings(lambda: load_inputs(config_from_dict(settings)))[1]) == 1, "under torchrun, rank 0 says it"
    settings["tokenizer"]["eos_token"] = "<|im_end|>"
    assert warnings(lambda: check_inputs(config_from_dict(settings)))[1] == []
