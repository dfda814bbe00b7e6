"""Parts of bench_dynamic_cp."""
