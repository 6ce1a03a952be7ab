"""Post-training of mixture-of-experts language models in JAX."""
