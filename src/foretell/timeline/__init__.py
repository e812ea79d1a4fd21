"""What happens when: a `Timeline` of events in lanes, predicted, simulated or measured, and the files it is written to.

>>> from foretell.timeline import Timeline
>>> two = Timeline.of(lane=["GPU", "GPU"], start_s=[0.0, 2.0], duration_s=[1.0, 3.0], name=["a", "b"])
>>> two.end_s, two.busy_s("GPU")
(5.0, 4.0)
"""

from foretell.timeline.chrome import chrome_events, write_chrome
from foretell.timeline.step import step_timeline
from foretell.timeline.timeline import Counter, Timeline

__all__ = ["Counter", "Timeline", "chrome_events", "step_timeline", "write_chrome"]
