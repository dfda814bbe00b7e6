"""Tiny vision-language models, samples with images, their results by transformers, and functions that ranks run."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import ranks, tiny
from tests.huggingface.test_adapters import strategy_of as adapted_strategy
from tests.support.layouts import Layout
from tests.support.ranks import meet, part

role = functools.partial(ranks.role, vision=True)
PATCH, MERGE, FRAMES = 4, 2, 2
IMAGE, VIDEO, START, END = 57, 58, 59, 60
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 5,
    "bos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
ENCODER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
SAMPLES: list[list[int | tuple[int, int]]] = [
    [9],
    [3, (4, 6), 7],
    [2, (8, 4), 5, (2, 2), 6],
    [(6, 6), 4],
    [13],
    [1, (2, 4), 2, (4, 4), 1, (2, 6), 3],
]
"""Each sample: numbers of text tokens, and grids of images in patches."""


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.0}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow))


def write_model(folder: Path, family: str = "qwen2_5_vl", **text: Any) -> Any:
    """Saves a model with random weights in `folder`, as the hub names its tensors; returns it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = {"tie_word_embeddings": False, **TEXT, **text}
    encoder, recurs = dict(ENCODER), False
    if family != "qwen2_5_vl":
        values = {**values, "head_dim": 8, "num_hidden_layers": 8}
        encoder = {
            name: value for name, value in ENCODER.items() if name not in ("window_size", "fullatt_block_indexes")
        }
        encoder |= {"num_position_embeddings": 36}
        if recurs := family.startswith("qwen3_5"):
            values |= {**tiny.MODELS[family][1], "num_hidden_layers": 4}
        else:
            encoder |= {"depth": 3, "deepstack_visual_indexes": [0, 1]}
    config = AutoConfig.for_model(
        family,
        text_config=values | (EXPERTS if family.endswith("moe") else {}),
        vision_config=encoder,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=values["tie_word_embeddings"],
    )
    model = AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(
        4 + recurs
    )  # of which none samples an image token, which transformers refuses
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            start = 1.0 if ("norm" in key or "ln_q" in key) and key.endswith("weight") else 0.0
            if recurs and not ("visual" in key or "linear_attn" in key):
                start = 0.0  # these norms multiply by 1 + weight
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + start)
    model.save_pretrained(folder)
    if family != "qwen2_5_vl":  # whose own numbers are these
        means = {"image_mean": MEAN, "image_std": STD}
        (folder / "preprocessor_config.json").write_text(json.dumps(means))
    return model.eval()


def samples(copies: int = 1) -> list[dict[str, torch.Tensor]]:
    """Token ids, uint8 patches and grids of `SAMPLES`; with `copies` each of them with so many different endings."""
    generator = torch.Generator().manual_seed(9)
    made = []
    for parts in SAMPLES:
        ids: list[torch.Tensor] = []
        patches, grids = [torch.zeros(0, 3 * PATCH**2, dtype=torch.uint8)], []
        for part_ in parts:
            if isinstance(part_, int):
                ids.append(torch.randint(0, IMAGE, (part_,), generator=generator))
                continue
            height, width = part_
            tokens = height * width // MERGE**2
            ids.append(torch.tensor([START, *[IMAGE] * tokens, END]))
            grids.append((1, height, width))
            patches.append(
                torch.randint(0, 256, (height * width, 3 * PATCH**2), generator=generator, dtype=torch.uint8)
            )
        made.append(
            {
                "input_ids": torch.cat(ids),
                "pixel_values": torch.cat(patches),
                "image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3),
            }
        )
    if copies == 1:
        return made
    endings = torch.randint(0, IMAGE, (len(made), copies, 3), generator=generator)
    pairs = [(row, ending) for row, own in zip(made, endings, strict=True) for ending in own]
    return [{**row, "input_ids": torch.cat([row["input_ids"], ending])} for row, ending in pairs]


def batch(rows: list[dict[str, torch.Tensor]] | None = None) -> Any:
    """`samples` as a batch, all of whose tokens are learnt."""
    from roll_batching.samples import SampleBatch
    from roll_batching.samples.image_fields import IMAGE_SCHEMA

    rows = samples() if rows is None else rows
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["response_mask"] = [torch.ones(len(row["input_ids"]), dtype=torch.bool) for row in rows]
    columns["images"] = [len(row["image_grid_thw"]) for row in rows]
    columns["image_patches"] = [len(row["pixel_values"]) for row in rows]
    return SampleBatch.from_lists(columns, {"input_ids": "token", "response_mask": "token", **IMAGE_SCHEMA})


def inputs(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arguments of transformers' model for one sample."""
    values = {"input_ids": row["input_ids"][None]}
    if not len(row["image_grid_thw"]):
        return values
    pixels = row["pixel_values"].view(-1, 3, 1, PATCH**2).float() / 255
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))
    frames = ((pixels - mean) / std).repeat(1, 1, FRAMES, 1).flatten(1)
    types = (values["input_ids"] == IMAGE).int()
    return values | {"pixel_values": frames, "image_grid_thw": row["image_grid_thw"], "mm_token_type_ids": types}


def expected_log_probs(model: Any, copies: int = 1) -> list[torch.Tensor]:
    """Of each sample's tokens given those before, from the second on, by transformers alone."""
    found = []
    for row in samples(copies):
        logits = model(**inputs(row)).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, row["input_ids"][1:, None])[:, 0])
    return found


def expected_losses(model: Any, steps: int, rate: float) -> list[float]:
    """Losses of `steps` AdamW steps over all tokens, by transformers and torch."""
    model = copy.deepcopy(model)
    adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = -torch.cat(expected_log_probs(model)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def expected_gradients(model: Any, copies: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of the first of these losses, by the hub's names of tensors."""
    from safetensors.torch import load_file

    model = copy.deepcopy(model)
    (-torch.cat(expected_log_probs(model, copies)).mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def expected_tokens(model: Any, new: int) -> list[list[int]]:
    """Each sample continued greedily, by transformers alone."""
    found = []
    for row in samples():
        for _ in range(new):
            token = model(**inputs(row)).logits[0, -1].argmax()
            row["input_ids"] = torch.cat([row["input_ids"], token[None]])
        found.append(row["input_ids"].tolist())
    return found


def hub_name(name: str, model: Any) -> str:
    """A parameter's name in the hub's files."""
    if model.config.model_type != "qwen2_5_vl":
        return name
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def strategy_of(directory: str, layout: Layout, mode: str = "packed", **settings: Any) -> Any:
    """A training strategy with the model in `directory`."""
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(role(directory, layout, mode, **settings))
    strategy.initialize()
    return strategy


def share(place: Any, copies: int = 1) -> Any:
    """This data-parallel rank's part of `batch`."""
    whole = batch(samples(copies))
    return whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))


def log_probs(strategy: Any, copies: int = 1) -> list[torch.Tensor]:
    """As `expected_log_probs`, of this rank's share."""
    from roll_batching.samples import collect, distribute

    local = share(strategy.layout, copies)
    plan = strategy.plan(strategy.gather_table(local), forward=True)
    assert (copies > 1) == any(mb.shared.any() for of_rank in plan.micro_batches for mb in of_rank)
    found = collect(strategy.compute_log_probs(distribute(local, plan), plan), plan).to_lists("log_probs")
    return [row[:-1] for row in found]


def losses(strategy: Any, steps: int, rate: float, copies: int = 1) -> list[float]:
    """As `expected_losses`."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute
    from roll_batching.settings import TrainingArgs

    strategy.start_phase(TrainingArgs(learning_rate=rate, max_grad_norm=0.0))
    found = []
    for _ in range(steps):
        local = share(strategy.layout, copies)
        plan = strategy.plan(strategy.gather_table(local))
        found.append(strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss)
    return found


def write_gradients(strategy: Any, folder: str) -> None:
    """Writes the gradients of the last step as a model directory, in the places of the weights."""
    from roll_batching.modeling.head import gpt_of

    with torch.no_grad():
        for chunk in strategy.chunks:
            for parameter in gpt_of(chunk).parameters():
                parameter.copy_(parameter.main_grad)
    strategy.export(folder)


def sampled(strategy: Any, new: int) -> tuple[list[list[int]], float]:
    """Greedy tokens of this rank's share, and how far log-probs of sampling are from those of packs.

    The latter are of two sampled responses to each prompt.
    """
    from roll_batching.samples import collect, distribute, gather_lengths
    from roll_batching.samples.image_fields import IMAGE_SCHEMA
    from roll_batching.strategy import GenerationSettings

    prompts = share(strategy.layout).without("response_mask")
    greedy = strategy.generate(prompts, GenerationSettings(max_new_tokens=new, eos_token_id=-1, greedy=True))
    settings = GenerationSettings(max_new_tokens=new, eos_token_id=5, num_return_sequences=2, seed=3)
    drawn = strategy.generate(prompts, settings)
    twice = torch.arange(len(prompts)).repeat_interleave(2)
    images = prompts.only(IMAGE_SCHEMA).select(twice, ids=drawn.ids)
    whole = drawn.with_fields(images.fields, images.schema)
    whole = whole.with_ids(whole.ids + strategy.layout.dp_rank * 100)
    plan = strategy.plan(gather_lengths(whole), forward=True)
    again = collect(strategy.compute_log_probs(distribute(whole, plan), plan), plan)
    predicted = torch.cat([row[1:] for row in whole.to_lists("response_mask")])
    pairs = (torch.cat([row[:-1] for row in one.to_lists("log_probs")])[predicted] for one in (whole, again))
    first, second = pairs
    return [row.tolist() for row in greedy.to_lists("input_ids")], float((first - second).abs().max())


def checkpointed(payload: tuple[str, Layout, str, bool]) -> list[float]:
    """Losses of two steps, the second in another layout from the checkpoint of the first; or of both in one."""
    from roll_batching.settings import TrainingArgs

    directory, layout, folder, loads = payload
    strategy = strategy_of(directory, layout)
    if not loads:
        first = losses(strategy, 1, 1e-2)
        strategy.save(folder)
        return first + step_losses(strategy, 2)
    strategy.start_phase(TrainingArgs(learning_rate=1e-2, max_grad_norm=0.0))
    strategy.load(folder)
    return step_losses(strategy, 2)


def step_losses(strategy: Any, steps: int) -> list[float]:
    """Losses of further steps with the same optimizer."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths

    found = []
    for _ in range(steps):
        local = share(strategy.layout)
        plan = strategy.plan(gather_lengths(local))
        found.append(strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss)
    return found


def resharded(payload: tuple[str, Layout, Layout]) -> tuple[int, list[torch.Tensor]]:
    """(data-parallel rank, log-probs) of a trained model, copied into another layout of the same ranks."""
    from roll_batching.strategy import MegatronInferStrategy

    directory, layout, other = payload
    strategy = strategy_of(directory, layout)
    copy_ = MegatronInferStrategy(role(directory, other))
    copy_.initialize(weights=False)
    with torch.no_grad():
        for chunk in copy_.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    copy_.copy_weights_from(strategy)
    return copy_.layout.dp_rank, log_probs(copy_)


def frozen(payload: tuple[str, Layout, str]) -> tuple[list[float], list[str]]:
    """(losses of two steps, names of parameters that moved) with the encoder frozen by a prefix."""
    from roll_batching.modeling.head import gpt_of
    from roll_batching.strategy import MegatronTrainStrategy

    directory, layout, prefix = payload
    config = role(directory, layout)
    args = config.model_args.model_copy(update={"freeze_module_prefix": (prefix,)})
    strategy = MegatronTrainStrategy(config.model_copy(update={"model_args": args}))
    strategy.initialize()
    named = [(name, p, p.detach().clone()) for chunk in strategy.chunks for name, p in gpt_of(chunk).named_parameters()]
    found = losses(strategy, 2, 1e-2)
    return found, [name for name, parameter, before in named if not torch.equal(parameter, before)]


def adapted(payload: tuple[str, Layout, str, str]) -> tuple[int, list[float], list[torch.Tensor]]:
    """(data-parallel rank, losses, log-probs after) of steps of LoRA, whose model is exported with them."""
    directory, layout, targets, to = payload
    strategy = adapted_strategy(directory, layout, lora_target=targets, lora_rank=4)
    found = losses(strategy, 3, 1e-2)
    strategy.export(to)
    return strategy.layout.dp_rank, found, log_probs(strategy)


def answers(payload: list[tuple[str, Layout, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each directory and layout: log-probs of this rank's share, and on request losses and gradients."""
    found = []
    for number, (directory, layout, wanted) in enumerate(payload):
        meet(number)
        strategy = strategy_of(directory, layout, wanted.get("mode", "packed"), **wanted.get("settings", {}))
        copies, encoded = wanted.get("copies", 1), list[int]()
        for module in strategy.chunks[0].modules():
            if hasattr(module, "image_mean"):
                module.register_forward_hook(lambda _, inputs, output, counts=encoded: counts.append(len(inputs[1])))
        one: dict[str, Any] = {"dp_rank": strategy.layout.dp_rank, "log_probs": log_probs(strategy, copies)}
        one["encoded"] = sum(encoded)
        if "new" in wanted:
            one["tokens"], one["gap"] = sampled(strategy, wanted["new"])
        if "steps" in wanted:
            one["losses"] = losses(strategy, wanted["steps"], wanted["rate"])
        if "export" in wanted:
            strategy.export(wanted["export"])
            ranks.streamed(strategy, wanted["export"])
        if "gradients" in wanted:
            losses(strategy, 1, 1e-9, copies)
            write_gradients(strategy, wanted["gradients"])
        found.append(one)
        del strategy
        part()
    return found
