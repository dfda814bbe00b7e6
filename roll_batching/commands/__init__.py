"""One file per command of `roll-batching`."""

COMMANDS = {
    "plan": ("plan:plan", "Plan one step for the sequence lengths in LENGTHS, and print its padding and balance."),
    "convert-config": (
        "convert_config:convert_config",
        "Convert a file to our YAML; comments list keys that are kept, changed in meaning, and left out.",
    ),
    "schema": ("schema:schema", "Print the JSON schema of job files, for editors that complete and check them."),
    "simulate": (
        "simulate:simulate",
        "Predict the time of one optimizer step: passes, exchange, bubbles. Nothing is run, memory is not counted.",
    ),
    "rehearse": (
        "rehearse:rehearse",
        "Count memory, FLOPs, collectives and host reads of a job's ranks, without a GPU and without weights.",
    ),
    "fit": (
        "fit:fit",
        "Find the largest caps of micro-batches that fit a GPU, and rank layouts by simulated step time.",
    ),
    "train": ("train:train", "Train: start one process per device, or run as one rank under torchrun."),
    "sft": (
        "train:sft",
        "Supervised fine-tuning on texts or conversations: `train` for a file with task sft or without a task.",
    ),
    "dpo": (
        "train:dpo",
        "Preference training on pairs of responses: `train` for a file with task dpo or without a task.",
    ),
    "doctor": (
        "doctor:doctor",
        "Check machines, ranks, kernels, layouts and the folder of runs; alone, under torchrun, or on Ray.",
    ),
    "export": (
        "export:export",
        "Write a checkpoint as a Hugging Face directory, with the tensor names and dtypes of its initial model.",
    ),
    "generate": ("generate:generate", "Sample responses of a checkpoint on one process, on the GPU if there is one."),
    "report": (
        "report:report",
        "Write one HTML page of a run: curves, tokens, balance, time, last plan, rollouts, settings, notices.",
    ),
    "eval": (
        "evaluate:evaluate",
        "Score responses of a checkpoint to held-out prompts, with the run's own reward and sampling.",
    ),
    "check-loss": (
        "check_loss:check_loss",
        "Run a loss on a tiny model under several layouts and partitions, and print each difference.",
    ),
}
"""Of each command: its module and function here, and the first line of its help, which `--help` shows unimported."""
