"""Megatron's `pipeline_model_parallel_layout` for one rank of any process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from roll_batching.distributed.parallel_layout import ParallelDims, ParallelLayout
from roll_batching.planning import FlopsCost


class RankLayerLayout(PipelineParallelLayerLayout):
    """Megatron's layer layout as one pipeline rank sees it.

    Megatron's own class (0.16.1, 0.19.2) asks its parallel state for the rank and for virtual stages. If a role has a
    second layout, the parallel state describes another model, and layers would get the numbers of other layers.
    """

    def __init__(self, layout: str | Sequence[Sequence[str]], parallel: ParallelLayout, heads: int = 0) -> None:
        chunks = layout if isinstance(layout, str) else [list(chunk) for chunk in layout]
        super().__init__(chunks, parallel.pp_size)
        for where in (self.layout[-1][-1], self.flatten_layout):  # Megatron wants the heads named, before the loss
            where[-1:-1] = [LayerType.mtp] * heads
        self.pp_rank = parallel.pp_rank

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of a type in a chunk of `pp_rank`, which is this rank by default."""
        stage = self.layout[self.pp_rank if pp_rank is None else pp_rank]
        return int(stage[vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of a type in all chunks before one of `pp_rank`."""
        rank, chunk = self.pp_rank if pp_rank is None else pp_rank, vp_stage or 0
        whole = sum(stage[before].count(layer_type) for before in range(chunk) for stage in self.layout)
        return int(whole + sum(stage[chunk].count(layer_type) for stage in self.layout[:rank]))


def layers_of_all_chunks(config: Any) -> list[range]:
    """Indices of the layers of all model chunks, in the order of the layers, of a model with this TransformerConfig."""
    from roll_batching.modeling.layers import layers_of_chunk

    virtual = config.virtual_pipeline_model_parallel_size
    table, stages = config.pipeline_model_parallel_layout, list[range]()
    for chunk in range(virtual or 1):
        for rank in range(config.pipeline_model_parallel_size):
            if table is None:
                stages.append(layers_of_chunk(config, rank, chunk if virtual else None))
            else:  # its own functions know one rank only
                first = stages[-1].stop if stages else 0
                stages.append(range(first, first + table.layout[rank][chunk].count(LayerType.decoder)))
    return stages


def hybrid_model_cost(config: Any, vocab_size: int, layout: ParallelDims) -> FlopsCost:
    """`modeling.cost.model_cost` of a `HybridTransformerConfig`, whose model chunks differ in any pipeline."""
    from roll_batching.settings.hybrid_cost import HybridSizes, hybrid_cost  # few models need it

    chunks = layers_of_all_chunks(config) if layout.pp_size > 1 else None
    sizes = HybridSizes.of_config(config, vocab_size)
    return hybrid_cost(sizes, ranks=layout.tp_size * layout.cp_size, chunks=chunks)
