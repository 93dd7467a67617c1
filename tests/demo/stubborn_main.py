"""A child that will not end when asked; it says when it has begun."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(float(sys.argv[1]))
