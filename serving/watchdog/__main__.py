"""Load the systems of the server, and help Triton where a Python process of a model crashes or stands still.

serve.sh starts this with the pid and the start time of tritonserver, and again if it crashes. It ends with the server.
Each module handles one of the faults in TRITON-FAULTS.md.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from serving.watchdog.crashed_processes import Crashes
from serving.watchdog.endless_loads import end_hung_loads
from serving.watchdog.memory_regions import SHARED_MEMORY, keep_regions
from serving.watchdog.missing_systems import keep_loading
from serving.watchdog.tritonserver import POLL_S, Stubs, client, log, models_of, start_time, stub_arguments
from triton_transformers.triton import TritonError

# The niceness of this program: on a machine that is busy with other work, a late report costs requests.
NICENESS = -10


def kill_orphans(server: int) -> None:
    """Kill the stubs of a server that has ended: TRITON-FAULTS.md#orphaned-processes.

    Search all processes for the server's pid, because a stub that was just starting is in no list yet. Search twice,
    because a stub is a shell for its first milliseconds.
    """
    for _ in range(2):
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            arguments = stub_arguments(pid)
            if arguments[5:6] != [str(server)]:
                continue
            log(f"killing process {pid}, which outlived its server")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            (SHARED_MEMORY / arguments[2]).unlink(missing_ok=True)
        time.sleep(POLL_S)


def main() -> None:
    server, started = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(OSError):  # only root may ask for this
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    # Reloads take longer than Triton waits for a process, so each kind of work has a thread. Daemons do not keep this
    # program from ending, and from being started again, after an error below.
    stubs, triton = Stubs(server), client()
    work = ((keep_loading, (triton,)), (end_hung_loads, (stubs, triton)), (keep_regions, (stubs, started)))
    threads = [threading.Thread(target=function, args=arguments, daemon=True) for function, arguments in work]
    for thread in threads:
        thread.start()
    crashes = Crashes(triton)
    while start_time(server) == started:
        try:
            crashes.poll(models_of(stubs.wait_for_search()))
        except TritonError as error:
            if error.status is not None:  # otherwise the server is starting or stopping: the next poll tries again
                log(f"Triton refused a request: {error}")
        except (OSError, ValueError):
            pass  # so is the server here
        if not threads[-1].is_alive() and start_time(server) == started:
            sys.exit("the search for the server's processes ended with an error")
    kill_orphans(server)
    threads[-1].join()  # which removes the memory of the processes


if __name__ == "__main__":
    main()
