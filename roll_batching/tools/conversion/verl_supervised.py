"""verl's SFT trainer: texts, their batches, and the length of the job."""

from __future__ import annotations

from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.mini_batch import context_ranks, data_parallel_ranks, put_mini_batch
from roll_batching.tools.conversion.verl_rollouts import convert_chat_template

_ROLE = "actor_train"


def convert_supervised(file: ForeignFile, devices: int) -> None:
    """verl.trainer.sft_trainer as `task: sft`."""
    file.draft.put(("task",), "sft", "verl.trainer.sft_trainer")
    layout = file.draft.values[_ROLE].get("strategy_args", {}).get("strategy_config", {})
    context = context_ranks(layout)
    packed, rows = file.take("data.use_dynamic_bsz"), file.take("data.micro_batch_size_per_gpu")
    cap = file.take("data.max_token_len_per_gpu")
    rows_key = "data.micro_batch_size_per_gpu"
    if packed:
        rows, rows_key = 1, "data.use_dynamic_bsz"
        file.put((_ROLE, "use_sequence_packing"), True, "data.use_dynamic_bsz")
        path = (_ROLE, "sequence_packing_args", "max_packed_sequence_length_train")
        file.put(path, None if cap is None else cap * context, "data.max_token_len_per_gpu")
    else:
        file.put((_ROLE, "padded_length"), "longest", rows_key)
    size = (file.take("data.train_batch_size"), "data.train_batch_size")
    put_mini_batch(file.draft, size, (rows, rows_key), data_parallel_ranks(layout, devices))
    file.move("data.max_length", ("sequence_length",), meaning="a longer text is an error that names it")
    if (cut := file.take("data.truncation")) not in (None, "error"):
        file.draft.leave_out("data.truncation", "refused", f"{cut}: a longer text is an error that names it")
    file.move("data.train_files", (_ROLE, "data_args", "file_name"))
    file.move("data.val_files", (_ROLE, "data_args", "eval_file_name"))
    file.move("data.messages_key", (_ROLE, "data_args", "messages"))
    convert_chat_template(file, supervised=True)
    file.move("trainer.seed", ("seed",))
    steps, epochs = file.take("trainer.total_training_steps"), file.take("trainer.total_epochs")
    file.put(("max_steps",), steps, "trainer.total_training_steps")
    if steps is None:
        file.put(("num_train_epochs",), epochs, "trainer.total_epochs")
    period = file.take("trainer.test_freq")
    if isinstance(period, int) and period > 0:
        file.put(("eval_steps",), period, "trainer.test_freq", "the first and the last step are evaluated, too")
    else:
        file.put(("eval_samples",), 0, "trainer.test_freq", "there is no evaluation")
