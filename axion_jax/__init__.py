"""Post-training of GLM-4.5-type mixture-of-experts models in JAX."""

import os

# transformers serves tokenizers here and advises at every import to install torch, which we leave
# out on purpose.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
