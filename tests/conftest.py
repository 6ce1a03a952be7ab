"""Every test sees eight CPU devices, strict ranks and annotated shapes checked as they run."""

import os

# Before the first import of jax, which reads both once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import jax
import jaxtyping

jax.config.update("jax_numpy_rank_promotion", "raise")

# Not types.py: JAX rebuilds pytrees with leaves that are not arrays. An int is a float (PEP 484).
jaxtyping.install_import_hook(
    ["axion_jax.rl", "axion_jax.models", "axion_jax.sharding"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
