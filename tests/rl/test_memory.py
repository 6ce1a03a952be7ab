"""Log-probs at full vocabulary and length, in a process of its own whose peak memory is measured."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from axion_jax.models.config import ModelConfig
from axion_jax.models.decoder import Decoder
from axion_jax.models.scores import token_logprobs

T, V, D = 32_768, 151_552, 32
decoder = Decoder(ModelConfig(
    vocab_size=V, hidden_size=D, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
    intermediate_size=16, num_dense_layers=1,
))
params = jax.jit(decoder.init)(jax.random.key(0))
hidden = jax.random.normal(jax.random.key(1), (1, T, D))
targets = jax.random.randint(jax.random.key(2), (1, T), 0, V)

def scored(params, hidden):
    return token_logprobs(
        decoder, params, hidden, targets, temperature=1.0, entropy=False, chunk=512
    )[0]

if sys.argv[1] == "gradient":
    out = jax.jit(jax.grad(lambda h: scored(params, h).sum()))(hidden)
else:
    out = jax.jit(scored)(params, hidden)
assert np.isfinite(np.asarray(out)).all()
# Not ru_maxrss: a process inherits that peak from whoever started it, here the whole test run.
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("what", ["logprobs", "gradient"])
def test_logprobs_of_32k_tokens_and_glms_vocabulary_peak_under_1_5_gb(what):
    # All logits at once would be 32,768 * 151,552 * 4 bytes = 19.9 GB; 512 predictions are 310 MB.
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1.5
