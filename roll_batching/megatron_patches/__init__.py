"""All places outside rehearsal where functions of Megatron-Core that are not public are replaced.

- `cpu_platform`: `tensor_parallel.random._set_cuda_rng_state`; functions of `torch.cuda`, three collectives of torch.
  For training without CUDA, with Megatron 0.16 to 0.19. Never undone; refused on machines with CUDA.
- `layers`, routers: `moe.router.switch_load_balancing_loss_func`, routers' `_apply_expert_bias`. A micro-batch may hold
  padding, or nothing else (0.16 to 0.19). Undone after the schedule's call.
- `layers`, latent attention: `multi_latent_attention.HAVE_TE`. Without TransformerEngine, 0.16 checks for an instance
  of a class that is none. Undone after the layer's construction.
- `layers`, GEMM of routers: `moe_utils.te_general_gemm`, defined as None. Without TransformerEngine, 0.16 does not
  define the name, and routers read it. Never undone: backward passes read it too.
- `planned_p2p`: `P2PCommunicator._communicate_shapes`, in a subclass. The plan knows the receive shapes (0.16 to 0.19,
  by signature). The communicator serves one call.
- `checkpoint_files`: `FileSystemWriterAsync`'s writers and `finish`, `_results_queue`, `save_config`, `save_common`. An
  error keeps its cause, and no process outlives a rank (0.16 to 0.19, what exists). Undone after each part of a save.

Everything else goes through public parameters: layer specs, a config's callbacks, `p2p_communicator`, process groups.
Two classes of ours are put in place of Megatron's in a built model: `modeling.head.DeferredHead` and, for generation
only, `modeling.attention.dense.DenseCore`. Rehearsal, which runs no step, replaces more (`rehearsal`).
"""
