"""What one iteration of a serving engine takes: decoding, prompts, or both in one batch.

>>> from foretell.hardware import device
>>> from foretell.simulate.serving import Batch, ServingPlan
>>> from foretell.simulate.serving.iteration import Iterations
>>> from foretell.workload import llm
>>> iterations = Iterations.of(llm.config("llama-3.1-8b"), ServingPlan(), device("h100-sxm"))
>>> batch = Batch.of(decode_seqs=[1, 64], decode_tokens=[1000, 64000])
>>> bool((iterations.time_s(batch) > iterations.weights_bytes / 3.352e12).all())
True
>>> iterations.bound(batch)
['bandwidth', 'bandwidth']
"""

from foretell.simulate.serving.iteration.constants import Constants, constants
from foretell.simulate.serving.iteration.model import BOUNDS, Iterations

__all__ = ["BOUNDS", "Constants", "Iterations", "constants"]
