"""The ledger: for every published technique in the product, what its authors report beside what we obtain, and how.

A system is one module, in the folder of the room that holds its mechanism (``claims/workload/repvgg.py``), with a
tuple ``CLAIMS``; the figures obtained stand in the JSON file beside it, with date, versions and command. A verdict
follows from claimed and obtained by a stated rule (`foretell.claims.rules`); none is typed in.

>>> from foretell.claims import claims
>>> [claim.verdict for claim in claims("repvgg/imagenet-top1")]
['not tried']
"""

from foretell.claims.claim import HOW, VERDICTS, Claim, Claimed, Obtained, Record, Source
from foretell.claims.ledger import claims, record, run
from foretell.claims.rules import AtMost, Direction, Equal, Gain, Rule

__all__ = [
    "HOW",
    "VERDICTS",
    "AtMost",
    "Claim",
    "Claimed",
    "Direction",
    "Equal",
    "Gain",
    "Obtained",
    "Record",
    "Rule",
    "Source",
    "claims",
    "record",
    "run",
]
