"""Losses that look right on one process, each with one fault; and right ones of every kind."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from roll_batching.losses import HostLoss, LossOutput, Max, Mean, SequenceView, Sum, TokenView, token_log_probs

VOCABULARY = 61


class ByTokens:
    needs = {"log_probs"}
    masks = ("response_mask",)


class ByLogits:
    needs = {"logits"}
    masks = ("response_mask",)


class TorchAllReduce(ByLogits):
    """Log-probs by torch's differentiable all-reduce: gradients TP times too large."""

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        add = lambda x: torch.distributed.nn.functional.all_reduce(x, group=sequence.tp_group)  # noqa: E731
        logits = sequence.logits.float()
        first = logits.shape[1] * sequence.tp_group.rank()
        here = (sequence.labels >= first) & (sequence.labels < first + logits.shape[1])
        chosen = logits.gather(1, (sequence.labels - first).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        nll = add(logits.exp().sum(-1)).log() - add(torch.where(here, chosen, 0.0))
        return LossOutput(sequence.mean(nll), {"nll": sequence.mean_metric(nll)})


class ForgottenExpand(ByLogits):
    """An entropy whose normaliser meets the columns without `expand`."""

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        vocabulary, logits = sequence.vocabulary, sequence.logits
        p = (logits - vocabulary.logsumexp(logits)[:, None]).exp()
        return LossOutput(sequence.mean(vocabulary.sum(p.square())))


class OwnShardOnly(ByLogits):
    """The squared logits of one rank's columns."""

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        return LossOutput(sequence.mean(sequence.logits[:, :20].square().sum(-1)))


class MeanPerMicroBatch(ByTokens):
    def token_loss(self, tokens: TokenView) -> LossOutput:
        mask = tokens.mask()
        return LossOutput(-(tokens.log_probs * mask).sum() / mask.sum())


class MeanPerSequence(ByTokens):
    """Adds up means of single sequences."""

    gather_cp = True

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        x = sequence.log_probs() * sequence.mask()
        return LossOutput(-x.sum() / sequence.mask().sum().clamp(min=1), {"n": Sum(sequence.mask().any())})


class SumOverContextRanks(ByTokens):
    """A penalty per sequence on each rank that has a part of it."""

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        penalty = sequence["rewards"].square() / sequence.num_sequences()
        return LossOutput(sequence.mean(-sequence.log_probs()) + penalty)


class WholeSequencesAreAssumed(ByTokens):
    """A ratio of a sequence from this rank's positions alone."""

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        ratio = sequence.sum(sequence.log_probs() - sequence["old_log_probs"]) / sequence.count().clamp(min=1)
        return LossOutput(sequence.mean(ratio.exp() * -sequence.log_probs()))


class SumOfMeans(ByTokens):
    """A sum as metric where a mean belongs."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        mean = tokens.segment_mean(tokens.log_probs.detach()).mean()
        return LossOutput(tokens.mean(-tokens.log_probs), {"mean": Sum(mean)})


class MeanOfMeans(ByTokens):
    """A mean over micro-batches as metric where one over tokens belongs."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        mean = tokens.log_probs.detach()[tokens.mask()].mean()
        return LossOutput(tokens.mean(-tokens.log_probs), {"mean": Mean(mean, torch.ones(()))})


class MaximumOfSums(ByTokens):
    """A maximum as metric where a sum belongs."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.log_probs), {"counted": Max(tokens.mask().sum())})


class FillerCounts(ByTokens):
    """The mean over all positions of a tensor, filler among them, by its own count of the batch's tokens."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput((1 - tokens.log_probs).sum() / tokens.num_tokens())


class NeighboursArePairs(ByTokens):
    """Every second sample of a micro-batch is compared with the one before."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        x = tokens.segment_sum(tokens.log_probs)
        count = len(x) // 2 * 2
        return LossOutput((x[0:count:2] - x[1:count:2]).square().sum() / tokens.num_sequences() + 0 * x.sum())


class RunningMean(ByTokens):
    """A state between calls."""

    def __init__(self) -> None:
        self.mean = 0.0

    def token_loss(self, tokens: TokenView) -> LossOutput:
        loss = tokens.mean(-tokens.log_probs * (1 + self.mean))
        self.mean = 0.5 * self.mean + float(tokens.segment_count().float().mean())
        return LossOutput(loss)


class Random(ByTokens):
    def token_loss(self, tokens: TokenView) -> LossOutput:
        import os

        return LossOutput(tokens.mean(-tokens.log_probs) * (1 + int.from_bytes(os.urandom(2)) / 65536))


class FailsUnderContextParallelism(ByTokens):
    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        return LossOutput(sequence.mean(-sequence.log_probs()[torch.arange(sequence.length)]))


class WaitsForOthers(ByTokens):
    """A collective call per sequence, which ranks of other sequences do not make."""

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        total = sequence.sum(sequence.log_probs())
        if len(sequence.log_probs()):
            seen = total.detach().clone()
            dist.all_reduce(seen, group=sequence.cp_group)
        return LossOutput(total / sequence.num_tokens())


class NeedsMargin(ByTokens):
    """Reads a field of its own."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.log_probs * tokens.per_token("margin")))


class OwnPairs(ByTokens):
    """A loss over pairs without a check of its own."""

    sums = ("chosen",)

    def token_loss(self, tokens: TokenView) -> LossOutput:
        x = tokens.segment_sum(tokens.log_probs - tokens["ref_log_probs"])
        order = torch.argsort(2 * tokens["pair"] + (~tokens["chosen"].bool()).long())
        margin = x[order[0::2]] - x[order[1::2]]
        return LossOutput(-torch.nn.functional.logsigmoid(margin).sum() / tokens.total("chosen"))


class Prepared(ByTokens):
    """Centres advantages over the step before it."""

    def prepare(self, batch: Any, layout: Any, seed: int) -> Any:
        from roll_batching.distributed import exchange

        here = batch["advantages"].sum().item() if layout.is_replica_leader else 0.0
        total = sum(exchange(layout.host_group, "advantages", lambda: here))
        return batch.with_fields({"centred": batch["advantages"] - total / 12}, {"centred": "sample"})

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput(tokens.mean(-tokens.log_probs * tokens.per_token("centred")))


class WholeRows(ByLogits):
    """A token loss of whole rows."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        p = tokens.full_logits().softmax(-1)
        top = p.topk(3).values.sum(-1)
        return LossOutput(tokens.sequence_mean(top), {"top": tokens.mean_metric(top), "largest": Max(top.max())})


class ByPublicFunction(ByLogits):
    """Log-probs by `token_log_probs`, from whole sequences."""

    gather_cp = True

    def sequence_loss(self, sequence: SequenceView) -> LossOutput:
        log_probs, entropy = token_log_probs(
            sequence.logits, sequence.labels, vocab_size=VOCABULARY, entropy=True, tp_group=sequence.tp_group
        )
        return LossOutput(sequence.sequence_mean(-log_probs - 0.1 * entropy))


class Critic:
    needs = {"values"}
    masks = ("response_mask",)

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput(tokens.mean((tokens.values - tokens["returns"]).square()))


def of_a_host(ids: Any, log_probs: torch.Tensor, entropy: Any) -> tuple[torch.Tensor, Any]:
    return -log_probs.sum() / 100, len(ids)


def host_loss() -> HostLoss:
    return HostLoss(of_a_host)


def host_loss_by_rows() -> HostLoss:
    """A host's function that takes the mean of its own micro-batch."""
    return HostLoss(mean_of_a_host)


def mean_of_a_host(ids: Any, log_probs: torch.Tensor, entropy: Any) -> tuple[torch.Tensor, Any]:
    return -log_probs.sum(1).mean(), None


number = 3
