"""Makes the measurements of `make tune` short, and lets repeated ones agree, as on a quiet machine.

Python imports this at its start, from PYTHONPATH.
"""

import os
import statistics
import sys

if "loadtest.tune" in sys.orig_argv or ("scripts.stack" in sys.orig_argv and "tune" in sys.orig_argv):
    sys.path.insert(0, os.getcwd())
    from loadtest.tune import goal

    sys.path.pop(0)
    goal.MINIMUM_TRY_S, goal.MAXIMUM_TRY_S, goal.TRY_REQUESTS, goal.REPORT_S = 0.6, 2.0, 10, 5.0
    goal.try_s.__defaults__ = (goal.MINIMUM_TRY_S,)
    if "loadtest.tune" in sys.orig_argv:
        statistics.stdev = lambda values: 0.0
