"""Design rules of published efficient architectures, as checks on a graph: each with its predicted gain.

A rule looks at a graph on a device and says where the rule is broken, with the numbers it saw, what to do, and by how
much the step becomes shorter. That gain is never guessed: the graph is changed as advised and predicted again.

>>> from foretell.advise import rules
>>> len(rules())
13
"""

from foretell.advise.api import Advice, advise
from foretell.advise.family import Rule, member, rule, rules
from foretell.advise.finding import Finding

__all__ = ["Advice", "Finding", "Rule", "advise", "member", "rule", "rules"]
