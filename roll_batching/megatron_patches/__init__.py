"""All places outside rehearsal where functions of Megatron-Core that are not public are replaced.

| module | replaces | Megatron | why | undone |
|---|---|---|---|---|
| `cpu_platform` | `tensor_parallel.random._set_cuda_rng_state`; functions of `torch.cuda`, three collectives of torch | 0.16 to 0.19 | training without CUDA | never; refused on machines with CUDA |
| `router_padding` | `moe.router.switch_load_balancing_loss_func`, routers' `_apply_expert_bias` | 0.16 to 0.19 | a micro-batch may hold padding, or nothing else | after the schedule's call |
| `planned_p2p` | `P2PCommunicator._communicate_shapes`, in a subclass | 0.16 to 0.19, by signature | receive shapes are known from the plan | the communicator serves one call |
| `checkpoint_files` | `FileSystemWriterAsync`'s writers and `finish`, `_results_queue`, `save_config`, `save_common` | 0.16 to 0.19, what exists | an error keeps its cause, and no process outlives a rank | after each part of a save |
| `without_engine` | `multi_latent_attention.HAVE_TE` | 0.16, without TransformerEngine | a check asks for an instance of a class that is none | after the layer's construction |
| `without_engine` | `moe_utils.te_general_gemm`, defined as None | 0.16, without TransformerEngine | routers read the name, which is undefined | never: backward passes read it too |

Everything else goes through public parameters: layer specs, a config's callbacks, `p2p_communicator`, process groups. Two
classes of ours are put in place of Megatron's in a built model: `modeling.head.DeferredHead` and, for generation only,
`modeling.attention.dense.DenseCore`. Rehearsal, which runs no step, replaces more (`rehearsal`).
"""  # noqa: E501  # a table
