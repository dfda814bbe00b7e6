"""Files and scripts of verl that cannot be read are one error with its place."""

from __future__ import annotations

import pytest

from roll_batching.errors import ConfigError
from tests.tools.conversion.test_verl import A, converted, from_yaml

pytestmark = pytest.mark.config


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (f"{A}.ppo_mini_batch_size=many", "write a whole number"),
        (f"{A}.ppo_mini_batch_size=0", "at least 1"),
        (f"{A}.optim.lr=nan", "write a number"),
        (f"{A}.optim.lr=.nan.", "write a number"),
        (f"{A}=3", "section"),
        ("loose", "write key=value"),
        (f"{A}.ppo_epochs=1,2", "write one"),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=ten", "write a number"),
        (f"'{A}.ppo_epochs=[1'", "ppo_epochs"),
        ("trainer.nnodes='two'", "write a whole number"),
        ("a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z.a.b.c.d.e.f.g.h=1", "deeper than"),
        (f'"{A}.ppo_epochs=1', "never closed"),
    ],
)
def test_bad_overrides_are_one_error_with_file_and_line(tmp_path, overrides, why):
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, overrides)
    message = str(error.value)
    assert why in message and "run.sh:5" in message and message.count("\n") <= 3, message


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("[1, 2]", "keys and values"),
        ("data: {train_batch_size: 8}", "neither a section"),
        ("actor_rollout_ref: 3", "section"),
        ("actor_rollout_ref: {actor: {optim: {lr: .nan}}}", "write a number"),
        ("actor_rollout_ref: {rollout: {n: many}}", "write a whole number"),
        ("a: b: c", "verl.yaml"),
        ("\x00\x01", "verl.yaml"),
    ],
)
def test_bad_files_are_one_error(tmp_path, text, why):
    with pytest.raises(ConfigError, match=why) as error:
        from_yaml(tmp_path, text)
    assert "verl.yaml" in str(error.value)


@pytest.mark.bad_input
def test_heads_whose_switch_is_no_switch(tmp_path):
    mtp = "actor_rollout_ref.model.mtp"
    done = converted(tmp_path, f"{mtp}.enable=True {mtp}.enable_train=[1] model_engine=megatron")
    assert "(the whole file)" not in {one.key for one in done.left_out}


@pytest.mark.bad_input
def test_a_size_beyond_floats_is_left_out(tmp_path):
    done = converted(tmp_path, f"data.train_batch_size=1{'0' * 400}")
    assert "data.train_batch_size" in {one.key for one in done.left_out_as("refused")}
