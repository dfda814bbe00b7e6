"""Token fields of a batch: the inputs of the forward pass, a code per token that compares samples, and masks."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from roll_batching.errors import DataError
from roll_batching.planning.plan import MicroBatch, Plan
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import MODEL_INPUTS

_BYTES = 8
"""Bytes of a digest: two unequal tokens at one place of two samples have equal codes in one of 2^64 cases."""


def inputs_of(batch: SampleBatch, *checked: str) -> SampleBatch:
    """The fields of `MODEL_INPUTS`, and those named in `checked`, which may change no output of the model.

    The forward pass reads a batch through this function: a field that `MODEL_INPUTS` lacks is an error there, and not
    an input by which samples with a common prefix differ unseen.
    """
    names = [name for name in batch.fields if name in MODEL_INPUTS or name in checked]
    counts = {batch.schema[name].counts for name in names} - {None, *names}
    return batch.only([*names, *(name for name in batch.fields if name in counts)])


def require_field(batch: SampleBatch, name: str, reader: str, *kinds: str) -> None:
    """Raises `DataError` unless the batch has the field `name`, of one of `kinds`, which `reader` needs."""
    spec = batch.schema.get(name)
    if spec is None or spec.kind not in kinds:
        problem = "lacks it" if spec is None else f"has it as a {spec.kind} field"
        needed = f"{reader} needs the {' or '.join(kinds)} field {name!r}, and the batch"
        raise DataError(f"{needed} {problem}: add it (fields of the batch: {', '.join(batch.schema)})")


def token_codes(batch: SampleBatch) -> np.ndarray:
    """[tokens], on the host: tokens with equal codes have equal values in all fields that the model reads.

    int32 token ids where these are the only field, else int64 digests. Values of samples, and rows such as patches of
    images, count for each token of their sample.
    """
    inputs = inputs_of(batch)
    if list(inputs.fields) == ["input_ids"]:
        ids: np.ndarray = inputs["input_ids"].to("cpu", torch.int32).numpy()
        return ids
    if not batch.num_tokens:
        return np.zeros(0, np.int64)
    columns = []
    for name, spec in sorted(inputs.schema.items()):
        if spec.per_token:
            columns.append(_bytes_of(inputs[name]).reshape(batch.num_tokens, -1))
        elif spec.kind != "static":  # one value for all samples
            digests = [_digest(_bytes_of(values).data) for values in inputs.to_lists(name)]
            columns.append(np.repeat(_join(digests).view(np.uint8).reshape(-1, _BYTES), batch.lengths.numpy(), axis=0))
    rows = np.concatenate(columns, axis=1)
    data, width = memoryview(rows.tobytes()), rows.shape[1]
    return _join([_digest(data[start : start + width]) for start in range(0, len(data), width)])


def _bytes_of(values: Tensor) -> np.ndarray:
    flat: np.ndarray = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _digest(data: memoryview) -> bytes:
    return blake2b(data, digest_size=_BYTES).digest()


def _join(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(bytearray().join(digests), np.int64)


def check_shared_rows(batch: SampleBatch, plan: Plan, dp_rank: int) -> None:
    """Raises `DataError` where samples of a micro-batch share positions whose inputs or labels differ.

    Position i of two samples is the same if their tokens 0 to i agree in all fields that the model reads, and their
    tokens i + 1 in `input_ids`, as labels. Fields that a pipeline stage lacks are checked by others.
    """
    codes = token_codes(batch)
    for mb in plan.micro_batches[dp_rank]:
        if mb.shared.any():
            _check_micro_batch(batch, codes, mb, plan.ids)


def _check_micro_batch(batch: SampleBatch, codes: np.ndarray, mb: MicroBatch, ids: np.ndarray) -> None:
    labels = batch["input_ids"].cpu().numpy() if "input_ids" in batch else codes
    starts = batch.offsets[batch.rows_of(ids[mb.samples])].tolist()
    for place, shared in enumerate(mb.shared.tolist()):
        if not shared:
            continue
        first, second = starts[place - 1], starts[place]
        differs = codes[first : first + shared] != codes[second : second + shared]
        label_differs = labels[first + shared] != labels[second + shared]
        if differs.any() or label_differs:
            token = int(differs.argmax()) if differs.any() else shared
            raise DataError(
                f"the plan lets sample {ids[mb.samples[place]]} share {shared} positions with sample "
                f"{ids[mb.samples[place - 1]]}, whose token {token} has another value of "
                f"{_difference(batch, first + token, second + token)}: plan with the prefixes that "
                "find_shared_prefixes(batch, table) finds in this batch"
            )


def _difference(batch: SampleBatch, first: int, second: int) -> str:
    """The field that differs between two tokens; of values of whole samples, all that the batch has."""
    inputs = inputs_of(batch)
    per_token = [name for name, spec in inputs.schema.items() if spec.per_token]
    others = [name for name in inputs.schema if name not in per_token]
    return next(
        (name for name in per_token if not torch.equal(inputs[name][first], inputs[name][second])), " or ".join(others)
    )


# ---- masks


def sample_of(batch: SampleBatch) -> torch.Tensor:
    """[tokens] int64: the row of each token's sample."""
    return torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)


def token_place(batch: SampleBatch, index: int) -> tuple[int, int]:
    """(id of the sample, position in it) of the value at `index` of a token or next_token field."""
    row = int(torch.searchsorted(batch.offsets, index, right=True)) - 1
    return int(batch.ids[row]), index - int(batch.offsets[row])


def by_prediction(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens, ...] a token or next_token field, shifted so that position i has the value of token i + 1, as in losses.

    The value at a sample's last position is undefined.
    """
    values: torch.Tensor = batch[name].cpu()
    return values.roll(-1, 0) if batch.schema[name].kind == "token" else values


def mask_of(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens] bool on the host: the token or next_token field `name` as a mask.

    Raises `DataError` for more than one value per token, or values other than bool, 0 and 1.
    """
    values: torch.Tensor = batch[name].cpu()
    if values.dim() != 1:
        raise DataError(f"the mask {name!r} has the shape {list(values.shape)}: give one value per token")
    if values.dtype is torch.bool:
        return values
    wrong = (values != 0) & (values != 1)  # NaN is neither
    if batch.schema[name].kind == "next_token":
        wrong[batch.offsets[1:] - 1] = False  # belongs to no token
    if len(positions := wrong.nonzero()):
        first = int(positions[0, 0])
        sample, position = token_place(batch, first)
        raise DataError(
            f"the mask {name!r} of sample {sample} is {values[first].item()} at position {position}, one of "
            f"{len(positions)} values that are neither 0 nor 1: a mask says what counts; weights of samples belong "
            "into a separate field (sample_weights), weights of tokens into the advantages"
        )
    return values == 1


def counted_positions(batch: SampleBatch, mask: str = "response_mask") -> torch.Tensor:
    """[tokens] bool: positions whose next token is in the mask field `mask`; never a sample's last position.

    Raises `DataError` for an invalid mask; see `mask_of`.
    """
    counted = mask_of(batch, mask)
    counted = counted.roll(-1, 0) if batch.schema[mask].kind == "token" else counted.clone()
    counted[batch.offsets[1:] - 1] = False  # no next token; the roll has put the next sample's first one there
    return counted
