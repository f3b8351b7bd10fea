"""A process may end while a result is on its way to the host: it ends as it says, and never aborts."""

import subprocess
import sys

import pytest

BUSY = """
import signal, jax, jax.numpy as jnp
from jspark.landing import fetch, fetch_later

# About a second on either; a loop would keep a GPU's host busy, which launches its turns.
turns, size = (400, 512) if jax.default_backend() == "cpu" else (6, 16384)
@jax.jit
def busy(x):
    if size > 512:
        y = x
        for _ in range(turns):
            y = y @ x / 100
        return y[:8, :8]
    return jax.lax.fori_loop(0, turns, lambda i, y: y @ x / 100, x)
x = jnp.ones((size, size))
busy(x).block_until_ready()
y = busy(x)
fetch_later(y)
assert not y.is_ready()
"""
INTERRUPTED = """
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    fetch(y)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("then", "said"), [("", ""), (INTERRUPTED, "interrupted\n")])
def test_a_process_ends_quietly_while_a_result_is_under_way(then, said):
    done = subprocess.run([sys.executable, "-c", BUSY + then], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
