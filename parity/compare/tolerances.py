"""Every bound that a comparison is held to: all errors are relative L2, if nothing else is said.

In float64 the two sides may differ by the order of their sums alone, so the bounds are fixed. In a
working dtype (float32, bfloat16, float16) none is: the JAX side may be off the float64 result by K
times what torch is off it in the same dtype, plus what rounding that result costs (budgets.py).
The bound of one part fed the reference's own input is called its band.
"""

from __future__ import annotations

# float64
FORWARD = 1e-13  # logits, losses, the values at probes
BACKWARD = 1e-12  # gradients, and the cotangents at probes
WORST_TOKEN = 1e-12  # the worst position (of a model of one's own: the worst row): no average
BANDS = {"forward": FORWARD, "backward": BACKWARD, "parameter": BACKWARD}  # by a point's direction
OPTIMIZER = 1e-12  # one step alone, from the reference's state; learning rates and clip factors
DRIFT = 1e-9  # after some 50 steps of training, each of which may add its rounding

# A spec or a naming is found by the logits of a short text, whose few tokens average less. It
# serves to name what is wrong, never to pass.
AGREES = 10 * FORWARD

# a working dtype
K = 2.0  # how many times torch's error the JAX side's may be
K_OF_KL = K**2  # KL grows with the square of the error
HOLLOW = 0.5  # a measured budget from which on zeros would pass, or nearly: it is told

# a diagnosis, where the reference was made to lose digits to a dtype: two frameworks do not lose
# the same ones, for one rounds a part's steps where the other rounds its result. It serves to name
# a cause, never to pass.
LOSS = 4.0
