"""Console programs of flashkv: dump, benchmarks, the demo's command line."""
